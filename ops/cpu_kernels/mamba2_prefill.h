// Mamba-2 over ragged sequences: operands, and the walk over sequences and heads.
#pragma once

#include "mamba2_blocks.h"
#include "mamba2_chunks.h"

namespace hybrid_runtime {

// Every head over every sequence, from its first state to the states asked for. `Form` knows the way through a segment.
template <class Form>
inline void run_sequences(const Mamba2Operands& p, const std::vector<std::vector<Segment>>& segments) {
  const int64_t num_heads = p.h0_SHPN.sizes[1], head_dim = p.h0_SHPN.sizes[2], state_dim = p.h0_SHPN.sizes[3];
  const int64_t bytes_per_head = round_up(head_dim, kStateTileRows) * state_dim * sizeof(float);
  const int64_t cached_heads = std::max<int64_t>(1, kCachedStateBytes / std::max<int64_t>(1, bytes_per_head));
  const Form form(p, segments);
  torch::stable::parallel_for(0, num_heads, 1, [&](int64_t begin, int64_t end) {
    HeadStates states(std::min(cached_heads, end - begin), head_dim, state_dim);
    typename Form::Scratch scratch(form, states);
    for (int64_t first = begin; first < end; first += cached_heads) {
      const int64_t last = std::min(first + cached_heads, end);
      for (size_t sequence = 0; sequence < segments.size(); ++sequence) {
        for (int64_t head = first; head < last; ++head) {
          states.load(head - first, p.h0_SHPN.at<float>(sequence, head));
        }
        for (const Segment& segment : segments[sequence]) {
          form.advance(segment, first, last, states, scratch);
          for (int64_t state : segment.states) {
            for (int64_t head = first; head < last; ++head) {
              states.save(head - first, p.states_RHPN.at<float>(state, head));
            }
          }
        }
      }
    }
  });
}

// x [L, H, P], dt [L, H], a [H], b and c [L, G, N], h0 [S, H, P, N] float32; sequences as for `causal_conv`. Returns y
// like x (padding tokens: 0) and the states [R, H, P, N] float32. If x is bfloat16, b and c are, and factors of products.
inline std::tuple<Tensor, Tensor> mamba2_prefill(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b,
                                                 const Tensor& c, const Tensor& h0, const Tensor& token_sequence,
                                                 const Tensor& token_offset, const Tensor& state_sequence,
                                                 const Tensor& state_length) {
  const Tensor first_states = torch::stable::contiguous(h0);
  const View h0_SHPN = view_of(first_states, "h0_SHPN", {kAny, kAny, kAny, kAny});
  require_dtype(h0_SHPN, ScalarType::Float, "float32");
  const int64_t num_sequences = h0_SHPN.sizes[0], num_heads = h0_SHPN.sizes[1];
  const int64_t head_dim = h0_SHPN.sizes[2], state_dim = h0_SHPN.sizes[3];
  const View x_LHP = view_of(x, "x_LHP", {kAny, num_heads, head_dim});
  const int64_t num_tokens = x_LHP.sizes[0];
  const View b_LGN = view_of(b, "b_LGN", {num_tokens, kAny, state_dim});
  const View c_LGN = view_of(c, "c_LGN", {num_tokens, b_LGN.sizes[1], state_dim});
  const View dt_LH = view_of(dt, "dt_LH", {num_tokens, num_heads}), a_H = view_of(a, "a_H", {num_heads});
  require_groups(b_LGN, b_LGN.sizes[1], num_heads);
  const auto segments =
      cut_sequences(token_sequence, token_offset, state_sequence, state_length, num_tokens, num_sequences);
  const int64_t num_states = state_sequence.size(0);

  Tensor y = torch::stable::new_empty(x, {num_tokens, num_heads, head_dim});
  Tensor states = torch::stable::new_empty(first_states, {num_states, num_heads, head_dim, state_dim});
  const Mamba2Operands p{x_LHP,
                         b_LGN,
                         c_LGN,
                         h0_SHPN,
                         view_of(y, "y_LHP", {num_tokens, num_heads, head_dim}),
                         view_of(states, "states_RHPN", {num_states, num_heads, head_dim, state_dim}),
                         TokenDecays(dt_LH, a_H)};
  const bool is_narrow = x_LHP.dtype == ScalarType::BFloat16;
  if (is_narrow) {
    for (const View& view : {b_LGN, c_LGN}) require_dtype(view, ScalarType::BFloat16, "bfloat16, as x");
  } else {
    require_dtype(x_LHP, ScalarType::Float, "float32 or bfloat16");
  }
  const View sequence_L = view_of(token_sequence, "token_sequence_L", {num_tokens});
  const size_t bytes_per_token = num_heads * head_dim * (is_narrow ? sizeof(BFloat) : sizeof(float));
  for (int64_t token = 0; token < num_tokens; ++token) {
    const bool is_padding = *sequence_L.at<int64_t>(token) == num_sequences;
    if (is_padding) std::memset(p.y_LHP.data + token * bytes_per_token, 0, bytes_per_token);
  }
  if (is_narrow) {
    run_sequences<Mamba2Chunks>(p, segments);
  } else {
    run_sequences<Mamba2Blocks>(p, segments);
  }
  return {y, states};
}

}  // namespace hybrid_runtime
