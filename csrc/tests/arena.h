// Random tables in buffers of exactly the bytes they need, so that a sanitizer sees a byte too far.
#ifndef MHT_TESTS_ARENA_H_
#define MHT_TESTS_ARENA_H_

#include <string.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "index.h"

namespace mht {

using Random = std::mt19937;

inline int64_t between(Random* random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(*random);
}

// A heap block of `size` bytes that begins `shift` bytes after a multiple of 16.
class Block {
 public:
  Block(int64_t size, int64_t shift, Random* random)
      : held_(new char[static_cast<size_t>(size + shift)]), shift_(shift), size_(size) {
    for (int64_t i = 0; i < size; ++i) data()[i] = static_cast<char>(between(random, 1, 255));
  }

  char* data() { return held_.get() + shift_; }
  int64_t size() const { return size_; }
  int64_t address() { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(data())); }
  std::vector<char> bytes() { return std::vector<char>(data(), data() + size_); }

 private:
  std::unique_ptr<char[]> held_;
  int64_t shift_;
  int64_t size_;
};

// What a table means, one segment at a time.
template <class Visit>
void each_segment(const mht_copy_table& table, const Visit& visit) {
  for (int64_t i = 0; i < table.copy_count; ++i) {
    const mht_copy& copy = table.copies[i];
    const int64_t count = segment_count(copy);
    for (int64_t segment = 0; segment < count; ++segment) {
      int64_t rest = segment;
      int64_t address = copy.base;
      for (int32_t axis = copy.axis_count - 1; axis >= 0; --axis) {
        const mht_axis& of = copy.axes[axis];
        const int64_t step = rest % of.count;
        address += of.list < 0 ? of.stride * step : table.offsets[of.list + step];
        rest /= of.count;
      }
      visit(address, copy.packed_offset + segment * copy.run_bytes, copy.run_bytes);
    }
  }
}

// One random copy of each kind after the other, each in a part of the memory of its own.
class RandomTable {
 public:
  explicit RandomTable(Random* random) {
    for (int64_t left = between(random, 0, 6); left > 0; --left) add(random);
    memory_.reset(new Block(memory_bytes_, between(random, 0, 15), random));
    packed_.reset(new Block(packed_bytes_, between(random, 0, 15), random));
    for (mht_copy& copy : copies_) copy.base += memory_->address();
    range_ = mht_range{memory_->address(), memory_bytes_};
  }

  mht_copy_table table() {
    return mht_copy_table{sizeof(mht_copy_table),
                          MHT_CHECK_OVERLAP,
                          copies_.data(),
                          static_cast<int64_t>(copies_.size()),
                          offsets_.data(),
                          static_cast<int64_t>(offsets_.size()),
                          packed_->address(),
                          packed_bytes_,
                          &range_,
                          1};
  }

  Block& memory() { return *memory_; }
  Block& packed() { return *packed_; }

 private:
  // Axes are made from the inside: each steps over all that is inside it, and perhaps a gap.
  void add(Random* random) {
    static const int64_t runs[] = {1, 2, 2, 4, 4, 8, 16, 32, 64, 128, 256, 3, 13, 48, 100, 1000, 5000, 8192, 70000};
    mht_copy copy{};
    copy.run_bytes = runs[between(random, 0, 18)];
    copy.axis_count = static_cast<int32_t>(between(random, 0, copy.run_bytes > 1000 ? 2 : 4));
    copy.packed_offset = packed_bytes_ + between(random, 0, 20);
    int64_t extent = copy.run_bytes;
    std::vector<int32_t> order;
    for (int32_t axis = 0; axis < copy.axis_count; ++axis) order.push_back(axis);
    if (between(random, 0, 1) == 0) std::shuffle(order.begin(), order.end(), *random);  // transposes among them
    for (size_t i = order.size(); i-- > 0;) {
      mht_axis& axis = copy.axes[order[i]];
      axis.count = static_cast<int32_t>(between(random, 1, copy.run_bytes > 1000 ? 4 : 9));
      axis.list = -1;
      const int64_t step = extent + (between(random, 0, 2) == 0 ? between(random, 1, 40) : 0);
      axis.stride = step;
      extent = step * (axis.count - 1) + extent;
      if (between(random, 0, 3) == 0) make_list(&axis, random);
    }
    copy.base = memory_bytes_ + between(random, 0, 20);
    memory_bytes_ = copy.base + extent;
    packed_bytes_ = copy.packed_offset + segment_count(copy) * copy.run_bytes;
    copies_.push_back(copy);
  }

  void make_list(mht_axis* axis, Random* random) {
    axis->list = static_cast<int32_t>(offsets_.size());
    for (int32_t step = 0; step < axis->count; ++step) offsets_.push_back(axis->stride * step);
    std::shuffle(offsets_.begin() + axis->list, offsets_.end(), *random);
    axis->stride = 12345;  // not used
  }

  std::vector<mht_copy> copies_;
  std::vector<int64_t> offsets_;
  int64_t memory_bytes_ = 0;
  int64_t packed_bytes_ = 0;
  mht_range range_{0, 0};
  std::unique_ptr<Block> memory_;
  std::unique_ptr<Block> packed_;
};

}  // namespace mht

#endif  // MHT_TESTS_ARENA_H_
