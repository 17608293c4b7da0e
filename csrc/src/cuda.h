// What api.cpp needs from CUDA; cuda.cu answers where CUDA was compiled in, cuda_absent.cpp where it was not.
#ifndef MHT_SRC_CUDA_H_
#define MHT_SRC_CUDA_H_

#include "mht/abi.h"

namespace mht {

int32_t cuda_version() noexcept;
mht_status cuda_device_count(int32_t* count) noexcept;
const char* cuda_status_text(mht_status status) noexcept;

}  // namespace mht

#endif  // MHT_SRC_CUDA_H_
