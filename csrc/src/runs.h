// Moving one run of bytes: through the cache, or past it.
#ifndef MHT_SRC_RUNS_H_
#define MHT_SRC_RUNS_H_

#include <stdint.h>
#include <string.h>

#include "index.h"
#include "streams.h"

namespace mht {

// A length that only run time knows; other lengths are those that KV caches are made of.
constexpr int64_t kAny = 0;

inline char* pointer(Address address) { return reinterpret_cast<char*>(static_cast<uintptr_t>(address)); }

template <int64_t kBytes>
inline void copy_run(char* target, const char* source, int64_t bytes) {
  if constexpr (kBytes == kAny) {
    memcpy(target, source, static_cast<size_t>(bytes));
  } else {
    // Line by line, which the compiler unrolls; of the whole it would make a call.
    constexpr int64_t kPart = kBytes < kLine ? kBytes : kLine;
    for (int64_t at = 0; at < kBytes; at += kPart) __builtin_memcpy(target + at, source + at, kPart);
  }
}

// Whole lines past the cache, so that they need not be read before they are written. The ends go through the cache:
// neighbours share those lines.
inline void stream_run(char* target, const char* source, int64_t bytes, StreamLines stream) {
  const int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) % kLine);
  if (head + kLine > bytes) {
    memcpy(target, source, static_cast<size_t>(bytes));
    return;
  }
  const int64_t lines = (bytes - head) / kLine;
  const int64_t tail = (bytes - head) % kLine;
  if (head > 0) memcpy(target, source, static_cast<size_t>(head));
  stream(target + head, source + head, lines);
  if (tail > 0) memcpy(target + bytes - tail, source + bytes - tail, static_cast<size_t>(tail));
}

// The memory of a segment whose turn comes soon.
template <Operation operation>
inline void prefetch_run(Address address, int64_t bytes) {
  constexpr int64_t kMost = 4096;
  for (int64_t at = 0; at < bytes && at < kMost; at += kLine) {
    __builtin_prefetch(pointer(address + static_cast<Address>(at)), operation == Operation::kGather ? 0 : 1);
  }
}

// One segment; `stream`: null to go through the cache.
template <Operation operation, int64_t kBytes>
inline void move_run(Address memory, Address packed, int64_t bytes, StreamLines stream) {
  if constexpr (operation == Operation::kClear) {
    memset(pointer(memory), 0, static_cast<size_t>(kBytes != kAny ? kBytes : bytes));
  } else {
    char* target = pointer(operation == Operation::kGather ? packed : memory);
    const char* source = pointer(operation == Operation::kGather ? memory : packed);
    if (stream != nullptr) {
      stream_run(target, source, bytes, stream);
    } else {
      copy_run<kBytes>(target, source, bytes);
    }
  }
}

}  // namespace mht

#endif  // MHT_SRC_RUNS_H_
