// The emulation as a library for the Python tests, with the signatures of the CPU functions.
#include "emulation.h"

extern "C" {

MHT_API mht_status mht_emulated_gather(const mht_copy_table* table, int32_t warps, int64_t* row) {
  return mht::run_emulated(table, mht::Operation::kGather, warps, row);
}

MHT_API mht_status mht_emulated_scatter(const mht_copy_table* table, int32_t warps, int64_t* row) {
  return mht::run_emulated(table, mht::Operation::kScatter, warps, row);
}

MHT_API mht_status mht_emulated_clear(const mht_copy_table* table, int32_t warps, int64_t* row) {
  return mht::run_emulated(table, mht::Operation::kClear, warps, row);
}

}  // extern "C"
