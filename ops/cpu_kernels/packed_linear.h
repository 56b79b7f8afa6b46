// y = x wᵀ + bias in bfloat16, with weights laid out so that they are read once, in the order in which they lie.
//
// Packed weights are panels of 32 outputs; a panel holds, for each pair of inputs, the 32 pairs of its outputs. So one
// instruction adds, for 16 outputs, the products of a pair, and no sum runs across lanes. A tile of rows keeps its sums
// in registers along all inputs: a row's result does not depend on how many rows there are. With few rows the time is
// that of reading the weights, with many that of the products.
#pragma once

#include <memory>
#include <utility>

#include "lanes.h"
#include "tensor_view.h"

namespace hybrid_runtime {

constexpr int64_t kPanelOutputs = 32;
constexpr int kLaneGroups = 2;  // of 16 outputs
// Of one pair of inputs, for all outputs of a panel.
constexpr int64_t kPairBytes = kPanelOutputs * 2 * sizeof(BFloat);
// 24 sums, two weights and one x: of 32 registers.
constexpr int kMaxTileRows = 12;
constexpr int64_t kReadAheadBytes = 4096;
// The level of cache that weights are fetched into ahead of their use: the first is soon full.
constexpr int kSecondLevel = 2;
constexpr int64_t kPackedTilesPerThread = 8;

// Rows in tiles of nearly equal size, so that no tile is a small rest.
struct RowTiles {
  int64_t num_rows, count;
  explicit RowTiles(int64_t rows) : num_rows(rows), count((rows + kMaxTileRows - 1) / kMaxTileRows) {}
  int64_t first_row(int64_t tile) const { return num_rows * tile / count; }
};

struct PackedLinear {
  const BFloat* x;   // [M, I]
  int64_t x_stride;  // elements from one row to the next
  const char* w;     // [panels, pairs, 32, 2]
  const BFloat* bias_O;
  BFloat* y_MO;
  int64_t num_rows, num_inputs, num_pairs, num_outputs;
};

// Pairs of a tile's rows, [pairs, rows], so that a tile reads them in order whatever the stride of x. Not inlined: among
// a caller's variables the inner loop would not keep its own in registers, and take three times as long.
[[gnu::noinline]] inline void pack_row_pairs(const PackedLinear& p, int64_t first_row, int64_t end_row, uint32_t* pairs_KM) {
  constexpr int64_t kBlock = 16;  // pairs: a cache line of each row
  const int64_t num_rows = end_row - first_row, num_whole = p.num_inputs / 2;
  for (int64_t begin = 0; begin < num_whole; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, num_whole);
    for (int64_t r = 0; r < num_rows; ++r) {
      const BFloat* x = p.x + (first_row + r) * p.x_stride;
      for (int64_t k = begin; k < end; ++k) std::memcpy(pairs_KM + k * num_rows + r, x + 2 * k, 4);
    }
  }
  if (num_whole == p.num_pairs) return;
  for (int64_t r = 0; r < num_rows; ++r) {
    pairs_KM[num_whole * num_rows + r] = p.x[(first_row + r) * p.x_stride + p.num_inputs - 1].bits;
  }
}

// What a tile brings into cache while it computes: `bytes_per_pair` from `from` on, for each pair of inputs. An address
// past the weights does no harm: a prefetch reads nothing.
struct ReadAhead {
  const char* from;
  int64_t bytes_per_pair;
};

// Rounds to nearest even.
inline void store_outputs(const Floats (&sums)[kLaneGroups], const Floats (&bias)[kLaneGroups], BFloat* y_O) {
  for (int group = 0; group < kLaneGroups; ++group) {
    BFloat rounded[16];
    store_lanes(sums[group] + bias[group], rounded);
    std::memcpy(y_O + 16 * group, rounded, sizeof(rounded));
  }
}

// All of ROWS rows against one panel, rounded once, at the end; the outputs past the last one are not written.
template <int ROWS>
inline void multiply_tile(const PackedLinear& p, const uint32_t* pairs_KM, int64_t first_row, int64_t panel,
                          ReadAhead ahead) {
  Floats sums[ROWS][kLaneGroups] = {};
  const char* w = p.w + panel * p.num_pairs * kPairBytes;
  const int64_t output = panel * kPanelOutputs, outputs = std::min(kPanelOutputs, p.num_outputs - output);
  BFloat* y = p.y_MO + first_row * p.num_outputs + output;
  for (int r = 0; r < ROWS; ++r) __builtin_prefetch(y + r * p.num_outputs, 1);
  for (int64_t k = 0; k < p.num_pairs; ++k) {
    __builtin_prefetch(ahead.from, 0, kSecondLevel);
    __builtin_prefetch(ahead.from + 64, 0, kSecondLevel);
    ahead.from += ahead.bytes_per_pair;
    const Words w0 = load_lanes(reinterpret_cast<const BFloat*>(w));
    const Words w1 = load_lanes(reinterpret_cast<const BFloat*>(w + 64));
    w += kPairBytes;
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      const Words x = Words{} + pairs_KM[r];
      sums[r][0] = Lanes<BFloat>::multiply_add(x, w0, sums[r][0]);
      sums[r][1] = Lanes<BFloat>::multiply_add(x, w1, sums[r][1]);
    }
    pairs_KM += ROWS;
  }
  BFloat bias[kPanelOutputs] = {};
  if (p.bias_O) std::copy_n(p.bias_O + output, outputs, bias);
  const Floats bias_lanes[kLaneGroups] = {load_floats(bias), load_floats(bias + 16)};
  for (int r = 0; r < ROWS; ++r) {
    if (outputs == kPanelOutputs) {
      store_outputs(sums[r], bias_lanes, y);
    } else {
      BFloat whole[kPanelOutputs];
      store_outputs(sums[r], bias_lanes, whole);
      std::memcpy(y, whole, outputs * sizeof(BFloat));
    }
    y += p.num_outputs;
  }
}

using TileFunction = void (*)(const PackedLinear&, const uint32_t*, int64_t, int64_t, ReadAhead);

template <int... ROWS>
inline TileFunction tile_function(int64_t rows, std::integer_sequence<int, ROWS...>) {
  constexpr TileFunction functions[] = {&multiply_tile<ROWS + 1>...};
  return functions[rows - 1];
}

// All rows against the panels from `begin` to `end`.
inline void multiply_panels(const PackedLinear& p, const RowTiles& tiles, const uint32_t* pairs_KM, int64_t begin,
                            int64_t end) {
  const int64_t panel_bytes = p.num_pairs * kPairBytes;
  // One tile reads ahead in its own stream of weights; of several, each brings a part of the next panel.
  const int64_t bytes_per_pair = (kPairBytes + tiles.count - 1) / tiles.count;
  const int64_t distance = tiles.count == 1 ? kReadAheadBytes : panel_bytes;
  for (int64_t panel = begin; panel < end; ++panel) {
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const int64_t first_row = tiles.first_row(tile), rows = tiles.first_row(tile + 1) - first_row;
      const ReadAhead ahead{p.w + panel * panel_bytes + distance + tile * bytes_per_pair * p.num_pairs,
                            bytes_per_pair};
      const TileFunction multiply = tile_function(rows, std::make_integer_sequence<int, kMaxTileRows>{});
      multiply(p, pairs_KM + first_row * p.num_pairs, first_row, panel, ahead);
    }
  }
}

inline void run_packed_linear(const PackedLinear& p) {
  const RowTiles tiles(p.num_rows);
  std::unique_ptr<uint32_t[]> pairs_KM(new uint32_t[p.num_rows * p.num_pairs]);
  const auto pack_tiles = [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first_row = tiles.first_row(tile);
      pack_row_pairs(p, first_row, tiles.first_row(tile + 1), pairs_KM.get() + first_row * p.num_pairs);
    }
  };
  torch::stable::parallel_for(0, tiles.count, kPackedTilesPerThread, pack_tiles);
  const int64_t num_panels = (p.num_outputs + kPanelOutputs - 1) / kPanelOutputs;
  const int64_t bytes_per_panel = p.num_pairs * kPairBytes * tiles.count;
  torch::stable::parallel_for(0, num_panels, grain_for(bytes_per_panel), [&](int64_t begin, int64_t end) {
    multiply_panels(p, tiles, pairs_KM.get(), begin, end);
  });
}

}  // namespace hybrid_runtime
