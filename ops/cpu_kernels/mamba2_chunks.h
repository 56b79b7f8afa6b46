// Mamba-2 of bfloat16 operands over ragged sequences: in chunks, as products of bfloat16 matrices.
//
// Of a chunk of Q tokens with decays a_t, K_t the product of a_1..a_t and D_ts that of a_(s+1)..a_t, for s <= t:
//
//   Y = K ∘ (C h) + (D ∘ dt ∘ C Bᵀ) X        h := K_Q h + Bᵀ (D_Q ∘ dt ∘ X)
//
// with a row per token and the state as [N, P]. An instruction takes twice as many products of bfloat16 as of floats.
// B, C and X are what they are; rounded to bfloat16 are the other factors: the state (as Y reads it), D ∘ dt ∘ C Bᵀ, and
// D_Q ∘ dt ∘ X. Sums, and the state that is carried on, are floats. Decays are products of factors: nothing cancels, as
// it would in differences of running sums.
#pragma once

#include "mamba2_states.h"

namespace hybrid_runtime {

constexpr int kChunkTokens = 32;     // two vectors of floats, or one of bfloat16
constexpr int kProductRows = 8;      // with the vectors of a tile, 16 sums in registers
constexpr size_t kChunksInTurn = 2;  // of a head, while its state is in the nearest cache
static_assert(HeadStates::kRowMultiple % kProductRows == 0 && kChunkTokens % kProductRows == 0);

struct TilePairs {
  Words of[kTileVectors];  // each the same columns of two rows
};

using ProductSums = Floats[kProductRows][kTileVectors];

// sums_r += Σ_i rows_ri columns_i; neighbours of a row, and rows of the columns, go in pairs.
[[gnu::always_inline]] inline void add_products(const BFloat* rows, int64_t row_stride, const TilePairs* columns,
                                                int64_t num_pairs, ProductSums& sums) {
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const TilePairs column = columns[pair];
#pragma GCC unroll 8
    for (int r = 0; r < kProductRows; ++r) {
      const Words row = broadcast_pair(rows + r * row_stride + 2 * pair);
#pragma GCC unroll 2
      for (int v = 0; v < kTileVectors; ++v) sums[r][v] = Lanes<BFloat>::multiply_add(row, column.of[v], sums[r][v]);
    }
  }
}

// Of two rows of bfloat16: lanes whose sum is their product.
inline Floats products(const BFloat* x, const BFloat* y, int64_t size) {
  Floats sums{};
  int64_t n = 0;
  for (; n + Lanes<BFloat>::count <= size; n += Lanes<BFloat>::count) {
    sums = Lanes<BFloat>::multiply_add(load_lanes(x + n), load_lanes(y + n), sums);
  }
  if (n == size) return sums;
  return Lanes<BFloat>::multiply_add(load_some_lanes(x + n, size - n), load_some_lanes(y + n, size - n), sums);
}

// What a head makes of the tokens of a chunk. Rows behind its tokens are of an earlier one: nothing reads their products.
struct HeadChunk {
  float kept[kChunkTokens];                               // K
  float weight[kChunkTokens];                             // D_Q ∘ dt, zeros behind the tokens
  alignas(64) BFloat scores[kChunkTokens][kChunkTokens];  // D ∘ dt ∘ C Bᵀ

  void load(const TokenDecays& decays, const Block& chunk, int64_t head, const float* b_dot_c_QQ) {
    Words lane;
    for (int n = 0; n < 16; ++n) lane[n] = n;
    Floats reach[2] = {};
    float left = 1;
    for (int t = 0; t < chunk.count; ++t) {
      const int64_t place = (chunk.begin + t) * decays.num_heads + head;
      left *= decays.decay[place];
      kept[t] = left;
      Floats score[2];
      for (int half = 0; half < 2; ++half) {
        const Floats before = reach[half] * broadcast(decays.decay[place]);
        reach[half] = lane + uint32_t(16 * half) == Words{} + uint32_t(t) ? broadcast(decays.dt[place]) : before;
        score[half] = reach[half] * load_floats(b_dot_c_QQ + t * kChunkTokens + 16 * half);
      }
      const Words joined = join_lanes(score[0], score[1]);
      std::memcpy(scores[t], &joined, sizeof(joined));
    }
    std::memcpy(weight, reach, sizeof(weight));
  }
};

// Mamba-2 of some tokens; what all heads read of B and C is laid out once.
class Mamba2Chunks {
 public:
  Mamba2Chunks(const Mamba2Operands& operands, const std::vector<std::vector<Segment>>& segments)
      : operands_(operands),
        num_groups_(operands.num_groups()),
        width_(round_up(operands.b_LGN.sizes[2], kProductRows)),
        chunk_at_(operands.x_LHP.sizes[0]) {
    for (const auto& own : segments) {
      for (const Segment& segment : own) {
        for (const Block& chunk : blocks_of(segment, kChunkTokens)) {
          chunk_at_[chunk.begin] = chunks_.size();
          chunks_.push_back(chunk);
        }
      }
    }
    c_.resize(chunks_.size() * num_groups_ * kChunkTokens * width_);
    b_columns_.resize(c_.size());
    b_dot_c_.resize(chunks_.size() * num_groups_ * kChunkTokens * kChunkTokens);
    torch::stable::parallel_for(0, chunks_.size(), 1, [&](int64_t begin, int64_t end) {
      std::vector<BFloat> b_QN(kChunkTokens * width_);
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        for (int64_t group = 0; group < num_groups_; ++group) load_inputs(chunk, group, b_QN.data());
      }
    });
  }

  // Of one thread.
  struct Scratch {
    std::vector<TilePairs> states;  // [head, tile, N / 2]: as the products with C read them
    HeadChunk chunk{};

    Scratch(const Mamba2Chunks&, const HeadStates& of_heads)
        : states(of_heads.num_heads * of_heads.num_tiles * of_heads.num_rows / 2) {}
  };

  // Heads `first` to `last` over a segment.
  void advance(const Segment& segment, int64_t first, int64_t last, HeadStates& states, Scratch& scratch) const {
    const int64_t pairs_per_tile = states.num_rows / 2;
    for (int64_t head = first; head < last; ++head) {
      for (int64_t tile = 0; tile < states.num_tiles; ++tile) {
        const int64_t place = (head - first) * states.num_tiles + tile;
        pair_rows(states.tile(head - first, tile), pairs_per_tile, scratch.states.data() + place * pairs_per_tile);
      }
    }
    const std::vector<Block> chunks = blocks_of(segment, kChunkTokens);
    for (size_t begin = 0; begin < chunks.size(); begin += kChunksInTurn) {
      const size_t end = std::min(begin + kChunksInTurn, chunks.size());
      for (int64_t head = first; head < last; ++head) {
        for (size_t at = begin; at < end; ++at) {
          const int64_t place = chunk_at_[chunks[at].begin] * num_groups_ + head / operands_.heads_per_group();
          scratch.chunk.load(operands_.decays, chunks[at], head,
                             b_dot_c_.data() + place * kChunkTokens * kChunkTokens);
          for (int64_t tile = 0; tile < states.num_tiles; ++tile) {
            TilePairs* pairs = scratch.states.data() + ((head - first) * states.num_tiles + tile) * pairs_per_tile;
            advance_tile(chunks[at], head, tile, place, scratch.chunk, states.tile(head - first, tile), pairs);
          }
        }
      }
    }
  }

 private:
  void load_inputs(int64_t chunk, int64_t group, BFloat* b_QN) {
    const Block& block = chunks_[chunk];
    const int64_t state_dim = operands_.b_LGN.sizes[2], place = chunk * num_groups_ + group;
    BFloat* c_QN = c_.data() + place * kChunkTokens * width_;
    BFloat* b_NQ = b_columns_.data() + place * kChunkTokens * width_;
    for (int64_t t = 0; t < block.count; ++t) {
      copy_last_axis(operands_.c_LGN, block.begin + t, group, state_dim, c_QN + t * width_);
      copy_last_axis(operands_.b_LGN, block.begin + t, group, state_dim, b_QN + t * width_);
    }
    for (int64_t n = 0; n < state_dim; ++n) {
      for (int64_t t = 0; t < block.count; ++t) b_NQ[n * kChunkTokens + t] = b_QN[t * width_ + n];
    }
    float* b_dot_c_QQ = b_dot_c_.data() + place * kChunkTokens * kChunkTokens;
    for (int64_t t = 0; t < block.count; ++t) {
      for (int64_t first = 0; first <= t; first += 16) {
        Floats sums[16] = {};
        for (int64_t s = first; s <= std::min(t, first + 15); ++s) {
          sums[s - first] = products(b_QN + s * width_, c_QN + t * width_, width_);
        }
        const Floats totals = sum_lanes(sums);
        std::memcpy(b_dot_c_QQ + t * kChunkTokens + first, &totals, sizeof(totals));
      }
    }
  }

  static void copy_last_axis(const View& view, int64_t i, int64_t j, int64_t size, BFloat* to) {
    const BFloat* from = view.at<BFloat>(i, j);
    for (int64_t n = 0; n < size; ++n) to[n] = from[n * view.strides[2]];
  }

  static void pair_rows(const float* h_NR, int64_t num_pairs, TilePairs* pairs) {
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
      for (int v = 0; v < kTileVectors; ++v) {
        const float* even = h_NR + 2 * pair * kStateTileRows + 16 * v;
        pairs[pair].of[v] = pair_lanes(load_floats(even), load_floats(even + kStateTileRows));
      }
    }
  }

  // A chunk of one head, one tile of its rows: writes y, advances the state.
  void advance_tile(const Block& chunk, int64_t head, int64_t tile, int64_t place, const HeadChunk& of_head,
                    float* h_NR, TilePairs* h_pairs) const {
    const BFloat* c_QN = c_.data() + place * kChunkTokens * width_;
    const BFloat* b_NQ = b_columns_.data() + place * kChunkTokens * width_;
    const int64_t head_dim = operands_.x_LHP.sizes[2], first_row = tile * kStateTileRows;
    const int64_t rows = std::min(kStateTileRows, head_dim - first_row);
    TilePairs x[kChunkTokens / 2], weighted_x[kChunkTokens / 2];
    load_tokens(chunk, head, first_row, rows, of_head, x, weighted_x);

    for (int64_t t = 0; t < chunk.count; t += kProductRows) {
      ProductSums y{};
      add_products(c_QN + t * width_, width_, h_pairs, width_ / 2, y);
      for (int r = 0; r < kProductRows; ++r) {
        for (int v = 0; v < kTileVectors; ++v) y[r][v] *= broadcast(of_head.kept[t + r]);
      }
      add_products(of_head.scores[t], kChunkTokens, x, (t + kProductRows) / 2, y);
      for (int r = 0; r < kProductRows; ++r) {
        if (t + r == chunk.count) break;
        const Words joined = join_lanes(y[r][0], y[r][1]);
        BFloat rounded[kStateTileRows];
        std::memcpy(rounded, &joined, sizeof(rounded));
        copy_rows(rounded, rows, operands_.y_LHP.at<BFloat>(chunk.begin + t + r, head) + first_row);
      }
    }
    const Floats kept = broadcast(of_head.kept[chunk.count - 1]);
    for (int64_t n = 0; n < width_; n += kProductRows) {
      ProductSums h;
      for (int r = 0; r < kProductRows; ++r) {
        for (int v = 0; v < kTileVectors; ++v) h[r][v] = load_floats(h_NR + (n + r) * kStateTileRows + 16 * v) * kept;
      }
      add_products(b_NQ + n * kChunkTokens, kChunkTokens, weighted_x, (chunk.count + 1) / 2, h);
      for (int r = 0; r < kProductRows; ++r) {
        for (int v = 0; v < kTileVectors; ++v) {
          std::memcpy(h_NR + (n + r) * kStateTileRows + 16 * v, &h[r][v], sizeof(h[r][v]));
        }
      }
      for (int r = 0; r < kProductRows; r += 2) {
        for (int v = 0; v < kTileVectors; ++v) h_pairs[(n + r) / 2].of[v] = pair_lanes(h[r][v], h[r + 1][v]);
      }
    }
  }

  // Of the tokens of a chunk, X and D_Q ∘ dt ∘ X.
  void load_tokens(const Block& chunk, int64_t head, int64_t first_row, int64_t rows, const HeadChunk& of_head,
                   TilePairs* x, TilePairs* weighted_x) const {
    const int64_t stride = operands_.x_LHP.strides[2];
    for (int t = 0; t < kChunkTokens; t += 2) {
      Floats even[kTileVectors] = {}, odd[kTileVectors] = {};
      float even_weight = 0, odd_weight = 0;
      if (t < chunk.count) {
        load_rows(operands_.x_LHP.at<BFloat>(chunk.begin + t, head) + first_row * stride, stride, rows, even);
        even_weight = of_head.weight[t];
      }
      if (t + 1 < chunk.count) {
        load_rows(operands_.x_LHP.at<BFloat>(chunk.begin + t + 1, head) + first_row * stride, stride, rows, odd);
        odd_weight = of_head.weight[t + 1];
      }
      for (int v = 0; v < kTileVectors; ++v) {
        x[t / 2].of[v] = (Words)even[v] >> 16 | (Words)odd[v];
        weighted_x[t / 2].of[v] = pair_lanes(even[v] * broadcast(even_weight), odd[v] * broadcast(odd_weight));
      }
    }
  }

  const Mamba2Operands& operands_;
  int64_t num_groups_, width_;         // N, filled up with zeros
  std::vector<int64_t> chunk_at_;      // [L]: number of the chunk that begins there
  std::vector<Block> chunks_;
  std::vector<BFloat> c_, b_columns_;  // [chunk, G, Q, N] and [chunk, G, N, Q], zeros behind tokens
  std::vector<float> b_dot_c_;         // [chunk, G, Q, Q]: c_t · b_s for s <= t
};

}  // namespace hybrid_runtime
