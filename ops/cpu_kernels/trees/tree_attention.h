// Attention of all nodes of draft trees over the committed contexts of their rows and over their ancestors.
//
// A unit of work is a block of queries, nodes with the heads that share a key, of one row. It goes through the places
// that they see, 64 at a time, context first, and keeps for each query the largest score so far, the sum of
// exponentials and the weighted values (Dao et al. 2022, "FlashAttention"): keys and values of a piece are converted
// once for all nodes. Products are in float32. A place whose values are not finite takes no part in them, in which even
// a weight of 0 would spread it, and is shown by the queries that see it.
#pragma once

#include <limits>

#include "paths.h"
#include "products.h"

namespace hybrid_runtime {

constexpr int64_t kPieceKeys = 64;
constexpr int64_t kBlockQueries = 96;

struct TreeAttention {
  View q_BTHD, k_UGD, v_UGV, table_RT, kv_slots_BT, out_BTHV;
  std::vector<int64_t> table_row_B, committed_B;
  WaysUp ways;
  float scale;
  int64_t window;  // at least 1; more than any context: none

  int64_t heads_per_group() const { return q_BTHD.sizes[2] / k_UGD.sizes[1]; }
  int64_t num_queries() const { return ways.num_nodes * heads_per_group(); }
  // The first position that any node of a row sees: the root reaches furthest back.
  int64_t first_position(int64_t row) const { return std::max<int64_t>(0, committed_B[row] + 1 - window); }
  int64_t context_slot(int64_t row, int64_t position) const {
    return table_RT.at<int32_t>(table_row_B[row])[position * table_RT.strides[1]];
  }
  int64_t node_slot(int64_t row, int64_t node) const {
    return kv_slots_BT.at<int64_t>(row)[node * kv_slots_BT.strides[1]];
  }
};

// Places of one row that stand together: positions of its context, or nodes of its tree.
struct Places {
  bool are_nodes;
  int64_t first, count;
};

// Buffers of one thread, for one block of queries of one row and group.
struct QueryBlock {
  int64_t row = 0, group = 0, first_query = 0, num_queries = 0, num_rows = 0;  // the last: filled up
  int64_t keys, values;                                                       // sizes, filled up
  Scratch memory;
  float *q_QD, *key_panels, *value_panels, *score_QP, *sum_QV, *out_V;
  float largest[kBlockQueries], total[kBlockQueries];
  bool sees_fault[kBlockQueries];
  bool is_faulty[kPieceKeys];

  explicit QueryBlock(const TreeAttention& p)
      : keys(rounded_up(p.q_BTHD.sizes[3], 16)),
        values(rounded_up(p.v_UGV.sizes[2], kPanelValues)),
        memory((kBlockQueries + kPieceKeys) * (keys + values) + kBlockQueries * kPieceKeys + values) {
    q_QD = memory.take(kBlockQueries * keys);
    key_panels = memory.take(kPieceKeys * keys);
    value_panels = memory.take(kPieceKeys * values);
    score_QP = memory.take(kBlockQueries * kPieceKeys);
    sum_QV = memory.take(kBlockQueries * values);
    out_V = memory.take(values);
  }
};

// Query number n of a row's group is head n % heads of node n / heads.
inline void begin_block(const TreeAttention& p, int64_t row, int64_t group, int64_t first, QueryBlock& s) {
  const int64_t heads = p.heads_per_group();
  s.row = row;
  s.group = group;
  s.first_query = first;
  s.num_queries = std::min(kBlockQueries, p.num_queries() - first);
  s.num_rows = rounded_up(s.num_queries, kProductRows);
  for (int64_t n = 0; n < s.num_queries; ++n) {
    float* q_D = s.q_QD + n * s.keys;
    read_node(p.q_BTHD, row, (first + n) / heads, group * heads + (first + n) % heads, q_D);
    for (int64_t d = 0; d < p.q_BTHD.sizes[3]; ++d) q_D[d] *= p.scale;
  }
  std::fill_n(s.sum_QV, s.num_rows * s.values, 0.0f);
  std::fill_n(s.score_QP, s.num_rows * kPieceKeys, 0.0f);
  std::fill_n(s.largest, s.num_queries, -std::numeric_limits<float>::infinity());
  std::fill_n(s.total, s.num_queries, 0.0f);
  std::fill_n(s.sees_fault, s.num_queries, false);
}

// Keys and values of some places as panels; places with values that are not finite are noted and left out.
template <class S>
inline void pack_places(const TreeAttention& p, const Places& places, QueryBlock& s) {
  const int64_t value_dim = p.v_UGV.sizes[2];
  const S *keys[kPieceKeys + 16], *values[kPieceKeys];
  for (int64_t n = 0; n < kPieceKeys + 16; ++n) {
    const int64_t place = places.first + std::min(n, places.count - 1);
    const int64_t slot = places.are_nodes ? p.node_slot(s.row, place) : p.context_slot(s.row, place);
    keys[n] = p.k_UGD.at<S>(slot, s.group);
    if (n < kPieceKeys) values[n] = p.v_UGV.at<S>(slot, s.group);
  }
  pack_rows<S>([&](int64_t n) { return keys[n]; }, kPieceKeys, p.k_UGD.sizes[2], s.keys, s.key_panels);
  for (int64_t n = 0; n < kPieceKeys; ++n) {
    Floats faults{};  // NaN where a value is not finite
    for (int64_t d = 0; d < s.values; d += 16) {
      const Floats value = load_up_to_16(values[n] + std::min(d, value_dim), value_dim - d);
      faults += value - value;
      put_floats(value, s.value_panels + d / kPanelValues * kPanelValues * kPieceKeys + n * kPanelValues + d % kPanelValues);
    }
    const Words is_fault = (Words)(faults != faults);
    s.is_faulty[n] = false;
    for (int lane = 0; lane < 16; ++lane) s.is_faulty[n] |= is_fault[lane] != 0;
    if (!s.is_faulty[n]) continue;
    for (int64_t d = 0; d < s.values; d += 16) {
      put_floats(Floats{},
                 s.value_panels + d / kPanelValues * kPanelValues * kPieceKeys + n * kPanelValues + d % kPanelValues);
    }
  }
}

// Which of some places a node sees: 0, or minus infinity. False if none.
inline bool mask_places(const TreeAttention& p, const Places& places, int64_t row, int64_t node,
                        float (&mask_P)[kPieceKeys]) {
  std::fill_n(mask_P, kPieceKeys, -std::numeric_limits<float>::infinity());
  bool sees_any = false;
  if (places.are_nodes) {
    const int32_t* way = p.ways.from(row, node);
    for (int64_t n = 0; n < std::min(p.ways.length(row, node), p.window); ++n) {
      if (way[n] < places.first || way[n] >= places.first + places.count) continue;
      mask_P[way[n] - places.first] = 0;
      sees_any = true;
    }
    return sees_any;
  }
  const int64_t first = p.committed_B[row] + p.ways.depth(row, node) + 1 - p.window;
  for (int64_t n = std::max<int64_t>(0, first - places.first); n < places.count; ++n) {
    mask_P[n] = 0;
    sees_any = true;
  }
  return sees_any;
}

// Turns the scores of a query into weights: exponentials of their distance from the largest so far, to which what the
// query has summed up is brought, too.
inline void weigh_places(const float (&mask_P)[kPieceKeys], int64_t query, QueryBlock& s) {
  float* score_P = s.score_QP + query * kPieceKeys;
  float largest = s.largest[query], total = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t n = 0; n < kPieceKeys; ++n) {
    score_P[n] = mask_P[n] == 0 ? score_P[n] : mask_P[n];
    largest = score_P[n] > largest ? score_P[n] : largest;
  }
#pragma omp simd reduction(+ : total)
  for (int64_t n = 0; n < kPieceKeys; ++n) {
    score_P[n] = exp_nonpositive(score_P[n] - largest);
    total += score_P[n];
  }
  if (largest != s.largest[query]) {
    const float kept = std::exp(s.largest[query] - largest);
    s.total[query] *= kept;
    float* sum_V = s.sum_QV + query * s.values;
#pragma omp simd
    for (int64_t d = 0; d < s.values; ++d) sum_V[d] *= kept;
    s.largest[query] = largest;
  }
  s.total[query] += total;
}

template <class S>
inline void attend_places(const TreeAttention& p, const Places& places, QueryBlock& s) {
  pack_places<S>(p, places, s);
  multiply_panels(s.q_QD, s.key_panels, s.num_rows, s.keys, kPieceKeys, s.score_QP);
  float mask_P[kPieceKeys];
  int64_t masked_node = kAny;
  bool sees_any = false;
  for (int64_t query = 0; query < s.num_queries; ++query) {
    const int64_t node = (s.first_query + query) / p.heads_per_group();
    if (node != masked_node) sees_any = mask_places(p, places, s.row, node, mask_P);
    masked_node = node;
    if (!sees_any) {
      std::fill_n(s.score_QP + query * kPieceKeys, kPieceKeys, 0.0f);
      continue;
    }
    weigh_places(mask_P, query, s);
    for (int64_t n = 0; n < kPieceKeys; ++n) s.sees_fault[query] |= s.is_faulty[n] && mask_P[n] == 0;
  }
  multiply_panels<true>(s.score_QP, s.value_panels, s.num_rows, kPieceKeys, s.values, s.sum_QV);
}

template <class S>
inline void attend_block(const TreeAttention& p, QueryBlock& s) {
  for (int64_t first = p.first_position(s.row); first < p.committed_B[s.row]; first += kPieceKeys) {
    attend_places<S>(p, {false, first, std::min(kPieceKeys, p.committed_B[s.row] - first)}, s);
  }
  for (int64_t first = 0; first < p.ways.num_nodes; first += kPieceKeys) {
    attend_places<S>(p, {true, first, std::min(kPieceKeys, p.ways.num_nodes - first)}, s);
  }
  const int64_t heads = p.heads_per_group();
  for (int64_t n = 0; n < s.num_queries; ++n) {
    const float total = s.sees_fault[n] ? std::numeric_limits<float>::quiet_NaN() : s.total[n];
    for (int64_t d = 0; d < s.values; ++d) s.out_V[d] = s.sum_QV[n * s.values + d] / total;
    write_node(s.out_V, p.out_BTHV, s.row, (s.first_query + n) / heads, s.group * heads + (s.first_query + n) % heads);
  }
}

// Rows alternate, so that threads share long contexts.
template <class S>
inline void run_tree_attention(const TreeAttention& p) {
  const int64_t num_rows = p.q_BTHD.sizes[0], num_groups = p.k_UGD.sizes[1];
  const int64_t num_blocks = (p.num_queries() + kBlockQueries - 1) / kBlockQueries;
  torch::stable::parallel_for(0, num_rows * num_groups * num_blocks, 1, [&](int64_t begin, int64_t end) {
    QueryBlock s(p);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t block = unit / num_rows % num_blocks, group = unit / num_rows / num_blocks;
      begin_block(p, unit % num_rows, group, block * kBlockQueries, s);
      attend_block<S>(p, s);
    }
  });
}

// Refuses slots that some node sees and the pools don't have.
inline void check_places(const TreeAttention& p) {
  const int64_t num_slots = p.k_UGD.sizes[0];
  for (size_t row = 0; row < p.committed_B.size(); ++row) {
    require(0 <= p.table_row_B[row] && p.table_row_B[row] < p.table_RT.sizes[0], "request_rows_B[", row, "] is ",
            p.table_row_B[row], ", which is no row of the table");
    require(0 <= p.committed_B[row] && p.committed_B[row] <= p.table_RT.sizes[1], "committed_lens_B[", row, "] is ",
            p.committed_B[row], ", not in 0..", p.table_RT.sizes[1]);
    for (int64_t position = p.first_position(row); position < p.committed_B[row]; ++position) {
      const int64_t slot = p.context_slot(row, position);
      require(0 <= slot && slot < num_slots, "req_to_token names slot ", slot, ", which the pool doesn't have");
    }
    for (int64_t node = 0; node < p.ways.num_nodes; ++node) {
      const int64_t slot = p.node_slot(row, node);
      require(0 <= slot && slot < num_slots, "kv_slots_BT[", row, ", ", node, "] is ", slot,
              ", which the pool doesn't have");
    }
  }
}

inline std::vector<int64_t> indices_of(const Tensor& tensor, const char* name, int64_t count) {
  const View view = view_of(tensor, name, {count});
  require_dtype(view, ScalarType::Long, "int64");
  std::vector<int64_t> indices(count);
  for (int64_t n = 0; n < count; ++n) indices[n] = *view.at<int64_t>(n);
  return indices;
}

// q [B, T, H, D], k_pool [U, G, D], v_pool [U, G, V], req_to_token [R, C] int32, request_rows and committed_lens [B],
// kv_slots and parents [B, T]; returns [B, T, H, V] in the dtype of q.
inline Tensor tree_attention(const Tensor& q, const Tensor& k_pool, const Tensor& v_pool, const Tensor& req_to_token,
                             const Tensor& request_rows, const Tensor& committed_lens, const Tensor& kv_slots,
                             const Tensor& parents, double scale, int64_t window) {
  TreeAttention p;
  p.q_BTHD = view_of(q, "q_BTHD", {kAny, kAny, kAny, kAny});
  const int64_t num_rows = p.q_BTHD.sizes[0], num_nodes = p.q_BTHD.sizes[1], num_heads = p.q_BTHD.sizes[2];
  p.k_UGD = view_of(k_pool, "k_pool", {kAny, kAny, p.q_BTHD.sizes[3]});
  p.v_UGV = view_of(v_pool, "v_pool", {p.k_UGD.sizes[0], p.k_UGD.sizes[1], kAny});
  require_groups(p.k_UGD, p.k_UGD.sizes[1], num_heads);
  require(p.k_UGD.dtype == p.v_UGV.dtype, "k_pool and v_pool must have one dtype");
  require_inner_contiguous(p.k_UGD, 3, 2);
  require_inner_contiguous(p.v_UGV, 3, 2);
  p.table_RT = view_of(req_to_token, "req_to_token", {kAny, kAny});
  require_dtype(p.table_RT, ScalarType::Int, "int32");
  p.table_row_B = indices_of(request_rows, "request_rows_B", num_rows);
  p.committed_B = indices_of(committed_lens, "committed_lens_B", num_rows);
  p.kv_slots_BT = view_of(kv_slots, "kv_slots_BT", {num_rows, num_nodes});
  require_dtype(p.kv_slots_BT, ScalarType::Long, "int64");
  p.ways = ways_up(parents, num_rows);
  require(p.ways.num_nodes == num_nodes, "parents_BT has ", p.ways.num_nodes, " nodes, not ", num_nodes);
  require(window >= 1, "window must be at least 1, not ", window);
  p.scale = static_cast<float>(scale);
  p.window = window;
  check_places(p);

  const int64_t value_dim = p.v_UGV.sizes[2];
  Tensor out = torch::stable::new_empty(q, {num_rows, num_nodes, num_heads, value_dim});
  p.out_BTHV = view_of(out, "out_BTHV", {num_rows, num_nodes, num_heads, value_dim});
  with_narrow_float_type(p.q_BTHD.dtype, p.q_BTHD.name, [](auto) {});
  with_narrow_float_type(p.k_UGD.dtype, p.k_UGD.name, [&](auto zero) { run_tree_attention<decltype(zero)>(p); });
  return out;
}

}  // namespace hybrid_runtime
