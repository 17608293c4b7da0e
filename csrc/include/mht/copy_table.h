// The table of one call: strided memory on one side, a contiguous packed buffer on the other.
//
// One call moves all layers, pages and heads of a chunk. core/copy_table.py makes the arrays; its numpy records have
// the layout of mht_axis and mht_copy. Every function checks the whole table first: what it refuses, it has not begun.
#ifndef MHT_COPY_TABLE_H_
#define MHT_COPY_TABLE_H_

#include "mht/abi.h"

#define MHT_MAX_AXES 6

// `count` steps of `stride` bytes, or where list >= 0 the byte offsets offsets[list] ... offsets[list + count - 1].
typedef struct mht_axis {
  int64_t stride;
  int32_t count;
  int32_t list;
} mht_axis;

// Segments of run_bytes at base plus one offset of each axis. In row-major order of the axes (the last runs fastest)
// they follow one another in the packed buffer from packed_offset. A count of 0 makes the copy empty.
typedef struct mht_copy {
  int64_t base;
  int64_t packed_offset;
  int64_t run_bytes;
  int32_t axis_count;
  int32_t reserved;  // 0
  mht_axis axes[MHT_MAX_AXES];
} mht_copy;

// Memory that copies may touch.
typedef struct mht_range {
  int64_t address;
  int64_t bytes;
} mht_range;

// Prove that a scatter writes no byte twice. Exact; slow where the copies interleave.
#define MHT_CHECK_OVERLAP 1

typedef struct mht_copy_table {
  int64_t struct_bytes;  // sizeof(mht_copy_table)
  int64_t flags;
  const mht_copy* copies;
  int64_t copy_count;
  const int64_t* offsets;
  int64_t offset_count;
  int64_t packed_address;  // not used by a clear, nor are the packed offsets
  int64_t packed_bytes;
  const mht_range* ranges;
  int64_t range_count;
} mht_copy_table;

#ifdef __cplusplus
extern "C" {
#endif

// sizeof of the structs above, in the order of their declaration (0 ... 3); 0 for any other index.
MHT_API int64_t mht_struct_bytes(int32_t index);

// Memory to packed buffer, in host memory. `threads` >= 1 is a bound: small work uses fewer. Where a copy is at fault
// `row` gets its number, else -1; it may be null. No two calls at once may touch bytes that one of them writes.
MHT_API mht_status mht_gather(const mht_copy_table* table, int32_t threads, int64_t* row);

// Packed buffer to memory.
MHT_API mht_status mht_scatter(const mht_copy_table* table, int32_t threads, int64_t* row);

// Zeroes all segments and nothing between them.
MHT_API mht_status mht_clear(const mht_copy_table* table, int32_t threads, int64_t* row);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // MHT_COPY_TABLE_H_
