// The span of addresses that a copy touches, and of the lists it uses.
#ifndef MHT_SRC_HULL_H_
#define MHT_SRC_HULL_H_

#include <algorithm>
#include <array>

#include "checked_math.h"
#include "mht/copy_table.h"

namespace mht {

// [low, high], both ends are reached.
struct Span {
  int64_t low;
  int64_t high;
};

// Lowest and highest offset of an axis. Thousands of rows name the same few page lists: the last answers are kept.
class AxisSpans {
 public:
  explicit AxisSpans(const int64_t* offsets) : offsets_(offsets) {}

  // False: 64 bits cannot hold it. For an axis that counts at least one and whose list is inside the offsets.
  bool find(const mht_axis& axis, Span* span) {
    if (axis.list >= 0) {
      *span = listed(axis);
      return true;
    }
    int64_t last = 0;
    if (!multiplied(axis.stride, int64_t{axis.count} - 1, &last)) return false;
    *span = Span{std::min<int64_t>(last, 0), std::max<int64_t>(last, 0)};
    return true;
  }

 private:
  struct Known {
    int32_t list = -1;
    int32_t count = 0;
    Span span{0, 0};
  };

  Span listed(const mht_axis& axis) {
    const uint32_t mixed = static_cast<uint32_t>(axis.list) * 2654435761u + static_cast<uint32_t>(axis.count);
    Known& known = known_[mixed % known_.size()];
    if (known.list != axis.list || known.count != axis.count) {
      const auto [low, high] = std::minmax_element(offsets_ + axis.list, offsets_ + axis.list + axis.count);
      known = Known{axis.list, axis.count, Span{*low, *high}};
    }
    return known.span;
  }

  const int64_t* offsets_;
  std::array<Known, 64> known_;
};

}  // namespace mht

#endif  // MHT_SRC_HULL_H_
