// The gated delta rules (GDN, KDA) over a draft tree: outputs and u of all nodes from the committed state, read once.
//
// A unit of work is one head of one row. Nodes are taken in their order: a node's parent stands before it. The decays
// between a node and one that it sees are multiplied up on the way from the one to the other, so that none exceeds 1,
// whichever shape the tree has.
#pragma once

#include "paths.h"
#include "products.h"

namespace hybrid_runtime {

struct DeltaTree {
  View q_BTGK, k_BTGK, v_BTHV, log_a_BTHK, beta_BTH, pool, y_BTHV, u_BTHV;
  std::vector<int64_t> slot_B;
  WaysUp ways;

  bool decays_per_channel() const { return log_a_BTHK.sizes[3] > 1; }
};

constexpr int64_t kPendingSums = 64;  // of pairs whose lanes are added up together, sixteen at a time

// Buffers of one thread, of one head at a time.
struct DeltaTreeScratch {
  int64_t row = kAny, group = kAny;  // whose scores without decays are at hand
  int64_t num_nodes, rows, keys, values;  // sizes, filled up but for the first
  Scratch memory;
  float *k_TK, *q_TK, *a_TK, *reach_TK;  // of a, one per node if it is no vector; reach: decay from the state on
  float *kq_in_RK, *read_RV;             // k and then q of all nodes decayed from the state on; their products with it
  float *panels, *u_TV, *v_V;
  float *score_k, *score_q;    // of every node with all that it sees, in the order of the ways up
  float *weight_k, *weight_q;  // the same of one node, decayed
  std::vector<Floats> sums_k, sums_q;  // scores whose lanes are not added up yet

  explicit DeltaTreeScratch(const DeltaTree& p)
      : num_nodes(p.ways.num_nodes),
        rows(rounded_up(2 * num_nodes, kProductRows)),
        keys(rounded_up(p.pool.sizes[3], kChannels)),
        values(rounded_up(p.pool.sizes[2], kPanelValues)),
        memory((4 * num_nodes + rows + values) * keys + (rows + num_nodes + 1) * values +
               num_nodes * (num_nodes + 3)),
        sums_k(rounded_up(std::max(num_nodes, kPendingSums), 16)),
        sums_q(sums_k.size()) {
    for (float** each : {&k_TK, &q_TK, &a_TK, &reach_TK}) *each = memory.take(num_nodes * keys);
    kq_in_RK = memory.take(rows * keys);
    read_RV = memory.take(rows * values);
    panels = memory.take(keys * values);
    u_TV = memory.take(num_nodes * values);
    v_V = memory.take(values);
    for (float** each : {&score_k, &score_q}) *each = memory.take(num_nodes * (num_nodes + 1) / 2);
    for (float** each : {&weight_k, &weight_q}) *each = memory.take(num_nodes);
  }
};

// Reads k, q and the decays of a head, and decays k and q from the state on.
inline void read_delta_head(const DeltaTree& p, int64_t row, int64_t head, DeltaTreeScratch& s) {
  const int64_t group = head * p.k_BTGK.sizes[2] / p.pool.sizes[1];
  for (int64_t node = 0; node < s.num_nodes; ++node) {
    float *k_K = s.k_TK + node * s.keys, *q_K = s.q_TK + node * s.keys, *a_K = s.a_TK + node * s.keys;
    read_node(p.k_BTGK, row, node, group, k_K);
    read_node(p.q_BTGK, row, node, group, q_K);
    read_decays(p.log_a_BTHK, row, node, head, s.keys, a_K);
    float* reach_K = s.reach_TK + node * s.keys;
    const float* above_K = node == 0 ? nullptr : s.reach_TK + p.ways.parent(row, node) * s.keys;
    float *k_in_K = s.kq_in_RK + node * s.keys, *q_in_K = k_in_K + s.num_nodes * s.keys;
    for (int64_t n = 0; n < s.keys; n += 16) {
      Floats reach = load_floats(a_K + n);
      if (above_K) reach *= load_floats(above_K + n);
      put_floats(reach, reach_K + n);
      put_floats(reach * load_floats(k_K + n), k_in_K + n);
      put_floats(reach * load_floats(q_K + n), q_in_K + n);
    }
  }
}

// Lanes of <k_i, k_j> and <q_i, k_j> of a node i with the nodes j on its way up; each decayed from j to i if decays are
// vectors, which do not leave the product.
template <bool PER_CHANNEL>
inline void multiply_way(const int32_t* way, int64_t length, const DeltaTreeScratch& s, Floats* sums_k,
                         Floats* sums_q) {
  const float *k_K = s.k_TK + way[0] * s.keys, *q_K = s.q_TK + way[0] * s.keys;
  std::fill_n(sums_k, length, Floats{});
  std::fill_n(sums_q, length, Floats{});
  for (int64_t first = 0; first < s.keys; first += kChannels) {
    Floats k[kChannelVectors], q[kChannelVectors];  // decayed from the node j of the loop on
    for (int64_t n = 0; n < kChannelVectors; ++n) {
      k[n] = load_floats(k_K + first + 16 * n);
      q[n] = load_floats(q_K + first + 16 * n);
    }
    for (int64_t place = 0; place < length; ++place) {
      const int64_t offset = way[place] * s.keys + first;
      Floats sum_k = sums_k[place], sum_q = sums_q[place];
#pragma GCC unroll 4
      for (int64_t n = 0; n < kChannelVectors; ++n) {
        const Floats key = load_floats(s.k_TK + offset + 16 * n);
        sum_k = multiply_add(k[n], key, sum_k);
        sum_q = multiply_add(q[n], key, sum_q);
        if constexpr (PER_CHANNEL) {
          const Floats decay = load_floats(s.a_TK + offset + 16 * n);
          k[n] *= decay;
          q[n] *= decay;
        }
      }
      sums_k[place] = sum_k;
      sums_q[place] = sum_q;
    }
  }
}

// Adds up the lanes of `count` sums; the vectors behind them, up to a multiple of 16, may hold anything.
inline void add_lanes(const Floats* sums, int64_t count, float* out) {
  for (int64_t first = 0; first < count; first += 16) {
    const Floats totals = sum_lanes(*reinterpret_cast<const Floats(*)[16]>(sums + first));
    std::memcpy(out + first, &totals, std::min<int64_t>(16, count - first) * sizeof(float));
  }
}

// The scores of all nodes of a head; without decays if these are scalars.
template <bool PER_CHANNEL>
inline void score_nodes(const WaysUp& ways, int64_t row, DeltaTreeScratch& s) {
  float *score_k = s.score_k, *score_q = s.score_q;
  int64_t pending = 0;
  const auto add_pending = [&] {
    add_lanes(s.sums_k.data(), pending, score_k);
    add_lanes(s.sums_q.data(), pending, score_q);
    score_k += pending;
    score_q += pending;
    pending = 0;
  };
  for (int64_t node = 0; node < s.num_nodes; ++node) {
    const int64_t length = ways.length(row, node);
    if (pending + length > static_cast<int64_t>(s.sums_k.size())) add_pending();
    multiply_way<PER_CHANNEL>(ways.from(row, node), length, s, s.sums_k.data() + pending, s.sums_q.data() + pending);
    pending += length;
  }
  add_pending();
}

inline void score_head(const DeltaTree& p, int64_t row, int64_t head, DeltaTreeScratch& s) {
  const int64_t group = head * p.k_BTGK.sizes[2] / p.pool.sizes[1];
  if (p.decays_per_channel()) {
    score_nodes<true>(p.ways, row, s);
  } else if (row != s.row || group != s.group) {
    score_nodes<false>(p.ways, row, s);
    s.row = row;
    s.group = group;
  }
}

// What a node weighs the u of those that it sees with.
inline void weigh_way(const DeltaTree& p, int64_t row, int64_t node, DeltaTreeScratch& s) {
  const int64_t first = p.ways.begin(row, node) - p.ways.begin(row, 0), length = p.ways.length(row, node);
  const int32_t* way = p.ways.from(row, node);
  const bool per_channel = p.decays_per_channel();
  float decay = 1;
  for (int64_t n = 0; n < length; ++n) {
    s.weight_k[n] = decay * s.score_k[first + n];
    s.weight_q[n] = decay * s.score_q[first + n];
    if (!per_channel) decay *= s.a_TK[way[n] * s.keys];
  }
}

// u_i = β_i (v_i - S k_in_i - Σ_j <k_i, k_j> u_j) over the nodes above i; y_i = S q_in_i + Σ_j <q_i, k_j> u_j with i.
template <class S>
inline void run_delta_tree_units(const DeltaTree& p, int64_t begin, int64_t end) {
  const int64_t num_heads = p.pool.sizes[1], value_dim = p.pool.sizes[2];
  DeltaTreeScratch s(p);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t row = unit / num_heads, head = unit % num_heads;
    if (p.slot_B[row] == 0) {
      write_zeros(p.y_BTHV, row, head);
      write_zeros(p.u_BTHV, row, head);
      continue;
    }
    read_delta_head(p, row, head, s);
    pack_state(p.pool.at<S>(p.slot_B[row], head), value_dim, p.pool.sizes[3], s.keys, s.panels);
    multiply_panels(s.kq_in_RK, s.panels, s.rows, s.keys, s.values, s.read_RV);
    score_head(p, row, head, s);
    for (int64_t node = 0; node < s.num_nodes; ++node) {
      const int32_t* way = p.ways.from(row, node);
      const int64_t length = p.ways.length(row, node);
      weigh_way(p, row, node, s);
      float *read_V = s.read_RV + node * s.values, *u_V = s.u_TV + node * s.values;
      float* y_V = read_V + s.num_nodes * s.values;
      add_weighted<2>({read_V, y_V}, {s.weight_k + 1, s.weight_q + 1}, way + 1, length - 1, s.u_TV, s.values);
      read_node(p.v_BTHV, row, node, head, s.v_V);
      const float beta = read_node_scalar(p.beta_BTH, row, node, head);
#pragma omp simd
      for (int64_t n = 0; n < s.values; ++n) {
        u_V[n] = beta * (s.v_V[n] - read_V[n]);
        y_V[n] = multiply_add(s.weight_q[0], u_V[n], y_V[n]);
      }
      write_node(y_V, p.y_BTHV, row, node, head);
      write_node(u_V, p.u_BTHV, row, node, head);
    }
  }
}

inline DeltaTree delta_tree_operands(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_a,
                                     const Tensor& beta, const Tensor& state_pool, const Tensor& slots,
                                     const Tensor& parents) {
  DeltaTree p;
  p.pool = view_of(state_pool, "state_pool", {kAny, kAny, kAny, kAny});
  const int64_t num_heads = p.pool.sizes[1], value_dim = p.pool.sizes[2], key_dim = p.pool.sizes[3];
  require_inner_contiguous(p.pool, 4, 1);
  p.slot_B = checked_slots(slots, p.pool.sizes[0]);
  const int64_t num_rows = p.slot_B.size();
  p.ways = ways_up(parents, num_rows);
  const int64_t num_nodes = p.ways.num_nodes;
  p.k_BTGK = view_of(k, "k_BTGK", {num_rows, num_nodes, kAny, key_dim});
  const int64_t num_groups = p.k_BTGK.sizes[2];
  p.q_BTGK = view_of(q, "q_BTGK", {num_rows, num_nodes, num_groups, key_dim});
  p.v_BTHV = view_of(v, "v_BTHV", {num_rows, num_nodes, num_heads, value_dim});
  p.log_a_BTHK = view_of(log_a, "log_a_BTHK", {num_rows, num_nodes, num_heads, kAny});
  p.beta_BTH = view_of(beta, "beta_BTH", {num_rows, num_nodes, num_heads});
  require(p.log_a_BTHK.sizes[3] == 1 || p.log_a_BTHK.sizes[3] == key_dim, "log_a_BTHK has ", p.log_a_BTHK.sizes[3],
          " channels for a key dim of ", key_dim);
  require_groups(p.k_BTGK, num_groups, num_heads);
  return p;
}

// q and k [B, T, G, K], v [B, T, H, V], log_a [B, T, H, K] or [B, T, H, 1], beta [B, T, H], state_pool [U, H, V, K],
// slots [B], parents [B, T]; returns y like v, and u of the same shape in float32.
inline std::tuple<Tensor, Tensor> delta_tree(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_a,
                                             const Tensor& beta, const Tensor& state_pool, const Tensor& slots,
                                             const Tensor& parents) {
  DeltaTree p = delta_tree_operands(q, k, v, log_a, beta, state_pool, slots, parents);
  const auto& shape = p.v_BTHV.sizes;
  Tensor y = torch::stable::new_empty(v, {shape[0], shape[1], shape[2], shape[3]});
  Tensor u = torch::stable::new_empty(v, {shape[0], shape[1], shape[2], shape[3]}, ScalarType::Float);
  p.y_BTHV = view_of(y, "y_BTHV", {shape[0], shape[1], shape[2], shape[3]});
  p.u_BTHV = view_of(u, "u_BTHV", {shape[0], shape[1], shape[2], shape[3]});
  with_narrow_float_type(p.pool.dtype, p.pool.name, [&](auto zero) {
    using S = decltype(zero);
    const int64_t bytes = p.pool.sizes[2] * p.pool.sizes[3] * sizeof(S);
    torch::stable::parallel_for(0, shape[0] * shape[2], grain_for(bytes),
                                [&](int64_t begin, int64_t end) { run_delta_tree_units<S>(p, begin, end); });
  });
  return {y, u};
}

}  // namespace hybrid_runtime
