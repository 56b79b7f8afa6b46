// The short causal convolution: one token of every row over windows in a pool, and all tokens of a prefill.
//
// Sums are rounded after every product and every addition, in the order of the PyTorch form: both give the same bits.
#pragma once

#include <atomic>

#include "tensor_view.h"

namespace hybrid_runtime {

struct ConvWeights {
  View weight_DW;
  bool has_bias;
  View bias_D;
  int64_t num_channels() const { return weight_DW.sizes[0]; }
  int64_t num_taps() const { return weight_DW.sizes[1]; }
};

inline ConvWeights conv_weights(const Tensor& weight, const std::optional<Tensor>& bias) {
  const View weight_DW = view_of(weight, "weight_DW", {kAny, kAny});
  require(weight_DW.sizes[1] > 0, "weight_DW must have at least one tap");
  return {weight_DW, bias.has_value(), bias ? view_of(*bias, "bias_D", {weight_DW.sizes[0]}) : weight_DW};
}

// The weights of some channels, tap by tap, and then their biases if there are any.
template <class C>
inline void read_weights(const ConvWeights& p, int64_t first, int64_t count, C* weight_WD) {
  with_float_type(p.weight_DW.dtype, p.weight_DW.name, [&](auto zero) {
    const auto* weight = p.weight_DW.at<decltype(zero)>(first);
    const int64_t num_taps = p.num_taps(), stride = p.weight_DW.strides[0], tap_stride = p.weight_DW.strides[1];
    for (int64_t tap = 0; tap < num_taps; ++tap) {
      for (int64_t d = 0; d < count; ++d) weight_WD[tap * count + d] = load<C>(weight[d * stride + tap * tap_stride]);
    }
  });
  if (p.has_bias) {
    with_float_type(p.bias_D.dtype, p.bias_D.name, [&](auto zero) {
      const auto* bias = p.bias_D.at<decltype(zero)>(first);
      C* bias_D = weight_WD + p.num_taps() * count;
      for (int64_t d = 0; d < count; ++d) bias_D[d] = load<C>(bias[d * p.bias_D.strides[0]]);
    });
  }
}

// y = Σ_w taps[w] ∘ weight[w] + bias for `count` channels, and a number of taps known to the compiler.
template <int TAPS, class X, class C>
inline void weigh_fixed_taps(const X* const* taps, const C* weight_WD, bool has_bias, int64_t count, X* y_D) {
#pragma omp simd
  for (int64_t d = 0; d < count; ++d) {
    C total = load<C>(taps[0][d]) * weight_WD[d];
#pragma GCC unroll 8  // or the loop around it is not vectorised
    for (int tap = 1; tap < TAPS; ++tap) total += load<C>(taps[tap][d]) * weight_WD[tap * count + d];
    y_D[d] = store<X>(has_bias ? total + weight_WD[TAPS * count + d] : total);
  }
}

// The same for any number of taps, in passes over `total_D`.
template <class X, class C>
inline void weigh_taps(const X* const* taps, int64_t num_taps, const C* weight_WD, bool has_bias, int64_t count,
                       C* total_D, X* y_D) {
  if (num_taps == 4) return weigh_fixed_taps<4>(taps, weight_WD, has_bias, count, y_D);
#pragma omp simd
  for (int64_t d = 0; d < count; ++d) total_D[d] = load<C>(taps[0][d]) * weight_WD[d];  // 0 plus -0 would be 0
  for (int64_t tap = 1; tap < num_taps; ++tap) {
    const X* x_D = taps[tap];
    const C* weight_D = weight_WD + tap * count;
#pragma omp simd
    for (int64_t d = 0; d < count; ++d) total_D[d] += load<C>(x_D[d]) * weight_D[d];
  }
#pragma omp simd
  for (int64_t d = 0; d < count; ++d) {
    y_D[d] = store<X>(has_bias ? total_D[d] + weight_WD[num_taps * count + d] : total_D[d]);
  }
}

// A copy of x if its channels don't lie side by side.
inline Tensor with_adjacent_channels(const Tensor& x) {
  return x.dim() == 2 && x.stride(1) == 1 ? x : torch::stable::contiguous(x);
}

constexpr int64_t kConvChannels = 128;  // of a block, whose weights are converted once for all rows
constexpr int64_t kMaxTaps = 64;

// x [B, D], weight [D, W], bias [D], window_pool [U, W - 1, D] of the dtype of x, slots [B]; returns y like x.
inline Tensor conv_step(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, Tensor window_pool,
                        const Tensor& slots) {
  const ConvWeights weights = conv_weights(weight, bias);
  const int64_t num_channels = weights.num_channels(), num_taps = weights.num_taps();
  const Tensor rows = with_adjacent_channels(x);
  const View pool = view_of(window_pool, "window_pool", {kAny, num_taps - 1, num_channels});
  const std::vector<int64_t> slot_B = checked_slots(slots, pool.sizes[0]);
  const int64_t num_rows = slot_B.size();
  const View x_BD = view_of(rows, "x_BD", {num_rows, num_channels});
  require(pool.dtype == x_BD.dtype, "window_pool and x_BD must have one dtype");
  require(num_taps <= kMaxTaps, "weight_DW has ", num_taps, " taps, more than ", kMaxTaps);
  require_inner_contiguous(pool, 3, 1);

  Tensor y = torch::stable::new_empty(x, {num_rows, num_channels});
  const View y_BD = view_of(y, "y_BD", {num_rows, num_channels});
  const int64_t num_blocks = (num_channels + kConvChannels - 1) / kConvChannels;
  with_float_type(x_BD.dtype, x_BD.name, [&](auto zero) {
    using X = decltype(zero);
    using C = arithmetic_t<X>;
    const int64_t grain = grain_for(num_rows * num_taps * kConvChannels * 8);
    torch::stable::parallel_for(0, num_blocks, grain, [&](int64_t begin, int64_t end) {
      std::vector<C> scratch((num_taps + 2) * kConvChannels);
      C* total_D = scratch.data() + (num_taps + 1) * kConvChannels;
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * kConvChannels, count = std::min(kConvChannels, num_channels - first);
        read_weights(weights, first, count, scratch.data());
        for (int64_t row = 0; row < num_rows; ++row) {
          const X* x_D = x_BD.at<X>(row) + first;
          X* y_D = y_BD.at<X>(row) + first;
          if (slot_B[row] == 0) {
            std::fill_n(y_D, count, store<X>(C{0}));
            continue;
          }
          X* window_D = pool.at<X>(slot_B[row]) + first;
          const X* taps[kMaxTaps];
          for (int64_t tap = 0; tap + 1 < num_taps; ++tap) taps[tap] = window_D + tap * num_channels;
          taps[num_taps - 1] = x_D;
          weigh_taps(taps, num_taps, scratch.data(), weights.has_bias, count, total_D, y_D);
          for (int64_t tap = 0; tap + 1 < num_taps; ++tap) {
            std::memcpy(window_D + tap * num_channels, taps[tap + 1], count * sizeof(X));
          }
        }
      }
    });
  });
  return y;
}

// Where the input `back` tokens before a place is: in x, or in the window of its sequence.
template <class X>
inline const X* input_at(const View& x_LD, const View& windows_SWD, int64_t token, int64_t offset, int64_t sequence,
                         int64_t back) {
  return offset >= back ? x_LD.at<X>(token - back) : windows_SWD.at<X>(sequence, windows_SWD.sizes[1] + offset - back);
}

// x [L, D] in sequences [L] (S: padding) at offsets [L]; windows [S, W - 1, D] of the dtype of x. For each of R
// requested states its sequence, its length and the flat index behind its last token. Returns y [L, D] and windows
// [R, W - 1, D].
inline std::tuple<Tensor, Tensor> causal_conv(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                              const Tensor& windows, const Tensor& token_sequence,
                                              const Tensor& token_offset, const Tensor& state_sequence,
                                              const Tensor& state_length, const Tensor& state_end) {
  const ConvWeights weights = conv_weights(weight, bias);
  const int64_t num_channels = weights.num_channels(), num_taps = weights.num_taps();
  const Tensor rows = with_adjacent_channels(x), window_rows = torch::stable::contiguous(windows);
  const View x_LD = view_of(rows, "x_LD", {kAny, num_channels});
  const int64_t num_tokens = x_LD.sizes[0];
  const View windows_SWD = view_of(window_rows, "windows_SWD", {kAny, num_taps - 1, num_channels});
  const int64_t num_sequences = windows_SWD.sizes[0];
  require(windows_SWD.dtype == x_LD.dtype, "windows_SWD and x_LD must have one dtype");
  require(num_taps <= kMaxTaps, "weight_DW has ", num_taps, " taps, more than ", kMaxTaps);
  const View sequence_L = view_of(token_sequence, "token_sequence_L", {num_tokens});
  const View offset_L = view_of(token_offset, "token_offset_L", {num_tokens});
  const View sequence_R = view_of(state_sequence, "state_sequence_R", {kAny});
  const int64_t num_states = sequence_R.sizes[0];
  const View length_R = view_of(state_length, "state_length_R", {num_states});
  const View end_R = view_of(state_end, "state_end_R", {num_states});
  for (const View& indices : {sequence_L, offset_L, sequence_R, length_R, end_R}) {
    require_dtype(indices, ScalarType::Long, "int64");
  }
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t sequence = *sequence_L.at<int64_t>(token), offset = *offset_L.at<int64_t>(token);
    require(0 <= sequence && sequence <= num_sequences && 0 <= offset && offset <= token, "token ", token,
            " can't be number ", offset, " of sequence ", sequence);
  }
  for (int64_t state = 0; state < num_states; ++state) {
    const int64_t length = *length_R.at<int64_t>(state), end = *end_R.at<int64_t>(state);
    const int64_t sequence = *sequence_R.at<int64_t>(state);
    require(0 <= sequence && sequence < num_sequences && 0 <= length && length <= end && end <= num_tokens, "state ",
            state, " can't end at token ", end, " of sequence ", sequence);
  }

  Tensor y = torch::stable::new_empty(x, {num_tokens, num_channels});
  const View y_LD = view_of(y, "y_LD", {num_tokens, num_channels});
  Tensor states = torch::stable::new_empty(x, {num_states, num_taps - 1, num_channels});
  const View states_RWD = view_of(states, "states_RWD", {num_states, num_taps - 1, num_channels});
  with_float_type(x_LD.dtype, x_LD.name, [&](auto zero) {
    using X = decltype(zero);
    using C = arithmetic_t<X>;
    const int64_t grain = grain_for(num_taps * num_channels * sizeof(X));
    torch::stable::parallel_for(0, num_tokens, grain, [&](int64_t begin, int64_t end) {
      std::vector<C> scratch((num_taps + 2) * num_channels);
      read_weights(weights, 0, num_channels, scratch.data());
      C* total_D = scratch.data() + (num_taps + 1) * num_channels;
      for (int64_t token = begin; token < end; ++token) {
        const int64_t sequence = *sequence_L.at<int64_t>(token), offset = *offset_L.at<int64_t>(token);
        X* y_D = y_LD.at<X>(token);
        if (sequence == num_sequences) {
          std::fill_n(y_D, num_channels, store<X>(C{0}));
          continue;
        }
        const X* taps[kMaxTaps];
        for (int64_t tap = 0; tap < num_taps; ++tap) {
          taps[tap] = input_at<X>(x_LD, windows_SWD, token, offset, sequence, num_taps - 1 - tap);
        }
        weigh_taps(taps, num_taps, scratch.data(), weights.has_bias, num_channels, total_D, y_D);
      }
    });
    for (int64_t state = 0; state < num_states; ++state) {
      const int64_t length = *length_R.at<int64_t>(state), last = *end_R.at<int64_t>(state) - 1;
      for (int64_t tap = 0; tap + 1 < num_taps; ++tap) {
        const X* from =
            input_at<X>(x_LD, windows_SWD, last, length - 1, *sequence_R.at<int64_t>(state), num_taps - 2 - tap);
        std::memcpy(states_RWD.at<X>(state, tap), from, num_channels * sizeof(X));
      }
    }
  });
  return {y, states};
}

}  // namespace hybrid_runtime
