// One token of every row, in place on the states in a pool: Mamba-2, and the delta rules (GDN, KDA).
//
// A unit of work is one head of one row. Its state passes through the core once: read, decayed, added to, written,
// and multiplied out while it is in registers. Rows of slot 0 are padding: their output is 0 and nothing is written.
#pragma once

#include "tensor_view.h"

namespace hybrid_runtime {

// x [B, H, P], dt [B, H], a [H], b and c [B, G, N], state_pool [U, H, P, N], slots [B]; returns y like x.
inline Tensor mamba2_step(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c,
                          Tensor state_pool, const Tensor& slots) {
  const View pool = view_of(state_pool, "state_pool", {kAny, kAny, kAny, kAny});
  const int64_t num_heads = pool.sizes[1], head_dim = pool.sizes[2], state_dim = pool.sizes[3];
  const View slots_B = view_of(slots, "slots_B", {kAny});
  const int64_t num_rows = slots_B.sizes[0];
  const View x_BHP = view_of(x, "x_BHP", {num_rows, num_heads, head_dim});
  const View dt_BH = view_of(dt, "dt_BH", {num_rows, num_heads});
  const View a_H = view_of(a, "a_H", {num_heads});
  const View b_BGN = view_of(b, "b_BGN", {num_rows, kAny, state_dim});
  const int64_t num_groups = b_BGN.sizes[1];
  const View c_BGN = view_of(c, "c_BGN", {num_rows, num_groups, state_dim});
  require(num_groups > 0 && num_heads % num_groups == 0, "b_BGN has ", num_groups, " groups for ", num_heads, " heads");
  require_inner_contiguous(pool, 4, 1);
  std::vector<int64_t> copy;
  const int64_t* slot_B = checked_slots(slots_B, pool.sizes[0], copy);

  Tensor y = torch::stable::new_empty(x, {num_rows, num_heads, head_dim});
  const View y_BHP = view_of(y, "y_BHP", {num_rows, num_heads, head_dim});
  with_float_type(pool.dtype, pool.name, [&](auto pool_zero) {
    using S = decltype(pool_zero);
    using C = arithmetic_t<S>;
    with_float_type(y_BHP.dtype, y_BHP.name, [&](auto y_zero) {
      using Y = decltype(y_zero);
      torch::stable::parallel_for(
          0, num_rows * num_heads, grain_for(head_dim * state_dim * sizeof(S)), [&](int64_t begin, int64_t end) {
            std::vector<C> scratch(2 * state_dim + head_dim);
            C *b_N = scratch.data(), *c_N = b_N + state_dim, *x_P = c_N + state_dim;
            int64_t read_row = -1, read_group = -1;
            for (int64_t unit = begin; unit < end; ++unit) {
              const int64_t row = unit / num_heads, head = unit % num_heads, group = head * num_groups / num_heads;
              Y* y_P = y_BHP.at<Y>(row, head);
              if (slot_B[row] == 0) {
                std::fill_n(y_P, head_dim, store<Y>(C{0}));
                continue;
              }
              if (row != read_row || group != read_group) {
                read_last_axis(b_BGN, 3, row, group, b_N);
                read_last_axis(c_BGN, 3, row, group, c_N);
                read_row = row;
                read_group = group;
              }
              read_last_axis(x_BHP, 3, row, head, x_P);
              const C dt_now = read_scalar<C>(dt_BH, row, head);
              const C kept = std::exp(dt_now * read_scalar<C>(a_H, head));
              S* h_N = pool.at<S>(slot_B[row], head);
              for (int64_t p = 0; p < head_dim; ++p, h_N += state_dim) {
                const C dtx = dt_now * x_P[p];
                C sum{0};
#pragma omp simd reduction(+ : sum)
                for (int64_t n = 0; n < state_dim; ++n) {
                  const C h = multiply_add(kept, load<C>(h_N[n]), dtx * b_N[n]);
                  h_N[n] = store<S>(h);
                  sum = multiply_add(h, c_N[n], sum);
                }
                y_P[p] = store<Y>(sum);
              }
            }
          });
    });
  });
  return y;
}

// q and k [B, G, K], v [B, H, V], log_a [B, H, K] or [B, H, 1], beta [B, H], state_pool [U, H, V, K], slots [B];
// returns y like v.
inline Tensor delta_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_a, const Tensor& beta,
                         Tensor state_pool, const Tensor& slots) {
  const View pool = view_of(state_pool, "state_pool", {kAny, kAny, kAny, kAny});
  const int64_t num_heads = pool.sizes[1], value_dim = pool.sizes[2], key_dim = pool.sizes[3];
  const View slots_B = view_of(slots, "slots_B", {kAny});
  const int64_t num_rows = slots_B.sizes[0];
  const View q_BGK = view_of(q, "q_BGK", {num_rows, kAny, key_dim});
  const int64_t num_groups = q_BGK.sizes[1];
  const View k_BGK = view_of(k, "k_BGK", {num_rows, num_groups, key_dim});
  const View v_BHV = view_of(v, "v_BHV", {num_rows, num_heads, value_dim});
  const View log_a_BHK = view_of(log_a, "log_a_BHK", {num_rows, num_heads, kAny});
  const View beta_BH = view_of(beta, "beta_BH", {num_rows, num_heads});
  require(log_a_BHK.sizes[2] == 1 || log_a_BHK.sizes[2] == key_dim, "log_a_BHK has ", log_a_BHK.sizes[2],
          " channels for a key dim of ", key_dim);
  require(num_groups > 0 && num_heads % num_groups == 0, "q_BGK has ", num_groups, " heads for ", num_heads);
  require_inner_contiguous(pool, 4, 1);
  std::vector<int64_t> copy;
  const int64_t* slot_B = checked_slots(slots_B, pool.sizes[0], copy);

  Tensor y = torch::stable::new_empty(v, {num_rows, num_heads, value_dim});
  const View y_BHV = view_of(y, "y_BHV", {num_rows, num_heads, value_dim});
  with_float_type(pool.dtype, pool.name, [&](auto pool_zero) {
    using S = decltype(pool_zero);
    using C = arithmetic_t<S>;
    with_float_type(y_BHV.dtype, y_BHV.name, [&](auto y_zero) {
      using Y = decltype(y_zero);
      torch::stable::parallel_for(
          0, num_rows * num_heads, grain_for(value_dim * key_dim * sizeof(S)), [&](int64_t begin, int64_t end) {
            std::vector<C> scratch(4 * key_dim + value_dim);
            C *q_K = scratch.data(), *k_K = q_K + key_dim, *a_K = k_K + key_dim, *s_K = a_K + key_dim;
            C* v_V = s_K + key_dim;
            for (int64_t unit = begin; unit < end; ++unit) {
              const int64_t row = unit / num_heads, head = unit % num_heads, group = head * num_groups / num_heads;
              Y* y_V = y_BHV.at<Y>(row, head);
              if (slot_B[row] == 0) {
                std::fill_n(y_V, value_dim, store<Y>(C{0}));
                continue;
              }
              read_last_axis(q_BGK, 3, row, group, q_K);
              read_last_axis(k_BGK, 3, row, group, k_K);
              read_last_axis(v_BHV, 3, row, head, v_V);
              read_last_axis(log_a_BHK, 3, row, head, a_K);
              for (int64_t n = 0; n < log_a_BHK.sizes[2]; ++n) a_K[n] = std::exp(a_K[n]);
              if (log_a_BHK.sizes[2] == 1) std::fill_n(a_K, key_dim, a_K[0]);
              const C beta_now = read_scalar<C>(beta_BH, row, head);
              S* state_K = pool.at<S>(slot_B[row], head);
              for (int64_t value = 0; value < value_dim; ++value, state_K += key_dim) {
                C answer{0};
#pragma omp simd reduction(+ : answer)
                for (int64_t n = 0; n < key_dim; ++n) {
                  s_K[n] = a_K[n] * load<C>(state_K[n]);
                  answer = multiply_add(s_K[n], k_K[n], answer);
                }
                const C u = beta_now * (v_V[value] - answer);
                C sum{0};
#pragma omp simd reduction(+ : sum)
                for (int64_t n = 0; n < key_dim; ++n) {
                  const C s = multiply_add(u, k_K[n], s_K[n]);
                  state_K[n] = store<S>(s);
                  sum = multiply_add(s, q_K[n], sum);
                }
                y_V[value] = store<Y>(sum);
              }
            }
          });
    });
  });
  return y;
}

}  // namespace hybrid_runtime
