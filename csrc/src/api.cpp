// Every exported function: arguments are checked here, once, and the work is done elsewhere.
#include <new>

#include "check.h"
#include "cpu.h"
#include "cuda.h"
#include "tile_table.h"

namespace {

mht_status run_on_cuda(mht_cuda_context* context, const mht_copy_table* table, mht::Operation operation, void* stream,
                       int64_t* ticket, int64_t* row) noexcept {
  int64_t unused = -1;
  int64_t* at = row != nullptr ? row : &unused;
  *at = -1;
  if (context == nullptr) return MHT_NO_CONTEXT;
  if (table == nullptr || ticket == nullptr) return MHT_INVALID_ARGUMENT;
  if (table->struct_bytes != static_cast<int64_t>(sizeof(mht_copy_table))) return MHT_WRONG_STRUCT_SIZE;
  try {
    mht::Checked checked;
    const mht_status status = mht::check_table(*table, operation, INT64_MAX, &checked, at);
    if (status != MHT_OK) return status;
  } catch (const std::bad_alloc&) {
    return MHT_NO_MEMORY;
  }
  return mht::run_on_cuda(context, *table, operation, stream, ticket, at);
}

}  // namespace

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

int64_t mht_cuda_table_bytes(int64_t copy_count, int64_t offset_count) {
  return mht::tile_table_bytes(copy_count, offset_count);
}

mht_status mht_cuda_context_create(int32_t device, int64_t max_table_bytes, int32_t max_calls, int32_t max_sms,
                                   mht_cuda_context** context) {
  if (context == nullptr) return MHT_INVALID_ARGUMENT;
  *context = nullptr;
  if (device < 0 || max_table_bytes < 1 || max_calls < 1 || max_sms < 0) return MHT_INVALID_ARGUMENT;
  return mht::create_context(mht::ContextSize{device, max_table_bytes, max_calls, max_sms}, context);
}

mht_status mht_cuda_context_destroy(mht_cuda_context* context) {
  return context == nullptr ? MHT_OK : mht::destroy_context(context);
}

mht_status mht_cuda_gather(mht_cuda_context* context, const mht_copy_table* table, void* stream, int64_t* ticket,
                           int64_t* row) {
  return run_on_cuda(context, table, mht::Operation::kGather, stream, ticket, row);
}

mht_status mht_cuda_scatter(mht_cuda_context* context, const mht_copy_table* table, void* stream, int64_t* ticket,
                            int64_t* row) {
  return run_on_cuda(context, table, mht::Operation::kScatter, stream, ticket, row);
}

mht_status mht_cuda_clear(mht_cuda_context* context, const mht_copy_table* table, void* stream, int64_t* ticket,
                          int64_t* row) {
  return run_on_cuda(context, table, mht::Operation::kClear, stream, ticket, row);
}

mht_status mht_cuda_query(mht_cuda_context* context, int64_t ticket) {
  return context == nullptr ? MHT_NO_CONTEXT : mht::query_call(context, ticket);
}

mht_status mht_cuda_wait(mht_cuda_context* context, int64_t ticket) {
  return context == nullptr ? MHT_NO_CONTEXT : mht::wait_for_call(context, ticket);
}
