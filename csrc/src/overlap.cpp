#include <cstdlib>

#include "check.h"
#include "hull.h"

namespace mht {
namespace {

struct Owned {
  int64_t low;
  int64_t high;  // one past the last byte
  int64_t row;
};

// The first that begins before another has ended.
bool are_apart(std::vector<Owned>* spans, int64_t* row) {
  std::sort(spans->begin(), spans->end(), [](const Owned& a, const Owned& b) { return a.low < b.low; });
  for (size_t i = 1; i < spans->size(); ++i) {
    if ((*spans)[i].low < (*spans)[i - 1].high) {
      *row = (*spans)[i].row;
      return false;
    }
  }
  return true;
}

// Least distance of two steps of an axis; 0 where two are equal.
uint64_t least_gap(const mht_axis& axis, const int64_t* offsets) {
  if (axis.list < 0) return axis.stride < 0 ? 0 - static_cast<uint64_t>(axis.stride) : static_cast<uint64_t>(axis.stride);
  std::vector<int64_t> sorted(offsets + axis.list, offsets + axis.list + axis.count);
  std::sort(sorted.begin(), sorted.end());
  uint64_t gap = UINT64_MAX;
  for (size_t i = 1; i < sorted.size(); ++i) {
    gap = std::min(gap, static_cast<uint64_t>(sorted[i]) - static_cast<uint64_t>(sorted[i - 1]));
  }
  return gap;
}

// Sufficient, not necessary: every axis steps over all that the narrower ones span.
bool is_nested(const mht_copy& copy, const int64_t* offsets, AxisSpans* spans) {
  struct Step {
    uint64_t gap;
    uint64_t extent;
  };
  std::vector<Step> steps;
  for (int32_t i = 0; i < copy.axis_count; ++i) {
    Span span{0, 0};
    spans->find(copy.axes[i], &span);
    const uint64_t extent = static_cast<uint64_t>(span.high) - static_cast<uint64_t>(span.low);
    steps.push_back(Step{least_gap(copy.axes[i], offsets), extent});
  }
  std::sort(steps.begin(), steps.end(), [](const Step& a, const Step& b) { return a.gap < b.gap; });
  uint64_t extent = static_cast<uint64_t>(copy.run_bytes);
  for (const Step& step : steps) {
    if (step.gap < extent) return false;
    extent += step.extent;
  }
  return true;
}

// Whether hulls are apart and axes nested, which needs no look at single segments.
bool is_plain(const mht_copy_table& table) {
  AxisSpans spans(table.offsets);
  std::vector<Owned> hulls;
  hulls.reserve(static_cast<size_t>(table.copy_count));
  for (int64_t i = 0; i < table.copy_count; ++i) {
    if (segment_count(table.copies[i]) == 0) continue;
    const mht_copy copy = normalised(table.copies[i], table.offsets);
    if (!is_nested(copy, table.offsets, &spans)) return false;
    Address low = static_cast<Address>(copy.base);
    Address high = low + static_cast<Address>(copy.run_bytes);
    for (int32_t axis = 0; axis < copy.axis_count; ++axis) {
      Span span{0, 0};
      spans.find(copy.axes[axis], &span);
      low += static_cast<Address>(span.low);
      high += static_cast<Address>(span.high);
    }
    hulls.push_back(Owned{static_cast<int64_t>(low), static_cast<int64_t>(high), i});
  }
  int64_t row = -1;
  return are_apart(&hulls, &row);
}

}  // namespace

bool are_disjoint(const mht_copy_table& table, int64_t* row) {
  if (is_plain(table)) return true;
  std::vector<Owned> segments;
  for (int64_t i = 0; i < table.copy_count; ++i) {
    const int64_t given = segment_count(table.copies[i]);
    if (given == 0) continue;
    const mht_copy copy = normalised(table.copies[i], table.offsets);
    const int64_t count = segment_count(copy);
    for (int64_t segment = 0; segment < count; ++segment) {
      const Address low = segment_address(copy, table.offsets, segment,
                                          [&copy](int64_t n, int32_t axis) { return n / copy.axes[axis].count; });
      segments.push_back(Owned{static_cast<int64_t>(low), static_cast<int64_t>(low) + copy.run_bytes, i});
    }
  }
  return are_apart(&segments, row);
}

}  // namespace mht
