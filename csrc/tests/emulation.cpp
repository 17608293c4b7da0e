#include "emulation.h"

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

}  // namespace

mht_status run_emulated(const mht_copy_table* table, Operation operation, int32_t warps, int64_t* row) noexcept {
  int64_t unused = -1;
  int64_t* at = row != nullptr ? row : &unused;
  Checked checked;
  if (warps < 1) return MHT_INVALID_ARGUMENT;
  mht_status status = check_table(*table, operation, INT64_MAX, &checked, at);
  if (status != MHT_OK) return status;
  const size_t bytes = static_cast<size_t>(tile_table_bytes(table->copy_count, table->offset_count));
  const std::unique_ptr<char, decltype(&free)> buffer(static_cast<char*>(malloc(bytes)), free);
  TileTable tiles;
  status = make_tiles(*table, buffer.get(), buffer.get(), &tiles, at);
  if (status != MHT_OK) return status;
  if (operation == Operation::kGather) launch<Operation::kGather>(tiles, warps);
  if (operation == Operation::kScatter) launch<Operation::kScatter>(tiles, warps);
  if (operation == Operation::kClear) launch<Operation::kClear>(tiles, warps);
  return MHT_OK;
}

}  // namespace mht
