// Sums and products that say whether 64 bits hold them.
//
// By value: GCC 12 answers !__builtin_add_overflow(a.low, b.low, &a.low) from the sum it has just stored.
#ifndef MHT_SRC_CHECKED_MATH_H_
#define MHT_SRC_CHECKED_MATH_H_

#include <stdint.h>

namespace mht {

[[nodiscard]] inline bool added(int64_t a, int64_t b, int64_t* sum) { return !__builtin_add_overflow(a, b, sum); }

[[nodiscard]] inline bool multiplied(int64_t a, int64_t b, int64_t* product) {
  return !__builtin_mul_overflow(a, b, product);
}

}  // namespace mht

#endif  // MHT_SRC_CHECKED_MATH_H_
