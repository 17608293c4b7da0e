// Random tables through the CPU functions and through the device code, against the meaning of a table.
#include <algorithm>

#include "arena.h"
#include "cpu.h"
#include "emulation.h"
#include "expect.h"

namespace mht {
namespace {

using Run = mht_status (*)(const mht_copy_table* table, Operation operation, int32_t threads, int64_t* row) noexcept;

void check(Run run, int32_t threads, Random* random) {
  RandomTable arena(random);
  const mht_copy_table table = arena.table();
  int64_t row = 7;

  std::vector<char> expected = arena.packed().bytes();
  each_segment(table, [&](int64_t address, int64_t packed, int64_t bytes) {
    memcpy(expected.data() + packed, arena.memory().data() + (address - arena.memory().address()),
           static_cast<size_t>(bytes));
  });
  EXPECT(run(&table, Operation::kGather, threads, &row) == MHT_OK && row == -1);
  EXPECT(arena.packed().bytes() == expected);

  for (int64_t i = 0; i < arena.packed().size(); ++i) arena.packed().data()[i] ^= 0x55;
  expected = arena.memory().bytes();
  each_segment(table, [&](int64_t address, int64_t packed, int64_t bytes) {
    memcpy(expected.data() + (address - arena.memory().address()), arena.packed().data() + packed,
           static_cast<size_t>(bytes));
  });
  EXPECT(run(&table, Operation::kScatter, threads, &row) == MHT_OK);
  EXPECT(arena.memory().bytes() == expected);

  each_segment(table, [&](int64_t address, int64_t, int64_t bytes) {
    memset(expected.data() + (address - arena.memory().address()), 0, static_cast<size_t>(bytes));
  });
  EXPECT(run(&table, Operation::kClear, threads, nullptr) == MHT_OK);
  EXPECT(arena.memory().bytes() == expected);
}

}  // namespace
}  // namespace mht

int main() {
  for (uint32_t seed = 0; seed < 150 && mht::failures == 0; ++seed) {
    mht::Random random(seed);
    mht::check(mht::run_on_cpu, static_cast<int32_t>(1 + seed % 4), &random);
    mht::check(mht::run_emulated, static_cast<int32_t>(1 + seed % 7), &random);
    if (mht::failures > 0) fprintf(stderr, "seed %u\n", seed);
  }
  return mht::failures;
}
