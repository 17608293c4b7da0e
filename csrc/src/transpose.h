// Transposing a matrix of small elements: K that one side keeps as [channel][token] and the other as [token][channel].
#ifndef MHT_SRC_TRANSPOSE_H_
#define MHT_SRC_TRANSPOSE_H_

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace mht {

struct Matrix {
  const char* source;  // rows of adjacent elements, source_stride bytes apart
  char* target;        // columns become rows, target_stride bytes apart
  int64_t source_stride;
  int64_t target_stride;
  int64_t rows;
  int64_t columns;
};

// One by one, without index arithmetic; what the blocks leave over, and other CPUs.
template <class Element>
inline void transpose_plainly(const Matrix& m, int64_t row, int64_t row_end, int64_t column, int64_t column_end) {
  for (int64_t c = column; c < column_end; ++c) {
    const char* from = m.source + row * m.source_stride + c * static_cast<int64_t>(sizeof(Element));
    char* to = m.target + c * m.target_stride + row * static_cast<int64_t>(sizeof(Element));
    for (int64_t r = row; r < row_end; ++r, from += m.source_stride, to += sizeof(Element)) {
      memcpy(to, from, sizeof(Element));
    }
  }
}

#if defined(__SSE2__)

inline __m128i load_row(const char* address) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(address)); }
inline void store_row(char* address, __m128i row) { _mm_storeu_si128(reinterpret_cast<__m128i*>(address), row); }

// Elements of a block's side: one register holds a row.
template <class Element>
constexpr int64_t kBlock = 16 / static_cast<int64_t>(sizeof(Element));

inline void transpose_block(const char* from, int64_t from_stride, char* to, int64_t to_stride, uint16_t /*element*/) {
  __m128i a[8];
  __m128i b[8];
  for (int i = 0; i < 8; ++i) a[i] = load_row(from + i * from_stride);
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
    b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
  }
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm_unpacklo_epi16(b[i], b[i + 4]);
    a[2 * i + 1] = _mm_unpackhi_epi16(b[i], b[i + 4]);
  }
  for (int i = 0; i < 4; ++i) {
    store_row(to + (2 * i) * to_stride, _mm_unpacklo_epi16(a[i], a[i + 4]));
    store_row(to + (2 * i + 1) * to_stride, _mm_unpackhi_epi16(a[i], a[i + 4]));
  }
}

inline void transpose_block(const char* from, int64_t from_stride, char* to, int64_t to_stride, uint32_t /*element*/) {
  __m128i a[4];
  __m128i b[4];
  for (int i = 0; i < 4; ++i) a[i] = load_row(from + i * from_stride);
  for (int i = 0; i < 2; ++i) {
    b[2 * i] = _mm_unpacklo_epi32(a[i], a[i + 2]);
    b[2 * i + 1] = _mm_unpackhi_epi32(a[i], a[i + 2]);
  }
  for (int i = 0; i < 2; ++i) {
    store_row(to + (2 * i) * to_stride, _mm_unpacklo_epi32(b[i], b[i + 2]));
    store_row(to + (2 * i + 1) * to_stride, _mm_unpackhi_epi32(b[i], b[i + 2]));
  }
}

inline void transpose_block(const char* from, int64_t from_stride, char* to, int64_t to_stride, uint8_t /*element*/) {
  __m128i a[16];
  __m128i b[16];
  for (int i = 0; i < 16; ++i) a[i] = load_row(from + i * from_stride);
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 8]);
      b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 8]);
    }
    for (int i = 0; i < 16; ++i) a[i] = b[i];
  }
  for (int i = 0; i < 16; ++i) store_row(to + i * to_stride, a[i]);
}

template <class Element>
inline void transpose(const Matrix& m) {
  constexpr int64_t block = kBlock<Element>;
  constexpr int64_t size = static_cast<int64_t>(sizeof(Element));
  const int64_t rows = m.rows / block * block;
  const int64_t columns = m.columns / block * block;
  for (int64_t column = 0; column < columns; column += block) {
    for (int64_t row = 0; row < rows; row += block) {
      transpose_block(m.source + row * m.source_stride + column * size, m.source_stride,
                      m.target + column * m.target_stride + row * size, m.target_stride, Element{});
    }
  }
  transpose_plainly<Element>(m, rows, m.rows, 0, columns);
  transpose_plainly<Element>(m, 0, m.rows, columns, m.columns);
}

#else

template <class Element>
inline void transpose(const Matrix& m) {
  transpose_plainly<Element>(m, 0, m.rows, 0, m.columns);
}

#endif

}  // namespace mht

#endif  // MHT_SRC_TRANSPOSE_H_
