// What every form of Mamba-2 over ragged sequences works with: decays, and the states of some heads in cache.
#pragma once

#include "lanes.h"
#include "sequences.h"
#include "tensor_view.h"

namespace hybrid_runtime {

constexpr int kTileVectors = 2;  // of 16 floats
constexpr int64_t kStateTileRows = 16 * kTileVectors;
constexpr int64_t kCachedStateBytes = 512 << 10;  // of the states that one thread works on, half a usual L2 cache

inline int64_t round_up(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

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

struct Mamba2Operands {
  View x_LHP, b_LGN, c_LGN, h0_SHPN, y_LHP, states_RHPN;
  TokenDecays decays;

  int64_t num_groups() const { return b_LGN.sizes[1]; }
  int64_t heads_per_group() const { return x_LHP.sizes[1] / num_groups(); }
};

// The states of some heads, which one thread carries through a sequence, in tiles [head, tile, N, rows]. Tiles start
// with a cache line: vectors that lie across two lines take half as long again.
struct HeadStates {
  static constexpr int64_t kLineFloats = 16;
  static constexpr int64_t kRowMultiple = 8;  // rows of zeros fill N up
  int64_t num_heads, head_dim, state_dim, num_rows, num_tiles;
  std::vector<float> numbers;

  HeadStates(int64_t num_heads, int64_t head_dim, int64_t state_dim)
      : num_heads(num_heads),
        head_dim(head_dim),
        state_dim(state_dim),
        num_rows(round_up(state_dim, kRowMultiple)),
        num_tiles(round_up(head_dim, kStateTileRows) / kStateTileRows),
        numbers(num_heads * num_tiles * num_rows * kStateTileRows + kLineFloats) {}
  float* tile(int64_t head, int64_t tile) {
    const int64_t first = -(reinterpret_cast<intptr_t>(numbers.data()) / int64_t{sizeof(float)}) & (kLineFloats - 1);
    return numbers.data() + first + (head * num_tiles + tile) * num_rows * kStateTileRows;
  }

  // The state of one head from, and to, [P, N].
  void load(int64_t head, const float* from_PN) {
    for_each_square(head, [&](float* square, int64_t row, int64_t n, int64_t rows, int64_t columns) {
      Floats numbers[16] = {};
      for (int64_t r = 0; r < rows; ++r) {
        const float* from = from_PN + (row + r) * state_dim + n;
        numbers[r] = columns == 16 ? load_floats(from) : load_some_lanes(from, columns);
      }
      transpose(numbers);
      const int64_t filled = std::min<int64_t>(16, num_rows - n);  // zeros, too: the state before may have been NaN
      for (int64_t c = 0; c < filled; ++c) std::memcpy(square + c * kStateTileRows, &numbers[c], sizeof(numbers[c]));
    });
  }
  void save(int64_t head, float* to_PN) {
    for_each_square(head, [&](float* square, int64_t row, int64_t n, int64_t rows, int64_t columns) {
      Floats numbers[16] = {};
      for (int64_t c = 0; c < columns; ++c) numbers[c] = load_floats(square + c * kStateTileRows);
      transpose(numbers);
      for (int64_t r = 0; r < rows; ++r) {
        float* to = to_PN + (row + r) * state_dim + n;
        if (columns == 16) {
          std::memcpy(to, &numbers[r], 16 * sizeof(float));
        } else {
          std::memcpy(to, &numbers[r], columns * sizeof(float));
        }
      }
    });
  }

 private:
  template <class F>
  void for_each_square(int64_t head, const F& function) {
    for (int64_t row = 0; row < head_dim; row += 16) {
      float* rows = tile(head, row / kStateTileRows) + row % kStateTileRows;
      for (int64_t n = 0; n < state_dim; n += 16) {
        function(rows + n * kStateTileRows, row, n, std::min<int64_t>(16, head_dim - row),
                 std::min<int64_t>(16, state_dim - n));
      }
    }
  }
};

// Rows of one token's x or y, up to a tile of them; a whole one is copied without a call.
template <class X>
inline void load_rows(const X* from, int64_t stride, int64_t count, Floats (&to)[kTileVectors]) {
  X rows[kStateTileRows] = {};
  if (count == kStateTileRows && stride == 1) {
    std::memcpy(rows, from, sizeof(rows));
  } else {
    for (int64_t row = 0; row < count; ++row) rows[row] = from[row * stride];
  }
  for (int v = 0; v < kTileVectors; ++v) to[v] = load_floats(rows + 16 * v);
}

template <class X>
inline void copy_rows(const X* from, int64_t count, X* to) {
  if (count == kStateTileRows) {
    std::memcpy(to, from, kStateTileRows * sizeof(X));
  } else {
    std::memcpy(to, from, count * sizeof(X));
  }
}

}  // namespace hybrid_runtime
