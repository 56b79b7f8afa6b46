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

#include "mamba2_states.h"

namespace hybrid_runtime {

constexpr int kBlockTokens = 4;  // with the vectors of a tile, 8 sums, 8 weights and 2 of the state are in registers
constexpr size_t kCachedBlocks = 8;  // which a head's state, once in the nearest cache, goes through

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

  void load(const TokenVectors& b, const TokenVectors& c, const Block& block, int64_t place, int64_t group) {
    float* to = of(place, group);
    for (int t = 0; t < kBlockTokens; ++t) {
      const bool is_token = t < block.count;
      const int64_t token = block.begin + (is_token ? t : 0);
      const float *b_N = b.of(token, group), *c_N = c.of(token, group);
      for (int64_t n = 0; n < state_dim; ++n) {
        to[n * 2 * kBlockTokens + t] = is_token ? b_N[n] : 0.0f;
        to[(2 * n + 1) * kBlockTokens + t] = is_token ? c_N[n] : 0.0f;
      }
    }
  }
};

// How much of what came before is left within a block of one head.
struct BlockDecays {
  float dt[kBlockTokens];
  float kept[kBlockTokens];                 // of the state before the block, behind each token
  float reach[kBlockTokens][kBlockTokens];  // [t][j]: of token j's input, behind token t

  BlockDecays(const TokenDecays& decays, const Block& block, int64_t head) {
    for (int t = 0; t < kBlockTokens; ++t) {
      const int64_t place = (block.begin + t) * decays.num_heads + head;
      dt[t] = t < block.count ? decays.dt[place] : 0.0f;
      const float decay = t < block.count ? decays.decay[place] : 1.0f;
      kept[t] = t == 0 ? decay : kept[t - 1] * decay;
      for (int j = 0; j < t; ++j) reach[t][j] = reach[t - 1][j] * decay;
      reach[t][t] = 1;
    }
  }
};

// Mamba-2 of some tokens; x and y are floats.
class Mamba2Blocks {
 public:
  Mamba2Blocks(const Mamba2Operands& operands, const std::vector<std::vector<Segment>>& segments)
      : operands_(operands),
        num_groups_(operands.num_groups()),
        b_(operands.b_LGN),
        c_(operands.c_LGN),
        b_dot_c_(operands.x_LHP.sizes[0] * num_groups_ * kBlockTokens) {
    for (const auto& own : segments) {
      for (const Segment& segment : own) {
        for (const Block& block : blocks_of(segment, kBlockTokens)) {
          for (int64_t group = 0; group < num_groups_; ++group) multiply_inputs(block, group);
        }
      }
    }
  }

  // Of one thread.
  struct Scratch {
    BlockInputs inputs;

    Scratch(const Mamba2Blocks& form, const HeadStates& states) : inputs(form.num_groups_, states.state_dim) {}
  };

  // Heads `first` to `last` over a segment, a few blocks outside, heads inside: x and y are walked along in memory, b
  // and c stay in the nearest cache, the heads' states in the next.
  void advance(const Segment& segment, int64_t first, int64_t last, HeadStates& states, Scratch& scratch) const {
    const int64_t heads_per_group = operands_.heads_per_group();
    const std::vector<Block> blocks = blocks_of(segment, kBlockTokens);
    for (size_t begin = 0; begin < blocks.size(); begin += kCachedBlocks) {
      const size_t end = std::min(begin + kCachedBlocks, blocks.size());
      for (size_t at = begin; at < end; ++at) {
        for (int64_t group = first / heads_per_group; group <= (last - 1) / heads_per_group; ++group) {
          scratch.inputs.load(b_, c_, blocks[at], at - begin, group);
        }
      }
      for (int64_t head = first; head < last; ++head) {
        for (size_t at = begin; at < end; ++at) {
          const BlockDecays decays(operands_.decays, blocks[at], head);
          const float* bc_N2T = scratch.inputs.of(at - begin, head / heads_per_group);
          for (int64_t tile = 0; tile < states.num_tiles; ++tile) {
            advance_block(blocks[at], head, tile, bc_N2T, decays, states.tile(head - first, tile));
          }
        }
      }
    }
  }

 private:
  // b_j · c_t of a block's tokens. Its tokens are `begin` to `begin + count`.
  void multiply_inputs(const Block& block, int64_t group) {
    for (int t = 0; t < block.count; ++t) {
      const float* c_N = c_.of(block.begin + t, group);
      for (int j = 0; j <= t; ++j) {
        const float* b_N = b_.of(block.begin + j, group);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t n = 0; n < b_.width; ++n) sum = multiply_add(b_N[n], c_N[n], sum);
        b_dot_c_[((block.begin + t) * num_groups_ + group) * kBlockTokens + j] = sum;
      }
    }
  }

  // A block of one head, one tile of its rows: writes y, advances the state.
  void advance_block(const Block& block, int64_t head, int64_t tile, const float* bc_N2T, const BlockDecays& decays,
                     float* h_NR) const {
    const int64_t head_dim = operands_.x_LHP.sizes[2], group = head / operands_.heads_per_group();
    const int64_t first_row = tile * kStateTileRows, rows = std::min(kStateTileRows, head_dim - first_row);
    TileTokens x{}, weight, h_dot_c;
    for (int t = 0; t < kBlockTokens; ++t) {
      if (t < block.count) {
        const int64_t stride = operands_.x_LHP.strides[2];
        load_rows(operands_.x_LHP.at<float>(block.begin + t, head) + first_row * stride, stride, rows, x[t]);
      }
      for (int v = 0; v < kTileVectors; ++v) {
        x[t][v] *= broadcast(decays.dt[t]);
        weight[t][v] = x[t][v] * broadcast(decays.reach[kBlockTokens - 1][t]);
      }
    }
    advance_tile(h_NR, bc_N2T, operands_.h0_SHPN.sizes[3], decays.kept[kBlockTokens - 1], weight, h_dot_c);
    for (int t = 0; t < block.count; ++t) {
      const float* b_dot_c = b_dot_c_.data() + ((block.begin + t) * num_groups_ + group) * kBlockTokens;
      Floats y[kTileVectors];
      for (int v = 0; v < kTileVectors; ++v) y[v] = h_dot_c[t][v] * broadcast(decays.kept[t]);
      for (int j = 0; j <= t; ++j) {
        const Floats share = broadcast(decays.reach[t][j] * b_dot_c[j]);
        for (int v = 0; v < kTileVectors; ++v) y[v] = Lanes<float>::multiply_add(share, x[j][v], y[v]);
      }
      float numbers[kStateTileRows];
      std::memcpy(numbers, y, sizeof(numbers));
      copy_rows(numbers, rows, operands_.y_LHP.at<float>(block.begin + t, head) + first_row);
    }
  }

  const Mamba2Operands& operands_;
  int64_t num_groups_;
  TokenVectors b_, c_;
  std::vector<float> b_dot_c_;  // [L, G, T]: of each token's c with b of the block's tokens up to it
};

}  // namespace hybrid_runtime
