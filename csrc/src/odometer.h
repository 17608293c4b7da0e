// Stepping through a copy's segments without a division per step.
#ifndef MHT_SRC_ODOMETER_H_
#define MHT_SRC_ODOMETER_H_

#include <algorithm>

#include "index.h"

namespace mht {

// All combinations of the axes [0, axes), the last running fastest.
class Odometer {
 public:
  Odometer(const mht_copy& copy, const int64_t* offsets, int32_t axes)
      : copy_(copy), offsets_(offsets), axes_(axes), address_(static_cast<Address>(copy.base)) {}

  // From the first combination to combination n: the only divisions of a piece.
  void seek(int64_t n) {
    for (int32_t axis = axes_ - 1; axis >= 0; --axis) {
      step_[axis] = static_cast<int32_t>(n % copy_.axes[axis].count);
      n /= copy_.axes[axis].count;
      offset_[axis] = axis_offset(copy_.axes[axis], offsets_, step_[axis]);
      address_ += offset_[axis];
    }
  }

  // After the last comes the first.
  void next() {
    for (int32_t axis = axes_ - 1; axis >= 0; --axis) {
      const bool wraps = ++step_[axis] == copy_.axes[axis].count;
      if (wraps) step_[axis] = 0;
      const Address before = offset_[axis];
      offset_[axis] = axis_offset(copy_.axes[axis], offsets_, step_[axis]);
      address_ += offset_[axis] - before;
      if (!wraps) return;
    }
  }

  Address address() const { return address_; }

 private:
  const mht_copy& copy_;
  const int64_t* offsets_;
  int32_t axes_;
  Address address_;
  int32_t step_[MHT_MAX_AXES];
  Address offset_[MHT_MAX_AXES];
};

// Segments [first, last) row by row: what is called for a row of the innermost axis has no index arithmetic left.
class Rows {
 public:
  Rows(const mht_copy& copy, const int64_t* offsets, int64_t first, int64_t last)
      : offsets_(offsets),
        inner_(copy.axis_count > 0 ? copy.axes[copy.axis_count - 1] : mht_axis{0, 1, -1}),
        outer_(copy, offsets, std::max(copy.axis_count - 1, 0)),
        step_(first % inner_.count),
        left_(last - first) {
    outer_.seek(first / inner_.count);
  }

  int64_t left() const { return left_; }

  // visit(address) for at most `most` segments; returns how many there were.
  template <class Visit>
  int64_t take(int64_t most, const Visit& visit) {
    const int64_t wanted = std::min(most, left_);
    for (int64_t taken = 0; taken < wanted;) {
      const int64_t steps = std::min<int64_t>(inner_.count - step_, wanted - taken);
      if (inner_.list >= 0) {
        const int64_t* listed = offsets_ + inner_.list + step_;
        for (int64_t i = 0; i < steps; ++i) visit(outer_.address() + static_cast<Address>(listed[i]));
      } else {
        Address address = outer_.address() + axis_offset(inner_, nullptr, step_);
        const Address stride = static_cast<Address>(inner_.stride);
        for (int64_t i = 0; i < steps; ++i, address += stride) visit(address);
      }
      taken += steps;
      step_ += steps;
      if (step_ == inner_.count) {
        step_ = 0;
        outer_.next();
      }
    }
    left_ -= wanted;
    return wanted;
  }

 private:
  const int64_t* offsets_;
  mht_axis inner_;
  Odometer outer_;
  int64_t step_;
  int64_t left_;
};

}  // namespace mht

#endif  // MHT_SRC_ODOMETER_H_
