// Mamba-2 over ragged sequences, a few tokens at a time, with the state of one head in cache.
//
// Of a block of T tokens with decays a_t, K_t the product of a_1..a_t and D_tj that of a_(j+1)..a_t:
//
//   y_t = K_t (h · c_t) + Σ_{j<=t} D_tj (b_j · c_t) dt_j x_j        h := K_T h + Σ_j D_Tj dt_j x_j b_jᵀ
//
// so that the state is read and written once per block: 2 T + 1 operations for T tokens on each of its elements, where
// the recurrence has 3 T. b_j · c_t is the same for all heads of a group. Decays are products of a few factors: nothing
// cancels, as it would in differences of running sums, and no chunk-sized matrix exists. The state of a head is cut into
// tiles of some rows, which lie in lanes.
#pragma once

#include "lanes.h"
#include "sequences.h"
#include "tensor_view.h"

namespace hybrid_runtime {

constexpr int kTileVectors = 2;  // of 16 floats: with 4 tokens, 8 sums, 8 weights and 2 of the state are in registers
constexpr int64_t kStateTileRows = 16 * kTileVectors;
constexpr size_t kCachedBlocks = 8;  // which a head's state, once in the nearest cache, goes through
constexpr int64_t kCachedStateBytes = 512 << 10;  // of the states that one thread works on, half a usual L2 cache

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

// Time steps and what each leaves of the state, as floats [L, H].
struct TokenDecays {
  int64_t num_heads;
  std::vector<float> dt, decay;

  TokenDecays(const View& dt_LH, const View& a_H) : num_heads(dt_LH.sizes[1]) {
    dt.resize(dt_LH.sizes[0] * num_heads);
    decay.resize(dt.size());
    std::vector<float> rate_H(num_heads);
    read_last_axis(a_H, 1, 0, 0, rate_H.data());
    torch::stable::parallel_for(0, dt_LH.sizes[0], 64, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        float *dt_of = dt.data() + token * num_heads, *decay_of = decay.data() + token * num_heads;
        read_last_axis(dt_LH, 2, token, 0, dt_of);
#pragma omp simd
        for (int64_t head = 0; head < num_heads; ++head) decay_of[head] = exp_nonpositive(dt_of[head] * rate_H[head]);
        for (int64_t head = 0; head < num_heads; ++head) {  // no model has it
          if (dt_of[head] * rate_H[head] > 0) decay_of[head] = std::exp(dt_of[head] * rate_H[head]);
        }
      }
    });
  }
};

struct Mamba2Prefill {
  View x_LHP, h0_SHPN, y_LHP, states_RHPN;
  TokenDecays decays;
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

using TileTokens = Floats[kBlockTokens][kTileVectors];  // of each token of a block, one number per row of a tile

// A tile of the state [N, rows]: returns h · c_t in `h_dot_c_TR`, then lets h decay and adds Σ_j weight_j b_j. Rows lie in
// lanes, so that no sum runs across them; the numbers b and c of one n lie together, [N, 2, T].
[[gnu::always_inline]] inline void advance_tile(float* h_NR, const float* bc_N2T, int64_t state_dim, float decay,
                                                const TileTokens& weight_TR, TileTokens& h_dot_c_TR) {
  // Copies that nobody else can see stay in registers.
  TileTokens weight, h_dot_c{};
  for (int t = 0; t < kBlockTokens; ++t) {
    for (int v = 0; v < kTileVectors; ++v) weight[t][v] = weight_TR[t][v];
  }
  const Floats decay_lanes = broadcast(decay);
  for (int64_t n = 0; n < state_dim; ++n) {
    Floats h[kTileVectors];
    for (int v = 0; v < kTileVectors; ++v) h[v] = load_floats(h_NR + 16 * v);
    for (int t = 0; t < kBlockTokens; ++t) {
      const Floats c = broadcast(bc_N2T[kBlockTokens + t]);
      for (int v = 0; v < kTileVectors; ++v) h_dot_c[t][v] = Lanes<float>::multiply_add(h[v], c, h_dot_c[t][v]);
    }
    for (int v = 0; v < kTileVectors; ++v) h[v] *= decay_lanes;
    for (int j = 0; j < kBlockTokens; ++j) {
      const Floats b = broadcast(bc_N2T[j]);
      for (int v = 0; v < kTileVectors; ++v) h[v] = Lanes<float>::multiply_add(weight[j][v], b, h[v]);
    }
    for (int v = 0; v < kTileVectors; ++v) std::memcpy(h_NR + 16 * v, &h[v], sizeof(h[v]));
    h_NR += kStateTileRows;
    bc_N2T += 2 * kBlockTokens;
  }
  for (int t = 0; t < kBlockTokens; ++t) {
    for (int v = 0; v < kTileVectors; ++v) h_dot_c_TR[t][v] = h_dot_c[t][v];
  }
}

// The states of some heads, which one thread carries through a sequence, in tiles [head, tile, N, rows]. Tiles start
// with a cache line: vectors that lie across two lines take half as long again.
struct HeadStates {
  static constexpr int64_t kLineFloats = 16;
  int64_t head_dim, state_dim, num_tiles;
  std::vector<float> numbers;

  HeadStates(int64_t num_heads, int64_t head_dim, int64_t state_dim)
      : head_dim(head_dim),
        state_dim(state_dim),
        num_tiles(round_up(head_dim, kStateTileRows) / kStateTileRows),
        numbers(num_heads * num_tiles * state_dim * kStateTileRows + kLineFloats) {}
  float* tile(int64_t head, int64_t tile) {
    const int64_t first = -(reinterpret_cast<intptr_t>(numbers.data()) / int64_t{sizeof(float)}) & (kLineFloats - 1);
    return numbers.data() + first + (head * num_tiles + tile) * state_dim * kStateTileRows;
  }
  // The first number of a row; the others follow `kStateTileRows` apart.
  float* row(int64_t head, int64_t row) { return tile(head, row / kStateTileRows) + row % kStateTileRows; }

  void load_row(int64_t head, int64_t row, const float* from_N) {
    float* to = this->row(head, row);
    for (int64_t n = 0; n < state_dim; ++n) to[n * kStateTileRows] = from_N[n];
  }
  void save_row(int64_t head, int64_t row, float* to_N) {
    const float* from = this->row(head, row);
    for (int64_t n = 0; n < state_dim; ++n) to_N[n] = from[n * kStateTileRows];
  }
};

// b and c of a few blocks, [block, G, N, 2, T]. Zeros, which neither decay nor add, stand in for tokens behind a block.
struct BlockInputs {
  int64_t num_groups, state_dim;
  std::vector<float> numbers;

  BlockInputs(int64_t num_groups, int64_t state_dim)
      : num_groups(num_groups),
        state_dim(state_dim),
        numbers(kCachedBlocks * num_groups * state_dim * 2 * kBlockTokens) {}
  float* of(int64_t place, int64_t group) {
    return numbers.data() + (place * num_groups + group) * state_dim * 2 * kBlockTokens;
  }

  void load(const Mamba2Prefill& p, const Block& block, int64_t place, int64_t group) {
    float* to = of(place, group);
    for (int t = 0; t < kBlockTokens; ++t) {
      const bool is_token = t < block.count;
      const int64_t token = block.begin + (is_token ? t : 0);
      const float *b_N = p.b.of(token, group), *c_N = p.c.of(token, group);
      for (int64_t n = 0; n < state_dim; ++n) {
        to[n * 2 * kBlockTokens + t] = is_token ? b_N[n] : 0.0f;
        to[(2 * n + 1) * kBlockTokens + t] = is_token ? c_N[n] : 0.0f;
      }
    }
  }
};

inline std::vector<Block> blocks_of(const Segment& segment) {
  std::vector<Block> blocks;
  for_each_block({segment}, [&](const Block& block) { blocks.push_back(block); });
  return blocks;
}

// How much of what came before is left within a block of one head.
struct BlockDecays {
  float dt[kBlockTokens];
  float kept[kBlockTokens];                 // of the state before the block, behind each token
  float reach[kBlockTokens][kBlockTokens];  // [t][j]: of token j's input, behind token t

  BlockDecays(const Mamba2Prefill& p, const Block& block, int64_t head) {
    for (int t = 0; t < kBlockTokens; ++t) {
      const int64_t place = (block.begin + t) * p.decays.num_heads + head;
      dt[t] = t < block.count ? p.decays.dt[place] : 0.0f;
      const float decay = t < block.count ? p.decays.decay[place] : 1.0f;
      kept[t] = t == 0 ? decay : kept[t - 1] * decay;
      for (int j = 0; j < t; ++j) reach[t][j] = reach[t - 1][j] * decay;
      reach[t][t] = 1;
    }
  }
};

// Rows of one token's x or y, up to a tile of them.
template <class X>
inline void load_rows(const X* from, int64_t stride, int64_t count, Floats (&to)[kTileVectors]) {
  X rows[kStateTileRows] = {};
  if (stride == 1) {
    std::memcpy(rows, from, count * sizeof(X));
  } else {
    for (int64_t row = 0; row < count; ++row) rows[row] = from[row * stride];
  }
  for (int v = 0; v < kTileVectors; ++v) to[v] = load_floats(rows + 16 * v);
}

template <class X>
inline void store_rows(const Floats (&from)[kTileVectors], int64_t count, X* to) {
  X rows[kTileVectors][16];
  for (int v = 0; v < kTileVectors; ++v) store_lanes(from[v], rows[v]);
  std::memcpy(to, rows, count * sizeof(X));
}

// A block of one head, one tile of its rows: writes y, advances the state.
template <class X>
inline void advance_block(const Mamba2Prefill& p, const Block& block, int64_t head, int64_t num_groups, int64_t tile,
                          const float* bc_N2T, const BlockDecays& decays, float* h_NR) {
  const int64_t head_dim = p.x_LHP.sizes[2], group = head * num_groups / p.x_LHP.sizes[1];
  const int64_t first_row = tile * kStateTileRows, rows = std::min(kStateTileRows, head_dim - first_row);
  TileTokens x{}, weight, h_dot_c;
  for (int t = 0; t < kBlockTokens; ++t) {
    if (t < block.count) {
      const int64_t stride = p.x_LHP.strides[2];
      load_rows(p.x_LHP.at<X>(block.begin + t, head) + first_row * stride, stride, rows, x[t]);
    }
    for (int v = 0; v < kTileVectors; ++v) {
      x[t][v] *= broadcast(decays.dt[t]);
      weight[t][v] = x[t][v] * broadcast(decays.reach[kBlockTokens - 1][t]);
    }
  }
  advance_tile(h_NR, bc_N2T, p.h0_SHPN.sizes[3], decays.kept[kBlockTokens - 1], weight, h_dot_c);
  for (int t = 0; t < block.count; ++t) {
    const float* b_dot_c = p.b_dot_c.data() + ((block.begin + t) * num_groups + group) * kBlockTokens;
    Floats y[kTileVectors];
    for (int v = 0; v < kTileVectors; ++v) y[v] = h_dot_c[t][v] * broadcast(decays.kept[t]);
    for (int j = 0; j <= t; ++j) {
      const Floats share = broadcast(decays.reach[t][j] * b_dot_c[j]);
      for (int v = 0; v < kTileVectors; ++v) y[v] = Lanes<float>::multiply_add(share, x[j][v], y[v]);
    }
    store_rows(y, rows, p.y_LHP.at<X>(block.begin + t, head) + first_row);
  }
}

// Heads `first` to `last` over one sequence, from its first state to the states asked for. A few blocks outside, heads
// inside: x and y are walked along in memory, b and c stay in the nearest cache, the heads' states in the next.
template <class X>
inline void run_sequence(const Mamba2Prefill& p, const std::vector<Segment>& segments, int64_t sequence, int64_t first,
                         int64_t last, int64_t num_groups, HeadStates& states, BlockInputs& inputs) {
  const int64_t head_dim = states.head_dim, heads_per_group = p.x_LHP.sizes[1] / num_groups;
  for (int64_t head = first; head < last; ++head) {
    for (int64_t row = 0; row < head_dim; ++row) {
      states.load_row(head - first, row, p.h0_SHPN.at<float>(sequence, head, row));
    }
  }
  for (const Segment& segment : segments) {
    const std::vector<Block> blocks = blocks_of(segment);
    for (size_t begin = 0; begin < blocks.size(); begin += kCachedBlocks) {
      const size_t end = std::min(begin + kCachedBlocks, blocks.size());
      for (size_t at = begin; at < end; ++at) {
        for (int64_t group = first / heads_per_group; group <= (last - 1) / heads_per_group; ++group) {
          inputs.load(p, blocks[at], at - begin, group);
        }
      }
      for (int64_t head = first; head < last; ++head) {
        for (size_t at = begin; at < end; ++at) {
          const BlockDecays decays(p, blocks[at], head);
          for (int64_t tile = 0; tile < states.num_tiles; ++tile) {
            const float* bc_N2T = inputs.of(at - begin, head / heads_per_group);
            advance_block<X>(p, blocks[at], head, num_groups, tile, bc_N2T, decays, states.tile(head - first, tile));
          }
        }
      }
    }
    for (int64_t state : segment.states) {
      for (int64_t head = first; head < last; ++head) {
        for (int64_t row = 0; row < head_dim; ++row) {
          states.save_row(head - first, row, p.states_RHPN.at<float>(state, head, row));
        }
      }
    }
  }
}

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
                  h0_SHPN,
                  view_of(y, "y_LHP", {num_tokens, num_heads, head_dim}),
                  view_of(states, "states_RHPN", {num_states, num_heads, head_dim, state_dim}),
                  TokenDecays(dt_LH, a_H),
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
      const int64_t bytes_per_head = round_up(head_dim, kStateTileRows) * state_dim * sizeof(float);
      const int64_t cached_heads = std::max<int64_t>(1, kCachedStateBytes / std::max<int64_t>(1, bytes_per_head));
      HeadStates states(std::min(cached_heads, end - begin), head_dim, state_dim);
      BlockInputs inputs(num_groups, state_dim);
      for (int64_t first = begin; first < end; first += cached_heads) {
        for (int64_t sequence = 0; sequence < num_sequences; ++sequence) {
          run_sequence<X>(p, segments[sequence], sequence, first, std::min(first + cached_heads, end), num_groups,
                          states, inputs);
        }
      }
    });
  });
  return {y, states};
}

}  // namespace hybrid_runtime
