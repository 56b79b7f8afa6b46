// The sequences of a prefill, cut into segments at whose ends a state is asked for, and these into short blocks.
#pragma once

#include "tensor_view.h"

namespace hybrid_runtime {

// Tokens that follow each other in one sequence; the states at their end are asked for by the rows `states`.
struct Segment {
  int64_t begin, end;
  std::vector<int64_t> states;
};

// A few tokens of a segment.
struct Block {
  int64_t begin, count;
};

// Each sequence cut where a state is asked for. Refuses indices that don't lay sequences one behind the other.
inline std::vector<std::vector<Segment>> cut_sequences(const Tensor& token_sequence, const Tensor& token_offset,
                                                       const Tensor& state_sequence, const Tensor& state_length,
                                                       int64_t num_tokens, int64_t num_sequences) {
  const View sequence_L = view_of(token_sequence, "token_sequence_L", {num_tokens});
  const View offset_L = view_of(token_offset, "token_offset_L", {num_tokens});
  const View sequence_R = view_of(state_sequence, "state_sequence_R", {kAny});
  const int64_t num_states = sequence_R.sizes[0];
  const View length_R = view_of(state_length, "state_length_R", {num_states});
  for (const View& indices : {sequence_L, offset_L, sequence_R, length_R}) {
    require_dtype(indices, ScalarType::Long, "int64");
  }
  std::vector<int64_t> start(num_sequences, 0), length(num_sequences, 0);
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t sequence = *sequence_L.at<int64_t>(token), offset = *offset_L.at<int64_t>(token);
    require(0 <= sequence && sequence <= num_sequences, "token ", token, " can't be of sequence ", sequence);
    if (sequence == num_sequences) continue;
    if (length[sequence] == 0) start[sequence] = token;
    require(offset == length[sequence] && token == start[sequence] + offset, "token ", token, " can't be number ",
            offset, " of sequence ", sequence);
    ++length[sequence];
  }
  std::vector<std::vector<Segment>> segments(num_sequences);
  for (int64_t sequence = 0; sequence < num_sequences; ++sequence) {
    if (length[sequence] > 0) segments[sequence].push_back({start[sequence], start[sequence] + length[sequence], {}});
  }
  for (int64_t state = 0; state < num_states; ++state) {
    const int64_t sequence = *sequence_R.at<int64_t>(state), covered = *length_R.at<int64_t>(state);
    require(0 <= sequence && sequence < num_sequences && 1 <= covered && covered <= length[sequence], "state ", state,
            " can't cover ", covered, " tokens of sequence ", sequence);
    const int64_t end = start[sequence] + covered;
    auto& own = segments[sequence];
    auto at = std::find_if(own.begin(), own.end(), [end](const Segment& segment) { return end <= segment.end; });
    if (end < at->end) {
      at = own.insert(at, {at->begin, end, {}});
      (at + 1)->begin = end;
    }
    at->states.push_back(state);
  }
  return segments;
}

inline std::vector<Block> blocks_of(const Segment& segment, int64_t num_tokens) {
  std::vector<Block> blocks;
  for (int64_t begin = segment.begin; begin < segment.end; begin += num_tokens) {
    blocks.push_back({begin, std::min(num_tokens, segment.end - begin)});
  }
  return blocks;
}

}  // namespace hybrid_runtime
