// Sixteen floats at a time: GCC's vector types, which every processor has in some form.
#pragma once

#include "numbers.h"

namespace hybrid_runtime {

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

// 64 bytes of T, and their products with another 64 bytes added to 16 sums.
template <class T>
struct Lanes;

template <>
struct Lanes<float> {
  static constexpr int64_t count = 16;
  using Vector = Floats;
  static Floats multiply_add(Vector x, Vector y, Floats sums) {
#ifdef __AVX512F__
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sums);
#else
    return sums + x * y;
#endif
  }
};

template <>
struct Lanes<BFloat> {
  static constexpr int64_t count = 32;
  using Vector = Words;
  static Floats multiply_add(Vector x, Vector y, Floats sums) {
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)(__m512i)x, (__m512bh)(__m512i)y);
#else
    // A bfloat16 is the upper half of a float; each word holds two.
    const Words upper = ~Words{} << 16;
    sums += (Floats)(x << 16) * (Floats)(y << 16);
    return sums + (Floats)(x & upper) * (Floats)(y & upper);
#endif
  }
};

template <class T>
inline typename Lanes<T>::Vector load_lanes(const T* from) {
  typename Lanes<T>::Vector lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

// The first `count` elements, then zeros.
template <class T>
inline typename Lanes<T>::Vector load_some_lanes(const T* from, int64_t count) {
  typename Lanes<T>::Vector lanes{};
  std::memcpy(&lanes, from, count * sizeof(T));
  return lanes;
}

inline Floats broadcast(float x) {
#ifdef __AVX512F__
  return (Floats)_mm512_set1_ps(x);
#else
  return Floats{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#endif
}

inline Floats load_floats(const float* from) { return load_lanes(from); }
inline Floats load_floats(const BFloat* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

inline void store_lanes(Floats x, float (&to)[16]) { std::memcpy(to, &x, sizeof(x)); }

// As `store<BFloat>`, sixteen at a time.
inline void store_lanes(Floats x, BFloat (&to)[16]) {
  const Words bits = (Words)x, is_number = (Words)(x == x);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Halves halves = __builtin_convertvector((rounded & is_number) | (0x7fc0 & ~is_number), Halves);
  std::memcpy(to, &halves, sizeof(halves));
}

// Lane n of the result is the sum over the lanes of sums[n], in the same order for every n.
inline Floats sum_lanes(const Floats (&sums)[16]) {
#ifdef __AVX512F__
  __m512 quarter[4];  // in each 128 bits: a part of the sums of four
  for (int n = 0; n < 4; ++n) {
    const __m512* s = reinterpret_cast<const __m512*>(sums) + 4 * n;
    const __m512d low = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(s[0], s[1]), _mm512_unpackhi_ps(s[0], s[1])));
    const __m512d high =
        _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(s[2], s[3]), _mm512_unpackhi_ps(s[2], s[3])));
    quarter[n] =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  }
  const auto add_halves = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return (Floats)add_halves(add_halves(quarter[0], quarter[1]), add_halves(quarter[2], quarter[3]));
#else
  Floats total{};
  for (int n = 0; n < 16; ++n) {
    for (int lane = 0; lane < 16; ++lane) total[n] += sums[n][lane];
  }
  return total;
#endif
}

}  // namespace hybrid_runtime
