// What api.cpp needs from CUDA; cuda.cu answers where CUDA was compiled in, cuda_absent.cpp where it was not.
#ifndef MHT_SRC_CUDA_H_
#define MHT_SRC_CUDA_H_

#include "index.h"
#include "mht/cuda.h"

namespace mht {

int32_t cuda_version() noexcept;
mht_status cuda_device_count(int32_t* count) noexcept;
const char* cuda_status_text(mht_status status) noexcept;

struct ContextSize {
  int32_t device;
  int64_t table_bytes;
  int32_t calls;
  int32_t sms;
};

mht_status create_context(const ContextSize& size, mht_cuda_context** context) noexcept;
mht_status destroy_context(mht_cuda_context* context) noexcept;

// The table has been checked; the context is not null.
mht_status run_on_cuda(mht_cuda_context* context, const mht_copy_table& table, Operation operation, void* stream,
                       int64_t* ticket, int64_t* row) noexcept;
mht_status query_call(mht_cuda_context* context, int64_t ticket) noexcept;
mht_status wait_for_call(mht_cuda_context* context, int64_t ticket) noexcept;

}  // namespace mht

#endif  // MHT_SRC_CUDA_H_
