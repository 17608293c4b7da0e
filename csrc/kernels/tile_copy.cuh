// What one lane of one warp does. Lanes share nothing and wait for nobody, so that the host can run the same code as
// loops over warps and lanes; csrc/tests does, and holds it to the other implementations.
#ifndef MHT_KERNELS_TILE_COPY_CUH_
#define MHT_KERNELS_TILE_COPY_CUH_

#include "tiles.h"
#include "words.cuh"

namespace mht {

struct Lane {
  uint32_t number;  // of `count` that work on one segment
  uint32_t count;
};

// Words one after the other; four loads are under way before the first store.
template <Operation operation, class Word>
MHT_HOST_DEVICE void move_words(Address memory, Address packed, uint32_t words, Lane lane) {
  constexpr uint32_t kAtOnce = 4;
  for (uint32_t first = lane.number; first < words; first += kAtOnce * lane.count) {
    Word held[kAtOnce];
    MHT_UNROLL
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t at = first + i * lane.count;
      held[i] = Word{};
      if (operation != Operation::kClear && at < words) {
        held[i] = load_word<Word>((operation == Operation::kGather ? memory : packed) + Address{at} * sizeof(Word));
      }
    }
    MHT_UNROLL
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t at = first + i * lane.count;
      if (at < words) {
        store_word<Word>((operation == Operation::kGather ? packed : memory) + Address{at} * sizeof(Word), held[i]);
      }
    }
  }
}

template <Operation operation>
MHT_HOST_DEVICE void move_aligned(Address memory, Address packed, uint32_t bytes, uint32_t width, Lane lane) {
  switch (width) {
    case 16:
      return move_words<operation, Word16>(memory, packed, bytes / 16, lane);
    case 8:
      return move_words<operation, uint64_t>(memory, packed, bytes / 8, lane);
    case 4:
      return move_words<operation, uint32_t>(memory, packed, bytes / 4, lane);
    case 2:
      return move_words<operation, uint16_t>(memory, packed, bytes / 2, lane);
    default:
      return move_words<operation, uint8_t>(memory, packed, bytes, lane);
  }
}

MHT_HOST_DEVICE uint32_t lowest_bit(Address bits) { return static_cast<uint32_t>(bits & (~bits + 1)); }

// The widest words that fit this segment. Where both sides are off by the same, its ends are moved byte by byte; where
// they are off by different amounts, words are as wide as the difference allows.
template <Operation operation>
MHT_HOST_DEVICE void move_segment(Address memory, Address packed, uint32_t bytes, Lane lane) {
  if constexpr (operation == Operation::kClear) packed = memory;
  constexpr uint32_t kWorthEnds = 64;
  const uint32_t plain = lowest_bit(memory | packed | bytes | kWordBytes);
  const uint32_t width = lowest_bit((memory ^ packed) | kWordBytes);
  if (plain == width || bytes < kWorthEnds) return move_aligned<operation>(memory, packed, bytes, plain, lane);
  const uint32_t head = static_cast<uint32_t>(~memory + 1) & (width - 1);
  const uint32_t body = (bytes - head) & ~(width - 1);
  const uint32_t done = head + body;
  move_words<operation, uint8_t>(memory, packed, head, lane);
  move_aligned<operation>(memory + head, packed + head, body, width, lane);
  move_words<operation, uint8_t>(memory + done, packed + done, bytes - done, lane);
}

// Addresses of segments; all but the innermost axis are looked at only when the innermost has run through.
class SegmentWalk {
 public:
  MHT_HOST_DEVICE SegmentWalk(const TiledCopy& tiled, const int64_t* offsets) : tiled_(tiled), offsets_(offsets) {}

  MHT_HOST_DEVICE Address address(uint32_t segment) {
    const int32_t last = tiled_.copy.axis_count - 1;
    if (last < 0) return static_cast<Address>(tiled_.copy.base);
    const mht_axis& inner = tiled_.copy.axes[last];
    const uint32_t outer = divided(segment, tiled_.dividers[last]);
    if (outer != outer_) {
      outer_ = outer;
      at_ = outer_address(outer, last);
    }
    return at_ + axis_offset(inner, offsets_, segment - outer * static_cast<uint32_t>(inner.count));
  }

 private:
  MHT_HOST_DEVICE Address outer_address(uint32_t outer, int32_t axes) const {
    Address address = static_cast<Address>(tiled_.copy.base);
    for (int32_t axis = axes - 1; axis >= 0; --axis) {
      const uint32_t rest = divided(outer, tiled_.dividers[axis]);
      const uint32_t step = outer - rest * static_cast<uint32_t>(tiled_.copy.axes[axis].count);
      address += axis_offset(tiled_.copy.axes[axis], offsets_, step);
      outer = rest;
    }
    return address;
  }

  const TiledCopy& tiled_;
  const int64_t* offsets_;
  uint32_t outer_ = UINT32_MAX;  // no segment has it: there are less than 2^31
  Address at_ = 0;
};

MHT_HOST_DEVICE Address packed_at(const TileTable& table, const TiledCopy& tiled) {
  return table.packed + static_cast<Address>(tiled.copy.packed_offset);
}

// One piece of a long segment by the whole warp.
template <Operation operation>
MHT_HOST_DEVICE void move_piece(const TileTable& table, const TiledCopy& tiled, uint32_t tile, uint32_t lane) {
  const uint32_t segment = divided(tile, tiled.by_pieces);
  const int64_t first = int64_t{tile - segment * tiled.pieces} * kTileBytes;
  const int64_t left = tiled.copy.run_bytes - first;
  const uint32_t bytes = static_cast<uint32_t>(left < kTileBytes ? left : kTileBytes);
  const Address memory = SegmentWalk(tiled, table.offsets).address(segment) + static_cast<Address>(first);
  const Address packed = packed_at(table, tiled) +
                         static_cast<Address>(segment) * static_cast<Address>(tiled.copy.run_bytes) +
                         static_cast<Address>(first);
  move_segment<operation>(memory, packed, bytes, Lane{lane, kWarpLanes});
}

// The share of one tile: its warp is split into groups of tiled.lanes lanes, which take segments in turns.
struct Share {
  uint32_t first;
  uint32_t last;
  uint32_t step;
  Lane lane;
};

MHT_HOST_DEVICE Share share_of(const TiledCopy& tiled, uint32_t tile, uint32_t lane) {
  const uint32_t begin = tile * tiled.tile_segments;
  const uint32_t left = tiled.segments - begin;
  const uint32_t end = begin + (left < tiled.tile_segments ? left : tiled.tile_segments);
  const Lane within{lane & (tiled.lanes - 1), tiled.lanes};
  return Share{begin + lane / tiled.lanes, end, kWarpLanes / tiled.lanes, within};
}

template <Operation operation>
MHT_HOST_DEVICE void move_segments(const TileTable& table, const TiledCopy& tiled, const Share& share) {
  const uint32_t bytes = static_cast<uint32_t>(tiled.copy.run_bytes);
  SegmentWalk walk(tiled, table.offsets);
  for (uint32_t segment = share.first; segment < share.last; segment += share.step) {
    const Address packed = packed_at(table, tiled) + static_cast<Address>(segment) * bytes;
    move_segment<operation>(walk.address(segment), packed, bytes, share.lane);
  }
}

// Where a segment is one aligned word for each lane, four segments are under way at once.
template <Operation operation>
MHT_HOST_DEVICE void move_single_words(const TileTable& table, const TiledCopy& tiled, const Share& share) {
  constexpr uint32_t kAtOnce = 4;
  const Address bytes = static_cast<Address>(tiled.copy.run_bytes);
  const Address place = static_cast<Address>(share.lane.number) * kWordBytes;
  if (place >= bytes) return;
  const Address packed = packed_at(table, tiled) + place;
  SegmentWalk walk(tiled, table.offsets);
  for (uint32_t segment = share.first; segment < share.last; segment += kAtOnce * share.step) {
    Address memory[kAtOnce];
    Word16 held[kAtOnce];
    MHT_UNROLL
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t number = segment + i * share.step;
      held[i] = Word16{};
      memory[i] = 0;
      if (number >= share.last) continue;
      memory[i] = walk.address(number) + place;
      if constexpr (operation == Operation::kGather) held[i] = load_word<Word16>(memory[i]);
      if constexpr (operation == Operation::kScatter) held[i] = load_word<Word16>(packed + number * bytes);
    }
    MHT_UNROLL
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t number = segment + i * share.step;
      if (number >= share.last) continue;
      store_word<Word16>(operation == Operation::kGather ? packed + number * bytes : memory[i], held[i]);
    }
  }
}

// The copy that tile `tile` belongs to, at or after `copy`: ever longer steps forward, then halving.
MHT_HOST_DEVICE int64_t find_copy(const TileTable& table, int64_t copy, int64_t tile) {
  int64_t step = 1;
  while (copy + step < table.copy_count && table.first_tiles[copy + step] <= tile) {
    copy += step;
    step *= 2;
  }
  for (; step > 0; step /= 2) {
    if (copy + step < table.copy_count && table.first_tiles[copy + step] <= tile) copy += step;
  }
  return copy;
}

// Everything that one lane does in a launch of `warps` warps.
template <Operation operation>
MHT_HOST_DEVICE void run_lane(const TileTable& table, int64_t warp, int64_t warps, uint32_t lane) {
  int64_t copy = 0;
  for (int64_t tile = warp; tile < table.tiles; tile += warps) {
    copy = find_copy(table, copy, tile);
    const TiledCopy& tiled = table.copies[copy];
    const uint32_t within = static_cast<uint32_t>(tile - table.first_tiles[copy]);
    if (tiled.pieces > 0) {
      move_piece<operation>(table, tiled, within, lane);
    } else if (tiled.is_single_words != 0) {
      move_single_words<operation>(table, tiled, share_of(tiled, within, lane));
    } else {
      move_segments<operation>(table, tiled, share_of(tiled, within, lane));
    }
  }
}

}  // namespace mht

#endif  // MHT_KERNELS_TILE_COPY_CUH_
