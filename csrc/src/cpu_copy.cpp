#include "cpu_copy.h"

#include <algorithm>

#include "odometer.h"
#include "runs.h"
#include "transpose.h"

namespace mht {
namespace {

// Longer runs may be shared between threads.
constexpr int64_t kDivisibleRun = 64 << 10;

// Addresses that are known, and being fetched, before their segments' turn comes.
constexpr int64_t kAheadBytes = 4096;
constexpr int64_t kMostAhead = 64;

// Shorter runs of a scatter are faster through the cache, with their lines fetched ahead.
constexpr int64_t kStreamedRun = 512;

struct Task {
  mht_copy copy;  // normalised
  const int64_t* offsets;
  Address packed;  // where the copy's packed bytes begin; not used by a clear
  int64_t first;  // bytes
  int64_t last;
  StreamLines stream;  // null: through the cache
};

int64_t divided_up(int64_t n, int64_t d) { return n / d + (n % d != 0 ? 1 : 0); }

// Short segments in a plain loop. The hardware reads ahead where that is possible at all.
template <Operation operation, int64_t kBytes>
void run_short(const Task& task) {
  const int64_t bytes = kBytes != kAny ? kBytes : task.copy.run_bytes;
  const int64_t first = divided_up(task.first, bytes);
  const int64_t last = divided_up(task.last, bytes);
  if (first >= last) return;
  Address packed = task.packed + static_cast<Address>(first * bytes);
  Rows(task.copy, task.offsets, first, last).take(last - first, [&](Address memory) {
    move_run<operation, kBytes>(memory, packed, bytes, nullptr);
    packed += static_cast<Address>(bytes);
  });
}

// Segments of lines: while some are moved the next are fetched, across the ends of rows and pages.
template <Operation operation, int64_t kBytes>
void run_lines(const Task& task) {
  const int64_t bytes = kBytes != kAny ? kBytes : task.copy.run_bytes;
  const int64_t first = divided_up(task.first, bytes);
  const int64_t last = divided_up(task.last, bytes);
  if (first >= last) return;
  const int64_t ahead = std::clamp<int64_t>(kAheadBytes / bytes, 1, kMostAhead);
  Address buffers[2][kMostAhead];
  Rows rows(task.copy, task.offsets, first, last);
  const auto fill = [&](Address* buffer) {
    return rows.take(ahead, [&buffer](Address memory) { *buffer++ = memory; });
  };
  // What is streamed need not be read first.
  const bool fetches = operation == Operation::kGather || task.stream == nullptr;
  Address packed = task.packed + static_cast<Address>(first * bytes);
  int64_t now = fill(buffers[0]);
  for (int turn = 0; now > 0; turn ^= 1) {
    const Address* here = buffers[turn];
    const Address* there = buffers[turn ^ 1];
    const int64_t next = fill(buffers[turn ^ 1]);
    for (int64_t i = 0; i < now; ++i, packed += static_cast<Address>(bytes)) {
      if (i < next && fetches) prefetch_run<operation>(there[i], bytes);
      move_run<operation, kBytes>(here[i], packed, bytes, task.stream);
    }
    now = next;
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
    move_run<operation, kAny>(odometer.address() + static_cast<Address>(within),
                              task.packed + static_cast<Address>(at), bytes, task.stream);
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
void run_small(const Task& task) {
  if (ran_transposed<operation>(task)) return;
  switch (task.copy.run_bytes) {
    case 1:
      return run_short<operation, 1>(task);
    case 2:
      return run_short<operation, 2>(task);
    case 4:
      return run_short<operation, 4>(task);
    case 8:
      return run_short<operation, 8>(task);
    case 16:
      return run_short<operation, 16>(task);
    case 32:
      return run_short<operation, 32>(task);
    default:
      return run_short<operation, kAny>(task);
  }
}

template <Operation operation>
void run_large(const Task& task) {
  if (task.copy.run_bytes >= kDivisibleRun) return run_long<operation>(task);
  switch (task.copy.run_bytes) {
    case 64:
      return run_lines<operation, 64>(task);
    case 128:
      return run_lines<operation, 128>(task);
    case 256:
      return run_lines<operation, 256>(task);
    default:
      return run_lines<operation, kAny>(task);
  }
}

template <Operation operation>
void run(const Task& task) {
  if (task.copy.run_bytes < kLine) return run_small<operation>(task);
  Task large = task;
  if (operation == Operation::kScatter && task.copy.run_bytes < kStreamedRun) large.stream = nullptr;
  run_large<operation>(large);
  if (large.stream != nullptr) finish_streams();
}

}  // namespace

void run_copy(Operation operation, bool streams, const mht_copy& copy, const int64_t* offsets, Address packed,
              int64_t first, int64_t last) noexcept {
  const Address packed_copy = packed + static_cast<Address>(copy.packed_offset);
  const Task task{normalised(copy, offsets), offsets, packed_copy, first, last, streams ? stream_lines() : nullptr};
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
