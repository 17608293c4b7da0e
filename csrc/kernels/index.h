// Where the segments of a copy lie: the one place for index arithmetic, compiled by the C++ compiler and by nvcc.
#ifndef MHT_KERNELS_INDEX_H_
#define MHT_KERNELS_INDEX_H_

#include <stdint.h>

#include "mht/copy_table.h"

#if defined(__CUDACC__)
#define MHT_HOST_DEVICE __host__ __device__ __forceinline__
#define MHT_UNROLL _Pragma("unroll")
#else
#define MHT_HOST_DEVICE inline
#define MHT_UNROLL
#endif

namespace mht {

enum class Operation { kGather, kScatter, kClear };

// Addresses add up in unsigned arithmetic: a checked table never leaves 64 bits, but differences of offsets may.
using Address = uint64_t;

MHT_HOST_DEVICE Address axis_offset(const mht_axis& axis, const int64_t* offsets, int64_t step) {
  const Address strided = static_cast<Address>(axis.stride) * static_cast<Address>(step);
  return axis.list < 0 ? strided : static_cast<Address>(offsets[axis.list + step]);
}

// Axes that a copy does not use count as one, so nobody has to look at axis_count first.
MHT_HOST_DEVICE int64_t segment_count(const mht_copy& copy) {
  uint64_t segments = 1;  // unsigned: an empty copy is not checked for overflow
  for (int32_t axis = 0; axis < copy.axis_count; ++axis) segments *= static_cast<uint64_t>(copy.axes[axis].count);
  return static_cast<int64_t>(segments);
}

// The address of segment `segment`; `divide(n, axis)` is n / copy.axes[axis].count, so that a GPU need not divide.
template <class Divide>
MHT_HOST_DEVICE Address segment_address(const mht_copy& copy, const int64_t* offsets, int64_t segment, Divide divide) {
  Address address = static_cast<Address>(copy.base);
  for (int32_t axis = copy.axis_count - 1; axis > 0; --axis) {
    const int64_t outer = divide(segment, axis);
    address += axis_offset(copy.axes[axis], offsets, segment - outer * copy.axes[axis].count);
    segment = outer;
  }
  return copy.axis_count > 0 ? address + axis_offset(copy.axes[0], offsets, segment) : address;
}

// The same segments with fewer and longer steps: what counts one is dropped, what continues the run is folded into it,
// and axes that continue one another become one. The packed order stays. For a copy that has been checked.
inline mht_copy normalised(const mht_copy& given, const int64_t* offsets) {
  mht_copy copy = given;
  copy.axis_count = 0;
  for (int32_t i = 0; i < given.axis_count; ++i) {
    const mht_axis& axis = given.axes[i];
    if (axis.count == 1) {
      copy.base = static_cast<int64_t>(static_cast<Address>(copy.base) + axis_offset(axis, offsets, 0));
      continue;
    }
    mht_axis* outer = copy.axis_count > 0 ? &copy.axes[copy.axis_count - 1] : nullptr;
    const int64_t steps = outer == nullptr ? 0 : static_cast<int64_t>(outer->count) * axis.count;
    int64_t extent = 0;
    if (outer != nullptr && outer->list < 0 && axis.list < 0 && steps <= INT32_MAX &&
        !__builtin_mul_overflow(axis.stride, static_cast<int64_t>(axis.count), &extent) && outer->stride == extent) {
      *outer = mht_axis{axis.stride, static_cast<int32_t>(steps), -1};
    } else {
      copy.axes[copy.axis_count++] = axis;
    }
  }
  while (copy.axis_count > 0) {
    const mht_axis& inner = copy.axes[copy.axis_count - 1];
    if (inner.list >= 0 || inner.stride != copy.run_bytes) break;
    copy.run_bytes *= inner.count;
    --copy.axis_count;
  }
  return copy;
}

}  // namespace mht

#endif  // MHT_KERNELS_INDEX_H_
