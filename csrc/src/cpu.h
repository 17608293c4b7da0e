// A whole table on the CPU.
#ifndef MHT_SRC_CPU_H_
#define MHT_SRC_CPU_H_

#include "index.h"

namespace mht {

mht_status run_on_cpu(const mht_copy_table* table, Operation operation, int32_t threads, int64_t* row) noexcept;

}  // namespace mht

#endif  // MHT_SRC_CPU_H_
