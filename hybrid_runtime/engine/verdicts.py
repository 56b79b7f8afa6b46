"""What a verify brings, once it is known what it accepted: tokens for users, KV slots, lengths, checkpoints, states."""

from __future__ import annotations

from collections.abc import Container

from hybrid_runtime.engine.batches import Indices
from hybrid_runtime.engine.commits import Commit
from hybrid_runtime.engine.delivery import Delivery
from hybrid_runtime.engine.results import SpeculationCounts, VerifiedBatch, VerifiedRow
from hybrid_runtime.engine.runner import ModelRunner
from hybrid_runtime.scheduling.request import Request, RequestStatus
from hybrid_runtime.scheduling.scheduler import Scheduler


class Verdicts:
    """Applies the results of verifies, between steps."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, delivery: Delivery) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._delivery = delivery
        self.counts = SpeculationCounts()

    def apply(self, batch: VerifiedBatch, invalid: Container[Request]) -> int:
        """Delivers the tokens behind accepted nodes, then keeps the nodes; returns how many tokens were delivered.

        In this order, because a stop string shows only in the text: what was accepted behind the token with which a
        request ends is dropped, so that it leaves what plain decoding would.
        """
        counts = [0 if row.request in invalid else self._deliver(row) for row in batch.rows]
        kept = [(row, row.nodes[:count]) for row, count in zip(batch.rows, counts, strict=True)]
        self._scheduler.residency.keep_kv([(row.request, nodes) for row, nodes in kept if len(nodes)])
        self._runner.commit(batch, [self._keep(row, nodes) for row, nodes in kept])
        return sum(counts)

    def _deliver(self, row: VerifiedRow) -> int:
        """How many of the tokens it takes until the request ends: all, or fewer. It moves out later, with the step."""
        for num_delivered, token in enumerate(row.sampled, start=1):
            self._delivery.append(token)
            if row.request.status is not RequestStatus.RUNNING:
                return num_delivered
        return len(row.sampled)

    def _keep(self, row: VerifiedRow, nodes: Indices) -> Commit:
        """Counts the tokens of the kept nodes as computed; returns what is to be done to the states of the row.

        No node: its logits were no numbers.
        """
        request, residence, position = row.request, row.request.resident, row.request.num_computed_tokens
        request.is_verifying = False
        if not len(nodes):
            return Commit(residence.row, residence.working_slot, nodes)
        stop, num_accepted = position + len(nodes), len(nodes) - 1
        request.num_computed_tokens = request.num_landed_tokens = stop
        self.counts.add(row.num_drafted, num_accepted)
        if self._scheduler.drafting is not None:
            self._scheduler.drafting.note(request, row.num_drafted, num_accepted)
        tracked = self._scheduler.residency.track_within(request, position, stop)
        if tracked is None:
            return Commit(residence.row, residence.working_slot, nodes)
        return Commit(residence.row, residence.working_slot, nodes, tracked.state_slot, tracked.length - position)
