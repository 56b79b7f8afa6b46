// Mamba-2 over a draft tree: outputs of all nodes from the committed state, which is read once.
//
// A unit of work is one head of one row. What its group's heads share, products of b and c along the ways up, is made
// once for those that follow each other in a thread.
#pragma once

#include "paths.h"
#include "products.h"

namespace hybrid_runtime {

struct Mamba2Tree {
  View x_BTHP, dt_BTH, a_H, b_BTGN, c_BTGN, pool, y_BTHP;
  std::vector<int64_t> slot_B;
  WaysUp ways;
};

// Buffers of one thread; of a head, or of a group as long as the group stays the same.
struct Mamba2TreeScratch {
  int64_t rows, keys, values;  // sizes, filled up
  int64_t row = kAny, group = kAny;
  Scratch memory;
  float *b_TN, *c_TN, *x_TP, *read_TP, *panels, *score, *weight, *dt_T, *decay_T, *y_P;

  explicit Mamba2TreeScratch(const Mamba2Tree& p)
      : rows(rounded_up(p.ways.num_nodes, kProductRows)),
        keys(rounded_up(p.pool.sizes[3], kChannels)),
        values(rounded_up(p.pool.sizes[2], kPanelValues)),
        memory(2 * rows * (keys + values + 1) + keys * values + values + rows * (rows + 1)) {
    for (float** each : {&b_TN, &c_TN}) *each = memory.take(rows * keys);
    for (float** each : {&x_TP, &read_TP}) *each = memory.take(rows * values);
    for (float** each : {&dt_T, &decay_T}) *each = memory.take(rows);
    panels = memory.take(keys * values);
    y_P = memory.take(values);
    score = memory.take(rows * (rows + 1) / 2);
    weight = memory.take(rows);
  }
};

// <c_i, b_j> for every pair of a node i and a node j that it sees.
inline void score_group(const Mamba2Tree& p, int64_t row, int64_t group, Mamba2TreeScratch& s) {
  if (row == s.row && group == s.group) return;
  s.row = row;
  s.group = group;
  float* score = s.score;
  for (int64_t node = 0; node < p.ways.num_nodes; ++node) {
    read_node(p.b_BTGN, row, node, group, s.b_TN + node * s.keys);
    read_node(p.c_BTGN, row, node, group, s.c_TN + node * s.keys);
    const int32_t* way = p.ways.from(row, node);
    const int64_t length = p.ways.length(row, node);
    for (int64_t first = 0; first < length; first += 16) {
      Floats sums[16] = {};
      const int64_t count = std::min<int64_t>(16, length - first);
      for (int64_t n = 0; n < count; ++n) {
        const float* b_N = s.b_TN + way[first + n] * s.keys;
        for (int64_t key = 0; key < s.keys; key += 16) {
          sums[n] = multiply_add(load_floats(s.c_TN + node * s.keys + key), load_floats(b_N + key), sums[n]);
        }
      }
      const Floats scores = sum_lanes(sums);
      std::memcpy(score + first, &scores, count * sizeof(float));
    }
    score += length;
  }
}

inline void read_mamba2_head(const Mamba2Tree& p, int64_t row, int64_t head, Mamba2TreeScratch& s) {
  const float a = read_scalar<float>(p.a_H, head);
  for (int64_t node = 0; node < p.ways.num_nodes; ++node) {
    read_node(p.x_BTHP, row, node, head, s.x_TP + node * s.values);
    s.dt_T[node] = read_node_scalar(p.dt_BTH, row, node, head);
    s.decay_T[node] = decay_of(s.dt_T[node] * a);
  }
}

// y_i = e^{l_i} h0 c_i + Σ_j e^{l_i - l_j} <c_i, b_j> dt_j x_j, with decays multiplied up node by node: none exceeds 1.
template <class S>
inline void run_mamba2_tree_units(const Mamba2Tree& p, int64_t begin, int64_t end) {
  const int64_t num_heads = p.pool.sizes[1], num_groups = p.b_BTGN.sizes[2];
  Mamba2TreeScratch s(p);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t row = unit / num_heads, head = unit % num_heads;
    if (p.slot_B[row] == 0) {
      write_zeros(p.y_BTHP, row, head);
      continue;
    }
    score_group(p, row, head * num_groups / num_heads, s);
    read_mamba2_head(p, row, head, s);
    pack_state(p.pool.at<S>(p.slot_B[row], head), p.pool.sizes[2], p.pool.sizes[3], s.keys, s.panels);
    multiply_panels(s.c_TN, s.panels, s.rows, s.keys, s.values, s.read_TP);
    const float* score = s.score;
    for (int64_t node = 0; node < p.ways.num_nodes; ++node) {
      const int32_t* way = p.ways.from(row, node);
      const int64_t length = p.ways.length(row, node);
      float decay = 1;
      for (int64_t n = 0; n < length; ++n) {
        s.weight[n] = decay * score[n] * s.dt_T[way[n]];
        decay *= s.decay_T[way[n]];
      }
      for (int64_t value = 0; value < s.values; ++value) s.y_P[value] = decay * s.read_TP[node * s.values + value];
      add_weighted<1>({s.y_P}, {s.weight}, way, length, s.x_TP, s.values);
      write_node(s.y_P, p.y_BTHP, row, node, head);
      score += length;
    }
  }
}

inline Mamba2Tree mamba2_tree_operands(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b,
                                       const Tensor& c, const Tensor& state_pool, const Tensor& slots,
                                       const Tensor& parents) {
  Mamba2Tree p;
  p.pool = view_of(state_pool, "state_pool", {kAny, kAny, kAny, kAny});
  const int64_t num_heads = p.pool.sizes[1], head_dim = p.pool.sizes[2], state_dim = p.pool.sizes[3];
  require_inner_contiguous(p.pool, 4, 1);
  p.slot_B = checked_slots(slots, p.pool.sizes[0]);
  const int64_t num_rows = p.slot_B.size();
  p.ways = ways_up(parents, num_rows);
  p.x_BTHP = view_of(x, "x_BTHP", {num_rows, p.ways.num_nodes, num_heads, head_dim});
  p.dt_BTH = view_of(dt, "dt_BTH", {num_rows, p.ways.num_nodes, num_heads});
  p.a_H = view_of(a, "a_H", {num_heads});
  p.b_BTGN = view_of(b, "b_BTGN", {num_rows, p.ways.num_nodes, kAny, state_dim});
  const int64_t num_groups = p.b_BTGN.sizes[2];
  p.c_BTGN = view_of(c, "c_BTGN", {num_rows, p.ways.num_nodes, num_groups, state_dim});
  require_groups(p.b_BTGN, num_groups, num_heads);
  return p;
}

// x [B, T, H, P], dt [B, T, H], a [H], b and c [B, T, G, N], state_pool [U, H, P, N], slots [B], parents [B, T];
// returns y like x.
inline Tensor mamba2_tree(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b, const Tensor& c,
                          const Tensor& state_pool, const Tensor& slots, const Tensor& parents) {
  Mamba2Tree p = mamba2_tree_operands(x, dt, a, b, c, state_pool, slots, parents);
  const auto& shape = p.x_BTHP.sizes;
  Tensor y = torch::stable::new_empty(x, {shape[0], shape[1], shape[2], shape[3]});
  p.y_BTHP = view_of(y, "y_BTHP", {shape[0], shape[1], shape[2], shape[3]});
  with_narrow_float_type(p.pool.dtype, p.pool.name, [&](auto zero) {
    using S = decltype(zero);
    const int64_t bytes = p.pool.sizes[2] * p.pool.sizes[3] * sizeof(S);
    torch::stable::parallel_for(0, shape[0] * shape[2], grain_for(bytes),
                                [&](int64_t begin, int64_t end) { run_mamba2_tree_units<S>(p, begin, end); });
  });
  return y;
}

}  // namespace hybrid_runtime
