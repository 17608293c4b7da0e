// A copy table cut into tiles of about equal work, one warp each: what the GPU is given.
#ifndef MHT_KERNELS_TILES_H_
#define MHT_KERNELS_TILES_H_

#include "index.h"

namespace mht {

// A warp moves four times 16 bytes a lane before it looks for more work.
constexpr int64_t kTileBytes = 8192;
constexpr uint32_t kWarpLanes = 32;
constexpr int64_t kWordBytes = 16;

// Division of n < 2^31 by a number known beforehand: one multiplication, one addition, one shift (Granlund, Montgomery).
struct Divider {
  uint32_t magic;
  uint32_t shift;
};

inline Divider make_divider(uint32_t divisor) {
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < divisor) ++shift;
  const uint64_t magic = ((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1;
  return Divider{static_cast<uint32_t>(magic), shift};
}

MHT_HOST_DEVICE uint32_t divided(uint32_t n, Divider divider) {
  const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(n) * divider.magic) >> 32);
  return (high + n) >> divider.shift;
}

// A normalised copy and how it is cut: a long segment into `pieces` tiles, else `tile_segments` segments a tile, each
// moved by `lanes` lanes of the warp.
struct TiledCopy {
  mht_copy copy;
  Divider dividers[MHT_MAX_AXES];
  Divider by_pieces;
  uint32_t segments;
  uint32_t pieces;
  uint32_t tile_segments;
  uint32_t lanes;
  uint32_t is_single_words;  // every segment is one aligned 16-byte word for each of its lanes, at most
};

// The argument of a launch; all pointers are the device's.
struct TileTable {
  const TiledCopy* copies;
  const int64_t* first_tiles;  // copy_count + 1; copy i has the tiles [first_tiles[i], first_tiles[i + 1])
  const int64_t* offsets;
  int64_t copy_count;
  int64_t tiles;
  Address packed;
};

}  // namespace mht

#endif  // MHT_KERNELS_TILES_H_
