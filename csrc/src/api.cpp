// Every exported function: arguments are checked here, once, and the work is done elsewhere.
#include "cpu.h"
#include "cuda.h"

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
    case MHT_WRONG_STRUCT_SIZE:
      return "the table struct has another size than the library's";
    case MHT_BAD_COPY:
      return "a run length, axis count, count of an axis or reserved field is not allowed";
    case MHT_BAD_LIST:
      return "a listed axis leaves the offsets";
    case MHT_OVERFLOW:
      return "a size or an address does not fit into 64 bits";
    case MHT_OUTSIDE_PACKED:
      return "packed bytes lie outside the packed buffer";
    case MHT_OUTSIDE_RANGES:
      return "memory lies outside all ranges";
    case MHT_PACKED_OVERLAP:
      return "two copies have the same packed bytes";
    case MHT_MEMORY_OVERLAP:
      return "a byte of memory would be written twice";
    case MHT_PACKED_IN_RANGES:
      return "the packed buffer lies in a range that copies may touch";
    case MHT_NO_MEMORY:
      return "not enough memory to check the table";
    case MHT_NO_CONTEXT:
      return "no CUDA context was given";
    case MHT_TABLE_TOO_LARGE:
      return "the table is larger than the CUDA context or a launch has room for";
    case MHT_BUSY:
      return "as many calls are in flight as the CUDA context has room for";
    case MHT_NOT_READY:
      return "the call is still running";
    default:
      return status > 0 ? mht::cuda_status_text(status) : "unknown status";
  }
}

int64_t mht_struct_bytes(int32_t index) {
  constexpr int64_t sizes[] = {sizeof(mht_axis), sizeof(mht_copy), sizeof(mht_range), sizeof(mht_copy_table)};
  return index >= 0 && index < 4 ? sizes[index] : 0;
}

mht_status mht_gather(const mht_copy_table* table, int32_t threads, int64_t* row) {
  return mht::run_on_cpu(table, mht::Operation::kGather, threads, row);
}

mht_status mht_scatter(const mht_copy_table* table, int32_t threads, int64_t* row) {
  return mht::run_on_cpu(table, mht::Operation::kScatter, threads, row);
}

mht_status mht_clear(const mht_copy_table* table, int32_t threads, int64_t* row) {
  return mht::run_on_cpu(table, mht::Operation::kClear, threads, row);
}
