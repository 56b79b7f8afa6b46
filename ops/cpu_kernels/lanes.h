// Sixteen floats at a time: GCC's vector types, which every processor has in some form.
#pragma once

#include "numbers.h"

namespace hybrid_runtime {

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint16_t WideHalves __attribute__((vector_size(64)));

constexpr WideHalves kInterleaved = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

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

// Two neighbours, in every lane.
inline Words broadcast_pair(const BFloat* from) {
  uint32_t pair;
  std::memcpy(&pair, from, sizeof(pair));
  return Words{} + pair;
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

// In each lane bfloat16 of `even` and, above it, of `odd`: with AVX512-BF16, subnormal numbers become 0.
inline Words pair_lanes(Floats even, Floats odd) {
#ifdef __AVX512BF16__
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  return (Words)_mm512_permutexvar_epi16((__m512i)kInterleaved, halves);
#else
  BFloat low[16], high[16];
  store_lanes(even, low);
  store_lanes(odd, high);
  Words pairs;
  for (int lane = 0; lane < 16; ++lane) pairs[lane] = low[lane].bits | uint32_t{high[lane].bits} << 16;
  return pairs;
#endif
}

// bfloat16 of `low`, then of `high`.
inline Words join_lanes(Floats low, Floats high) {
#ifdef __AVX512BF16__
  return (Words)(__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
  BFloat rounded[2][16];
  store_lanes(low, rounded[0]);
  store_lanes(high, rounded[1]);
  Words joined;
  std::memcpy(&joined, rounded, sizeof(joined));
  return joined;
#endif
}

// Rows become columns.
inline void transpose(Floats (&rows)[16]) {
#ifdef __AVX512F__
  const auto* from = reinterpret_cast<const __m512*>(rows);
  __m512 pairs[16], quads[16];
  for (int n = 0; n < 16; n += 2) {
    pairs[n] = _mm512_unpacklo_ps(from[n], from[n + 1]);
    pairs[n + 1] = _mm512_unpackhi_ps(from[n], from[n + 1]);
  }
  for (int n = 0; n < 16; n += 4) {
    for (int part = 0; part < 2; ++part) {
      const __m512d low = _mm512_castps_pd(pairs[n + part]), high = _mm512_castps_pd(pairs[n + 2 + part]);
      quads[n + 2 * part] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      quads[n + 2 * part + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  for (int n = 0; n < 4; ++n) {  // lane 4 m + n of rows 0-3, 4-7, 8-11 and 12-15 stands in 128 bits number m
    const __m512 a = _mm512_shuffle_f32x4(quads[n], quads[4 + n], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(quads[n], quads[4 + n], 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(quads[8 + n], quads[12 + n], 0x88);
    const __m512 d = _mm512_shuffle_f32x4(quads[8 + n], quads[12 + n], 0xdd);
    rows[n] = (Floats)_mm512_shuffle_f32x4(a, c, 0x88);
    rows[4 + n] = (Floats)_mm512_shuffle_f32x4(b, d, 0x88);
    rows[8 + n] = (Floats)_mm512_shuffle_f32x4(a, c, 0xdd);
    rows[12 + n] = (Floats)_mm512_shuffle_f32x4(b, d, 0xdd);
  }
#else
  for (int row = 0; row < 16; ++row) {
    for (int column = row + 1; column < 16; ++column) {
      const float upper = rows[row][column];
      rows[row][column] = rows[column][row];
      rows[column][row] = upper;
    }
  }
#endif
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
