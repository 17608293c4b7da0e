#include "cuda.h"

#include <cuda_runtime_api.h>

namespace mht {

int32_t cuda_version() noexcept { return CUDART_VERSION; }

mht_status cuda_device_count(int32_t* count) noexcept {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  *count = error == cudaSuccess ? devices : 0;
  return static_cast<mht_status>(error);
}

const char* cuda_status_text(mht_status status) noexcept {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

}  // namespace mht
