// Cutting a checked table into tiles, in memory that a GPU will read.
#ifndef MHT_SRC_TILE_TABLE_H_
#define MHT_SRC_TILE_TABLE_H_

#include "tiles.h"

namespace mht {

// What a table of so many copies and offsets needs at most; -1: more than 64 bits can count.
int64_t tile_table_bytes(int64_t copy_count, int64_t offset_count) noexcept;

// Writes the tiles of `table`, which has been checked, to `buffer` (tile_table_bytes, aligned to 16). `seen_at` is where
// the device sees the buffer. MHT_TABLE_TOO_LARGE: a copy has more segments or tiles than 31 bits count.
mht_status make_tiles(const mht_copy_table& table, char* buffer, const char* seen_at, TileTable* tiles,
                      int64_t* row) noexcept;

}  // namespace mht

#endif  // MHT_SRC_TILE_TABLE_H_
