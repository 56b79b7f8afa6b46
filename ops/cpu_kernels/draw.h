// The next token of every row, without a sort.
//
// Tokens are ordered by falling score, and of equal scores by rising id. What min-p, top-k and top-p leave is a front of
// this order, so that its last token describes it. That token is found by bisection on scores; the draw, the maximum of
// score + noise over the front, is one pass. Words of noise are made for all tokens, but logarithms only where a word
// is small enough to win.
#pragma once

#include <memory>

#include "philox.h"
#include "tensor_view.h"

namespace hybrid_runtime {

constexpr int64_t kDrawBlock = 4 * kPhiloxGroups;

struct DrawOptions {
  double temperature, min_p, top_p;  // 0: greedy; 0: off; 1: off
  int64_t top_k;                     // the size of the vocabulary or more: off
  NoiseKey key;
};

// The tokens up to and including a score and, of those that have this score, up to and including an id.
template <class C>
struct Front {
  C score;
  int64_t id;
  bool holds(C other, int64_t other_id) const { return other > score || (other == score && other_id <= id); }
};

// Working memory of a thread, and the row that it is at: scaled logits, the largest of each block, weights.
template <class C>
struct ScoredRow {
  explicit ScoredRow(int64_t size)
      : num_tokens(size), largest((size + kDrawBlock - 1) / kDrawBlock), scores(new C[size]), weights(new C[size]) {}
  int64_t num_tokens;
  std::vector<C> largest;
  std::unique_ptr<C[]> scores, weights;

  int64_t block_end(int64_t begin) const { return std::min(begin + kDrawBlock, num_tokens); }

  // Calls `function` with begin and end of each block that has a score of `score` or above.
  template <class F>
  void for_each_block(C score, const F& function) const {
    for (int64_t begin = 0; begin < num_tokens; begin += kDrawBlock) {
      if (largest[begin / kDrawBlock] >= score) function(begin, block_end(begin));
    }
  }
};

// NaN loses: what follows compares with scores, and no comparison with NaN holds.
template <class C>
inline C larger(C x, C than) {
  return x > than ? x : than;
}

template <class C>
inline C largest_of(const C* values, int64_t count) {
  constexpr int64_t kLanes = 16;
  C lanes[kLanes];
  std::fill_n(lanes, kLanes, -std::numeric_limits<C>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = larger(values[i + lane], lanes[lane]);
  }
  for (; i < count; ++i) lanes[0] = larger(values[i], lanes[0]);
  C result = lanes[0];
  for (C value : lanes) result = larger(value, result);
  return result;
}

template <class C>
inline int64_t first_of_value(const C* values, int64_t count, C value) {
  const C* found = std::find(values, values + count, value);
  return found == values + count ? 0 : found - values;
}

// (logits - largest) / temperature, with +inf as the largest finite number: at most 0.
template <class C>
inline void score_row(const C* logits, C peak, C temperature, ScoredRow<C>& row) {
  const C max = std::numeric_limits<C>::max();
  for (int64_t begin = 0; begin < row.num_tokens; begin += kDrawBlock) {
    const int64_t end = row.block_end(begin);
    for (int64_t id = begin; id < end; ++id) {
      row.scores[id] = ((logits[id] > max ? max : logits[id]) - peak) / temperature;
    }
    row.largest[begin / kDrawBlock] = largest_of(&row.scores[begin], end - begin);
  }
}

// Σ of the weights of scores above `score`. Never rises with `score`: also rounded sums keep the order of their terms.
template <class C>
inline double weight_above(const ScoredRow<C>& row, C score) {
  double total = 0;
  row.for_each_block(score, [&](int64_t begin, int64_t end) {
    const C *scores = row.scores.get() + begin, *weights = row.weights.get() + begin;
    const int64_t half = (end - begin) / 2;  // two sums at a time: one would wait for its own last addition
    C low{0}, high = (end - begin) % 2 && scores[2 * half] > score ? weights[2 * half] : C{0};
#pragma omp simd reduction(+ : low, high)
    for (int64_t i = 0; i < half; ++i) {
      low += scores[i] > score ? weights[i] : C{0};
      high += scores[half + i] > score ? weights[half + i] : C{0};
    }
    total += low + high;
  });
  return total;
}

// Weighs tokens by e^score; returns what those in `front` weigh. The others' weights are left as they are.
template <class C>
inline double weigh(ScoredRow<C>& row, Front<C> front) {
  double total = 0;
  row.for_each_block(front.score, [&](int64_t begin, int64_t end) {
    for (int64_t id = begin; id < end; ++id) row.weights[id] = exp_nonpositive(row.scores[id]);
    if (front.score == -std::numeric_limits<C>::infinity()) return;  // such tokens weigh nothing
    for (int64_t id = begin; id < std::min(end, front.id + 1); ++id) {
      if (row.scores[id] == front.score) total += row.weights[id];
    }
  });
  return total + weight_above(row, front.score);
}

// A number that grows as scores, which are at most 0, fall; and back.
template <class C>
using magnitude_t = std::conditional_t<sizeof(C) == 8, uint64_t, uint32_t>;
template <class C>
inline magnitude_t<C> magnitude_of(C score) {
  return bits_as<magnitude_t<C>>(std::fabs(score));
}
template <class C>
inline C score_of(magnitude_t<C> magnitude) {
  return -bits_as<C>(magnitude);
}

// The tokens of `front` whose predecessors weigh less than `target` together; it is above 0.
template <class C>
inline Front<C> cut(const ScoredRow<C>& row, Front<C> front, double target) {
  // What lies above scores of magnitude `kept` weighs less than the target.
  magnitude_t<C> kept = 0, dropped = magnitude_of(front.score);
  double ahead = weight_above(row, front.score);
  if (ahead < target) {
    kept = dropped;
  } else {
    ahead = 0;
  }
  while (dropped - kept > 1) {
    const magnitude_t<C> middle = kept + (dropped - kept) / 2;
    const double weight = weight_above(row, score_of<C>(middle));
    (weight < target ? kept : dropped) = middle;
    if (weight < target) ahead = weight;
  }
  Front<C> result{score_of<C>(kept), 0};
  row.for_each_block(result.score, [&](int64_t begin, int64_t end) {
    for (int64_t id = begin; id < end; ++id) {
      if (row.scores[id] != result.score || !front.holds(result.score, id)) continue;
      if (!(ahead < target)) return;
      result.id = id;
      ahead += row.weights[id];
    }
  });
  return result;
}

// What min-p, top-k and top-p leave.
template <class C>
inline Front<C> kept_front(const DrawOptions& options, ScoredRow<C>& row) {
  const C floor = options.min_p > 0 ? std::log(static_cast<C>(options.min_p)) : -std::numeric_limits<C>::infinity();
  Front<C> front{floor, row.num_tokens};
  if (options.top_k < row.num_tokens) {
    std::fill_n(row.weights.get(), row.num_tokens, C{1});
    front = cut(row, front, static_cast<double>(options.top_k));
  }
  if (options.top_p < 1) front = cut(row, front, options.top_p * weigh(row, front));
  return front;
}

// The token of `front` where score + noise is largest.
template <class C>
inline int64_t draw_from(const ScoredRow<C>& row, Front<C> front, const NoiseKey& key) {
  uint32_t words[4][kPhiloxGroups];
  const auto perturbed = [&](int64_t id) {
    const int64_t place = id % kDrawBlock;
    return row.scores[id] + gumbel_of_word<C>(words[place % 4][place / 4]);
  };
  // The first in the order is in every front. With it, no token that is more than 27 below the largest score can win.
  int64_t best_id = first_of_value(row.scores.get(), row.num_tokens, C{0});
  philox_block(key, best_id / kDrawBlock * kPhiloxGroups, words);
  C best = perturbed(best_id);
  const C lowest = larger(front.score, std::numeric_limits<C>::lowest());
  row.for_each_block(lowest, [&](int64_t begin, int64_t end) {
    // Noise is -log(-log(1 - u)) <= -log u: a word above this leaves score + noise below `best`, whatever is rounded.
    const double highest = std::exp(static_cast<double>(row.largest[begin / kDrawBlock] - best)) * 0x1.01p32;
    if (highest < 0.5 || philox_block(key, begin / 4, words) > highest) return;
    for (int64_t id = begin; id < end; ++id) {
      const int64_t place = id - begin;
      if (words[place % 4][place / 4] > highest || !front.holds(row.scores[id], id)) continue;
      const C total = perturbed(id);
      if (total > best || (total == best && id < best_id)) {
        best = total;
        best_id = id;
      }
    }
  });
  return best_id;
}

template <class C>
inline int64_t draw_row(const C* logits, const DrawOptions& options, ScoredRow<C>& row) {
  const C peak = largest_of(logits, row.num_tokens);
  if (options.temperature == 0 || !(peak > -std::numeric_limits<C>::infinity())) {
    return first_of_value(logits, row.num_tokens, peak);
  }
  using Limits = std::numeric_limits<C>;
  const double temperature = std::min<double>(std::max<double>(options.temperature, Limits::min()), Limits::max());
  score_row(logits, std::min(peak, Limits::max()), static_cast<C>(temperature), row);
  return draw_from(row, kept_front(options, row), options.key);
}

inline View option_of(const Tensor& tensor, const char* name, int64_t num_rows, ScalarType dtype) {
  const View option = view_of(tensor, name, {num_rows});
  require_dtype(option, dtype, dtype == ScalarType::Double ? "float64" : "int64");
  return option;
}

// logits [B, V] float32 or float64, options [B] (float64 and int64); returns ids [B] int64. See ops/draw.py.
inline Tensor draw_tokens(const Tensor& logits, const Tensor& temperature, const std::optional<Tensor>& min_p,
                          const std::optional<Tensor>& top_k, const std::optional<Tensor>& top_p, const Tensor& seeds,
                          const Tensor& sample_indices, const Tensor& positions) {
  const View logits_BV = view_of(logits, "logits_BV", {kAny, kAny});
  const int64_t num_rows = logits_BV.sizes[0], num_tokens = logits_BV.sizes[1];
  require(num_tokens > 0, "logits_BV must have at least one token");
  require(logits_BV.dtype == ScalarType::Float || logits_BV.dtype == ScalarType::Double,
          "logits_BV must be of dtype float32 or float64");
  require_inner_contiguous(logits_BV, 2, 1);
  const View temperature_B = option_of(temperature, "temperature_B", num_rows, ScalarType::Double);
  const View seeds_B = option_of(seeds, "seeds_B", num_rows, ScalarType::Long);
  const View samples_B = option_of(sample_indices, "sample_indices_B", num_rows, ScalarType::Long);
  const View positions_B = option_of(positions, "positions_B", num_rows, ScalarType::Long);
  const View min_p_B = min_p ? option_of(*min_p, "min_p_B", num_rows, ScalarType::Double) : View{};
  const View top_k_B = top_k ? option_of(*top_k, "top_k_B", num_rows, ScalarType::Long) : View{};
  const View top_p_B = top_p ? option_of(*top_p, "top_p_B", num_rows, ScalarType::Double) : View{};

  Tensor ids = torch::stable::new_empty(seeds, {num_rows});
  const View ids_B = view_of(ids, "ids_B", {num_rows});
  const auto draw_rows = [&](auto zero, int64_t begin, int64_t end) {
    using C = decltype(zero);
    ScoredRow<C> row(num_tokens);
    for (int64_t b = begin; b < end; ++b) {
      const DrawOptions options{*temperature_B.at<double>(b),
                                min_p ? *min_p_B.at<double>(b) : 0.0,
                                top_p ? *top_p_B.at<double>(b) : 1.0,
                                top_k ? *top_k_B.at<int64_t>(b) : num_tokens,
                                {*seeds_B.at<int64_t>(b), *samples_B.at<int64_t>(b), *positions_B.at<int64_t>(b)}};
      *ids_B.at<int64_t>(b) = draw_row(logits_BV.at<C>(b), options, row);
    }
  };
  torch::stable::parallel_for(0, num_rows, grain_for(num_tokens * sizeof(double)), [&](int64_t begin, int64_t end) {
    if (logits_BV.dtype == ScalarType::Float) {
      draw_rows(float{}, begin, end);
    } else {
      draw_rows(double{}, begin, end);
    }
  });
  return ids;
}

}  // namespace hybrid_runtime
