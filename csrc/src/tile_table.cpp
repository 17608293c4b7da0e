#include "tile_table.h"

#include <string.h>

#include <algorithm>

#include "checked_math.h"

namespace mht {
namespace {

// Lanes for one segment: one word each, the next power of two. Below a word each lane takes segments of its own.
uint32_t lanes_for(int64_t run_bytes) {
  uint32_t lanes = 1;
  while (lanes < kWarpLanes && lanes * kWordBytes < run_bytes) lanes *= 2;
  return lanes;
}

// `bits`: of the packed address and of all listed offsets.
bool is_single_words(const mht_copy& copy, uint32_t lanes, Address bits) {
  bits |= static_cast<Address>(copy.base) | static_cast<Address>(copy.packed_offset);
  bits |= static_cast<Address>(copy.run_bytes);
  for (int32_t axis = 0; axis < copy.axis_count; ++axis) {
    if (copy.axes[axis].list < 0) bits |= static_cast<Address>(copy.axes[axis].stride);
  }
  return bits % kWordBytes == 0 && copy.run_bytes <= lanes * kWordBytes;
}

// Tiles of the copy; -1: more than can be counted.
int64_t cut(const mht_copy& copy, Address bits, TiledCopy* tiled) {
  const int64_t segments = segment_count(copy);
  const bool is_long = copy.run_bytes > kTileBytes;
  const int64_t pieces = is_long ? (copy.run_bytes - 1) / kTileBytes + 1 : 0;
  const int64_t tile_segments = is_long ? 0 : kTileBytes / copy.run_bytes;
  int64_t tiles = 0;
  if (segments > INT32_MAX || pieces > INT32_MAX) return -1;
  if (!multiplied(segments, std::max<int64_t>(pieces, 1), &tiles)) return -1;
  if (!is_long) tiles = (segments - 1) / tile_segments + 1;
  if (tiles > INT32_MAX) return -1;
  memset(tiled, 0, sizeof(*tiled));
  tiled->copy = copy;
  for (int32_t axis = 0; axis < copy.axis_count; ++axis) {
    tiled->dividers[axis] = make_divider(static_cast<uint32_t>(copy.axes[axis].count));
  }
  tiled->by_pieces = make_divider(static_cast<uint32_t>(std::max<int64_t>(pieces, 1)));
  tiled->segments = static_cast<uint32_t>(segments);
  tiled->pieces = static_cast<uint32_t>(pieces);
  tiled->tile_segments = static_cast<uint32_t>(tile_segments);
  tiled->lanes = lanes_for(copy.run_bytes);
  tiled->is_single_words = is_single_words(copy, tiled->lanes, bits) ? 1 : 0;
  return tiles;
}

}  // namespace

int64_t tile_table_bytes(int64_t copy_count, int64_t offset_count) noexcept {
  int64_t copies = 0;
  int64_t numbers = 0;
  int64_t bytes = 0;
  if (copy_count < 0 || offset_count < 0) return -1;
  if (!multiplied(copy_count, sizeof(TiledCopy), &copies)) return -1;
  if (!added(copy_count, offset_count, &numbers) || !added(numbers, 1, &numbers)) return -1;
  if (!multiplied(numbers, sizeof(int64_t), &numbers) || !added(copies, numbers, &bytes)) return -1;
  return bytes;
}

mht_status make_tiles(const mht_copy_table& table, char* buffer, const char* seen_at, TileTable* tiles,
                      int64_t* row) noexcept {
  TiledCopy* copies = reinterpret_cast<TiledCopy*>(buffer);
  const size_t copy_bytes = static_cast<size_t>(table.copy_count) * sizeof(TiledCopy);
  const size_t first_bytes = (static_cast<size_t>(table.copy_count) + 1) * sizeof(int64_t);
  int64_t* first_tiles = reinterpret_cast<int64_t*>(buffer + copy_bytes);
  Address bits = static_cast<Address>(table.packed_address);
  for (int64_t i = 0; i < table.offset_count; ++i) bits |= static_cast<Address>(table.offsets[i]);
  int64_t made = 0;
  int64_t total = 0;
  for (int64_t i = 0; i < table.copy_count; ++i) {
    if (segment_count(table.copies[i]) == 0) continue;
    const int64_t count = cut(normalised(table.copies[i], table.offsets), bits, &copies[made]);
    if (count < 0) {
      *row = i;
      return MHT_TABLE_TOO_LARGE;
    }
    first_tiles[made++] = total;
    total += count;
  }
  first_tiles[made] = total;
  if (table.offset_count > 0) {
    memcpy(buffer + copy_bytes + first_bytes, table.offsets, static_cast<size_t>(table.offset_count) * sizeof(int64_t));
  }
  tiles->copies = reinterpret_cast<const TiledCopy*>(seen_at);
  tiles->first_tiles = reinterpret_cast<const int64_t*>(seen_at + copy_bytes);
  tiles->offsets = reinterpret_cast<const int64_t*>(seen_at + copy_bytes + first_bytes);
  tiles->copy_count = made;
  tiles->tiles = total;
  tiles->packed = static_cast<Address>(table.packed_address);
  return MHT_OK;
}

}  // namespace mht
