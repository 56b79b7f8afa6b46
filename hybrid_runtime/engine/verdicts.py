"""What a verify changes, once it is known what it accepted: KV slots, lengths, checkpoints, states."""

from __future__ import annotations

from collections.abc import Container

from hybrid_runtime.engine.commits import Commit
from hybrid_runtime.engine.results import SampledToken, SpeculationCounts, VerifiedBatch, VerifiedRow
from hybrid_runtime.engine.runner import ModelRunner
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.scheduling.scheduler import Scheduler


class Verdicts:
    """Applies the results of verifies, between steps."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self.counts = SpeculationCounts()

    def apply(self, batch: VerifiedBatch, invalid: Container[Request]) -> list[SampledToken]:
        """Keeps what was accepted, in KV and states; returns the tokens that it brought, one per accepted node.

        They are among the requests' tokens before any of them is delivered: where one ends its request, what was
        accepted behind it is computed all the same, and goes to the tree.
        """
        valid = [row for row in batch.rows if row.request not in invalid]
        self._runner.commit(batch, [self._keep(row, is_valid=row.request not in invalid) for row in batch.rows])
        for row in valid:
            for token in row.sampled:
                row.request.tokens.append(token.token_id)
        return [token for row in valid for token in row.sampled]

    def _keep(self, row: VerifiedRow, *, is_valid: bool) -> Commit:
        """Takes in one row; returns what is to be done to its states: nothing if its logits were no numbers."""
        request, residency, num_accepted = row.request, self._scheduler.residency, len(row.nodes) - 1
        residence, position = request.resident, request.num_computed_tokens
        request.is_verifying = False
        if not is_valid:
            return Commit(residence.row, residence.working_slot, row.nodes[:0])
        residency.order_kv(request, row.nodes, 1 + row.num_drafted)
        stop = position + len(row.nodes)
        request.num_computed_tokens = request.num_landed_tokens = stop
        self.counts.add(row.num_drafted, num_accepted)
        if self._scheduler.drafting is not None:
            self._scheduler.drafting.note(request, row.num_drafted, num_accepted)
        tracked = residency.track_within(request, position, stop)
        if tracked is None:
            return Commit(residence.row, residence.working_slot, row.nodes)
        return Commit(residence.row, residence.working_slot, row.nodes, tracked.state_slot, tracked.length - position)
