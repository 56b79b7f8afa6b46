// The short convolution over a draft tree: outputs of all nodes from the committed window, and windows behind accepted
// paths. As conv.h, to the same bits as the PyTorch form.
#pragma once

#include "../conv.h"
#include "paths.h"

namespace hybrid_runtime {

// A copy of x `[B, T, D]` if its channels don't lie side by side.
inline Tensor nodes_with_adjacent_channels(const Tensor& x) {
  return x.dim() == 3 && x.stride(2) == 1 ? x : torch::stable::contiguous(x);
}

// x [B, T, D], weight [D, W], bias [D], window_pool [U, W - 1, D] of the dtype of x, slots [B], parents [B, T]; returns
// y like x. A unit of work is a block of channels of one row.
inline Tensor conv_tree(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                        const Tensor& window_pool, const Tensor& slots, const Tensor& parents) {
  const ConvWeights weights = conv_weights(weight, bias);
  const int64_t num_channels = weights.num_channels(), num_taps = weights.num_taps();
  const Tensor nodes = nodes_with_adjacent_channels(x);
  const View pool = view_of(window_pool, "window_pool", {kAny, num_taps - 1, num_channels});
  const std::vector<int64_t> slot_B = checked_slots(slots, pool.sizes[0]);
  const int64_t num_rows = slot_B.size();
  const WaysUp ways = ways_up(parents, num_rows);
  const View x_BTD = view_of(nodes, "x_BTD", {num_rows, ways.num_nodes, num_channels});
  require(pool.dtype == x_BTD.dtype, "window_pool and x_BTD must have one dtype");
  require(num_taps <= kMaxTaps, "weight_DW has ", num_taps, " taps, more than ", kMaxTaps);
  require_inner_contiguous(pool, 3, 1);

  Tensor y = torch::stable::new_empty(x, {num_rows, ways.num_nodes, num_channels});
  const View y_BTD = view_of(y, "y_BTD", {num_rows, ways.num_nodes, num_channels});
  const int64_t num_blocks = (num_channels + kConvChannels - 1) / kConvChannels;
  with_narrow_float_type(x_BTD.dtype, x_BTD.name, [&](auto zero) {
    using X = decltype(zero);
    const int64_t grain = grain_for(ways.num_nodes * num_taps * kConvChannels * 8);
    torch::stable::parallel_for(0, num_rows * num_blocks, grain, [&](int64_t begin, int64_t end) {
      std::vector<float> scratch((num_taps + 2) * kConvChannels);
      float* total_D = scratch.data() + (num_taps + 1) * kConvChannels;
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t row = unit % num_rows, first = unit / num_rows * kConvChannels;
        const int64_t count = std::min(kConvChannels, num_channels - first);
        if (row == 0 || unit == begin) read_weights(weights, first, count, scratch.data());
        for (int64_t node = 0; node < ways.num_nodes; ++node) {
          X* y_D = y_BTD.at<X>(row, node) + first;
          if (slot_B[row] == 0) {
            std::fill_n(y_D, count, store<X>(0.0f));
            continue;
          }
          const int32_t* way = ways.from(row, node);
          const int64_t length = ways.length(row, node);
          const X* taps[kMaxTaps];
          for (int64_t back = 0; back < num_taps; ++back) {
            const int64_t before = num_taps - 1 + length - 1 - back;  // of the window, if the way is too short
            taps[num_taps - 1 - back] =
                (back < length ? x_BTD.at<X>(row, way[back]) : pool.at<X>(slot_B[row], before)) + first;
          }
          weigh_taps(taps, num_taps, scratch.data(), weights.has_bias, count, total_D, y_D);
        }
      }
    });
  });
  return y;
}

// window_pool [U, W - 1, D], slots and destinations [B], x [B, T, D] of its dtype, path nodes [B, T] and their number
// [B]. The window behind a path is the last W - 1 inputs of the one before and the path's.
inline void conv_fold(Tensor window_pool, const Tensor& slots, const Tensor& destinations, const Tensor& x,
                      const Tensor& path_nodes, const Tensor& num_nodes) {
  const View pool = view_of(window_pool, "window_pool", {kAny, kAny, kAny});
  const int64_t num_inputs = pool.sizes[1], num_channels = pool.sizes[2];
  require_inner_contiguous(pool, 3, 1);
  const Commit commit = checked_commit(slots, destinations, path_nodes, num_nodes, pool.sizes[0]);
  const Tensor nodes = nodes_with_adjacent_channels(x);
  const View x_BTD = view_of(nodes, "x_BTD", {static_cast<int64_t>(commit.nodes_B.size()), path_nodes.size(1), num_channels});
  require(pool.dtype == x_BTD.dtype, "window_pool and x_BTD must have one dtype");
  with_narrow_float_type(pool.dtype, pool.name, [&](auto zero) {
    using X = decltype(zero);
    for (size_t row = 0; row < commit.nodes_B.size(); ++row) {
      const auto& path = commit.nodes_B[row];
      if (path.empty()) continue;
      for (int64_t input = 0; input < num_inputs; ++input) {  // each comes from behind the place that it goes to
        const int64_t from = input + static_cast<int64_t>(path.size());
        const X* source = from < num_inputs ? pool.at<X>(commit.slot_B[row], from)
                                            : x_BTD.at<X>(row, path[from - num_inputs]);
        std::memcpy(pool.at<X>(commit.destination_B[row], input), source, num_channels * sizeof(X));
      }
    }
  });
}

}  // namespace hybrid_runtime
