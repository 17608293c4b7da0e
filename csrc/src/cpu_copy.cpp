#include "cpu_copy.h"

#include <algorithm>

#include "runs.h"
#include "transpose.h"

namespace mht {
namespace {

// Longer runs may be shared between threads.
constexpr int64_t kDivisibleRun = 64 << 10;

char* pointer(Address address) { return reinterpret_cast<char*>(static_cast<uintptr_t>(address)); }

// Steps through all combinations of the axes [0, axes), the last running fastest.
class Odometer {
 public:
  Odometer(const mht_copy& copy, const int64_t* offsets, int32_t axes) : copy_(copy), offsets_(offsets), axes_(axes) {
    address_ = static_cast<Address>(copy.base);
  }

  // To combination n: the only divisions of a piece.
  void seek(int64_t n) {
    for (int32_t axis = axes_ - 1; axis >= 0; --axis) {
      step_[axis] = static_cast<int32_t>(n % copy_.axes[axis].count);
      n /= copy_.axes[axis].count;
      offset_[axis] = axis_offset(copy_.axes[axis], offsets_, step_[axis]);
      address_ += offset_[axis];
    }
  }

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

struct Task {
  mht_copy copy;  // normalised
  const int64_t* offsets;
  Address packed;  // where the copy's packed bytes begin; not used by a clear
  int64_t first;  // bytes
  int64_t last;
};

int64_t divided_up(int64_t n, int64_t d) { return n / d + (n % d != 0 ? 1 : 0); }

// Whole segments, the innermost axis in a loop without index arithmetic.
template <Operation operation, int64_t kBytes>
void run_segments(const Task& task) {
  const mht_copy& copy = task.copy;
  const int64_t bytes = kBytes != kAny ? kBytes : copy.run_bytes;
  const Address run = static_cast<Address>(bytes);
  int64_t segment = divided_up(task.first, bytes);
  const int64_t end = divided_up(task.last, bytes);
  if (segment >= end) return;
  Address packed = task.packed + static_cast<Address>(segment * bytes);
  const int32_t outer_axes = copy.axis_count - 1;
  const mht_axis inner = outer_axes >= 0 ? copy.axes[outer_axes] : mht_axis{0, 1, -1};
  Odometer outer(copy, task.offsets, std::max(outer_axes, 0));
  outer.seek(segment / inner.count);
  int64_t step = segment % inner.count;
  while (segment < end) {
    const int64_t steps = std::min(inner.count - step, end - segment);
    if (inner.list >= 0) {
      const int64_t* listed = task.offsets + inner.list + step;
      for (int64_t i = 0; i < steps; ++i, packed += run) {
        move_run<operation, kBytes>(pointer(outer.address() + static_cast<Address>(listed[i])), pointer(packed), bytes);
      }
    } else {
      Address memory = outer.address() + axis_offset(inner, nullptr, step);
      const Address stride = static_cast<Address>(inner.stride);
      for (int64_t i = 0; i < steps; ++i, packed += run, memory += stride) {
        move_run<operation, kBytes>(pointer(memory), pointer(packed), bytes);
      }
    }
    segment += steps;
    step = 0;
    outer.next();
  }
}

// Long runs: the piece may begin and end inside one.
template <Operation operation>
void run_long(const Task& task) {
  const mht_copy& copy = task.copy;
  Odometer odometer(copy, task.offsets, copy.axis_count);
  odometer.seek(task.first / copy.run_bytes);
  int64_t within = task.first % copy.run_bytes;
  for (int64_t at = task.first; at < task.last; within = 0, odometer.next()) {
    const int64_t bytes = std::min(copy.run_bytes - within, task.last - at);
    move_run<operation, kAny>(pointer(odometer.address() + static_cast<Address>(within)),
                             pointer(task.packed + static_cast<Address>(at)), bytes);
    at += bytes;
  }
}

// The axis whose elements touch in memory while those of the last axis touch in the packed buffer; -1: none.
int32_t transposed_axis(const mht_copy& copy) {
  if (copy.axis_count < 2 || copy.axes[copy.axis_count - 1].list >= 0) return -1;
  for (int32_t axis = copy.axis_count - 2; axis >= 0; --axis) {
    if (copy.axes[axis].list < 0 && copy.axes[axis].stride == copy.run_bytes) return axis;
  }
  return -1;
}

// One matrix (axis x last axis) for each combination of the other axes.
template <Operation operation, class Element>
void run_transposed(const Task& task, int32_t axis) {
  const mht_copy& copy = task.copy;
  const mht_axis& across = copy.axes[axis];
  const mht_axis& along = copy.axes[copy.axis_count - 1];
  int64_t across_packed = copy.run_bytes * along.count;
  mht_copy memory = copy;
  mht_copy packed = copy;
  packed.base = 0;
  memory.axis_count = packed.axis_count = 0;
  int64_t step_bytes = across_packed;
  for (int32_t i = copy.axis_count - 2; i >= 0; step_bytes *= copy.axes[i].count, --i) {
    if (i == axis) across_packed = step_bytes;
    packed.axes[i] = mht_axis{step_bytes, copy.axes[i].count, -1};
  }
  for (int32_t i = 0; i < copy.axis_count - 1; ++i) {
    if (i == axis) continue;
    memory.axes[memory.axis_count++] = copy.axes[i];
    packed.axes[packed.axis_count++] = packed.axes[i];
  }
  const int64_t matrix_bytes = copy.run_bytes * along.count * across.count;
  int64_t n = divided_up(task.first, matrix_bytes);
  const int64_t end = divided_up(task.last, matrix_bytes);
  Odometer in_memory(memory, task.offsets, memory.axis_count);
  Odometer in_packed(packed, task.offsets, packed.axis_count);
  in_memory.seek(n);
  in_packed.seek(n);
  for (; n < end; ++n, in_memory.next(), in_packed.next()) {
    char* at_memory = pointer(in_memory.address());
    char* at_packed = pointer(task.packed + in_packed.address());
    if constexpr (operation == Operation::kGather) {
      transpose<Element>(Matrix{at_memory, at_packed, along.stride, across_packed, along.count, across.count});
    } else {
      transpose<Element>(Matrix{at_packed, at_memory, across_packed, along.stride, across.count, along.count});
    }
  }
}

template <Operation operation>
bool ran_transposed(const Task& task) {
  const int32_t axis = operation == Operation::kClear ? -1 : transposed_axis(task.copy);
  if (axis < 0) return false;
  switch (task.copy.run_bytes) {
    case 1:
      return run_transposed<operation, uint8_t>(task, axis), true;
    case 2:
      return run_transposed<operation, uint16_t>(task, axis), true;
    case 4:
      return run_transposed<operation, uint32_t>(task, axis), true;
    default:
      return false;
  }
}

template <Operation operation>
void run(const Task& task) {
  if (task.copy.run_bytes >= kDivisibleRun) return run_long<operation>(task);
  if (ran_transposed<operation>(task)) return;
  switch (task.copy.run_bytes) {
    case 1:
      return run_segments<operation, 1>(task);
    case 2:
      return run_segments<operation, 2>(task);
    case 4:
      return run_segments<operation, 4>(task);
    case 8:
      return run_segments<operation, 8>(task);
    case 16:
      return run_segments<operation, 16>(task);
    case 32:
      return run_segments<operation, 32>(task);
    case 64:
      return run_segments<operation, 64>(task);
    case 128:
      return run_segments<operation, 128>(task);
    case 256:
      return run_segments<operation, 256>(task);
    default:
      return run_segments<operation, kAny>(task);
  }
}

}  // namespace

void run_copy(Operation operation, const mht_copy& copy, const int64_t* offsets, Address packed, int64_t first,
              int64_t last) noexcept {
  const Task task{normalised(copy, offsets), offsets, packed + static_cast<Address>(copy.packed_offset), first, last};
  switch (operation) {
    case Operation::kGather:
      return run<Operation::kGather>(task);
    case Operation::kScatter:
      return run<Operation::kScatter>(task);
    case Operation::kClear:
      return run<Operation::kClear>(task);
  }
}

}  // namespace mht
