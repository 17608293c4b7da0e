// Division by multiplication, and the search for a tile's copy.
#include <vector>

#include "arena.h"
#include "expect.h"
#include "tile_copy.cuh"
#include "tile_table.h"

namespace {

void check_division() {
  mht::Random random(3);
  std::vector<uint32_t> numbers = {0, 1, 2, 3, 5, 7, 15, 16, 17, 641, 65535, 65536, 65537, INT32_MAX - 1, INT32_MAX};
  for (int i = 0; i < 200; ++i) numbers.push_back(static_cast<uint32_t>(mht::between(&random, 0, INT32_MAX)));
  for (const uint32_t divisor : numbers) {
    if (divisor == 0) continue;
    const mht::Divider divider = mht::make_divider(divisor);
    for (const uint32_t n : numbers) EXPECT(mht::divided(n, divider) == n / divisor);
    for (const uint64_t multiple : {uint64_t{divisor}, uint64_t{divisor} * 3, uint64_t{divisor} * 1000}) {
      if (multiple > INT32_MAX) continue;
      const uint32_t n = static_cast<uint32_t>(multiple);
      EXPECT(mht::divided(n, divider) == n / divisor && mht::divided(n - 1, divider) == (n - 1) / divisor);
    }
  }
}

void check_search() {
  std::vector<int64_t> first_tiles = {0};
  mht::Random random(4);
  for (int i = 0; i < 300; ++i) first_tiles.push_back(first_tiles.back() + mht::between(&random, 1, 9));
  mht::TileTable table{};
  table.first_tiles = first_tiles.data();
  table.copy_count = static_cast<int64_t>(first_tiles.size()) - 1;
  for (const int64_t step : {1, 2, 5, 64, 1000}) {
    int64_t copy = 0;
    for (int64_t tile = 0; tile < first_tiles.back(); tile += step) {
      copy = mht::find_copy(table, copy, tile);
      EXPECT(first_tiles[static_cast<size_t>(copy)] <= tile && tile < first_tiles[static_cast<size_t>(copy) + 1]);
    }
  }
}

// More segments or tiles than a launch counts; the memory is never touched.
void check_limits() {
  const mht_axis many{0, INT32_MAX, -1};
  std::vector<mht_copy> copies = {mht_copy{4096, 0, 3, 2, 0, {many, {0, 2, -1}}}};
  std::vector<char> buffer(static_cast<size_t>(mht::tile_table_bytes(1, 0)) + 16);
  mht_copy_table table{};
  table.copies = copies.data();
  table.copy_count = 1;
  mht::TileTable tiles{};
  int64_t row = -1;
  char* aligned = buffer.data() + (16 - reinterpret_cast<uintptr_t>(buffer.data()) % 16) % 16;
  EXPECT(mht::make_tiles(table, aligned, aligned, &tiles, &row) == MHT_TABLE_TOO_LARGE && row == 0);
  copies[0] = mht_copy{4096, 0, int64_t{1} << 50, 0, 0, {}};
  EXPECT(mht::make_tiles(table, aligned, aligned, &tiles, &row) == MHT_TABLE_TOO_LARGE);
  EXPECT(mht::tile_table_bytes(INT64_MAX, 1) == -1 && mht::tile_table_bytes(1, INT64_MAX) == -1);
}

}  // namespace

int main() {
  check_division();
  check_search();
  check_limits();
  return mht::failures;
}
