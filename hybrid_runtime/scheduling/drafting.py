"""What requests verify next: how many tokens each may draft, and the KV slots of what is drafted."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from hybrid_runtime.errors import PoolExhausted
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.scheduling.residency import Residency
from hybrid_runtime.speculative.adaptive import DraftBudget
from hybrid_runtime.speculative.draft import Draft, Drafter, DraftRow, Int32Array, check_drafts

_LOGGER = logging.getLogger(__name__)
_NO_DRAFT = Draft.chain(())


class Drafting:
    """Asks a drafter, within what each request may draft.

    That is never more than its output may still grow by, the request table has room for, the pools can give without a
    preemption, and, with `is_adaptive`, its drafts of late deserve.
    """

    def __init__(
        self, drafter: Drafter, residency: Residency, *, tree_size: int, is_adaptive: bool, vocab_size: int
    ) -> None:
        """`tree_size`: nodes of a tree at most, the root included."""
        self.drafter = drafter
        self.residency = residency
        self.tree_size = tree_size
        self.is_adaptive = is_adaptive
        self.vocab_size = vocab_size
        self.num_failures = 0

    def __call__(self, requests: Sequence[Request]) -> Mapping[Request, Draft]:
        """A draft of each, which may be empty. Takes the KV slots of the drafted nodes, for the request to own.

        A drafter that raises, or whose drafts are none, costs the step its drafts and no request anything.
        """
        rows = [DraftRow(r.resident.row, _read_only(r.tokens[:]), self._max_nodes(r)) for r in requests]
        if not any(row.max_nodes for row in rows):
            return dict.fromkeys(requests, _NO_DRAFT)
        try:
            drafts = self.drafter.draft(rows)
            if len(drafts) == len(rows) and not any(map(len, drafts)):  # what a lookup mostly finds costs little
                return dict.fromkeys(requests, _NO_DRAFT)
            check_drafts(drafts, rows, vocab_size=self.vocab_size, drafter=type(self.drafter).__name__)
        except Exception as error:  # the drafter's
            self.num_failures += 1
            if self.num_failures == 1:
                _LOGGER.error("a drafter failed; requests go on without drafts where it does", exc_info=error)
            return dict.fromkeys(requests, _NO_DRAFT)
        return self._within_slots(dict(zip(requests, drafts, strict=True)))

    def note(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Takes in how a draft fared; both counts are without the root."""
        if request.draft_budget is None:
            request.draft_budget = DraftBudget(self.tree_size - 1)
        request.draft_budget.record(num_drafted, num_accepted)

    def _max_nodes(self, request: Request) -> int:
        tokens, position = request.tokens, request.num_computed_tokens
        room = self.residency.table.slots.shape[1] - position - 1
        # The last token that is emitted is never a node.
        limit = min(self.tree_size - 1, room, tokens.max_len - len(tokens) - 1)
        if self.is_adaptive and request.draft_budget is not None:
            limit = min(limit, request.draft_budget.limit if request.draft_budget.is_due else 0)
        return max(0, limit)

    def _within_slots(self, drafts: Mapping[Request, Draft]) -> Mapping[Request, Draft]:
        """The beginnings of drafts that there are KV slots for. They have them afterwards."""
        supply = self.residency.supply
        num_left = supply.kv.num_free + supply.cache.num_evictable_kv
        found: dict[Request, Draft] = {}
        for request, draft in drafts.items():
            fits = len(draft) <= num_left
            found[request] = draft if fits else Draft(draft.token_ids[:num_left], draft.parents[:num_left])
            num_left -= len(found[request])
        try:
            slots = supply.take_kv(sum(map(len, found.values())))
        except PoolExhausted:  # what counts as evictable may be less together
            return dict.fromkeys(drafts, _NO_DRAFT)
        for request, draft in found.items():
            self.residency.extend(request, slots[: len(draft)])
            slots = slots[len(draft) :]
        return found


def _read_only(tokens: Int32Array) -> Int32Array:
    """A drafter that writes to the tokens fails, and the text stays what it is."""
    tokens.flags.writeable = False
    return tokens
