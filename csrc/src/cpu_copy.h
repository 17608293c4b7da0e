// One copy, or a piece of it, on a CPU.
#ifndef MHT_SRC_CPU_COPY_H_
#define MHT_SRC_CPU_COPY_H_

#include "index.h"

namespace mht {

// Bytes [first, last) of what `copy` moves, cut so that neighbouring pieces share no byte and leave none out.
// `copy` has been checked and is not empty; `packed` is where the packed buffer begins, not used by a clear; `streams`:
// whole lines are written past the cache.
void run_copy(Operation operation, bool streams, const mht_copy& copy, const int64_t* offsets, Address packed,
              int64_t first, int64_t last) noexcept;

}  // namespace mht

#endif  // MHT_SRC_CPU_COPY_H_
