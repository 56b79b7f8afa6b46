// The state behind every node of a draft tree, written out: what rollbacks by snapshot and by replay are made of.
//
// A unit of work is one head of one row. Rows of a state don't depend on each other: eight of them are taken through the
// whole tree before the next, so that those of a node's parent are still in cache. States go out past the caches, which
// they would only flush: nobody reads them before the verdict. All recurrences step alike:
//
//     u = β (v - S (a ∘ k));   S' = a ∘ S + u kᵀ;   y = S' q = S (a ∘ q) + u <k, q>
//
// with u = dt x, whatever the state, for Mamba-2.
#pragma once

#include "delta_tree.h"
#include "mamba2_tree.h"

namespace hybrid_runtime {

constexpr int64_t kStateRows = 8;  // of a state that are taken through a tree together

// A buffer `[B, T, H, V, K]` whose states are contiguous.
struct NodeStates {
  char* data;
  int64_t row_stride, node_stride, head_stride;

  template <class S>
  S* at(int64_t row, int64_t node, int64_t head) const {
    return reinterpret_cast<S*>(data) + row * row_stride + node * node_stride + head * head_stride;
  }
};

inline NodeStates node_states_of(const Tensor& states, const View& pool, int64_t num_rows, int64_t num_nodes) {
  require(states.is_cpu() && states.dim() == 5, "node_states must be a CPU tensor of 5 axes");
  const int64_t expected[] = {num_rows, num_nodes, pool.sizes[1], pool.sizes[2], pool.sizes[3]};
  for (int axis = 0; axis < 5; ++axis) {
    const bool fits = axis < 2 ? states.size(axis) >= expected[axis] : states.size(axis) == expected[axis];
    require(fits, "node_states must have size ", expected[axis], axis < 2 ? " or more on axis " : " on axis ", axis,
            ", not ", states.size(axis));
  }
  require(states.scalar_type() == pool.dtype, "node_states must have the dtype of state_pool");
  require((pool.sizes[3] == 1 || states.stride(4) == 1) && (pool.sizes[2] == 1 || states.stride(3) == pool.sizes[3]),
          "node_states must be contiguous behind its first 3 axes");
  return {static_cast<char*>(states.data_ptr()), states.stride(0), states.stride(1), states.stride(2)};
}

// What a step of each node of a head takes, and the rows of all nodes' states; sizes are filled up.
struct StepTerms {
  int64_t num_nodes, keys, values;
  Scratch memory;
  float *a_TK, *k_TK, *ak_TK, *aq_TK;  // decay, k, and k and q decayed
  float *kq_T, *beta_T, *v_TV, *y_TV;  // <k, q>; β, or 1; v, or dt x
  float *states_TRK, *before_RK;

  StepTerms(int64_t nodes, int64_t key_dim, int64_t value_dim)
      : num_nodes(nodes),
        keys(rounded_up(key_dim, 16)),
        values(rounded_up(value_dim, 16)),
        memory((4 * nodes + (nodes + 1) * kStateRows) * keys + 2 * nodes * (values + 1)) {
    for (float** each : {&a_TK, &k_TK, &ak_TK, &aq_TK}) *each = memory.take(nodes * keys);
    for (float** each : {&v_TV, &y_TV}) *each = memory.take(nodes * values);
    for (float** each : {&kq_T, &beta_T}) *each = memory.take(nodes);
    states_TRK = memory.take(nodes * kStateRows * keys);
    before_RK = memory.take(kStateRows * keys);
  }

  // From a, k and q (in the place of aq) of a node.
  void multiply(int64_t node) {
    float *a_K = a_TK + node * keys, *k_K = k_TK + node * keys, *aq_K = aq_TK + node * keys, kq = 0;
#pragma omp simd reduction(+ : kq)
    for (int64_t n = 0; n < keys; ++n) {
      kq = multiply_add(k_K[n], aq_K[n], kq);
      ak_TK[node * keys + n] = a_K[n] * k_K[n];
      aq_K[n] *= a_K[n];
    }
    kq_T[node] = kq;
  }
};

// Writes sixteen floats to memory; past the caches where `to` is the beginning of a cache line.
inline void stream(Floats x, float* to) {
#ifdef __AVX512F__
  if (reinterpret_cast<uintptr_t>(to) % 64 == 0) {
    _mm512_stream_ps(to, (__m512)x);
    return;
  }
#endif
  put_floats(x, to);
}
inline void stream(Floats x, BFloat* to) { store_lanes(x, *reinterpret_cast<BFloat(*)[16]>(to)); }

// The answers of eight rows of a state to ak, and to aq: before u is known, all that depends on the state.
inline Floats answer_rows(const float* before_RK, const float* ak_K, const float* aq_K, int64_t keys) {
  Floats sums[16] = {};
  for (int64_t n = 0; n < keys; n += 16) {
    const Floats ak = load_floats(ak_K + n), aq = load_floats(aq_K + n);
#pragma GCC unroll 8
    for (int64_t row = 0; row < kStateRows; ++row) {
      const Floats state = load_floats(before_RK + row * keys + n);
      sums[row] = multiply_add(state, ak, sums[row]);
      sums[kStateRows + row] = multiply_add(state, aq, sums[kStateRows + row]);
    }
  }
  return sum_lanes(sums);
}

// Steps up to eight rows of a state through one node.
template <class S>
inline void step_rows(const StepTerms& terms, int64_t node, const float* before_RK, int64_t value, int64_t num_rows,
                      int64_t key_dim, bool is_delta, S* out_VK) {
  const int64_t keys = terms.keys, at = node * terms.values + value;
  const float *a_K = terms.a_TK + node * keys, *k_K = terms.k_TK + node * keys;
  float* after_RK = terms.states_TRK + node * kStateRows * keys;
  float answers[16];
  store_lanes(answer_rows(before_RK, terms.ak_TK + node * keys, terms.aq_TK + node * keys, keys), answers);
  for (int64_t row = 0; row < num_rows; ++row) {
    const float v = terms.v_TV[at + row], u = is_delta ? terms.beta_T[node] * (v - answers[row]) : v;
    terms.y_TV[at + row] = multiply_add(u, terms.kq_T[node], answers[kStateRows + row]);
    S* out_K = out_VK + (value + row) * key_dim;
    for (int64_t n = 0; n < keys; n += 16) {
      const Floats state = multiply_add(broadcast(u), load_floats(k_K + n),
                                        load_floats(a_K + n) * load_floats(before_RK + row * keys + n));
      put_floats(state, after_RK + row * keys + n);
      if (n + 16 <= key_dim) {
        stream(state, out_K + n);
      } else {
        for (int64_t lane = 0; n + lane < key_dim; ++lane) out_K[n + lane] = store<S>(state[lane]);
      }
    }
  }
}

// All nodes of one head.
template <class S>
inline void step_head(const StepTerms& terms, const S* state_VK, int64_t value_dim, int64_t key_dim, bool is_delta,
                      const WaysUp& ways, const NodeStates& states, int64_t row, int64_t head) {
  for (int64_t value = 0; value < value_dim; value += kStateRows) {
    const int64_t num_rows = std::min(kStateRows, value_dim - value);
    for (int64_t r = 0; r < num_rows; ++r) {
      for (int64_t n = 0; n < terms.keys; n += 16) {
        put_floats(load_up_to_16(state_VK + (value + r) * key_dim + n, key_dim - n), terms.before_RK + r * terms.keys + n);
      }
    }
    for (int64_t node = 0; node < terms.num_nodes; ++node) {
      const float* before_RK =
          node == 0 ? terms.before_RK : terms.states_TRK + ways.parent(row, node) * kStateRows * terms.keys;
      step_rows(terms, node, before_RK, value, num_rows, key_dim, is_delta, states.at<S>(row, node, head));
    }
  }
}

// Calls `read_terms(row, head, terms)` for every head of every row that is not padding, and then walks its tree. The
// states of padding rows are not written.
template <class F>
inline void walk_heads(const View& pool, const std::vector<int64_t>& slot_B, const WaysUp& ways,
                       const NodeStates& states, bool is_delta, const View& y_BTHV, const F& read_terms) {
  const int64_t num_heads = pool.sizes[1], value_dim = pool.sizes[2], key_dim = pool.sizes[3];
  const int64_t num_units = static_cast<int64_t>(slot_B.size()) * num_heads;
  with_narrow_float_type(pool.dtype, pool.name, [&](auto zero) {
    using S = decltype(zero);
    const int64_t grain = grain_for(ways.num_nodes * value_dim * key_dim * sizeof(S));
    torch::stable::parallel_for(0, num_units, grain, [&](int64_t begin, int64_t end) {
      StepTerms terms(ways.num_nodes, key_dim, value_dim);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t row = unit / num_heads, head = unit % num_heads;
        if (slot_B[row] == 0) {
          write_zeros(y_BTHV, row, head);
          continue;
        }
        read_terms(row, head, terms);
        for (int64_t node = 0; node < ways.num_nodes; ++node) terms.multiply(node);
        step_head(terms, pool.at<S>(slot_B[row], head), value_dim, key_dim, is_delta, ways, states, row, head);
        for (int64_t node = 0; node < ways.num_nodes; ++node) {
          write_node(terms.y_TV + node * terms.values, y_BTHV, row, node, head);
        }
      }
#ifdef __AVX512F__
      _mm_sfence();  // streamed stores are seen by whom the thread tells that it is done
#endif
    });
  });
}

// As `mamba2_tree`; also writes node_states [B, T, H, P, N].
inline Tensor mamba2_tree_states(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c,
                                 const Tensor& state_pool, const Tensor& slots, const Tensor& parents,
                                 Tensor node_states) {
  Mamba2Tree p = mamba2_tree_operands(x, dt, a, b, c, state_pool, slots, parents);
  const auto& shape = p.x_BTHP.sizes;
  const int64_t num_groups = p.b_BTGN.sizes[2];
  const NodeStates states = node_states_of(node_states, p.pool, shape[0], shape[1]);
  Tensor y = torch::stable::new_empty(x, {shape[0], shape[1], shape[2], shape[3]});
  p.y_BTHP = view_of(y, "y_BTHP", {shape[0], shape[1], shape[2], shape[3]});
  walk_heads(p.pool, p.slot_B, p.ways, states, false, p.y_BTHP, [&](int64_t row, int64_t head, StepTerms& terms) {
    const int64_t group = head * num_groups / shape[2];
    const float rate = read_scalar<float>(p.a_H, head);
    for (int64_t node = 0; node < terms.num_nodes; ++node) {
      const float dt_node = read_node_scalar(p.dt_BTH, row, node, head);
      std::fill_n(terms.a_TK + node * terms.keys, p.pool.sizes[3], decay_of(dt_node * rate));
      read_node(p.b_BTGN, row, node, group, terms.k_TK + node * terms.keys);
      read_node(p.c_BTGN, row, node, group, terms.aq_TK + node * terms.keys);
      float* dtx_P = terms.v_TV + node * terms.values;
      read_node(p.x_BTHP, row, node, head, dtx_P);
      for (int64_t n = 0; n < shape[3]; ++n) dtx_P[n] *= dt_node;
    }
  });
  return y;
}

// As `delta_tree`, without u; also writes node_states [B, T, H, V, K].
inline Tensor delta_tree_states(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_a,
                                const Tensor& beta, const Tensor& state_pool, const Tensor& slots,
                                const Tensor& parents, Tensor node_states) {
  DeltaTree p = delta_tree_operands(q, k, v, log_a, beta, state_pool, slots, parents);
  const auto& shape = p.v_BTHV.sizes;
  const int64_t key_dim = p.pool.sizes[3], num_groups = p.k_BTGK.sizes[2];
  const NodeStates states = node_states_of(node_states, p.pool, shape[0], shape[1]);
  Tensor y = torch::stable::new_empty(v, {shape[0], shape[1], shape[2], shape[3]});
  p.y_BTHV = view_of(y, "y_BTHV", {shape[0], shape[1], shape[2], shape[3]});
  walk_heads(p.pool, p.slot_B, p.ways, states, true, p.y_BTHV, [&](int64_t row, int64_t head, StepTerms& terms) {
    const int64_t group = head * num_groups / shape[2];
    for (int64_t node = 0; node < terms.num_nodes; ++node) {
      read_decays(p.log_a_BTHK, row, node, head, key_dim, terms.a_TK + node * terms.keys);
      read_node(p.k_BTGK, row, node, group, terms.k_TK + node * terms.keys);
      read_node(p.q_BTGK, row, node, group, terms.aq_TK + node * terms.keys);
      read_node(p.v_BTHV, row, node, head, terms.v_TV + node * terms.values);
      terms.beta_T[node] = read_node_scalar(p.beta_BTH, row, node, head);
    }
  });
  return y;
}

}  // namespace hybrid_runtime
