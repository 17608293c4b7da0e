// Writing whole cache lines past the cache.
#ifndef MHT_SRC_STREAMS_H_
#define MHT_SRC_STREAMS_H_

#include <stdint.h>

namespace mht {

constexpr int64_t kLine = 64;

// `target` begins a line. Finish with finish_streams.
using StreamLines = void (*)(char* target, const char* source, int64_t lines);

// The best this CPU has; found once.
StreamLines stream_lines() noexcept;

// Streamed bytes come before whatever this thread says next ("the slot is full").
void finish_streams() noexcept;

}  // namespace mht

#endif  // MHT_SRC_STREAMS_H_
