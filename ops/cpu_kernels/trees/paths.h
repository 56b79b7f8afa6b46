// Draft trees and accepted paths as the kernels walk them, checked before anything is read or written by them.
#pragma once

#include "../tensor_view.h"

namespace hybrid_runtime {

// For each node of each row the nodes that it sees: itself, its parent, and so on up to the root.
struct WaysUp {
  int64_t num_nodes = 0;
  std::vector<int32_t> nodes;
  std::vector<int64_t> first_BT;  // where the way of a node begins in `nodes`; at the end the length of `nodes`

  int64_t begin(int64_t row, int64_t node) const { return first_BT[row * num_nodes + node]; }
  int64_t length(int64_t row, int64_t node) const {
    return first_BT[row * num_nodes + node + 1] - first_BT[row * num_nodes + node];
  }
  const int32_t* from(int64_t row, int64_t node) const { return nodes.data() + begin(row, node); }
  int64_t parent(int64_t row, int64_t node) const { return node == 0 ? 0 : from(row, node)[1]; }
  int64_t depth(int64_t row, int64_t node) const { return length(row, node) - 1; }
  // Pairs of a node and one that it sees, in a row.
  int64_t num_pairs(int64_t row) const { return begin(row + 1, 0) - begin(row, 0); }
};

inline WaysUp ways_up(const Tensor& parents, int64_t num_rows) {
  const View parents_BT = view_of(parents, "parents_BT", {num_rows, kAny});
  require_dtype(parents_BT, ScalarType::Long, "int64");
  WaysUp ways;
  ways.num_nodes = parents_BT.sizes[1];
  require(ways.num_nodes > 0, "parents_BT must have at least one node");
  ways.first_BT.push_back(0);
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t node = 0; node < ways.num_nodes; ++node) {
      const int64_t parent = parents_BT.at<int64_t>(row)[node * parents_BT.strides[1]];
      require(0 <= parent && parent < std::max<int64_t>(node, 1), "parents_BT[", row, ", ", node, "] is ", parent,
              ", which is no node before it");
      ways.nodes.push_back(static_cast<int32_t>(node));
      if (node > 0) {
        const int64_t begin = ways.begin(row, parent), end = begin + ways.length(row, parent);
        for (int64_t place = begin; place < end; ++place) ways.nodes.push_back(ways.nodes[place]);
      }
      ways.first_BT.push_back(static_cast<int64_t>(ways.nodes.size()));
    }
  }
  return ways;
}

// What is committed: for each row the accepted nodes from the root on, from which slot, to which.
struct Commit {
  std::vector<std::vector<int32_t>> nodes_B;  // empty: the row changes nothing
  std::vector<int64_t> slot_B, destination_B;
};

// Rows whose destination is slot 0, or that have no accepted nodes, change nothing.
inline Commit checked_commit(const Tensor& slots, const Tensor& destinations, const Tensor& nodes,
                             const Tensor& num_nodes, int64_t num_slots) {
  Commit commit{{}, checked_slots(slots, num_slots), checked_slots(destinations, num_slots)};
  const int64_t num_rows = static_cast<int64_t>(commit.slot_B.size());
  require(static_cast<int64_t>(commit.destination_B.size()) == num_rows, "destinations_B must have size ", num_rows,
          " on axis 0, not ", commit.destination_B.size());
  const View nodes_BT = view_of(nodes, "path.nodes_BT", {num_rows, kAny});
  const View num_nodes_B = view_of(num_nodes, "path.num_nodes_B", {num_rows});
  require_dtype(nodes_BT, ScalarType::Long, "int64");
  require_dtype(num_nodes_B, ScalarType::Long, "int64");
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t count = *num_nodes_B.at<int64_t>(row);
    require(0 <= count && count <= nodes_BT.sizes[1], "path.num_nodes_B[", row, "] is ", count, ", not in 0..",
            nodes_BT.sizes[1]);
    std::vector<int32_t> accepted;
    for (int64_t place = 0; place < (commit.destination_B[row] == 0 ? 0 : count); ++place) {
      const int64_t node = nodes_BT.at<int64_t>(row)[place * nodes_BT.strides[1]];
      require(0 <= node && node < nodes_BT.sizes[1], "path.nodes_BT[", row, ", ", place, "] is ", node,
              ", which is no node");
      accepted.push_back(static_cast<int32_t>(node));
    }
    commit.nodes_B.push_back(std::move(accepted));
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    if (commit.nodes_B[row].empty()) continue;
    for (int64_t other = 0; other < num_rows; ++other) {
      if (other == row || commit.nodes_B[other].empty()) continue;
      const int64_t slot = commit.destination_B[row];
      require(slot != commit.slot_B[other] && slot != commit.destination_B[other], "slot ", slot,
              " is written for row ", row, " and used by row ", other);
    }
  }
  return commit;
}

}  // namespace hybrid_runtime
