// The device code on the host: warps and lanes as loops, in an order that no GPU would choose.
#ifndef MHT_TESTS_EMULATION_H_
#define MHT_TESTS_EMULATION_H_

#include "index.h"

namespace mht {

// As run_on_cpu, with `warps` in the place of `threads`.
mht_status run_emulated(const mht_copy_table* table, Operation operation, int32_t warps, int64_t* row) noexcept;

}  // namespace mht

#endif  // MHT_TESTS_EMULATION_H_
