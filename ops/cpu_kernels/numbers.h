// Numbers as the kernels compute with them: bfloat16, multiply-add, 16 floats at a time, exp.
//
// Built with -ffp-contract=off: where a product may keep its low bits (and where it must not) is said in the code.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace hybrid_runtime {

struct BFloat {
  uint16_t bits;
};

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// The dtype of arithmetic on stored values of type T.
template <class T>
struct Arithmetic {
  using type = float;
};
template <>
struct Arithmetic<double> {
  using type = double;
};
template <class T>
using arithmetic_t = typename Arithmetic<T>::type;

template <class C, class T>
inline C load(T x) {
  return static_cast<C>(x);
}
template <>
inline float load<float, BFloat>(BFloat x) {
  return bits_as<float>(static_cast<uint32_t>(x.bits) << 16);
}
template <>
inline double load<double, BFloat>(BFloat x) {
  return load<float>(x);
}

template <class T, class C>
inline T store(C x) {
  return static_cast<T>(x);
}
// Rounds to nearest even, as PyTorch does; every NaN becomes the same quiet one.
template <>
inline BFloat store<BFloat, float>(float x) {
  uint32_t bits = bits_as<uint32_t>(x);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>(x == x ? rounded : 0x7fc0)};
}
template <>
inline BFloat store<BFloat, double>(double x) {
  return store<BFloat>(static_cast<float>(x));
}

// x * y + z, in one rounding where the machine has an instruction for it.
inline float multiply_add(float x, float y, float z) {
#ifdef __FP_FAST_FMAF
  return __builtin_fmaf(x, y, z);
#else
  return x * y + z;
#endif
}
inline double multiply_add(double x, double y, double z) {
#ifdef __FP_FAST_FMA
  return __builtin_fma(x, y, z);
#else
  return x * y + z;
#endif
}

// e^x for x <= 0, to about one unit in the last place; 0 where the result would be subnormal, NaN for NaN. Vectorises.
inline float exp_nonpositive(float x) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693145752f, kLn2Low = 1.42860677e-6f;  // their sum is ln 2; the first is exact times n
  x = x < -87.0f ? -87.0f - 1.0f : x;
  float n = multiply_add(x, kLog2E, 12582912.0f) - 12582912.0f;  // rounds to the nearest integer
  float r = multiply_add(n, -kLn2Low, multiply_add(n, -kLn2High, x));
  float p = 1.0f / 5040.0f;  // Taylor: |r| <= ln 2 / 2, so that the term left out is below 6e-9
  p = multiply_add(p, r, 1.0f / 720.0f);
  p = multiply_add(p, r, 1.0f / 120.0f);
  p = multiply_add(p, r, 1.0f / 24.0f);
  p = multiply_add(p, r, 1.0f / 6.0f);
  p = multiply_add(p, r, 0.5f);
  p = multiply_add(p, r, 1.0f);
  p = multiply_add(p, r, 1.0f);
  bool is_number = x == x;
  int32_t exponent = static_cast<int32_t>(is_number ? n : 0.0f) + 127;
  float result = exponent <= 1 ? 0.0f : p * bits_as<float>(exponent << 23);
  return is_number ? result : x;
}
inline double exp_nonpositive(double x) { return std::exp(x); }

}  // namespace hybrid_runtime
