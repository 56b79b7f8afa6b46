"""Puts the parts of speculative decoding together: rollback, records, drafter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from hybrid_runtime.engine.mtp_drafter import CompiledDraftStep, EagerDraftStep, MtpDrafter
from hybrid_runtime.engine.steps import SpeculativeSteps
from hybrid_runtime.graphs.step_inputs import StepMemory
from hybrid_runtime.memory.records import RecordPlan
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.models.mtp import MTP_FILE, MtpHead, load_mtp
from hybrid_runtime.models.rollback import ROLLBACKS, Rollback
from hybrid_runtime.speculative.draft import Drafter
from hybrid_runtime.speculative.ngram import NgramDrafter
from hybrid_runtime.speculative_config import SpeculativeConfig


@dataclass(frozen=True)
class SpeculationPlan:
    """What a runtime speculates with.

    `head`: the drafter's, for method "mtp". `drafter`: one that its user brought; it takes the place of the method's.
    """

    config: SpeculativeConfig
    head: MtpHead | None = None
    drafter: Drafter | None = None

    @classmethod
    def load(
        cls, config: SpeculativeConfig, model: HybridModel, folder: Path | None, drafter: Drafter | None
    ) -> SpeculationPlan:
        """With the head that the config or the checkpoint's `folder` names, if one is needed.

        Raises FileNotFoundError if it is not there, ValueError if there is no place to look for it, or if it or `topk`
        does not fit the model.
        """
        if drafter is not None or config.method != "mtp":
            return cls(config, drafter=drafter)
        if config.mtp_path is None and folder is None:
            raise ValueError(
                "speculative.method='mtp' needs a head: give speculative.mtp_path, or a checkpoint folder that holds "
                f"{MTP_FILE}; method='ngram' needs none"
            )
        if config.topk > model.spec.vocab_size:
            raise ValueError(f"speculative.topk={config.topk} exceeds the vocabulary of {model.spec.vocab_size} tokens")
        path = Path(config.mtp_path) if config.mtp_path is not None else (folder or Path()) / MTP_FILE
        return cls(config, load_mtp(path, model))

    @property
    def rollback(self) -> Rollback:
        return ROLLBACKS[self.config.rollback]

    def records(self, model: HybridModel, state_dtype: torch.dtype, max_num_seqs: int) -> RecordPlan:
        """What verifies note down, for all rows and the padding row."""
        layers = model.record_layers(self.config.tree_size, self.rollback, state_dtype)
        return RecordPlan(layers, max_num_seqs + 1, self.rollback.shared_records)

    def steps_for(self, model: HybridModel, num_rows: int) -> SpeculativeSteps:
        """What the steps need; call it where tensors may be made that are written in any mode."""
        hidden_RD = None
        if self.drafter is None and self.head is not None:
            size = (num_rows, model.spec.hidden_size)
            hidden_RD = torch.zeros(size, dtype=model.dtype, device=model.device)
        return SpeculativeSteps(self.rollback, self.config.tree_size, hidden_RD)

    def make_drafter(
        self, model: HybridModel, memory: StepMemory, steps: SpeculativeSteps, *, compiles: bool
    ) -> Drafter:
        """The drafter, for a model in the forms that its steps run. `compiles`: whether these are compiled."""
        config = self.config
        if self.drafter is not None:
            return self.drafter
        if config.method == "ngram":
            return NgramDrafter(
                min_ngram=config.ngram_min,
                max_ngram=config.ngram_max,
                topk=config.topk,
                num_steps=config.num_steps,
                num_nodes=config.tree_size - 1,
            )
        assert self.head is not None
        assert steps.hidden_RD is not None
        head = self.head.with_target(model)
        make_step = CompiledDraftStep if compiles and model.device.type == "cpu" else EagerDraftStep
        return MtpDrafter(
            make_step(head, memory, config.topk),
            steps.hidden_RD,
            topk=config.topk,
            num_steps=config.num_steps,
            max_nodes=config.tree_size - 1,
        )
