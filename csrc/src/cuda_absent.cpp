#include "cuda.h"

namespace mht {

int32_t cuda_version() noexcept { return 0; }

mht_status cuda_device_count(int32_t* count) noexcept {
  *count = 0;
  return MHT_NO_CUDA;
}

const char* cuda_status_text(mht_status) noexcept { return "a CUDA error code, from a build without CUDA"; }

}  // namespace mht
