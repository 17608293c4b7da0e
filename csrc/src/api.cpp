// Every exported function: arguments are checked here, once, and the work is done elsewhere.
#include "cuda.h"
#include "mht/abi.h"

int32_t mht_abi_version(void) { return MHT_ABI_VERSION; }

int32_t mht_cuda_version(void) { return mht::cuda_version(); }

mht_status mht_cuda_device_count(int32_t* count) {
  if (count == nullptr) return MHT_INVALID_ARGUMENT;
  return mht::cuda_device_count(count);
}

const char* mht_status_text(mht_status status) {
  switch (status) {
    case MHT_OK:
      return "success";
    case MHT_INVALID_ARGUMENT:
      return "invalid argument";
    case MHT_NO_CUDA:
      return "this build of libmht_kernels has no CUDA part";
    default:
      return status > 0 ? mht::cuda_status_text(status) : "unknown status";
  }
}
