// Moving one run: the sizes that KV caches are made of get code of their own.
#ifndef MHT_SRC_RUNS_H_
#define MHT_SRC_RUNS_H_

#include <stdint.h>
#include <string.h>

#include "index.h"

namespace mht {

// A length that is known at compile time, or (kAny) only at run time.
constexpr int64_t kAny = 0;

// Below this a call costs more than the bytes; memcpy's own dispatch is best above it.
constexpr int64_t kInlineBytes = 256;

template <int64_t kBytes>
inline void copy_run(char* target, const char* source, int64_t bytes) {
  if constexpr (kBytes != kAny) {
    // Through registers, in parts that the compiler unrolls: left alone it may call memcpy.
    constexpr int64_t kPart = kBytes < 64 ? kBytes : 64;
    for (int64_t at = 0; at < kBytes; at += kPart) __builtin_memcpy(target + at, source + at, kPart);
  } else {
    memcpy(target, source, static_cast<size_t>(bytes));
  }
}

template <int64_t kBytes>
inline void clear_run(char* target, int64_t bytes) {
  memset(target, 0, static_cast<size_t>(kBytes != kAny ? kBytes : bytes));
}

template <Operation operation, int64_t kBytes>
inline void move_run(char* memory, char* packed, int64_t bytes) {
  if constexpr (operation == Operation::kGather) copy_run<kBytes>(packed, memory, bytes);
  if constexpr (operation == Operation::kScatter) copy_run<kBytes>(memory, packed, bytes);
  if constexpr (operation == Operation::kClear) clear_run<kBytes>(memory, bytes);
}

}  // namespace mht

#endif  // MHT_SRC_RUNS_H_
