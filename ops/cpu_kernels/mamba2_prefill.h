// Mamba-2 over ragged sequences, a few tokens at a time, with the state of one head in cache.
//
// Of a block of T tokens with decays a_t, K_t the product of a_1..a_t and D_tj that of a_(j+1)..a_t:
//
//   y_t = K_t (h · c_t) + Σ_{j<=t} D_tj (b_j · c_t) dt_j x_j        h := K_T h + Σ_j D_Tj dt_j x_j b_jᵀ
//
// so that the state is read and written once per block: 2 T + 1 operations for T tokens on each of its elements, where
// the recurrence has 3 T. b_j · c_t is the same for all heads of a group. Decays are products of a few factors: nothing
// cancels, as it would in differences of running sums, and no chunk-sized matrix exists.
#pragma once

#include "lanes.h"
#include "sequences.h"
#include "tensor_view.h"

namespace hybrid_runtime {

constexpr int kBlockRows = 4;  // of a head's state

inline int64_t round_up(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// One operand per token as floats, [G, L, N] with N rounded up to lanes and zeros behind.
struct TokenVectors {
  int64_t num_tokens, width;
  std::vector<float> numbers;

  explicit TokenVectors(const View& x_LGN) : num_tokens(x_LGN.sizes[0]), width(round_up(x_LGN.sizes[2], 16)) {
    numbers.resize(x_LGN.sizes[1] * num_tokens * width);
    torch::stable::parallel_for(0, num_tokens, 64, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        for (int64_t group = 0; group < x_LGN.sizes[1]; ++group) {
          read_last_axis(x_LGN, 3, token, group, numbers.data() + (group * num_tokens + token) * width);
        }
      }
    });
  }
  const float* of(int64_t token, int64_t group) const { return numbers.data() + (group * num_tokens + token) * width; }
};

struct Mamba2Prefill {
  View x_LHP, dt_LH, a_H, h0_SHPN, y_LHP, states_RHPN;
  TokenVectors b, c;
  std::vector<float> b_dot_c;  // [L, G, T]: of each token's c with b of the block's tokens up to it
};

// b_j · c_t of a block's tokens. Its tokens are `begin` to `begin + count`.
inline void multiply_inputs(Mamba2Prefill& p, const Block& block, int64_t group, int64_t num_groups) {
  for (int t = 0; t < block.count; ++t) {
    const float* c_N = p.c.of(block.begin + t, group);
    for (int j = 0; j <= t; ++j) {
      const float* b_N = p.b.of(block.begin + j, group);
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t n = 0; n < p.b.width; ++n) sum = multiply_add(b_N[n], c_N[n], sum);
      p.b_dot_c[((block.begin + t) * num_groups + group) * kBlockTokens + j] = sum;
    }
  }
}

// Four rows of the state: returns h · c_t of row r in lane 4 r + t, then lets h decay and adds Σ_j weight_TP[j, r] b_j.
// Vectors are `width` apart.
inline Floats advance_rows(float* h_RN, int64_t width, const float* b_TN, const float* c_TN, float decay,
                           const float* weight_TP, int64_t rows) {
  Floats sums[16] = {};
  for (int64_t n = 0; n < width; n += 16) {
    Floats b[kBlockTokens], c[kBlockTokens];
    for (int t = 0; t < kBlockTokens; ++t) {
      b[t] = load_floats(b_TN + t * width + n);
      c[t] = load_floats(c_TN + t * width + n);
    }
    for (int r = 0; r < kBlockRows; ++r) {
      float* h_N = h_RN + r * width + n;
      Floats h = load_floats(h_N);
      for (int t = 0; t < kBlockTokens; ++t) {
        sums[r * kBlockTokens + t] = Lanes<float>::multiply_add(h, c[t], sums[r * kBlockTokens + t]);
      }
      h *= broadcast(decay);
      for (int j = 0; j < kBlockTokens; ++j) {
        h = Lanes<float>::multiply_add(broadcast(weight_TP[j * rows + r]), b[j], h);
      }
      std::memcpy(h_N, &h, sizeof(h));
    }
  }
  return sum_lanes(sums);
}

// The states of some heads, which one thread carries through a sequence, and what a block of one head needs.
struct HeadScratch {
  int64_t rows, width;  // of a head's state, rounded up
  std::vector<float> h_HPN, b_TN, c_TN, x_TP, weight_TP, h_dot_c_TP, y_P;

  HeadScratch(int64_t num_heads, int64_t head_dim, int64_t state_dim)
      : rows(round_up(head_dim, kBlockRows)),
        width(round_up(state_dim, 16)),
        h_HPN(num_heads * rows * width),
        b_TN(kBlockTokens * width),
        c_TN(kBlockTokens * width),
        x_TP(kBlockTokens * rows),
        weight_TP(kBlockTokens * rows),
        h_dot_c_TP(kBlockTokens * rows),
        y_P(rows) {}
  float* state(int64_t index) { return h_HPN.data() + index * rows * width; }
};

template <class X>
inline void advance_block(const Mamba2Prefill& p, const Block& block, int64_t head, int64_t num_groups, float* h_PN,
                          HeadScratch& s) {
  const int64_t head_dim = p.x_LHP.sizes[2], group = head * num_groups / p.x_LHP.sizes[1];
  const float a = read_scalar<float>(p.a_H, head);
  const float *b_TN = p.b.of(block.begin, group), *c_TN = p.c.of(block.begin, group);
  if (block.count < kBlockTokens) {
    // The tokens behind it may be anybody's: zeros, which neither decay nor add, stand in for them.
    std::fill(std::copy_n(b_TN, block.count * s.width, s.b_TN.begin()), s.b_TN.end(), 0.0f);
    std::fill(std::copy_n(c_TN, block.count * s.width, s.c_TN.begin()), s.c_TN.end(), 0.0f);
    b_TN = s.b_TN.data();
    c_TN = s.c_TN.data();
  }
  float kept[kBlockTokens], reach[kBlockTokens][kBlockTokens];
  for (int t = 0; t < kBlockTokens; ++t) {
    const int64_t token = block.begin + std::min<int64_t>(t, block.count - 1);
    const float dt = t < block.count ? read_scalar<float>(p.dt_LH, token, head) : 0.0f;
    kept[t] = std::exp(dt * a);
    reach[t][t] = 1;
    for (int j = 0; j < t; ++j) reach[t][j] = reach[t - 1][j] * kept[t];
    float* x_P = s.x_TP.data() + t * s.rows;
    const X* from = p.x_LHP.at<X>(token, head);
    for (int64_t row = 0; row < head_dim; ++row) x_P[row] = dt * load<float>(from[row * p.x_LHP.strides[2]]);
  }
  for (int t = 1; t < kBlockTokens; ++t) kept[t] *= kept[t - 1];
  for (int j = 0; j < kBlockTokens; ++j) {
    const float weight = reach[kBlockTokens - 1][j];
    const float* x_P = s.x_TP.data() + j * s.rows;
    float* weight_P = s.weight_TP.data() + j * s.rows;
#pragma omp simd
    for (int64_t row = 0; row < s.rows; ++row) weight_P[row] = weight * x_P[row];
  }
  for (int64_t row = 0; row < s.rows; row += kBlockRows) {
    float products[16];
    store_lanes(advance_rows(h_PN + row * s.width, s.width, b_TN, c_TN, kept[kBlockTokens - 1],
                             s.weight_TP.data() + row, s.rows),
                products);
    for (int r = 0; r < kBlockRows; ++r) {
      for (int t = 0; t < kBlockTokens; ++t) s.h_dot_c_TP[t * s.rows + row + r] = products[r * kBlockTokens + t];
    }
  }
  for (int t = 0; t < block.count; ++t) {
    const float* b_dot_c = p.b_dot_c.data() + ((block.begin + t) * num_groups + group) * kBlockTokens;
    const float* from_state_P = s.h_dot_c_TP.data() + t * s.rows;
    float* y_P = s.y_P.data();
#pragma omp simd
    for (int64_t row = 0; row < s.rows; ++row) y_P[row] = kept[t] * from_state_P[row];
    for (int j = 0; j <= t; ++j) {
      const float weight = reach[t][j] * b_dot_c[j];
      const float* x_P = s.x_TP.data() + j * s.rows;
#pragma omp simd
      for (int64_t row = 0; row < s.rows; ++row) y_P[row] = multiply_add(weight, x_P[row], y_P[row]);
    }
    X* to = p.y_LHP.at<X>(block.begin + t, head);
#pragma omp simd
    for (int64_t row = 0; row < head_dim; ++row) to[row] = store<X>(y_P[row]);
  }
}

// Heads `first` to `last` over one sequence, from its first state to the states asked for. Blocks outside, heads
// inside: x and y are walked along in memory, b and c stay in the nearest cache, the heads' states in the next.
template <class X>
inline void run_sequence(const Mamba2Prefill& p, const std::vector<Segment>& segments, int64_t sequence, int64_t first,
                         int64_t last, int64_t num_groups, HeadScratch& s) {
  const int64_t head_dim = p.x_LHP.sizes[2], bytes = p.h0_SHPN.sizes[3] * sizeof(float);
  std::fill(s.h_HPN.begin(), s.h_HPN.end(), 0.0f);
  for (int64_t head = first; head < last; ++head) {
    for (int64_t row = 0; row < head_dim; ++row) {
      std::memcpy(s.state(head - first) + row * s.width, p.h0_SHPN.at<float>(sequence, head, row), bytes);
    }
  }
  for (const Segment& segment : segments) {
    for_each_block({segment}, [&](const Block& block) {
      for (int64_t head = first; head < last; ++head) {
        advance_block<X>(p, block, head, num_groups, s.state(head - first), s);
      }
    });
    for (int64_t state : segment.states) {
      for (int64_t head = first; head < last; ++head) {
        for (int64_t row = 0; row < head_dim; ++row) {
          std::memcpy(p.states_RHPN.at<float>(state, head, row), s.state(head - first) + row * s.width, bytes);
        }
      }
    }
  }
}

constexpr int64_t kCachedStateBytes = 512 << 10;  // of the states that one thread works on, half a usual L2 cache

// x [L, H, P], dt [L, H], a [H], b and c [L, G, N], h0 [S, H, P, N] float32; sequences as for `causal_conv`. Returns y
// like x (padding tokens: 0) and the states [R, H, P, N] float32.
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
  const int64_t num_groups = b_LGN.sizes[1];
  const View c_LGN = view_of(c, "c_LGN", {num_tokens, num_groups, state_dim});
  const View dt_LH = view_of(dt, "dt_LH", {num_tokens, num_heads}), a_H = view_of(a, "a_H", {num_heads});
  require_groups(b_LGN, num_groups, num_heads);
  const auto segments =
      cut_sequences(token_sequence, token_offset, state_sequence, state_length, num_tokens, num_sequences);
  const int64_t num_states = state_sequence.size(0);
  const View sequence_L = view_of(token_sequence, "token_sequence_L", {num_tokens});
  const auto is_padding = [&](int64_t token) { return *sequence_L.at<int64_t>(token) == num_sequences; };

  Tensor y = torch::stable::new_empty(x, {num_tokens, num_heads, head_dim});
  Tensor states = torch::stable::new_empty(first_states, {num_states, num_heads, head_dim, state_dim});
  Mamba2Prefill p{x_LHP,
                  dt_LH,
                  a_H,
                  h0_SHPN,
                  view_of(y, "y_LHP", {num_tokens, num_heads, head_dim}),
                  view_of(states, "states_RHPN", {num_states, num_heads, head_dim, state_dim}),
                  TokenVectors(b_LGN),
                  TokenVectors(c_LGN),
                  std::vector<float>(num_tokens * num_groups * kBlockTokens)};
  for (const auto& own : segments) {
    for_each_block(own, [&](const Block& block) {
      for (int64_t group = 0; group < num_groups; ++group) multiply_inputs(p, block, group, num_groups);
    });
  }
  with_narrow_float_type(x_LHP.dtype, x_LHP.name, [&](auto zero) {
    using X = decltype(zero);
    for (int64_t token = 0; token < num_tokens; ++token) {
      if (is_padding(token)) std::fill_n(p.y_LHP.at<X>(token), num_heads * head_dim, store<X>(0.0f));
    }
    torch::stable::parallel_for(0, num_heads, 1, [&](int64_t begin, int64_t end) {
      const int64_t bytes_per_head = round_up(head_dim, kBlockRows) * round_up(state_dim, 16) * sizeof(float);
      const int64_t cached_heads = std::max<int64_t>(1, kCachedStateBytes / std::max<int64_t>(1, bytes_per_head));
      HeadScratch scratch(std::min(cached_heads, end - begin), head_dim, state_dim);
      for (int64_t first = begin; first < end; first += cached_heads) {
        for (int64_t sequence = 0; sequence < num_sequences; ++sequence) {
          run_sequence<X>(p, segments[sequence], sequence, first, std::min(first + cached_heads, end), num_groups,
                          scratch);
        }
      }
    });
  });
  return {y, states};
}

}  // namespace hybrid_runtime
