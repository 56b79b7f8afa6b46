// One token of every row, in place on the states in a pool: Mamba-2, and the delta rules (GDN, KDA).
//
// A unit of work is one head of one row. Its state passes through the core once: read, decayed, added to, written,
// and multiplied out while it is in registers. Rows of slot 0 are padding: their output is 0 and nothing is written.
// The arithmetic has the dtype that the pool's S implies; other operands are converted as they are read.
#pragma once

#include "tensor_view.h"

namespace hybrid_runtime {

struct Mamba2Step {
  View x_BHP, dt_BH, a_H, b_BGN, c_BGN, pool, y_BHP;
  std::vector<int64_t> slot_B;
};

// h := kept h + dtx bᵀ of one head; returns h c.
template <class S, class C>
inline void update_mamba2_state(S* h_PN, C kept, C dt, const C* x_P, const C* b_N, const C* c_N, int64_t head_dim,
                                int64_t state_dim, C* y_P) {
  for (int64_t p = 0; p < head_dim; ++p) {
    S* h_N = h_PN + p * state_dim;
    const C dtx = dt * x_P[p];
    C sum{0};
#pragma omp simd reduction(+ : sum)
    for (int64_t n = 0; n < state_dim; ++n) {
      const C h = multiply_add(kept, load<C>(h_N[n]), dtx * b_N[n]);
      h_N[n] = store<S>(h);
      sum = multiply_add(h, c_N[n], sum);
    }
    y_P[p] = sum;
  }
}

template <class S>
inline void run_mamba2_units(const Mamba2Step& p, int64_t begin, int64_t end) {
  using C = arithmetic_t<S>;
  const int64_t num_heads = p.pool.sizes[1], head_dim = p.pool.sizes[2], state_dim = p.pool.sizes[3];
  std::vector<C> scratch(2 * (state_dim + head_dim));
  C *b_N = scratch.data(), *c_N = b_N + state_dim, *x_P = c_N + state_dim, *y_P = x_P + head_dim;
  int64_t read_row = kAny, read_group = kAny;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t row = unit / num_heads, head = unit % num_heads, group = head * p.b_BGN.sizes[1] / num_heads;
    if (p.slot_B[row] == 0) {
      std::fill_n(y_P, head_dim, C{0});
      write_last_axis(y_P, p.y_BHP, 3, row, head);
      continue;
    }
    if (row != read_row || group != read_group) {
      read_last_axis(p.b_BGN, 3, row, group, b_N);
      read_last_axis(p.c_BGN, 3, row, group, c_N);
      read_row = row;
      read_group = group;
    }
    read_last_axis(p.x_BHP, 3, row, head, x_P);
    const C dt = read_scalar<C>(p.dt_BH, row, head);
    const C kept = std::exp(dt * read_scalar<C>(p.a_H, head));
    update_mamba2_state(p.pool.at<S>(p.slot_B[row], head), kept, dt, x_P, b_N, c_N, head_dim, state_dim, y_P);
    write_last_axis(y_P, p.y_BHP, 3, row, head);
  }
}

// x [B, H, P], dt [B, H], a [H], b and c [B, G, N], state_pool [U, H, P, N], slots [B]; returns y like x.
inline Tensor mamba2_step(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c,
                          Tensor state_pool, const Tensor& slots) {
  Mamba2Step p;
  p.pool = view_of(state_pool, "state_pool", {kAny, kAny, kAny, kAny});
  const int64_t num_heads = p.pool.sizes[1], head_dim = p.pool.sizes[2], state_dim = p.pool.sizes[3];
  require_inner_contiguous(p.pool, 4, 1);
  p.slot_B = checked_slots(slots, p.pool.sizes[0]);
  const int64_t num_rows = p.slot_B.size();
  p.x_BHP = view_of(x, "x_BHP", {num_rows, num_heads, head_dim});
  p.dt_BH = view_of(dt, "dt_BH", {num_rows, num_heads});
  p.a_H = view_of(a, "a_H", {num_heads});
  p.b_BGN = view_of(b, "b_BGN", {num_rows, kAny, state_dim});
  const int64_t num_groups = p.b_BGN.sizes[1];
  p.c_BGN = view_of(c, "c_BGN", {num_rows, num_groups, state_dim});
  require_groups(p.b_BGN, num_groups, num_heads);

  Tensor y = torch::stable::new_empty(x, {num_rows, num_heads, head_dim});
  p.y_BHP = view_of(y, "y_BHP", {num_rows, num_heads, head_dim});
  with_float_type(p.pool.dtype, p.pool.name, [&](auto zero) {
    using S = decltype(zero);
    torch::stable::parallel_for(0, num_rows * num_heads, grain_for(head_dim * state_dim * sizeof(S)),
                                [&](int64_t begin, int64_t end) { run_mamba2_units<S>(p, begin, end); });
  });
  return y;
}

struct DeltaStep {
  View q_BGK, k_BGK, v_BHV, log_a_BHK, beta_BH, pool, y_BHV;
  std::vector<int64_t> slot_B;
};

// S' = a ∘ S; u = β (v - S' k); S := S' + u kᵀ of one head; returns S q. `s_K` is scratch.
template <class S, class C>
inline void update_delta_state(S* state_VK, const C* a_K, C beta, const C* q_K, const C* k_K, const C* v_V,
                               int64_t value_dim, int64_t key_dim, C* s_K, C* y_V) {
  for (int64_t value = 0; value < value_dim; ++value) {
    S* state_K = state_VK + value * key_dim;
    C answer{0};
#pragma omp simd reduction(+ : answer)
    for (int64_t n = 0; n < key_dim; ++n) {
      s_K[n] = a_K[n] * load<C>(state_K[n]);
      answer = multiply_add(s_K[n], k_K[n], answer);
    }
    const C u = beta * (v_V[value] - answer);
    C sum{0};
#pragma omp simd reduction(+ : sum)
    for (int64_t n = 0; n < key_dim; ++n) {
      const C s = multiply_add(u, k_K[n], s_K[n]);
      state_K[n] = store<S>(s);
      sum = multiply_add(s, q_K[n], sum);
    }
    y_V[value] = sum;
  }
}

template <class S>
inline void run_delta_units(const DeltaStep& p, int64_t begin, int64_t end) {
  using C = arithmetic_t<S>;
  const int64_t num_heads = p.pool.sizes[1], value_dim = p.pool.sizes[2], key_dim = p.pool.sizes[3];
  std::vector<C> scratch(4 * key_dim + 2 * value_dim);
  C *q_K = scratch.data(), *k_K = q_K + key_dim, *a_K = k_K + key_dim, *s_K = a_K + key_dim;
  C *v_V = s_K + key_dim, *y_V = v_V + value_dim;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t row = unit / num_heads, head = unit % num_heads, group = head * p.q_BGK.sizes[1] / num_heads;
    if (p.slot_B[row] == 0) {
      std::fill_n(y_V, value_dim, C{0});
      write_last_axis(y_V, p.y_BHV, 3, row, head);
      continue;
    }
    read_last_axis(p.q_BGK, 3, row, group, q_K);
    read_last_axis(p.k_BGK, 3, row, group, k_K);
    read_last_axis(p.v_BHV, 3, row, head, v_V);
    read_last_axis(p.log_a_BHK, 3, row, head, a_K);
    for (int64_t n = 0; n < p.log_a_BHK.sizes[2]; ++n) a_K[n] = std::exp(a_K[n]);
    if (p.log_a_BHK.sizes[2] == 1) std::fill_n(a_K, key_dim, a_K[0]);
    update_delta_state(p.pool.at<S>(p.slot_B[row], head), a_K, read_scalar<C>(p.beta_BH, row, head), q_K, k_K, v_V,
                       value_dim, key_dim, s_K, y_V);
    write_last_axis(y_V, p.y_BHV, 3, row, head);
  }
}

// q and k [B, G, K], v [B, H, V], log_a [B, H, K] or [B, H, 1], beta [B, H], state_pool [U, H, V, K], slots [B];
// returns y like v.
inline Tensor delta_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_a, const Tensor& beta,
                         Tensor state_pool, const Tensor& slots) {
  DeltaStep p;
  p.pool = view_of(state_pool, "state_pool", {kAny, kAny, kAny, kAny});
  const int64_t num_heads = p.pool.sizes[1], value_dim = p.pool.sizes[2], key_dim = p.pool.sizes[3];
  require_inner_contiguous(p.pool, 4, 1);
  p.slot_B = checked_slots(slots, p.pool.sizes[0]);
  const int64_t num_rows = p.slot_B.size();
  p.q_BGK = view_of(q, "q_BGK", {num_rows, kAny, key_dim});
  const int64_t num_groups = p.q_BGK.sizes[1];
  p.k_BGK = view_of(k, "k_BGK", {num_rows, num_groups, key_dim});
  p.v_BHV = view_of(v, "v_BHV", {num_rows, num_heads, value_dim});
  p.log_a_BHK = view_of(log_a, "log_a_BHK", {num_rows, num_heads, kAny});
  p.beta_BH = view_of(beta, "beta_BH", {num_rows, num_heads});
  require(p.log_a_BHK.sizes[2] == 1 || p.log_a_BHK.sizes[2] == key_dim, "log_a_BHK has ", p.log_a_BHK.sizes[2],
          " channels for a key dim of ", key_dim);
  require_groups(p.q_BGK, num_groups, num_heads);

  Tensor y = torch::stable::new_empty(v, {num_rows, num_heads, value_dim});
  p.y_BHV = view_of(y, "y_BHV", {num_rows, num_heads, value_dim});
  with_float_type(p.pool.dtype, p.pool.name, [&](auto zero) {
    using S = decltype(zero);
    torch::stable::parallel_for(0, num_rows * num_heads, grain_for(value_dim * key_dim * sizeof(S)),
                                [&](int64_t begin, int64_t end) { run_delta_units<S>(p, begin, end); });
  });
  return y;
}

}  // namespace hybrid_runtime
