// The C ABI of libmht_kernels: version, statuses, and what describes the library itself.
//
// Loaded with dlopen by mooncake_hetero_tp/native; no Python, no torch, no C++ in any signature. A function that can
// fail returns an mht_status: 0 is success, a positive value is CUDA's own error code, a negative one is named below.
// No C++ exception leaves the library. tests/unit/native reads the declarations in csrc/include and holds the Python
// side and the exported symbols to them.
#ifndef MHT_ABI_H_
#define MHT_ABI_H_

#include <stdint.h>

// Raised by one whenever a declaration or a struct in csrc/include changes; the loader refuses any other value.
#define MHT_ABI_VERSION 3

#if defined(_WIN32)
#error "libmht_kernels is built for Linux only"
#endif
#define MHT_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t mht_status;

#define MHT_OK 0
#define MHT_INVALID_ARGUMENT (-1)    // a null pointer or a value outside its range
#define MHT_NO_CUDA (-2)             // this build has no CUDA part
#define MHT_WRONG_STRUCT_SIZE (-3)   // struct_bytes is not the size this build knows
#define MHT_BAD_COPY (-4)            // run length, axis count, an axis' count or a reserved field
#define MHT_BAD_LIST (-5)            // a listed axis that leaves the offsets
#define MHT_OVERFLOW (-6)            // sizes or addresses that 64 bits cannot hold
#define MHT_OUTSIDE_PACKED (-7)      // packed bytes outside the packed buffer
#define MHT_OUTSIDE_RANGES (-8)      // memory that no range names
#define MHT_PACKED_OVERLAP (-9)      // two copies with the same packed bytes
#define MHT_MEMORY_OVERLAP (-10)     // a scatter that would write a byte twice
#define MHT_PACKED_IN_RANGES (-11)   // the packed buffer lies in a range, so that a copy could read what it writes
#define MHT_NO_MEMORY (-12)          // the check needs more memory than there is
#define MHT_NO_CONTEXT (-13)         // a CUDA function without a context
#define MHT_TABLE_TOO_LARGE (-14)    // more than the context, or a launch, has room for
#define MHT_BUSY (-15)               // as many calls in flight as the context has room for
#define MHT_NOT_READY (-16)          // the call is still running

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
