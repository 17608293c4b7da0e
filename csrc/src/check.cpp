#include "check.h"

#include <numeric>

#include "checked_math.h"
#include "hull.h"

namespace mht {
namespace {

// Half a tebibyte at half a mebibyte each; what lies beyond belongs to the last.
constexpr size_t kMaxPieces = 1 << 20;

// What one pass over the rows needs to know of each.
struct Extent {
  int64_t bytes = 0;
  std::array<Span, MHT_MAX_AXES + 1> from;  // from[a]: offsets that the axes a, a + 1, ... add up to; the last is 0
};

// The ranges as a sorted list without touching neighbours: a segment may run from one allocation into the next.
class Ranges {
 public:
  mht_status take(const mht_range* ranges, int64_t count) {
    merged_.reserve(static_cast<size_t>(count));
    for (const mht_range* range = ranges; range != ranges + count; ++range) {
      int64_t end = 0;
      if (range->address < 0 || range->bytes < 0) return MHT_INVALID_ARGUMENT;
      if (!added(range->address, range->bytes, &end)) return MHT_OVERFLOW;
      if (range->bytes > 0) merged_.push_back(Span{range->address, end});
    }
    std::sort(merged_.begin(), merged_.end(), [](const Span& a, const Span& b) { return a.low < b.low; });
    size_t kept = 0;
    for (const Span& span : merged_) {
      if (kept > 0 && span.low <= merged_[kept - 1].high) {
        merged_[kept - 1].high = std::max(merged_[kept - 1].high, span.high);
      } else {
        merged_[kept++] = span;
      }
    }
    merged_.resize(kept);
    return MHT_OK;
  }

  // Whether [low, high) lies in one of them.
  bool hold(int64_t low, int64_t high) {
    if (last_ < merged_.size() && merged_[last_].low <= low && high <= merged_[last_].high) return true;
    const size_t after = first_above(low);
    if (after == 0 || merged_[after - 1].high < high) return false;
    last_ = after - 1;
    return true;
  }

  bool touch(int64_t low, int64_t high) const {
    const size_t after = first_above(high - 1);
    return after > 0 && merged_[after - 1].high > low;
  }

 private:
  size_t first_above(int64_t address) const {
    const auto found = std::upper_bound(merged_.begin(), merged_.end(), address,
                                        [](int64_t value, const Span& span) { return value < span.low; });
    return static_cast<size_t>(found - merged_.begin());
  }

  std::vector<Span> merged_;
  size_t last_ = 0;
};

mht_status check_arguments(const mht_copy_table& table, Operation operation) {
  if (table.copy_count < 0 || table.offset_count < 0 || table.range_count < 0) return MHT_INVALID_ARGUMENT;
  if (table.copy_count > 0 && table.copies == nullptr) return MHT_INVALID_ARGUMENT;
  if (table.offset_count > 0 && table.offsets == nullptr) return MHT_INVALID_ARGUMENT;
  if (table.range_count > 0 && table.ranges == nullptr) return MHT_INVALID_ARGUMENT;
  if ((table.flags & ~int64_t{MHT_CHECK_OVERLAP}) != 0) return MHT_INVALID_ARGUMENT;
  if (operation == Operation::kClear) return MHT_OK;
  int64_t end = 0;
  if (table.packed_address < 0 || table.packed_bytes < 0) return MHT_INVALID_ARGUMENT;
  if (table.packed_address == 0 && table.packed_bytes > 0) return MHT_INVALID_ARGUMENT;
  return added(table.packed_address, table.packed_bytes, &end) ? MHT_OK : MHT_OVERFLOW;
}

mht_status check_shape(const mht_copy& copy, int64_t offset_count) {
  if (copy.run_bytes < 1 || copy.reserved != 0) return MHT_BAD_COPY;
  if (copy.axis_count < 0 || copy.axis_count > MHT_MAX_AXES) return MHT_BAD_COPY;
  for (int32_t i = 0; i < copy.axis_count; ++i) {
    if (copy.axes[i].count < 0) return MHT_BAD_COPY;
  }
  for (int32_t i = 0; i < copy.axis_count; ++i) {
    const mht_axis& axis = copy.axes[i];
    if (axis.list < -1 || (axis.list >= 0 && int64_t{axis.list} + axis.count > offset_count)) return MHT_BAD_LIST;
  }
  return MHT_OK;
}

bool is_empty(const mht_copy& copy) {
  return std::any_of(copy.axes, copy.axes + copy.axis_count, [](const mht_axis& axis) { return axis.count == 0; });
}

bool add(const Span& a, const Span& b, Span* sum) {
  return added(a.low, b.low, &sum->low) && added(a.high, b.high, &sum->high);
}

// False: 64 bits cannot hold a size or an address.
bool measure(const mht_copy& copy, AxisSpans* spans, Extent* extent) {
  extent->bytes = copy.run_bytes;
  Span sum{0, 0};
  extent->from[static_cast<size_t>(copy.axis_count)] = sum;
  for (int32_t i = copy.axis_count - 1; i >= 0; --i) {
    Span span{0, 0};
    if (!multiplied(extent->bytes, copy.axes[i].count, &extent->bytes)) return false;
    if (!spans->find(copy.axes[i], &span) || !add(sum, span, &sum)) return false;
    extent->from[static_cast<size_t>(i)] = sum;
  }
  const Span run{copy.base, copy.base};
  int64_t end = 0;
  return add(sum, run, &sum) && added(sum.high, copy.run_bytes, &end);
}

// Exact: an axis whose hull leaves one range (layers in several allocations) is looked at step by step.
bool is_inside(const mht_copy& copy, const int64_t* offsets, const Extent& extent, int32_t axis, Address at,
               Ranges* ranges) {
  const Span& hull = extent.from[static_cast<size_t>(axis)];
  const Address low = at + static_cast<Address>(hull.low);
  const Address high = at + static_cast<Address>(hull.high) + static_cast<Address>(copy.run_bytes);
  if (ranges->hold(static_cast<int64_t>(low), static_cast<int64_t>(high))) return true;
  if (axis == copy.axis_count) return false;
  for (int32_t step = 0; step < copy.axes[axis].count; ++step) {
    const Address next = at + axis_offset(copy.axes[axis], offsets, step);
    if (!is_inside(copy, offsets, extent, axis + 1, next, ranges)) return false;
  }
  return true;
}

bool is_inside_packed(const mht_copy& copy, int64_t bytes, int64_t packed_bytes) {
  return copy.packed_offset >= 0 && bytes <= packed_bytes && copy.packed_offset <= packed_bytes - bytes;
}

mht_status check_copy(const mht_copy_table& table, const mht_copy& copy, Operation operation, AxisSpans* spans,
                      Ranges* ranges, int64_t* bytes) {
  const mht_status shape = check_shape(copy, table.offset_count);
  if (shape != MHT_OK) return shape;
  *bytes = 0;
  if (is_empty(copy)) return MHT_OK;
  Extent extent;
  if (!measure(copy, spans, &extent)) return MHT_OVERFLOW;
  if (operation != Operation::kClear && !is_inside_packed(copy, extent.bytes, table.packed_bytes)) {
    return MHT_OUTSIDE_PACKED;
  }
  if (!is_inside(copy, table.offsets, extent, 0, static_cast<Address>(copy.base), ranges)) return MHT_OUTSIDE_RANGES;
  *bytes = extent.bytes;
  return MHT_OK;
}

int64_t bytes_of(const mht_copy& copy) { return segment_count(copy) * copy.run_bytes; }

// Packed bytes in the order of the rows are disjoint by one comparison each; any other order is sorted first.
bool is_packed_once(const mht_copy_table& table, int64_t* row) {
  const mht_copy* copies = table.copies;
  std::vector<int64_t> order;
  int64_t end = 0;
  for (int64_t i = 0; i < table.copy_count; ++i) {
    const int64_t bytes = bytes_of(copies[i]);
    if (bytes > 0 && copies[i].packed_offset < end) {
      order.resize(static_cast<size_t>(table.copy_count));
      break;
    }
    if (bytes > 0) end = copies[i].packed_offset + bytes;
  }
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [copies](int64_t a, int64_t b) { return copies[a].packed_offset < copies[b].packed_offset; });
  end = 0;
  for (const int64_t i : order) {
    const int64_t bytes = bytes_of(copies[i]);
    if (bytes > 0 && copies[i].packed_offset < end) {
      *row = i;
      return false;
    }
    if (bytes > 0) end = copies[i].packed_offset + bytes;
  }
  return true;
}

}  // namespace

mht_status check_table(const mht_copy_table& table, Operation operation, int64_t piece_bytes, Checked* found,
                       int64_t* row) {
  *row = -1;
  const mht_status arguments = check_arguments(table, operation);
  if (arguments != MHT_OK) return arguments;
  Ranges ranges;
  const mht_status taken = ranges.take(table.ranges, table.range_count);
  if (taken != MHT_OK) return taken;
  const bool has_packed = operation != Operation::kClear;
  if (has_packed && table.packed_bytes > 0 &&
      ranges.touch(table.packed_address, table.packed_address + table.packed_bytes)) {
    return MHT_PACKED_IN_RANGES;
  }

  AxisSpans spans(table.offsets);
  int64_t next_piece = 0;
  for (int64_t i = 0; i < table.copy_count; ++i) {
    int64_t bytes = 0;
    const mht_status status = check_copy(table, table.copies[i], operation, &spans, &ranges, &bytes);
    if (status != MHT_OK || !added(found->bytes, bytes, &bytes)) {
      *row = i;
      return status != MHT_OK ? status : MHT_OVERFLOW;
    }
    for (; next_piece < bytes && found->pieces.size() < kMaxPieces; next_piece += piece_bytes) {
      found->pieces.push_back(Piece{i, next_piece - found->bytes});
    }
    found->bytes = bytes;
  }
  if (has_packed && !is_packed_once(table, row)) return MHT_PACKED_OVERLAP;
  const bool proves = operation == Operation::kScatter && (table.flags & MHT_CHECK_OVERLAP) != 0;
  return proves && !are_disjoint(table, row) ? MHT_MEMORY_OVERLAP : MHT_OK;
}

}  // namespace mht
