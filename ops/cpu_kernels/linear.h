// y = x wᵀ + bias with the weights in the layout they were loaded in, for few rows of x.
//
// A tile of rows and outputs keeps its sums in registers and walks along the inputs, 64 bytes of x and of w at a time;
// the 16 partial sums of each lane are added up at the end. Weights are read once from memory; with few rows that, not
// arithmetic, sets the time, so the rows of the next tile are prefetched.
#pragma once

#include "tensor_view.h"

namespace hybrid_runtime {

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

// 64 bytes of T, and their products with another 64 bytes added to 16 sums.
template <class T>
struct Lanes;

template <>
struct Lanes<float> {
  static constexpr int64_t count = 16;
  using Vector = Floats;
  static Floats multiply_add(Vector x, Vector w, Floats sums) {
#ifdef __AVX512F__
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)w, (__m512)sums);
#else
    return sums + x * w;
#endif
  }
};

template <>
struct Lanes<BFloat> {
  static constexpr int64_t count = 32;
  using Vector = Words;
  static Floats multiply_add(Vector x, Vector w, Floats sums) {
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)(__m512i)x, (__m512bh)(__m512i)w);
#else
    // A bfloat16 is the upper half of a float; each word holds two.
    const Words upper = ~Words{} << 16;
    sums += (Floats)(x << 16) * (Floats)(w << 16);
    return sums + (Floats)(x & upper) * (Floats)(w & upper);
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

inline float sum_of(Floats sums) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)sums);
#else
  float total = 0;
  for (int lane = 0; lane < 16; ++lane) total += sums[lane];
  return total;
#endif
}

#ifdef __AVX512F__
constexpr int kTileRows = 4, kTileOutputs = 6;  // 24 of 32 registers hold sums
#else
constexpr int kTileRows = 2, kTileOutputs = 2;
#endif
constexpr int64_t kMaxSkinnyRows = 64;

struct LinearRows {
  const char* x;
  int64_t x_stride;  // elements from one row to the next
  const char* w;
  const char* bias;  // null if there is none
  char* y;
  int64_t num_inputs, num_outputs;
};

template <class T, int ROWS, int OUTPUTS, bool PREFETCH>
inline void linear_tile(const LinearRows& p, int64_t row, int64_t output) {
  constexpr int64_t step = Lanes<T>::count;
  const T* x = reinterpret_cast<const T*>(p.x) + row * p.x_stride;
  const T* w = reinterpret_cast<const T*>(p.w) + output * p.num_inputs;
  Floats sums[ROWS][OUTPUTS] = {};
  int64_t i = 0;
  for (; i + step <= p.num_inputs; i += step) {
    typename Lanes<T>::Vector x_lanes[ROWS];
    for (int r = 0; r < ROWS; ++r) x_lanes[r] = load_lanes(x + r * p.x_stride + i);
    for (int o = 0; o < OUTPUTS; ++o) {
      // An address past the weights does no harm: a prefetch reads nothing.
      if (PREFETCH) __builtin_prefetch(w + (OUTPUTS + o) * p.num_inputs + i);
      const auto w_lanes = load_lanes(w + o * p.num_inputs + i);
      for (int r = 0; r < ROWS; ++r) sums[r][o] = Lanes<T>::multiply_add(x_lanes[r], w_lanes, sums[r][o]);
    }
  }
  if (const int64_t rest = p.num_inputs - i; rest > 0) {
    for (int o = 0; o < OUTPUTS; ++o) {
      const auto w_lanes = load_some_lanes(w + o * p.num_inputs + i, rest);
      for (int r = 0; r < ROWS; ++r) {
        sums[r][o] = Lanes<T>::multiply_add(load_some_lanes(x + r * p.x_stride + i, rest), w_lanes, sums[r][o]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    T* y = reinterpret_cast<T*>(p.y) + (row + r) * p.num_outputs + output;
    for (int o = 0; o < OUTPUTS; ++o) {
      const float bias = p.bias ? load<float>(reinterpret_cast<const T*>(p.bias)[output + o]) : 0.0f;
      y[o] = store<T>(sum_of(sums[r][o]) + bias);
    }
  }
}

// All rows against `OUTPUTS` outputs from `output` on. The first tile fetches from memory, the others find it in cache.
template <class T, int OUTPUTS>
inline void linear_column(const LinearRows& p, int64_t num_rows, int64_t output) {
  int64_t row = 0;
  if (num_rows >= kTileRows) linear_tile<T, kTileRows, OUTPUTS, true>(p, 0, output), row = kTileRows;
  for (; row + kTileRows <= num_rows; row += kTileRows) linear_tile<T, kTileRows, OUTPUTS, false>(p, row, output);
  switch (num_rows - row) {
    case 3:
      return linear_tile<T, 3, OUTPUTS, true>(p, row, output);
    case 2:
      return linear_tile<T, 2, OUTPUTS, true>(p, row, output);
    case 1:
      return linear_tile<T, 1, OUTPUTS, true>(p, row, output);
  }
}

template <class T>
inline void skinny_linear(const LinearRows& p, int64_t num_rows) {
  const int64_t bytes_per_output = p.num_inputs * sizeof(T) * std::max<int64_t>(1, num_rows / 4);
  torch::stable::parallel_for(0, p.num_outputs, grain_for(bytes_per_output), [&](int64_t begin, int64_t end) {
    int64_t output = begin;
    for (; output + kTileOutputs <= end; output += kTileOutputs) linear_column<T, kTileOutputs>(p, num_rows, output);
    for (; output < end; ++output) linear_column<T, 1>(p, num_rows, output);
  });
}

// aten's linear, whose matrix product is near the machine's peak when there are many rows.
inline Tensor aten_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  StableIValue stack[] = {torch::stable::detail::from(x), torch::stable::detail::from(weight),
                          torch::stable::detail::from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// x [..., I], weight [O, I], bias [O], one dtype; returns [..., O].
inline Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const View w_OI = view_of(weight, "weight_OI", {kAny, kAny});
  const int64_t num_outputs = w_OI.sizes[0], num_inputs = w_OI.sizes[1];
  require(x.is_cpu(), "x must be a CPU tensor");
  require(x.dim() >= 1 && x.size(x.dim() - 1) == num_inputs, "the last axis of x must have size ", num_inputs);
  require(x.scalar_type() == w_OI.dtype, "x and weight_OI must have one dtype");
  if (bias) {
    const View bias_O = view_of(*bias, "bias_O", {num_outputs});
    require(bias_O.dtype == w_OI.dtype, "bias_O and weight_OI must have one dtype");
  }
  const int64_t num_rows = num_inputs > 0 ? x.numel() / num_inputs : 0;
  const bool own_dtype = w_OI.dtype == ScalarType::BFloat16 || w_OI.dtype == ScalarType::Float;
  if (!own_dtype || num_rows == 0 || num_rows > kMaxSkinnyRows || !weight.is_contiguous()) {
    return aten_linear(x, weight, bias);
  }
  const bool two_axes = x.dim() == 2 && x.stride(1) == 1;
  const Tensor rows = two_axes || x.is_contiguous() ? x : torch::stable::contiguous(x);
  const Tensor bias_row = bias ? torch::stable::contiguous(*bias) : rows;
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = num_outputs;
  Tensor y = torch::stable::new_empty(x, torch::headeronly::IntHeaderOnlyArrayRef(shape.data(), shape.size()));
  const LinearRows pointers{static_cast<const char*>(rows.data_ptr()),
                            two_axes ? x.stride(0) : num_inputs,
                            w_OI.data,
                            bias ? static_cast<const char*>(bias_row.data_ptr()) : nullptr,
                            static_cast<char*>(y.data_ptr()),
                            num_inputs,
                            num_outputs};
  if (w_OI.dtype == ScalarType::BFloat16) {
    skinny_linear<BFloat>(pointers, num_rows);
  } else {
    skinny_linear<float>(pointers, num_rows);
  }
  return y;
}

}  // namespace hybrid_runtime
