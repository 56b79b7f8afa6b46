// Attention of a ragged prefill in bfloat16, over the pool slots that a table names.
//
// Both products, scores and weighted values, are those of rows with panels (see packed_linear.h): of 32 keys by pairs of
// channels, and of 32 value channels by pairs of keys. A tile of rows, queries with the heads that share a key, goes
// along its context in chunks and keeps the largest score so far, the sum of exponentials and the weighted values (Dao
// et al. 2022, "FlashAttention"): no matrix of scores exists, and keys behind the last query of a tile are not read.
#pragma once

#include <limits>

#include "lanes.h"
#include "packed_linear.h"
#include "tensor_view.h"

namespace hybrid_runtime {

constexpr int64_t kChunkKeys = 256;

// One sequence: its tokens on the flat axis, its context in the pools, and the panels of each of its groups.
struct PrefillSequence {
  int64_t start, length, context, first_key;  // keys before `first_key` are seen by no query
  const int32_t* slots;
  std::vector<uint32_t> keys, values;  // [G, panels of keys, D / 2, 32], [G, panels of channels, keys / 2, 32]
  int64_t num_keys() const { return context - first_key; }
  int64_t num_key_panels() const { return (num_keys() + kPanelOutputs - 1) / kPanelOutputs; }
  int64_t num_padded_keys() const { return num_key_panels() * kPanelOutputs; }
};

struct PrefillAttention {
  View q_LHD, k_UGD, v_UGV, out_LHV;
  float scale;
  int64_t window;  // at least 1; more than any context: none
  int64_t num_heads() const { return q_LHD.sizes[1]; }
  int64_t num_groups() const { return k_UGD.sizes[1]; }
  int64_t heads_per_group() const { return num_heads() / num_groups(); }
  int64_t num_key_pairs() const { return (q_LHD.sizes[2] + 1) / 2; }
  int64_t value_dim() const { return v_UGV.sizes[2]; }
  int64_t num_value_panels() const { return (value_dim() + kPanelOutputs - 1) / kPanelOutputs; }
};

inline uint32_t pair_of(BFloat first, BFloat second) { return first.bits | static_cast<uint32_t>(second.bits) << 16; }

// A panel of 32 keys: [D / 2, 32]; keys behind the last one are zeros.
inline void pack_keys(const PrefillAttention& p, PrefillSequence& s, int64_t group, int64_t panel) {
  const int64_t dim = p.k_UGD.sizes[2], num_pairs = p.num_key_pairs();
  uint32_t* to = s.keys.data() + (group * s.num_key_panels() + panel) * num_pairs * kPanelOutputs;
  const int64_t first = panel * kPanelOutputs, count = std::min(kPanelOutputs, s.num_keys() - first);
  for (int64_t key = 0; key < count; ++key) {
    const BFloat* from = p.k_UGD.at<BFloat>(s.slots[s.first_key + first + key], group);
    for (int64_t pair = 0; pair < dim / 2; ++pair) std::memcpy(to + pair * kPanelOutputs + key, from + 2 * pair, 4);
    if (dim % 2) to[(num_pairs - 1) * kPanelOutputs + key] = pair_of(from[dim - 1], BFloat{0});
  }
}

// The values of a panel of 32 keys, as part of all panels of channels; keys and channels behind the last are zeros.
inline void pack_values(const PrefillAttention& p, PrefillSequence& s, int64_t group, int64_t panel) {
  const int64_t first = panel * kPanelOutputs, end = std::min(first + kPanelOutputs, s.num_keys());
  const int64_t pairs_per_panel = s.num_padded_keys() / 2;
  for (int64_t key = first; key < end; key += 2) {
    const BFloat* even = p.v_UGV.at<BFloat>(s.slots[s.first_key + key], group);
    const BFloat* odd = key + 1 < end ? p.v_UGV.at<BFloat>(s.slots[s.first_key + key + 1], group) : nullptr;
    for (int64_t d = 0; d < p.value_dim(); ++d) {
      const int64_t channels = group * p.num_value_panels() + d / kPanelOutputs;
      s.values[(channels * pairs_per_panel + key / 2) * kPanelOutputs + d % kPanelOutputs] =
          pair_of(even[d], odd ? odd[d] : BFloat{0});
    }
  }
}

// Adds to ROWS rows of 32 floats, `stride` apart, the products of their pairs [pairs, ROWS] with a panel [pairs, 32].
template <int ROWS>
inline void add_products(const uint32_t* pairs_KM, const uint32_t* panel, int64_t num_pairs, float* to, int64_t stride) {
  Floats sums[ROWS][kLaneGroups];
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < kLaneGroups; ++v) sums[r][v] = load_floats(to + r * stride + 16 * v);
  }
  for (int64_t k = 0; k < num_pairs; ++k) {
    const Words w0 = load_lanes(reinterpret_cast<const BFloat*>(panel));
    const Words w1 = load_lanes(reinterpret_cast<const BFloat*>(panel + 16));
    panel += kPanelOutputs;
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      const Words x = Words{} + pairs_KM[r];
      sums[r][0] = Lanes<BFloat>::multiply_add(x, w0, sums[r][0]);
      sums[r][1] = Lanes<BFloat>::multiply_add(x, w1, sums[r][1]);
    }
    pairs_KM += ROWS;
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < kLaneGroups; ++v) std::memcpy(to + r * stride + 16 * v, &sums[r][v], sizeof(Floats));
  }
}

using AddProducts = void (*)(const uint32_t*, const uint32_t*, int64_t, float*, int64_t);

template <int... ROWS>
inline AddProducts add_products_of(int64_t rows, std::integer_sequence<int, ROWS...>) {
  constexpr AddProducts functions[] = {&add_products<ROWS + 1>...};
  return functions[rows - 1];
}

// Rows of one group of one sequence that are computed together, with room for a chunk of keys.
struct AttentionTile {
  int64_t num_rows = 0, padded_value_dim;
  int64_t begin[kMaxTileRows], end[kMaxTileRows];  // the keys that each row sees
  float largest[kMaxTileRows], total[kMaxTileRows];
  std::vector<uint32_t> query_pairs, weight_pairs;  // [D / 2, rows], [kChunkKeys / 2, rows]
  std::vector<float> scores, sums;                  // [rows, kChunkKeys], [rows, padded V]

  explicit AttentionTile(const PrefillAttention& p)
      : padded_value_dim(p.num_value_panels() * kPanelOutputs),
        query_pairs(p.num_key_pairs() * kMaxTileRows),
        weight_pairs(kChunkKeys / 2 * kMaxTileRows),
        scores(kMaxTileRows * kChunkKeys),
        sums(kMaxTileRows * padded_value_dim) {}
};

// Row r of a sequence's group is head r % heads of query r / heads.
inline void begin_tile(const PrefillAttention& p, const PrefillSequence& s, int64_t group, int64_t first_row,
                       int64_t num_rows, AttentionTile& t) {
  const int64_t heads = p.heads_per_group(), dim = p.q_LHD.sizes[2];
  t.num_rows = num_rows;
  std::fill(t.sums.begin(), t.sums.end(), 0.0f);
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t query = (first_row + r) / heads, position = s.context - s.length + query;
    t.end[r] = position + 1 - s.first_key;
    t.begin[r] = std::max<int64_t>(0, t.end[r] - p.window);
    t.largest[r] = -std::numeric_limits<float>::infinity();
    t.total[r] = 0;
    const BFloat* q_D = p.q_LHD.at<BFloat>(s.start + query, group * heads + (first_row + r) % heads);
    const int64_t stride = p.q_LHD.strides[2];
    for (int64_t d = 0; d < dim; d += 2) {
      t.query_pairs[d / 2 * num_rows + r] = pair_of(q_D[d * stride], d + 1 < dim ? q_D[(d + 1) * stride] : BFloat{0});
    }
  }
}

// Scores of one row with the chunk's keys `from` to `to`, the ones it sees: exponentials of their distance from the
// largest so far, rounded, as pairs; zeros for the other keys. What the row has summed up is brought to that distance.
inline void weigh_row(const PrefillAttention& p, AttentionTile& t, int64_t r, int64_t num_keys, int64_t from,
                      int64_t to) {
  float* score_T = t.scores.data() + r * kChunkKeys;
  float largest = t.largest[r];
#pragma omp simd reduction(max : largest)
  for (int64_t k = from; k < to; ++k) {
    score_T[k] *= p.scale;
    largest = score_T[k] > largest ? score_T[k] : largest;
  }
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t k = from; k < to; ++k) {
    score_T[k] = exp_nonpositive(score_T[k] - largest);
    total += score_T[k];
  }
  std::fill(score_T, score_T + from, 0.0f);
  std::fill(score_T + to, score_T + num_keys, 0.0f);
  if (largest != t.largest[r]) {
    const float kept = std::exp(t.largest[r] - largest);
    t.total[r] *= kept;
    float* sum_V = t.sums.data() + r * t.padded_value_dim;
#pragma omp simd
    for (int64_t d = 0; d < t.padded_value_dim; ++d) sum_V[d] *= kept;
    t.largest[r] = largest;
  }
  t.total[r] += total;
  BFloat weight_T[kChunkKeys];
  for (int64_t k = 0; k < num_keys; k += 16) {
    BFloat rounded[16];
    store_lanes(load_floats(score_T + k), rounded);
    std::memcpy(weight_T + k, rounded, sizeof(rounded));
  }
  for (int64_t pair = 0; pair < num_keys / 2; ++pair) {
    std::memcpy(t.weight_pairs.data() + pair * t.num_rows + r, weight_T + 2 * pair, 4);
  }
}

inline void attend_tile(const PrefillAttention& p, const PrefillSequence& s, int64_t group, AttentionTile& t) {
  const AddProducts add = add_products_of(t.num_rows, std::make_integer_sequence<int, kMaxTileRows>{});
  const int64_t num_pairs = p.num_key_pairs(), last = t.end[t.num_rows - 1];
  for (int64_t first = t.begin[0] / kChunkKeys * kChunkKeys; first < last; first += kChunkKeys) {
    const int64_t num_keys = std::min(kChunkKeys, s.num_padded_keys() - first);
    std::fill(t.scores.begin(), t.scores.end(), 0.0f);
    for (int64_t key = 0; key < num_keys && first + key < last; key += kPanelOutputs) {
      const int64_t panel = group * s.num_key_panels() + (first + key) / kPanelOutputs;
      add(t.query_pairs.data(), s.keys.data() + panel * num_pairs * kPanelOutputs, num_pairs, t.scores.data() + key,
          kChunkKeys);
    }
    for (int64_t r = 0; r < t.num_rows; ++r) {
      const auto within = [&](int64_t key) { return std::clamp<int64_t>(key - first, 0, num_keys); };
      weigh_row(p, t, r, num_keys, within(t.begin[r]), within(t.end[r]));
    }
    const int64_t num_seen = std::min(num_keys, (last - first + kPanelOutputs - 1) / kPanelOutputs * kPanelOutputs);
    for (int64_t panel = 0; panel < p.num_value_panels(); ++panel) {
      const uint32_t* values = s.values.data() + ((group * p.num_value_panels() + panel) * s.num_padded_keys() + first) /
                                                     2 * kPanelOutputs;
      add(t.weight_pairs.data(), values, num_seen / 2, t.sums.data() + panel * kPanelOutputs, t.padded_value_dim);
    }
  }
}

inline void finish_tile(const PrefillAttention& p, const PrefillSequence& s, int64_t group, int64_t first_row,
                        const AttentionTile& t) {
  const int64_t heads = p.heads_per_group();
  for (int64_t r = 0; r < t.num_rows; ++r) {
    const int64_t query = (first_row + r) / heads, head = group * heads + (first_row + r) % heads;
    const float* sum_V = t.sums.data() + r * t.padded_value_dim;
    BFloat* to = p.out_LHV.at<BFloat>(s.start + query, head);
    for (int64_t d = 0; d < p.value_dim(); ++d) to[d] = store<BFloat>(sum_V[d] / t.total[r]);
  }
}

// q [L, H, D], pools [U, G, D] and [U, G, V], all bfloat16; table [R, T] int32; on the host, int64 [S]: rows of the table,
// contexts, lengths and starts of the sequences. Returns [L, H, V], zero for padding tokens.
inline Tensor prefill_attention(const Tensor& q, const Tensor& k_pool, const Tensor& v_pool, const Tensor& table,
                                const Tensor& rows, const Tensor& context_lens, const Tensor& lengths,
                                const Tensor& starts, double scale, int64_t window) {
  const View q_LHD = view_of(q, "q_LHD", {kAny, kAny, kAny});
  const int64_t num_tokens = q_LHD.sizes[0], num_heads = q_LHD.sizes[1], key_dim = q_LHD.sizes[2];
  const View k_UGD = view_of(k_pool, "k_pool", {kAny, kAny, key_dim});
  const int64_t num_slots = k_UGD.sizes[0], num_groups = k_UGD.sizes[1];
  const View v_UGV = view_of(v_pool, "v_pool", {num_slots, num_groups, kAny});
  for (const View& view : {q_LHD, k_UGD, v_UGV}) require_dtype(view, ScalarType::BFloat16, "bfloat16");
  for (const View& view : {k_UGD, v_UGV}) {
    require(view.sizes[2] <= 1 || view.strides[2] == 1, view.name, " must be contiguous on its last axis");
  }
  require_groups(k_UGD, num_groups, num_heads);
  require(window >= 1, "window must be at least 1, not ", window);
  const View table_RT = view_of(table, "req_to_token", {kAny, kAny});
  require_dtype(table_RT, ScalarType::Int, "int32");
  require(table_RT.sizes[1] <= 1 || table_RT.strides[1] == 1, "req_to_token must be contiguous on its last axis");
  const View rows_S = view_of(rows, "request_rows_S", {kAny});
  const int64_t num_sequences = rows_S.sizes[0];
  const View contexts_S = view_of(context_lens, "context_lens_S", {num_sequences});
  const View lengths_S = view_of(lengths, "lengths_S", {num_sequences});
  const View starts_S = view_of(starts, "starts_S", {num_sequences});
  for (const View& view : {rows_S, contexts_S, lengths_S, starts_S}) require_dtype(view, ScalarType::Long, "int64");

  Tensor out = torch::stable::new_zeros(q, {num_tokens, num_heads, v_UGV.sizes[2]});
  const PrefillAttention p{q_LHD,
                           k_UGD,
                           v_UGV,
                           view_of(out, "out_LHV", {num_tokens, num_heads, v_UGV.sizes[2]}),
                           static_cast<float>(scale),
                           window};
  for (int64_t sequence = 0; sequence < num_sequences; ++sequence) {
    const int64_t row = *rows_S.at<int64_t>(sequence), context = *contexts_S.at<int64_t>(sequence);
    const int64_t length = *lengths_S.at<int64_t>(sequence), start = *starts_S.at<int64_t>(sequence);
    require(0 <= row && row < table_RT.sizes[0], "request_rows_S[", sequence, "] is ", row, ", which is no row");
    require(0 <= length && length <= context && context <= table_RT.sizes[1], "sequence ", sequence, " can't have ",
            length, " tokens of a context of ", context);
    require(0 <= start && start + length <= num_tokens, "sequence ", sequence, " can't start at token ", start);
    if (length == 0) continue;
    PrefillSequence s{start, length, context, 0, table_RT.at<int32_t>(row), {}, {}};
    s.first_key = std::max<int64_t>(0, context - length + 1 - window);
    for (int64_t key = s.first_key; key < context; ++key) {
      require(0 <= s.slots[key] && s.slots[key] < num_slots, "req_to_token[", row, ", ", key, "] is ", s.slots[key],
              ", which is no slot of the pools");
    }
    s.keys.assign(num_groups * s.num_padded_keys() * p.num_key_pairs(), 0);
    s.values.assign(num_groups * p.num_value_panels() * s.num_padded_keys() / 2 * kPanelOutputs, 0);
    const int64_t bytes_per_panel = kPanelOutputs * (key_dim + p.value_dim()) * sizeof(BFloat);
    torch::stable::parallel_for(0, num_groups * s.num_key_panels(), grain_for(bytes_per_panel),
                                [&](int64_t begin, int64_t end) {
                                  for (int64_t unit = begin; unit < end; ++unit) {
                                    const int64_t group = unit / s.num_key_panels(), panel = unit % s.num_key_panels();
                                    pack_keys(p, s, group, panel);
                                    pack_values(p, s, group, panel);
                                  }
                                });
    const int64_t num_rows = length * p.heads_per_group();
    const int64_t tiles_per_group = (num_rows + kMaxTileRows - 1) / kMaxTileRows;
    const int64_t grain = grain_for(bytes_per_panel * s.num_key_panels());
    torch::stable::parallel_for(0, num_groups * tiles_per_group, grain, [&](int64_t begin, int64_t end) {
      AttentionTile t(p);
      for (int64_t unit = begin; unit < end; ++unit) {
        // Late tiles see more keys: one from the start and one from the end by turns, so that threads get equal shares.
        const int64_t group = unit % num_groups, turn = unit / num_groups;
        const int64_t tile = turn % 2 ? tiles_per_group - 1 - turn / 2 : turn / 2;
        const int64_t first_row = tile * kMaxTileRows;
        begin_tile(p, s, group, first_row, std::min<int64_t>(kMaxTileRows, num_rows - first_row), t);
        attend_tile(p, s, group, t);
        finish_tile(p, s, group, first_row, t);
      }
    });
  }
  return out;
}

}  // namespace hybrid_runtime
