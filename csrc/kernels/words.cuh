// Loads and stores of 1, 2, 4, 8 and 16 bytes.
//
// What is read is written by nobody during a launch (checked: the packed buffer lies in no range), so reads may take the
// read-only path. Words of 16 bytes are used once: they are kept out of L1 and are the first to leave L2. Narrower ones
// share sectors with those of other lanes, so they stay.
#ifndef MHT_KERNELS_WORDS_CUH_
#define MHT_KERNELS_WORDS_CUH_

#include "index.h"

namespace mht {

struct alignas(16) Word16 {
  uint32_t x, y, z, w;
};

template <class Word>
MHT_HOST_DEVICE Word load_word(Address address) {
  const Word* from = reinterpret_cast<const Word*>(static_cast<uintptr_t>(address));
#if defined(__CUDA_ARCH__)
  return __ldg(from);
#else
  return *from;
#endif
}

template <>
MHT_HOST_DEVICE Word16 load_word<Word16>(Address address) {
#if defined(__CUDA_ARCH__)
  Word16 word;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(address));
  return word;
#else
  return *reinterpret_cast<const Word16*>(static_cast<uintptr_t>(address));
#endif
}

template <class Word>
MHT_HOST_DEVICE void store_word(Address address, Word word) {
  *reinterpret_cast<Word*>(static_cast<uintptr_t>(address)) = word;
}

template <>
MHT_HOST_DEVICE void store_word<Word16>(Address address, Word16 word) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(address), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
#else
  *reinterpret_cast<Word16*>(static_cast<uintptr_t>(address)) = word;
#endif
}

}  // namespace mht

#endif  // MHT_KERNELS_WORDS_CUH_
