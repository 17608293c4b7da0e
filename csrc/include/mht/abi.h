// The C ABI of libmht_kernels: what may be called from outside, and nothing else.
//
// Loaded with dlopen by mooncake_hetero_tp/native; no Python, no torch, no C++ in any signature. A function that can
// fail returns an mht_status: 0 is success, a positive value is CUDA's own error code, a negative one is named below.
// No C++ exception leaves the library. tests/unit/native reads the declarations in this file and holds the Python side
// and the exported symbols to them.
#ifndef MHT_ABI_H_
#define MHT_ABI_H_

#include <stdint.h>

// Raised by one whenever a declaration or a struct in csrc/include changes; the loader refuses any other value.
#define MHT_ABI_VERSION 1

#if defined(_WIN32)
#error "libmht_kernels is built for Linux only"
#endif
#define MHT_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t mht_status;

#define MHT_OK 0
#define MHT_INVALID_ARGUMENT (-1)  // a null pointer or a value outside its range
#define MHT_NO_CUDA (-2)           // this build has no CUDA part

// MHT_ABI_VERSION of the header the library was built from.
MHT_API int32_t mht_abi_version(void);

// CUDART_VERSION (13000 for 13.0) of the runtime linked in; 0 in a CPU-only build.
MHT_API int32_t mht_cuda_version(void);

// Number of usable CUDA devices. Works without a driver: then the status is 35 (cudaErrorInsufficientDriver).
MHT_API mht_status mht_cuda_device_count(int32_t* count);

// A static, English sentence for a status; never null.
MHT_API const char* mht_status_text(mht_status status);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // MHT_ABI_H_
