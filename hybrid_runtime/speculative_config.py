"""The options of speculative decoding."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hybrid_runtime.field_checks import invalid, normalize_integers, require_bool, require_choice, require_int

METHODS = ("mtp", "ngram")
ROLLBACKS = ("fold", "replay", "snapshot")
MAX_NUM_DRAFT_TOKENS = 64  # what the tree forms of the operations hold
DEFAULT_TREE_SIZE = 16  # one tile of a matrix product; the 36 candidates of topk 4, num_steps 3 are mostly poor ones


def max_num_draft_tokens(topk: int, num_steps: int) -> int:
    """Nodes of the largest draft tree, the root included: the first step gives `topk`, each later one `topk²`."""
    return 1 + topk + (num_steps - 1) * topk**2


@dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are drafted and how what was rejected is rolled back; never written to afterwards.

    Raises ValueError, naming the field and the value, for a value of the wrong type or out of range.

    Fields:
    method: "mtp": a head that predicts from the target's hidden states and its committed KV; "ngram": what followed the
        latest earlier occurrence of the last tokens, in the prompt or the output; needs no weights
    num_steps: tokens that the longest path of a draft has
    topk: branches; 1 drafts a chain, more a tree
    num_draft_tokens: nodes of one verify, the root (the last sampled token) included; None: `tree_size` says how many
    rollback: "fold": no states of nodes are kept, the accepted path is folded into the state; "replay": the accepted
        tokens run again; "snapshot": the state after each node is kept
    mtp_path: a safetensors file of the head; None: the checkpoint's own. For "mtp" only
    ngram_min, ngram_max: how many of the last tokens are looked up, at least and at most. For "ngram" only
    adaptive: a request whose drafts keep failing drafts less
    """

    method: str
    num_steps: int = 3
    topk: int = 1
    num_draft_tokens: int | None = None
    rollback: str = "fold"
    mtp_path: str | os.PathLike[str] | None = None
    ngram_min: int = 2
    ngram_max: int = 4
    adaptive: bool = True

    def __post_init__(self) -> None:
        require_choice("method", self.method, METHODS)
        require_choice("rollback", self.rollback, ROLLBACKS)
        for name in ("num_steps", "topk"):
            require_int(name, getattr(self, name), minimum=1, maximum=MAX_NUM_DRAFT_TOKENS - 1)
        if self.num_draft_tokens is not None:
            require_int("num_draft_tokens", self.num_draft_tokens, minimum=2, maximum=MAX_NUM_DRAFT_TOKENS)
        for name in ("ngram_min", "ngram_max"):
            require_int(name, getattr(self, name), minimum=1)
        require_bool("adaptive", self.adaptive)
        self._check_mtp_path()
        normalize_integers(self)
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min={self.ngram_min} is more than ngram_max={self.ngram_max}")
        self._check_tree()

    def _check_mtp_path(self) -> None:
        if isinstance(self.mtp_path, os.PathLike):
            object.__setattr__(self, "mtp_path", os.fspath(self.mtp_path))
        if self.mtp_path is None:
            return
        if not isinstance(self.mtp_path, str) or not self.mtp_path or "\0" in self.mtp_path:
            raise invalid("mtp_path", self.mtp_path, "must be a path or None")
        if self.method != "mtp":
            raise ValueError(f"mtp_path={self.mtp_path!r} needs method='mtp', which is {self.method!r}")

    def _check_tree(self) -> None:
        largest = max_num_draft_tokens(self.topk, self.num_steps)
        if self.num_draft_tokens is not None and self.num_draft_tokens > largest:
            raise ValueError(
                f"num_draft_tokens={self.num_draft_tokens} is more than a tree of topk={self.topk}, "
                f"num_steps={self.num_steps} has: 1 + {self.topk} + ({self.num_steps} - 1) * {self.topk}² = {largest}"
            )

    @property
    def tree_size(self) -> int:
        """Nodes of one verify, the root included: `num_draft_tokens`, or what it stands for when None.

        A chain has all its steps. A tree has the best `DEFAULT_TREE_SIZE` nodes, or all where there are fewer.
        """
        if self.num_draft_tokens is not None:
            return self.num_draft_tokens
        largest = max_num_draft_tokens(self.topk, self.num_steps)
        return largest if self.topk == 1 else min(largest, DEFAULT_TREE_SIZE)
