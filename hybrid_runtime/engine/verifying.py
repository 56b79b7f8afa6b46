"""Reads back what a verify chose, and finds what it accepts.

Shapes: B rows, T nodes of a draft tree, N = B T nodes row by row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.engine.batches import Indices
from hybrid_runtime.engine.results import (
    ForwardResult,
    RankedLogprobs,
    SampledToken,
    VerifiedBatch,
    VerifiedRow,
    rank_logprobs,
)
from hybrid_runtime.engine.steps import VerifyOutputs
from hybrid_runtime.engine.verify_batch import PreparedVerify
from hybrid_runtime.graphs.read_back import ReadBack
from hybrid_runtime.sampling import gather_logprobs
from hybrid_runtime.scheduling.request import Request


def accepted_nodes(
    token_ids_T: Indices, parents_T: Indices, chosen_T: Indices, *, end_token_ids: frozenset[int], max_accepted: int
) -> list[int]:
    """The path from the root along which each node's token is the one that the target chose behind its parent.

    That is exact for greedy and for sampled requests: the target draws its token behind every node with the key that
    plain decoding would use there, so that texts, and hence their distribution, are those of plain decoding. Proposals
    are matched with the target's own draw: the naive sampling of SpecInfer (Miao et al. 2024, arXiv 2305.09781). One of
    a node's children is accepted with the sum of the target's probabilities of all, and no lossless rule accepts given
    children more often.

    Arrays hold a row's own nodes. A token that ends the request is never accepted: it is the last one, and needs no KV
    and no state. At most `max_accepted` nodes, at least 1, are. Of siblings with equal tokens the first counts.
    """
    path = [0]
    for node in range(1, len(token_ids_T)):  # a child comes after its parent
        token = int(token_ids_T[node])
        if parents_T[node] == path[-1] and token == chosen_T[path[-1]] and token not in end_token_ids:
            if len(path) == max_accepted:
                break
            path.append(node)
    return path


def _num_sound(is_invalid_T: NDArray[np.bool_]) -> int:
    """How many nodes of a path come before the first whose logits are no numbers: that one is the root of the next."""
    return int(np.argmax(is_invalid_T)) if is_invalid_T.any() else len(is_invalid_T)


@dataclass(frozen=True)
class LaunchedVerify:
    """The results of a verify, which may still be on their way."""

    prepared: PreparedVerify
    outputs: VerifyOutputs
    token_ids_N: Tensor
    read_back: ReadBack  # tokens, and which are invalid

    def wait(self) -> ForwardResult:
        token_ids_N, is_invalid_N = self.read_back.wait()
        batch = self.prepared.batch
        chosen_BT = token_ids_N.numpy().reshape(batch.token_ids_BT.shape)
        is_invalid_BT = is_invalid_N.numpy().reshape(batch.token_ids_BT.shape)
        paths = [
            path[: _num_sound(is_invalid_T[path])]
            for path, is_invalid_T in zip(self._paths(chosen_BT), is_invalid_BT, strict=True)
        ]
        invalid = frozenset(request for request, path in zip(self.prepared.requests, paths, strict=True) if not path)
        logprobs = self._logprobs(paths)
        rows = []
        for place, request in enumerate(self.prepared.requests):
            nodes = np.array(paths[place], dtype=np.int64)
            tokens = chosen_BT[place, nodes].tolist()
            sampled = [SampledToken(request, *pair) for pair in zip(tokens, logprobs[place], strict=True)]
            rows.append(VerifiedRow(request, nodes, int(batch.num_nodes_B[place]) - 1, sampled))
        return ForwardResult([], [], invalid, VerifiedBatch(tuple(rows), self.outputs.hidden_ND))

    def _paths(self, chosen_BT: Indices) -> list[list[int]]:
        batch, paths = self.prepared.batch, []
        for place, request in enumerate(self.prepared.requests):
            own = slice(0, int(batch.num_nodes_B[place]))
            paths.append(
                accepted_nodes(
                    batch.token_ids_BT[place, own],
                    batch.parents_BT[place, own],
                    chosen_BT[place],
                    end_token_ids=request.end_token_ids,
                    max_accepted=self.prepared.max_accepted[place],
                )
            )
        return paths

    def _logprobs(self, paths: list[list[int]]) -> list[list[RankedLogprobs | None]]:
        """Per row and accepted node, of the token behind it; None where they are not wanted."""
        found: list[list[RankedLogprobs | None]] = [[None] * len(path) for path in paths]
        num_nodes = self.prepared.batch.token_ids_BT.shape[1]
        wanting: list[tuple[Request, int]] = [
            (request, place)
            for place, request in enumerate(self.prepared.requests)
            if request.params.logprobs is not None
        ]
        if not wanting:
            return found
        places = [(place, index) for _, place in wanting for index in range(len(paths[place]))]
        nodes_N = torch.tensor([place * num_nodes + paths[place][index] for place, index in places])
        nodes_N = nodes_N.to(self.outputs.logits_NV.device)
        counts = [self.prepared.requests[place].params.logprobs or 0 for place, _ in places]
        gathered = gather_logprobs(self.outputs.logits_NV[nodes_N], self.token_ids_N[nodes_N], max(counts))
        for (place, index), entry in zip(places, rank_logprobs(gathered, counts), strict=True):
            found[place][index] = entry
        return found
