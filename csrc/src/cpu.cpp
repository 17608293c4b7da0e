#include "cpu.h"

#include <new>

#include "check.h"
#include "cpu_copy.h"
#include "workers.h"

namespace mht {
namespace {

// Small enough that threads end together, large enough that finding a piece's place costs nothing.
constexpr int64_t kPieceBytes = 512 << 10;

// A scatter's pages are read much later: written past the cache, up to twice as fast from 512 B on. What a gather packs
// is sent at once, and reading it from memory costs more than was won, unless the cache cannot hold it (measured on
// Sapphire Rapids Xeons with 2 MiB of L2 a core: slots of 8 MiB take 6 to 7 ms instead of 9 for 64 MiB, and sending
// them takes what it took).
constexpr int64_t kStreamedGather = 4 << 20;

bool streams(Operation operation, int64_t bytes) {
  return operation == Operation::kScatter || (operation == Operation::kGather && bytes >= kStreamedGather);
}

void run_piece(const mht_copy_table& table, Operation operation, const Checked& checked, size_t number) noexcept {
  const Piece begin = checked.pieces[number];
  const bool is_last = number + 1 == checked.pieces.size();
  const Piece end = is_last ? Piece{table.copy_count, 0} : checked.pieces[number + 1];
  const bool past_cache = streams(operation, checked.bytes);
  const Address packed = static_cast<Address>(table.packed_address);
  for (int64_t i = begin.copy; i <= end.copy && i < table.copy_count; ++i) {
    const mht_copy& copy = table.copies[i];
    const int64_t first = i == begin.copy ? begin.byte : 0;
    const int64_t last = i == end.copy ? end.byte : segment_count(copy) * copy.run_bytes;
    if (first < last) run_copy(operation, past_cache, copy, table.offsets, packed, first, last);
  }
}

mht_status run_checked(const mht_copy_table& table, Operation operation, int32_t threads, int64_t* row) {
  Checked checked;
  const int64_t piece_bytes = threads > 1 ? kPieceBytes : INT64_MAX;
  const mht_status status = check_table(table, operation, piece_bytes, &checked, row);
  if (status != MHT_OK) return status;
  const int64_t pieces = static_cast<int64_t>(checked.pieces.size());
  share(pieces, threads, [&](int64_t i) { run_piece(table, operation, checked, static_cast<size_t>(i)); });
  return MHT_OK;
}

}  // namespace

mht_status run_on_cpu(const mht_copy_table* table, Operation operation, int32_t threads, int64_t* row) noexcept {
  int64_t unused = -1;
  int64_t* at = row != nullptr ? row : &unused;
  *at = -1;
  if (table == nullptr || threads < 1) return MHT_INVALID_ARGUMENT;
  if (table->struct_bytes != static_cast<int64_t>(sizeof(mht_copy_table))) return MHT_WRONG_STRUCT_SIZE;
  try {
    return run_checked(*table, operation, threads, at);
  } catch (const std::bad_alloc&) {
    return MHT_NO_MEMORY;
  }
}

}  // namespace mht
