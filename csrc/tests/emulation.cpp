// The device code on the host: warps and lanes as loops, in an order that no GPU would choose. Built by the Python tests
// into a library of its own.
#include <stdlib.h>

#include <memory>

#include "check.h"
#include "tile_copy.cuh"
#include "tile_table.h"

namespace mht {
namespace {

template <Operation operation>
void launch(const TileTable& tiles, int64_t warps) {
  for (int64_t warp = warps - 1; warp >= 0; --warp) {
    for (uint32_t lane = kWarpLanes; lane-- > 0;) run_lane<operation>(tiles, warp, warps, lane);
  }
}

mht_status emulate(const mht_copy_table& table, Operation operation, int32_t warps, int64_t* row) {
  Checked checked;
  mht_status status = check_table(table, operation, INT64_MAX, &checked, row);
  if (status != MHT_OK) return status;
  const size_t bytes = static_cast<size_t>(tile_table_bytes(table.copy_count, table.offset_count));
  const std::unique_ptr<char, decltype(&free)> buffer(static_cast<char*>(malloc(bytes)), free);
  TileTable tiles;
  status = make_tiles(table, buffer.get(), buffer.get(), &tiles, row);
  if (status != MHT_OK) return status;
  if (operation == Operation::kGather) launch<Operation::kGather>(tiles, warps);
  if (operation == Operation::kScatter) launch<Operation::kScatter>(tiles, warps);
  if (operation == Operation::kClear) launch<Operation::kClear>(tiles, warps);
  return MHT_OK;
}

}  // namespace
}  // namespace mht

// The signature of the CPU functions; `warps` in the place of `threads`.
#define MHT_EMULATED(name, operation)                                                                          \
  extern "C" MHT_API mht_status name(const mht_copy_table* table, int32_t warps, int64_t* row) {               \
    return warps < 1 ? MHT_INVALID_ARGUMENT : mht::emulate(*table, mht::Operation::operation, warps, row);     \
  }

MHT_EMULATED(mht_emulated_gather, kGather)
MHT_EMULATED(mht_emulated_scatter, kScatter)
MHT_EMULATED(mht_emulated_clear, kClear)
