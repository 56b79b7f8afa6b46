// Attention of one new token per row over the pool slots that a table names, without a copy of the context.
//
// A unit of work is a piece of one row's context, with all heads. Each piece yields, per head, the largest score, the
// sum of exponentials and the weighted sum of values; the pieces of a row are then put together (Dao et al. 2023,
// "Flash-Decoding"). Pieces have a fixed
// length, so that the result doesn't depend on the number of threads.
#pragma once

#include <atomic>
#include <limits>

#include "lanes.h"
#include "tensor_view.h"

namespace hybrid_runtime {

constexpr int64_t kPieceLength = 64;

struct Piece {
  int64_t row, begin, end;  // positions of the row's context
};

// What one piece gives: for each head its largest score, sum of exponentials, and V weighted sums.
template <class C>
struct PieceResults {
  int64_t num_heads, value_dim;
  std::vector<C> numbers;

  PieceResults(int64_t num_pieces, int64_t heads, int64_t values)
      : num_heads(heads), value_dim(values), numbers(num_pieces * heads * (values + 2)) {}
  C* of(int64_t piece, int64_t head) { return numbers.data() + (piece * num_heads + head) * (value_dim + 2); }
};

struct DecodeOperands {
  View q_BHD, k_UGD, v_UGV, table_RT, out_BHV;
  double scale = 1;
};

// Scores of the queries of one head with the keys of a piece, before scaling.
template <class S, class C>
inline void score_keys(const C* q_D, const S* const* keys, int64_t length, int64_t key_dim, C* score_T) {
  for (int64_t t = 0; t < length; ++t) {
    C sum{0};
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < key_dim; ++d) sum = multiply_add(q_D[d], load<C>(keys[t][d]), sum);
    score_T[t] = sum;
  }
}

// The same for queries of the keys' dtype. `keys` and `score_T` have room for a multiple of 16.
template <class S>
inline void score_keys_by_lanes(const S* q_D, const S* const* keys, int64_t length, int64_t key_dim, float* score_T) {
  constexpr int64_t step = Lanes<S>::count;
  for (int64_t first = 0; first < length; first += 16) {
    Floats sums[16] = {};
    int64_t d = 0;
    for (; d + step <= key_dim; d += step) {
      const auto q_lanes = load_lanes(q_D + d);
      for (int t = 0; t < 16; ++t) sums[t] = Lanes<S>::multiply_add(q_lanes, load_lanes(keys[first + t] + d), sums[t]);
    }
    if (const int64_t rest = key_dim - d; rest > 0) {
      const auto q_lanes = load_some_lanes(q_D + d, rest);
      for (int t = 0; t < 16; ++t) {
        sums[t] = Lanes<S>::multiply_add(q_lanes, load_some_lanes(keys[first + t] + d, rest), sums[t]);
      }
    }
    const Floats scores = sum_lanes(sums);
    std::memcpy(score_T + first, &scores, sizeof(scores));
  }
}

// Adds to the sums [V] of HEADS heads, `sum_stride` apart, the values weighted by the heads' weights [T].
template <int HEADS, class S, class C>
inline void weigh_values(const C* weight_HT, const S* const* values, int64_t length, int64_t value_dim, C* sum_HV,
                         int64_t sum_stride) {
  int64_t d = 0;
  if constexpr (std::is_same_v<C, float> && !std::is_same_v<S, double>) {
    for (; d + 16 <= value_dim; d += 16) {
      Floats sums[HEADS] = {};
      for (int64_t t = 0; t < length; ++t) {
        const Floats value = load_floats(values[t] + d);
        for (int h = 0; h < HEADS; ++h) {
          const Floats weight = broadcast(weight_HT[h * kPieceLength + t]);
          sums[h] = Lanes<float>::multiply_add(weight, value, sums[h]);
        }
      }
      for (int h = 0; h < HEADS; ++h) std::memcpy(sum_HV + h * sum_stride + d, &sums[h], sizeof(Floats));
    }
  }
  for (; d < value_dim; ++d) {
    for (int h = 0; h < HEADS; ++h) {
      C sum{0};
      for (int64_t t = 0; t < length; ++t) {
        sum = multiply_add(weight_HT[h * kPieceLength + t], load<C>(values[t][d]), sum);
      }
      sum_HV[h * sum_stride + d] = sum;
    }
  }
}

// Turns scores into exponentials of their distance from the largest; notes both it and their sum in `result`.
template <class C>
inline void exponentiate(C* score_T, int64_t length, C scale, C* result) {
  C largest = -std::numeric_limits<C>::infinity(), sum{0};
#pragma omp simd reduction(max : largest)
  for (int64_t t = 0; t < length; ++t) {
    score_T[t] *= scale;
    largest = score_T[t] > largest ? score_T[t] : largest;
  }
#pragma omp simd reduction(+ : sum)
  for (int64_t t = 0; t < length; ++t) {
    score_T[t] = exp_nonpositive(score_T[t] - largest);
    sum += score_T[t];
  }
  result[0] = largest;
  result[1] = sum;
}

// One piece of one row, with queries of dtype Q. Returns a slot that the table names and the pool doesn't have, or
// kAny.
template <class Q, class S, class C>
inline int64_t attend_piece(const DecodeOperands& p, int64_t table_row, const Piece& piece, PieceResults<C>& results,
                            int64_t index, C* scratch) {
  constexpr bool by_lanes = std::is_same_v<Q, S> && std::is_same_v<C, float>;
  const int64_t num_heads = p.q_BHD.sizes[1], key_dim = p.q_BHD.sizes[2], value_dim = p.v_UGV.sizes[2];
  const int64_t num_groups = p.k_UGD.sizes[1], heads_per_group = num_heads / num_groups;
  const int64_t length = piece.end - piece.begin, result_stride = value_dim + 2;
  C *score_HT = scratch, *q_D = score_HT + heads_per_group * kPieceLength;
  int64_t slot_T[kPieceLength];
  for (int64_t t = 0; t < length; ++t) {
    slot_T[t] = p.table_RT.at<int32_t>(table_row)[(piece.begin + t) * p.table_RT.strides[1]];
    if (slot_T[t] < 0 || slot_T[t] >= p.k_UGD.sizes[0]) return slot_T[t];
  }
  for (int64_t group = 0; group < num_groups; ++group) {
    const S *keys[kPieceLength], *values[kPieceLength];
    for (int64_t t = 0; t < kPieceLength; ++t) {
      const int64_t slot = slot_T[t < length ? t : 0];  // the last 16 keys are filled up with any
      keys[t] = p.k_UGD.at<S>(slot, group);
      values[t] = p.v_UGV.at<S>(slot, group);
    }
    C* result = results.of(index, group * heads_per_group);
    for (int64_t h = 0; h < heads_per_group; ++h) {
      const int64_t head = group * heads_per_group + h;
      C* score_T = score_HT + h * kPieceLength;
      if constexpr (by_lanes) {
        score_keys_by_lanes(p.q_BHD.at<Q>(piece.row, head), keys, length, key_dim, score_T);
      } else {
        read_last_axis(p.q_BHD, 3, piece.row, head, q_D);
        score_keys(q_D, keys, length, key_dim, score_T);
      }
      exponentiate(score_T, length, static_cast<C>(p.scale), result + h * result_stride);
    }
    int64_t h = 0;
    for (; h + 4 <= heads_per_group; h += 4) {
      weigh_values<4>(score_HT + h * kPieceLength, values, length, value_dim, result + h * result_stride + 2,
                      result_stride);
    }
    const C* weight_HT = score_HT + h * kPieceLength;
    C* sum_HV = result + h * result_stride + 2;
    switch (heads_per_group - h) {
      case 3:
        weigh_values<3>(weight_HT, values, length, value_dim, sum_HV, result_stride);
        break;
      case 2:
        weigh_values<2>(weight_HT, values, length, value_dim, sum_HV, result_stride);
        break;
      case 1:
        weigh_values<1>(weight_HT, values, length, value_dim, sum_HV, result_stride);
        break;
    }
  }
  return kAny;
}

// Adds up a head's pieces, which are `first` to `last`, and divides by the sum of exponentials.
template <class C, class Q>
inline void join_pieces(PieceResults<C>& results, int64_t first, int64_t last, int64_t head, Q* out_V) {
  C largest = -std::numeric_limits<C>::infinity(), sum{0};
  for (int64_t piece = first; piece < last; ++piece) largest = std::max(largest, results.of(piece, head)[0]);
  C* total_V = results.of(first, head) + 2;
  for (int64_t piece = first; piece < last; ++piece) {
    const C* result = results.of(piece, head);
    const C weight = exp_nonpositive(result[0] - largest);
    sum = multiply_add(weight, result[1], sum);
    if (piece == first) {
#pragma omp simd
      for (int64_t d = 0; d < results.value_dim; ++d) total_V[d] *= weight;
    } else {
#pragma omp simd
      for (int64_t d = 0; d < results.value_dim; ++d) total_V[d] = multiply_add(weight, result[d + 2], total_V[d]);
    }
  }
#pragma omp simd
  for (int64_t d = 0; d < results.value_dim; ++d) out_V[d] = store<Q>(total_V[d] / sum);
}

// The pieces of every row's visible context, row by row.
struct Pieces {
  std::vector<Piece> pieces;
  std::vector<int64_t> first_of_row, table_rows;
};

inline Pieces cut_contexts(const View& table_RT, const View& rows_B, const View& lens_B, int64_t window) {
  require_dtype(table_RT, ScalarType::Int, "int32");
  require_dtype(rows_B, ScalarType::Long, "int64");
  require_dtype(lens_B, ScalarType::Long, "int64");
  require(window == kAny || window > 0, "window must be at least 1, not ", window);
  Pieces cut;
  cut.first_of_row.push_back(0);
  for (int64_t row = 0; row < lens_B.sizes[0]; ++row) {
    const int64_t length = *lens_B.at<int64_t>(row), table_row = *rows_B.at<int64_t>(row);
    require(0 <= table_row && table_row < table_RT.sizes[0], "request_rows_B[", row, "] is ", table_row,
            ", which is no row of the table");
    require(1 <= length && length <= table_RT.sizes[1], "context_lens_B[", row, "] is ", length, ", not in 1..",
            table_RT.sizes[1]);
    const int64_t first = window == kAny ? 0 : std::max<int64_t>(0, length - window);
    for (int64_t begin = first; begin < length; begin += kPieceLength) {
      cut.pieces.push_back({row, begin, std::min(begin + kPieceLength, length)});
    }
    cut.first_of_row.push_back(cut.pieces.size());
    cut.table_rows.push_back(table_row);
  }
  return cut;
}

template <class Q, class S, class C>
inline void decode_rows(const DecodeOperands& p, const Pieces& cut) {
  const int64_t num_rows = p.q_BHD.sizes[0], num_heads = p.q_BHD.sizes[1], num_groups = p.k_UGD.sizes[1];
  const int64_t key_dim = p.q_BHD.sizes[2], value_dim = p.v_UGV.sizes[2], num_pieces = cut.pieces.size();
  PieceResults<C> results(num_pieces, num_heads, value_dim);
  std::atomic<int64_t> wrong_slot{kAny};
  const int64_t piece_bytes = kPieceLength * num_groups * (key_dim + value_dim) * sizeof(S);
  torch::stable::parallel_for(0, num_pieces, grain_for(piece_bytes), [&](int64_t begin, int64_t end) {
    std::vector<C> scratch(num_heads / num_groups * kPieceLength + key_dim);
    for (int64_t index = begin; index < end; ++index) {
      const Piece& piece = cut.pieces[index];
      const int64_t slot = attend_piece<Q, S, C>(p, cut.table_rows[piece.row], piece, results, index, scratch.data());
      if (slot != kAny) wrong_slot = slot;
    }
  });
  require(wrong_slot == kAny, "req_to_token names slot ", wrong_slot.load(), ", which the pool doesn't have");
  const int64_t row_bytes = num_pieces * num_heads * value_dim * sizeof(C) / std::max<int64_t>(1, num_rows);
  torch::stable::parallel_for(0, num_rows, grain_for(row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t head = 0; head < num_heads; ++head) {
        join_pieces<C, Q>(results, cut.first_of_row[row], cut.first_of_row[row + 1], head, p.out_BHV.at<Q>(row, head));
      }
    }
  });
}

// q [B, H, D], k_pool [U, G, D], v_pool [U, G, V], req_to_token [R, T] int32, request_rows and context_lens [B] int64;
// window: tokens that are visible, or kAny for all. Returns [B, H, V] in the dtype of q. Pools are float64 if q is.
inline Tensor decode_attention(const Tensor& q, const Tensor& k_pool, const Tensor& v_pool, const Tensor& req_to_token,
                               const Tensor& request_rows, const Tensor& context_lens, double scale, int64_t window) {
  const Tensor rows = torch::stable::contiguous(q);
  DecodeOperands p;
  p.scale = scale;
  p.q_BHD = view_of(rows, "q_BHD", {kAny, kAny, kAny});
  const int64_t num_rows = p.q_BHD.sizes[0], num_heads = p.q_BHD.sizes[1];
  p.k_UGD = view_of(k_pool, "k_pool", {kAny, kAny, p.q_BHD.sizes[2]});
  p.v_UGV = view_of(v_pool, "v_pool", {p.k_UGD.sizes[0], p.k_UGD.sizes[1], kAny});
  require_groups(p.k_UGD, p.k_UGD.sizes[1], num_heads);
  require(p.k_UGD.dtype == p.v_UGV.dtype, "k_pool and v_pool must have one dtype");
  require_inner_contiguous(p.k_UGD, 3, 2);
  require_inner_contiguous(p.v_UGV, 3, 2);
  p.table_RT = view_of(req_to_token, "req_to_token", {kAny, kAny});
  const Pieces cut = cut_contexts(p.table_RT, view_of(request_rows, "request_rows_B", {num_rows}),
                                  view_of(context_lens, "context_lens_B", {num_rows}), window);

  const int64_t value_dim = p.v_UGV.sizes[2];
  Tensor out = torch::stable::new_empty(q, {num_rows, num_heads, value_dim});
  p.out_BHV = view_of(out, "out_BHV", {num_rows, num_heads, value_dim});
  if (p.q_BHD.dtype == ScalarType::Double) {
    require_dtype(p.k_UGD, ScalarType::Double, "float64");
    decode_rows<double, double, double>(p, cut);
    return out;
  }
  with_narrow_float_type(p.q_BHD.dtype, p.q_BHD.name, [&](auto q_zero) {
    with_narrow_float_type(p.k_UGD.dtype, p.k_UGD.name,
                           [&](auto pool_zero) { decode_rows<decltype(q_zero), decltype(pool_zero), float>(p, cut); });
  });
  return out;
}

}  // namespace hybrid_runtime
