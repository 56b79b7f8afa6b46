// The noise of ops/noise.py: words of Philox-4x32-10, and a Gumbel value of a word.
#pragma once

#include <initializer_list>
#include <limits>

#include "lanes.h"

namespace hybrid_runtime {

// Words of 32 bits, each in the lower half of 64; what stands in the upper halves does not matter.
typedef uint64_t WideWords __attribute__((vector_size(64)));

inline WideWords multiply_lower_halves(WideWords x, uint32_t multiplier) {
#ifdef __AVX512F__
  return (WideWords)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(multiplier));
#else
  return (x & 0xffffffff) * multiplier;
#endif
}

struct NoiseKey {
  int64_t seed, sample, position;
};

constexpr int64_t kPhiloxGroups = 64;

// Words of `kPhiloxGroups` groups of four tokens from `first_group` on: word w of a group is that of its token w.
// Returns the smallest.
inline uint32_t philox_block(const NoiseKey& key, int64_t first_group, uint32_t (&words)[4][kPhiloxGroups]) {
  typedef uint32_t EightWords __attribute__((vector_size(32)));
  const WideWords place{0, 1, 2, 3, 4, 5, 6, 7};
  EightWords smallest = ~EightWords{};
  for (int64_t group = 0; group < kPhiloxGroups; group += 8) {
    WideWords c0 = WideWords{} + static_cast<uint64_t>(key.position), c1 = place + (first_group + group);
    WideWords c2 = WideWords{} + static_cast<uint64_t>(key.sample), c3{};
    uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint64_t>(key.seed) >> 32;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const WideWords product0 = multiply_lower_halves(c0, 0xD2511F53), product1 = multiply_lower_halves(c2, 0xCD9E8D57);
      c0 = (product1 >> 32) ^ c1 ^ k0;
      c2 = (product0 >> 32) ^ c3 ^ k1;
      c1 = product1;
      c3 = product0;
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    int word = 0;
    for (WideWords c : {c0, c1, c2, c3}) {
      const EightWords narrow = __builtin_convertvector(c, EightWords);
      smallest = narrow < smallest ? narrow : smallest;
      std::memcpy(&words[word++][group], &narrow, sizeof(narrow));
    }
  }
  uint32_t result = smallest[0];
  for (int lane = 1; lane < 8; ++lane) result = smallest[lane] < result ? smallest[lane] : result;
  return result;
}

// -log(-log(1 - u)) of the uniform number u that a word stands for, strictly between 0 and 1.
template <class C>
inline C gumbel_of_word(uint32_t word) {
  const C uniform = (static_cast<C>(word) + C{0.5}) * C{0x1p-32};
  const C below_one = 1 - std::numeric_limits<C>::epsilon() / 2;
  return -std::log(-std::log1p(-(uniform < below_one ? uniform : below_one)));
}

}  // namespace hybrid_runtime
