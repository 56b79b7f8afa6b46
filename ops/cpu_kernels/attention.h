// Attention of one new token per row over the pool slots that a table names, without a copy of the context.
//
// A unit of work is a piece of one row's context, with all heads. Each piece yields, per head, the largest score, the
// sum of exponentials and the weighted sum of values; the pieces of a row are then put together. Pieces have a fixed
// length, so that the result doesn't depend on the number of threads.
#pragma once

#include <atomic>
#include <limits>

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
  double scale;
};

// One piece of one row. Returns a slot that the table names and the pool doesn't have, or kAny.
template <class S, class C>
inline int64_t attend_piece(const DecodeOperands& p, int64_t table_row, const Piece& piece, PieceResults<C>& results,
                            int64_t index, C* scratch) {
  const int64_t num_heads = p.q_BHD.sizes[1], key_dim = p.q_BHD.sizes[2], value_dim = p.v_UGV.sizes[2];
  const int64_t num_groups = p.k_UGD.sizes[1], heads_per_group = num_heads / num_groups;
  const int64_t length = piece.end - piece.begin;
  C *q_HD = scratch, *score_HT = q_HD + num_heads * key_dim, *one_token = score_HT + num_heads * kPieceLength;
  int64_t slot_T[kPieceLength];
  for (int64_t t = 0; t < length; ++t) {
    slot_T[t] = p.table_RT.at<int32_t>(table_row)[(piece.begin + t) * p.table_RT.strides[1]];
    if (slot_T[t] < 0 || slot_T[t] >= p.k_UGD.sizes[0]) return slot_T[t];
  }
  for (int64_t head = 0; head < num_heads; ++head) {
    read_last_axis(p.q_BHD, 3, piece.row, head, q_HD + head * key_dim);
    for (int64_t d = 0; d < key_dim; ++d) q_HD[head * key_dim + d] *= static_cast<C>(p.scale);
  }
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t group = 0; group < num_groups; ++group) {
      const S* key = p.k_UGD.at<S>(slot_T[t], group);
#pragma omp simd
      for (int64_t d = 0; d < key_dim; ++d) one_token[d] = load<C>(key[d]);
      for (int64_t head = group * heads_per_group; head < (group + 1) * heads_per_group; ++head) {
        const C* q_D = q_HD + head * key_dim;
        C sum{0};
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < key_dim; ++d) sum = multiply_add(q_D[d], one_token[d], sum);
        score_HT[head * kPieceLength + t] = sum;
      }
    }
  }
  for (int64_t head = 0; head < num_heads; ++head) {
    C* score_T = score_HT + head * kPieceLength;
    C largest = -std::numeric_limits<C>::infinity(), sum{0};
#pragma omp simd reduction(max : largest)
    for (int64_t t = 0; t < length; ++t) largest = score_T[t] > largest ? score_T[t] : largest;
#pragma omp simd reduction(+ : sum)
    for (int64_t t = 0; t < length; ++t) {
      score_T[t] = exp_nonpositive(score_T[t] - largest);
      sum += score_T[t];
    }
    C* result = results.of(index, head);
    result[0] = largest;
    result[1] = sum;
    std::fill_n(result + 2, value_dim, C{0});
  }
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t group = 0; group < num_groups; ++group) {
      const S* value = p.v_UGV.at<S>(slot_T[t], group);
#pragma omp simd
      for (int64_t d = 0; d < value_dim; ++d) one_token[d] = load<C>(value[d]);
      for (int64_t head = group * heads_per_group; head < (group + 1) * heads_per_group; ++head) {
        const C weight = score_HT[head * kPieceLength + t];
        C* sum_V = results.of(index, head) + 2;
#pragma omp simd
        for (int64_t d = 0; d < value_dim; ++d) sum_V[d] = multiply_add(weight, one_token[d], sum_V[d]);
      }
    }
  }
  return kAny;
}

// Adds up a head's pieces, which are `first` to `last`, and divides by the sum of exponentials.
template <class C, class Q>
inline void join_pieces(PieceResults<C>& results, int64_t first, int64_t last, int64_t head, Q* out_V) {
  C largest = -std::numeric_limits<C>::infinity(), sum{0};
  for (int64_t piece = first; piece < last; ++piece) largest = std::max(largest, results.of(piece, head)[0]);
  C* total = results.of(first, head);
  for (int64_t piece = first; piece < last; ++piece) {
    const C* result = results.of(piece, head);
    const C weight = exp_nonpositive(result[0] - largest);
    sum = multiply_add(weight, result[1], sum);
    for (int64_t d = 2; d < results.value_dim + 2; ++d) {
      total[d] = piece == first ? weight * result[d] : multiply_add(weight, result[d], total[d]);
    }
  }
  for (int64_t d = 0; d < results.value_dim; ++d) out_V[d] = store<Q>(total[d + 2] / sum);
}

template <class S, class C>
inline void decode_rows(const DecodeOperands& p, const std::vector<int64_t>& table_rows,
                        const std::vector<Piece>& pieces, const std::vector<int64_t>& first_piece) {
  const int64_t num_rows = p.q_BHD.sizes[0], num_heads = p.q_BHD.sizes[1];
  const int64_t key_dim = p.q_BHD.sizes[2], value_dim = p.v_UGV.sizes[2];
  const int64_t bytes = kPieceLength * p.k_UGD.sizes[1] * (key_dim + value_dim) * sizeof(S);
  PieceResults<C> results(pieces.size(), num_heads, value_dim);
  std::atomic<int64_t> wrong_slot{kAny};
  torch::stable::parallel_for(0, pieces.size(), grain_for(bytes), [&](int64_t begin, int64_t end) {
    std::vector<C> scratch(num_heads * (key_dim + kPieceLength) + std::max(key_dim, value_dim));
    for (int64_t index = begin; index < end; ++index) {
      const Piece& piece = pieces[index];
      const int64_t slot = attend_piece<S, C>(p, table_rows[piece.row], piece, results, index, scratch.data());
      if (slot != kAny) wrong_slot = slot;
    }
  });
  require(wrong_slot == kAny, "req_to_token names slot ", wrong_slot.load(), ", which the pool doesn't have");
  with_float_type(p.out_BHV.dtype, p.out_BHV.name, [&](auto zero) {
    using Q = decltype(zero);
    for (int64_t row = 0; row < num_rows; ++row) {
      for (int64_t head = 0; head < num_heads; ++head) {
        join_pieces<C, Q>(results, first_piece[row], first_piece[row + 1], head, p.out_BHV.at<Q>(row, head));
      }
    }
  });
}

// q [B, H, D], k_pool [U, G, D], v_pool [U, G, V], req_to_token [R, T] int32, request_rows and context_lens [B] int64;
// window: tokens that are visible, or kAny for all. Returns [B, H, V] in the dtype of q.
inline Tensor decode_attention(const Tensor& q, const Tensor& k_pool, const Tensor& v_pool, const Tensor& req_to_token,
                               const Tensor& request_rows, const Tensor& context_lens, double scale, int64_t window) {
  const View q_BHD = view_of(q, "q_BHD", {kAny, kAny, kAny});
  const int64_t num_rows = q_BHD.sizes[0], num_heads = q_BHD.sizes[1];
  const View k_UGD = view_of(k_pool, "k_pool", {kAny, kAny, q_BHD.sizes[2]});
  const View v_UGV = view_of(v_pool, "v_pool", {k_UGD.sizes[0], k_UGD.sizes[1], kAny});
  const View table_RT = view_of(req_to_token, "req_to_token", {kAny, kAny});
  const View rows_B = view_of(request_rows, "request_rows_B", {num_rows});
  const View lens_B = view_of(context_lens, "context_lens_B", {num_rows});
  require(k_UGD.sizes[1] > 0 && num_heads % k_UGD.sizes[1] == 0, "k_pool has ", k_UGD.sizes[1], " heads for ", num_heads);
  require(k_UGD.dtype == v_UGV.dtype, "k_pool and v_pool must have one dtype");
  require_inner_contiguous(k_UGD, 3, 2);
  require_inner_contiguous(v_UGV, 3, 2);
  require_dtype(table_RT, ScalarType::Int, "int32");
  require_dtype(rows_B, ScalarType::Long, "int64");
  require_dtype(lens_B, ScalarType::Long, "int64");
  require(window == kAny || window > 0, "window must be at least 1, not ", window);

  std::vector<Piece> pieces;
  std::vector<int64_t> first_piece(num_rows + 1), table_rows(num_rows);
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t length = *lens_B.at<int64_t>(row);
    table_rows[row] = *rows_B.at<int64_t>(row);
    require(0 <= table_rows[row] && table_rows[row] < table_RT.sizes[0], "request_rows_B[", row, "] is ",
            table_rows[row], ", which is no row of the table");
    require(1 <= length && length <= table_RT.sizes[1], "context_lens_B[", row, "] is ", length, ", not in 1..",
            table_RT.sizes[1]);
    for (int64_t begin = window == kAny ? 0 : std::max<int64_t>(0, length - window); begin < length;
         begin += kPieceLength) {
      pieces.push_back({row, begin, std::min(begin + kPieceLength, length)});
    }
    first_piece[row + 1] = pieces.size();
  }

  Tensor out = torch::stable::new_empty(q, {num_rows, num_heads, v_UGV.sizes[2]});
  const View out_BHV = view_of(out, "out_BHV", {num_rows, num_heads, v_UGV.sizes[2]});
  const DecodeOperands operands{q_BHD, k_UGD, v_UGV, table_RT, out_BHV, scale};
  with_float_type(k_UGD.dtype, k_UGD.name, [&](auto zero) {
    using S = decltype(zero);
    if (q_BHD.dtype == ScalarType::Double) {
      decode_rows<S, double>(operands, table_rows, pieces, first_piece);
    } else {
      decode_rows<S, float>(operands, table_rows, pieces, first_piece);
    }
  });
  return out;
}

}  // namespace hybrid_runtime
