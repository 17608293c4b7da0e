#include "cuda.h"

namespace mht {

int32_t cuda_version() noexcept { return 0; }

mht_status cuda_device_count(int32_t* count) noexcept {
  *count = 0;
  return MHT_NO_CUDA;
}

const char* cuda_status_text(mht_status) noexcept { return "a CUDA error code, from a build without CUDA"; }

mht_status create_context(const ContextSize&, mht_cuda_context**) noexcept { return MHT_NO_CUDA; }

mht_status destroy_context(mht_cuda_context*) noexcept { return MHT_NO_CUDA; }

mht_status run_on_cuda(mht_cuda_context*, const mht_copy_table&, Operation, void*, int64_t*, int64_t*) noexcept {
  return MHT_NO_CUDA;
}

mht_status query_call(mht_cuda_context*, int64_t) noexcept { return MHT_NO_CUDA; }

mht_status wait_for_call(mht_cuda_context*, int64_t) noexcept { return MHT_NO_CUDA; }

}  // namespace mht
