// y = x wᵀ + bias with the weights in the layout they were loaded in, for few rows of x.
//
// A tile of rows and outputs keeps its sums in registers and walks along the inputs, 64 bytes of x and of w at a time;
// the 16 partial sums of each lane are added up at the end. Weights are read once from memory; with few rows that, not
// arithmetic, sets the time, so the rows of the next tile are prefetched.
#pragma once

#include "lanes.h"
#include "tensor_view.h"

namespace hybrid_runtime {

// A tile has at most 16 sums. Its rows share the loads of w, its outputs those of x.
constexpr int kTileRows = 4;
constexpr int64_t kBlockOutputs = 16;
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
  static_assert(ROWS * OUTPUTS <= 16);
  constexpr int64_t step = Lanes<T>::count;
  const T* x = reinterpret_cast<const T*>(p.x) + row * p.x_stride;
  const T* w = reinterpret_cast<const T*>(p.w) + output * p.num_inputs;
  Floats sums[16] = {};
  const auto add_products = [&](auto load) {
    typename Lanes<T>::Vector x_lanes[ROWS];
    for (int r = 0; r < ROWS; ++r) x_lanes[r] = load(x + r * p.x_stride);
    for (int o = 0; o < OUTPUTS; ++o) {
      const auto w_lanes = load(w + o * p.num_inputs);
      for (int r = 0; r < ROWS; ++r) {
        sums[r * OUTPUTS + o] = Lanes<T>::multiply_add(x_lanes[r], w_lanes, sums[r * OUTPUTS + o]);
      }
    }
  };
  int64_t i = 0;
  for (; i + step <= p.num_inputs; i += step) {
    if (PREFETCH) {
      // An address past the weights does no harm: a prefetch reads nothing.
      for (int o = 0; o < OUTPUTS; ++o) __builtin_prefetch(w + (OUTPUTS + o) * p.num_inputs + i);
    }
    add_products([i](const T* from) { return load_lanes(from + i); });
  }
  if (const int64_t rest = p.num_inputs - i; rest > 0) {
    add_products([i, rest](const T* from) { return load_some_lanes(from + i, rest); });
  }

  Floats totals = sum_lanes(sums);
  if (p.bias) {
    const T* bias = reinterpret_cast<const T*>(p.bias) + output;
    for (int n = 0; n < ROWS * OUTPUTS; ++n) totals[n] += load<float>(bias[n % OUTPUTS]);
  }
  T rounded[16];
  store_lanes(totals, rounded);
  for (int r = 0; r < ROWS; ++r) {
    T* y = reinterpret_cast<T*>(p.y) + (row + r) * p.num_outputs + output;
    std::memcpy(y, rounded + r * OUTPUTS, OUTPUTS * sizeof(T));
  }
}

// ROWS rows against `outputs` outputs from `output` on.
template <class T, int ROWS, bool PREFETCH>
inline void linear_rows(const LinearRows& p, int64_t row, int64_t output, int64_t outputs) {
  constexpr int width = ROWS == 1 ? 16 : ROWS == 2 ? 8 : 4;
  const int64_t end = output + outputs;
  for (; output + width <= end; output += width) linear_tile<T, ROWS, width, PREFETCH>(p, row, output);
  for (; output < end; ++output) linear_tile<T, ROWS, 1, PREFETCH>(p, row, output);
}

template <class T>
inline void skinny_linear(const LinearRows& p, int64_t num_rows) {
  const int64_t num_blocks = (p.num_outputs + kBlockOutputs - 1) / kBlockOutputs;
  const int64_t bytes_per_block = kBlockOutputs * p.num_inputs * sizeof(T) * ((num_rows + 3) / 4);
  torch::stable::parallel_for(0, num_blocks, grain_for(bytes_per_block), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t output = block * kBlockOutputs, outputs = std::min(kBlockOutputs, p.num_outputs - output);
      int64_t row = 0;
      for (; row + kTileRows <= num_rows; row += kTileRows) {
        // The first rows bring the weights from memory, the others find them in cache.
        if (row == 0) {
          linear_rows<T, kTileRows, true>(p, row, output, outputs);
        } else {
          linear_rows<T, kTileRows, false>(p, row, output, outputs);
        }
      }
      switch (num_rows - row) {
        case 3:
          linear_rows<T, 3, true>(p, row, output, outputs);
          break;
        case 2:
          linear_rows<T, 2, true>(p, row, output, outputs);
          break;
        case 1:
          linear_rows<T, 1, true>(p, row, output, outputs);
          break;
      }
    }
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
