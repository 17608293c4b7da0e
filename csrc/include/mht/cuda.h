// The same three operations on a CUDA device.
//
// A context owns everything that CUDA allocates, so that no call does: make it where allocating is allowed. A call
// checks the table on the host, writes it to pinned memory of the context, and enqueues one small copy of it to the
// device, one launch and one event on the given stream. Nothing synchronises a device or a stream.
#ifndef MHT_CUDA_H_
#define MHT_CUDA_H_

#include "mht/copy_table.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mht_cuda_context mht_cuda_context;

// Bytes that a table of so many copies and offsets takes in a context; negative: too many to count.
MHT_API int64_t mht_cuda_table_bytes(int64_t copy_count, int64_t offset_count);

// Room for `max_calls` calls in flight with tables of up to `max_table_bytes` each. `max_sms` bounds the blocks of a
// launch and so the multiprocessors that it occupies; 0: no bound. Loads the kernels. On failure nothing is kept and
// `context` gets null; without a driver the status is 35 (cudaErrorInsufficientDriver).
MHT_API mht_status mht_cuda_context_create(int32_t device, int64_t max_table_bytes, int32_t max_calls, int32_t max_sms,
                                           mht_cuda_context** context);

// Waits for the calls in flight, then frees. Null is allowed.
MHT_API mht_status mht_cuda_context_destroy(mht_cuda_context* context);

// As mht_gather, for addresses that the context's device can reach, in the order of `stream` (a cudaStream_t of that
// device). `ticket` gets the number of the call. Refused calls have enqueued nothing. Thread-safe.
MHT_API mht_status mht_cuda_gather(mht_cuda_context* context, const mht_copy_table* table, void* stream,
                                   int64_t* ticket, int64_t* row);
MHT_API mht_status mht_cuda_scatter(mht_cuda_context* context, const mht_copy_table* table, void* stream,
                                    int64_t* ticket, int64_t* row);
MHT_API mht_status mht_cuda_clear(mht_cuda_context* context, const mht_copy_table* table, void* stream,
                                  int64_t* ticket, int64_t* row);

// MHT_OK once the call's event has completed, MHT_NOT_READY before.
MHT_API mht_status mht_cuda_query(mht_cuda_context* context, int64_t ticket);

// Sleeps until the call's event has completed.
MHT_API mht_status mht_cuda_wait(mht_cuda_context* context, int64_t ticket);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // MHT_CUDA_H_
