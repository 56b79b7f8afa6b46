// The state behind an accepted path, from one slot to another or the same: read once, written once.
//
// A unit of work is one head of one row. All recurrences end in the same sum: kept ∘ S + Σ_j u_j k_jᵀ over the path's
// nodes, where k_j is decayed from its node to the end of the path.
#pragma once

#include "paths.h"
#include "products.h"

namespace hybrid_runtime {

// The terms of one head; sizes are filled up.
struct FoldTerms {
  int64_t keys, values;
  Scratch memory;
  float *kept_K, *k_JK, *u_JV, *a_K;

  FoldTerms(int64_t num_nodes, int64_t key_dim, int64_t value_dim)
      : keys(rounded_up(key_dim, kChannels)),
        values(rounded_up(value_dim, 16)),
        memory((num_nodes + 2) * keys + num_nodes * values) {
    for (float** each : {&kept_K, &a_K}) *each = memory.take(keys);
    k_JK = memory.take(num_nodes * keys);
    u_JV = memory.take(num_nodes * values);
  }
};

// VALUES rows of 64 channels of a state, which stay in registers.
template <int64_t VALUES, class S>
inline void fold_block(const S* from, S* to, int64_t stride, const FoldTerms& terms, int64_t num_nodes, int64_t value,
                       int64_t key) {
  Floats sums[VALUES][kChannelVectors];
#pragma GCC unroll 4
  for (int64_t row = 0; row < VALUES; ++row) {
#pragma GCC unroll 4
    for (int64_t n = 0; n < kChannelVectors; ++n) {
      sums[row][n] = load_floats(terms.kept_K + key + 16 * n) * load_floats(from + row * stride + 16 * n);
    }
  }
  for (int64_t node = 0; node < num_nodes; ++node) {
    const float *k_K = terms.k_JK + node * terms.keys + key, *u_V = terms.u_JV + node * terms.values + value;
    Floats k[kChannelVectors];
#pragma GCC unroll 4
    for (int64_t n = 0; n < kChannelVectors; ++n) k[n] = load_floats(k_K + 16 * n);
#pragma GCC unroll 4
    for (int64_t row = 0; row < VALUES; ++row) {
      const Floats u = broadcast(u_V[row]);
#pragma GCC unroll 4
      for (int64_t n = 0; n < kChannelVectors; ++n) sums[row][n] = multiply_add(u, k[n], sums[row][n]);
    }
  }
#pragma GCC unroll 4
  for (int64_t row = 0; row < VALUES; ++row) {
#pragma GCC unroll 4
    for (int64_t n = 0; n < kChannelVectors; ++n) {
      store_lanes(sums[row][n], *reinterpret_cast<S(*)[16]>(to + row * stride + 16 * n));
    }
  }
}

// The same where fewer than 64 channels are left.
template <class S>
inline void fold_rest(const S* from, S* to, int64_t count, const FoldTerms& terms, int64_t num_nodes, int64_t value,
                      int64_t key) {
  S some[kChannels] = {};
  std::memcpy(some, from, count * sizeof(S));
  fold_block<1>(some, some, kChannels, terms, num_nodes, value, key);
  std::memcpy(to, some, count * sizeof(S));
}

template <class S>
inline void fold_state(const S* from_VK, S* to_VK, int64_t value_dim, int64_t key_dim, const FoldTerms& terms,
                       int64_t num_nodes) {
  constexpr int64_t kValues = 4;
  for (int64_t value = 0; value < value_dim; value += kValues) {
    const int64_t rows = std::min(kValues, value_dim - value);
    for (int64_t key = 0; key < key_dim; key += kChannels) {
      const int64_t count = std::min(kChannels, key_dim - key), offset = value * key_dim + key;
      if (rows == kValues && count == kChannels) {
        fold_block<kValues>(from_VK + offset, to_VK + offset, key_dim, terms, num_nodes, value, key);
        continue;
      }
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = offset + row * key_dim;
        fold_rest(from_VK + at, to_VK + at, count, terms, num_nodes, value + row, key);
      }
    }
  }
}

// Calls `read_terms(row, head, terms)` for every head of every row that commits, and then folds its state.
template <class F>
inline void fold_heads(const View& pool, const Commit& commit, const F& read_terms) {
  const int64_t num_heads = pool.sizes[1], value_dim = pool.sizes[2], key_dim = pool.sizes[3];
  size_t longest = 0;
  std::vector<int64_t> rows;
  for (size_t row = 0; row < commit.nodes_B.size(); ++row) {
    longest = std::max(longest, commit.nodes_B[row].size());
    if (!commit.nodes_B[row].empty()) rows.push_back(row);
  }
  with_narrow_float_type(pool.dtype, pool.name, [&](auto zero) {
    using S = decltype(zero);
    const int64_t bytes = 2 * value_dim * key_dim * sizeof(S), num_units = rows.size() * num_heads;
    torch::stable::parallel_for(0, num_units, grain_for(bytes), [&](int64_t begin, int64_t end) {
      FoldTerms terms(longest, key_dim, value_dim);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t row = rows[unit / num_heads], head = unit % num_heads;
        read_terms(row, head, terms);
        fold_state(pool.at<S>(commit.slot_B[row], head), pool.at<S>(commit.destination_B[row], head), value_dim,
                   key_dim, terms, commit.nodes_B[row].size());
      }
    });
  });
}

// state_pool [U, H, V, K], slots and destinations [B], k [B, T, G, K], u [B, T, H, V], log_a [B, T, H, K] or
// [B, T, H, 1], path nodes [B, T] and their number [B].
inline void delta_fold(Tensor state_pool, const Tensor& slots, const Tensor& destinations, const Tensor& k,
                       const Tensor& u, const Tensor& log_a, const Tensor& nodes, const Tensor& num_nodes) {
  const View pool = view_of(state_pool, "state_pool", {kAny, kAny, kAny, kAny});
  const int64_t num_heads = pool.sizes[1], value_dim = pool.sizes[2], key_dim = pool.sizes[3];
  require_inner_contiguous(pool, 4, 1);
  const Commit commit = checked_commit(slots, destinations, nodes, num_nodes, pool.sizes[0]);
  const int64_t num_rows = commit.nodes_B.size(), num_places = nodes.size(1);
  const View k_BTGK = view_of(k, "k_BTGK", {num_rows, num_places, kAny, key_dim});
  const View u_BTHV = view_of(u, "u_BTHV", {num_rows, num_places, num_heads, value_dim});
  const View log_a_BTHK = view_of(log_a, "log_a_BTHK", {num_rows, num_places, num_heads, kAny});
  const int64_t num_groups = k_BTGK.sizes[2], num_decays = log_a_BTHK.sizes[3];
  require(num_decays == 1 || num_decays == key_dim, "log_a_BTHK has ", num_decays, " channels for a key dim of ",
          key_dim);
  require_groups(k_BTGK, num_groups, num_heads);
  fold_heads(pool, commit, [&](int64_t row, int64_t head, FoldTerms& terms) {
    const auto& path = commit.nodes_B[row];
    std::fill_n(terms.kept_K, key_dim, 1.0f);
    for (int64_t place = static_cast<int64_t>(path.size()) - 1; place >= 0; --place) {
      float* k_K = terms.k_JK + place * terms.keys;
      read_node(k_BTGK, row, path[place], head * num_groups / num_heads, k_K);
      read_node(u_BTHV, row, path[place], head, terms.u_JV + place * terms.values);
      read_decays(log_a_BTHK, row, path[place], head, key_dim, terms.a_K);
#pragma omp simd
      for (int64_t n = 0; n < key_dim; ++n) {
        k_K[n] *= terms.kept_K[n];
        terms.kept_K[n] *= terms.a_K[n];
      }
    }
  });
}

// state_pool [U, H, P, N], slots and destinations [B], dt [B, T, H], a [H], x [B, T, H, P], b [B, T, G, N], path nodes
// [B, T] and their number [B].
inline void mamba2_fold(Tensor state_pool, const Tensor& slots, const Tensor& destinations, const Tensor& dt,
                        const Tensor& a, const Tensor& x, const Tensor& b, const Tensor& nodes,
                        const Tensor& num_nodes) {
  const View pool = view_of(state_pool, "state_pool", {kAny, kAny, kAny, kAny});
  const int64_t num_heads = pool.sizes[1], head_dim = pool.sizes[2], state_dim = pool.sizes[3];
  require_inner_contiguous(pool, 4, 1);
  const Commit commit = checked_commit(slots, destinations, nodes, num_nodes, pool.sizes[0]);
  const int64_t num_rows = commit.nodes_B.size(), num_places = nodes.size(1);
  const View dt_BTH = view_of(dt, "dt_BTH", {num_rows, num_places, num_heads});
  const View a_H = view_of(a, "a_H", {num_heads});
  const View x_BTHP = view_of(x, "x_BTHP", {num_rows, num_places, num_heads, head_dim});
  const View b_BTGN = view_of(b, "b_BTGN", {num_rows, num_places, kAny, state_dim});
  const int64_t num_groups = b_BTGN.sizes[2];
  require_groups(b_BTGN, num_groups, num_heads);
  fold_heads(pool, commit, [&](int64_t row, int64_t head, FoldTerms& terms) {
    const auto& path = commit.nodes_B[row];
    float kept = 1;
    for (int64_t place = static_cast<int64_t>(path.size()) - 1; place >= 0; --place) {
      const float dt = read_node_scalar(dt_BTH, row, path[place], head);
      float* dtx_P = terms.u_JV + place * terms.values;
      read_node(x_BTHP, row, path[place], head, dtx_P);
      read_node(b_BTGN, row, path[place], head * num_groups / num_heads, terms.k_JK + place * terms.keys);
      for (int64_t n = 0; n < head_dim; ++n) dtx_P[n] *= kept * dt;
      kept *= decay_of(dt * read_scalar<float>(a_H, head));
    }
    std::fill_n(terms.kept_K, state_dim, kept);
  });
}

}  // namespace hybrid_runtime
