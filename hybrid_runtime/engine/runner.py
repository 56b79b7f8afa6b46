"""Runs prepared steps on the device and reads back what the host needs.

Shapes: B rows, S sequences, M tokens whose logits are wanted, V vocabulary, R rows of the request table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybrid_runtime.engine.batches import Indices, ScoredSpan, to_device
from hybrid_runtime.engine.commits import Commit, Commits
from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.engine.prepared import PreparedDecode, PreparedPrefill, PreparedStep, SampledRows, prepare_step
from hybrid_runtime.engine.ranges import Range
from hybrid_runtime.engine.results import (
    ForwardResult,
    RankedLogprobs,
    SampledToken,
    ScoredToken,
    VerifiedBatch,
    rank_logprobs,
)
from hybrid_runtime.engine.speculation import SpeculationPlan
from hybrid_runtime.engine.step_runners import commit_runner, decode_runner, verify_runner
from hybrid_runtime.engine.steps import EagerSteps, StepOutputs, Steps, VerifyOutputs
from hybrid_runtime.engine.verify_batch import PreparedVerify
from hybrid_runtime.engine.verifying import LaunchedVerify
from hybrid_runtime.graphs.commit_runner import CommitRunner
from hybrid_runtime.graphs.decode_runner import MODEL_FIELDS
from hybrid_runtime.graphs.read_back import ReadBack
from hybrid_runtime.graphs.step_inputs import CommitInputs, draw_inputs
from hybrid_runtime.graphs.verify_runner import VerifyRunner
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.ops.ragged import DEFAULT_CHUNK_SIZE
from hybrid_runtime.sampling import GatheredLogprobs, SamplingInputs, gather_logprobs, sample
from hybrid_runtime.scheduling.request import Request
from hybrid_runtime.scheduling.scheduler import ScheduledStep

_ROWS = MODEL_FIELDS.index("request_rows_B")


@dataclass(frozen=True)
class LaunchedForward:
    """The results of one forward, which may still be on their way."""

    requests: tuple[Request, ...]  # [B]
    is_invalid_B: ReadBack  # bool
    sampled: SampledRows
    token_ids_B: ReadBack | None  # of the sampled rows; None: there are none
    logprobs: GatheredLogprobs | None  # of the sampled rows, if one wants any
    scored: tuple[tuple[ScoredSpan, GatheredLogprobs], ...]

    def wait(self) -> ForwardResult:
        """Reads the results back."""
        [is_invalid_B] = self.is_invalid_B.wait()
        flagged = zip(self.requests, is_invalid_B.tolist(), strict=True)
        invalid = frozenset(request for request, is_invalid in flagged if is_invalid)
        scored = [token for span, gathered in self.scored for token in _scored_tokens(span, gathered)]
        return ForwardResult(
            [token for token in self._sampled_tokens() if token.request not in invalid],
            [token for token in scored if token.request not in invalid],
            invalid,
        )

    def _sampled_tokens(self) -> list[SampledToken]:
        if self.token_ids_B is None:
            return []
        requests = self.sampled.requests
        logprobs: list[RankedLogprobs | None] = [None] * len(requests)
        if self.logprobs is not None:
            wanted = [request.params.logprobs for request in requests]
            ranked = rank_logprobs(self.logprobs, [count or 0 for count in wanted])
            logprobs = [entry if count is not None else None for entry, count in zip(ranked, wanted, strict=True)]
        [token_ids_B] = self.token_ids_B.wait()
        return [SampledToken(*fields) for fields in zip(requests, token_ids_B.tolist(), logprobs, strict=True)]


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose work has been handed to the device."""

    forwards: tuple[LaunchedForward | LaunchedVerify, ...]

    def wait(self) -> list[ForwardResult]:
        """The results, of the prefill first. Blocks until they are there."""
        return [forward.wait() for forward in self.forwards]


class ModelRunner:
    """Owns no request state: everything comes with the prepared step, but for the token chosen last for each row."""

    def __init__(
        self,
        model: HybridModel,
        memory: EngineMemory,
        *,
        make_steps: Callable[..., Steps] = EagerSteps,
        speculation: SpeculationPlan | None = None,
    ) -> None:
        """`make_steps(model, step_memory, last_token_R, speculative_steps)` makes the forwards."""
        self.model = model
        self.memory = memory
        self.num_prefill_forwards = 0
        self.num_decode_forwards = 0
        self.num_verify_forwards = 0
        num_rows = len(memory.table.slots)
        with torch.inference_mode(False):  # as the pools: writable in either mode
            self.last_token_R = torch.zeros(num_rows, dtype=torch.int64, device=model.device)
            self.speculative = None if speculation is None else speculation.steps_for(model, num_rows)
        # What is compiled is kept, and must not depend on modes that happen to be on around this call.
        with torch.inference_mode(False), self._autocast_off():
            self.steps = make_steps(model, memory.step_memory, self.last_token_R, self.speculative)
        is_lazy = self.speculative is not None and self.speculative.rollback.is_lazy
        # Paths are handed over on the host: the runner of commits is who takes them to the device.
        self.commits = Commits(self._run_commit, torch.device("cpu"), is_lazy=is_lazy)
        max_batch, device = num_rows - 1, model.device
        self._decode_runner = decode_runner(self.steps, max_batch, device)
        self._verify_runner: VerifyRunner | None = None
        self._commit_runner: CommitRunner | None = None
        if self.speculative is not None:
            sizes = (self.steps, self.speculative, max_batch, device)
            self._verify_runner = verify_runner(lambda inputs, draw: self.steps.verify(inputs, draw), *sizes)
            self._commit_runner = commit_runner(lambda inputs: self.steps.commit(inputs), *sizes)

    def prepare(self, step: ScheduledStep) -> PreparedStep:
        """Everything that the device needs for a step. Host only; reads requests and table, which may change then."""
        copy_table = not self.memory.table_is_shared
        return prepare_step(step, self.memory.table, copy_table=copy_table, tree_size=self.steps.tree_size)

    def launch(self, prepared: PreparedStep) -> LaunchedStep:
        """Hands a step to the device, in the order of its stream: table, working slots, prefill, decode, checkpoints.

        Writes the KV of all tokens, the working slots and the checkpoints' slots. A decode row whose token was not
        known on the host takes the one that the device chose last for it.
        """
        with Range("load"):
            if prepared.table_entries is not None:
                self.memory.load_table(prepared.table_entries)
        self.commits.catch_up()
        with Range("copy"):
            pool = self.memory.state_pool
            if prepared.copies is not None:
                pool.copy(self._indices(prepared.copies.sources), self._indices(prepared.copies.destinations))
            if prepared.clears is not None:
                pool.clear(self._indices(prepared.clears))
        forwards: list[LaunchedForward | LaunchedVerify] = []
        if prepared.prefill is not None:
            with Range("run.prefill"):
                forwards.append(self._prefill(prepared.prefill))
        if prepared.decode is not None:
            with Range(f"run.decode.b{len(prepared.decode.requests)}"):
                forwards.append(self._decode(prepared.decode))
        if prepared.verify is not None:
            num_rows, num_nodes = prepared.verify.batch.token_ids_BT.shape
            with Range(f"run.verify.b{num_rows}.t{num_nodes}"):
                forwards.append(self._verify(prepared.verify))
        return LaunchedStep(tuple(forwards))

    def commit(self, batch: VerifiedBatch, commits: Sequence[Commit]) -> None:
        """After a verify: has the states behind the accepted paths written, and keeps what the next draft reads.

        `commits` are those of all rows of the verify, in its order.
        """
        self.commits.add(commits)
        speculative = self.speculative
        assert speculative is not None
        if speculative.hidden_RD is not None:
            num_nodes = batch.hidden_ND.shape[0] // len(commits)
            live = [(place, commit) for place, commit in enumerate(commits) if len(commit.nodes)]
            last = np.array([place * num_nodes + int(commit.nodes[-1]) for place, commit in live], dtype=np.int64)
            of_rows = np.array([commit.request_row for _, commit in live], dtype=np.int64)
            speculative.hidden_RD.index_put_((self._indices(of_rows),), batch.hidden_ND[self._indices(last)])

    def close(self) -> None:
        """Lets go of pools, packed weights and compiled code; nothing can be launched afterwards."""
        for name in ("model", "steps", "_decode_runner", "_verify_runner", "_commit_runner"):
            self.__dict__.pop(name, None)  # it may be called again, after an interrupt

    def repack_weights(self) -> None:
        """Brings the packed copies of weights up to date, after the weights were changed in place."""
        self.model.repack()

    def _prefill(self, prefill: PreparedPrefill) -> LaunchedForward:
        """One forward over all chunks.

        The logits behind a chunk's last token tell whether the chunk is sound, even where no token is sampled from
        them: it has seen all the KV and the state that may be kept.
        """
        batch = prefill.batch
        inputs = batch.to_device(self.model.device, chunk_size=DEFAULT_CHUNK_SIZE)
        self.num_prefill_forwards += 1
        with self._autocast_off():
            outputs = self.steps.prefill(inputs, draw_inputs(self._indices(batch.draw_FM)))
        scored = tuple((span, self._score(outputs.logits_BV, span)) for span in batch.scored)
        if batch.scored:
            last_rows_S = self._indices(batch.last_rows_S)
            outputs = StepOutputs(*(output[last_rows_S] for output in outputs))
        return self._choose(outputs, batch.request_rows_S, prefill.requests, prefill.sampled, scored)

    def _decode(self, decode: PreparedDecode) -> LaunchedForward:
        """One forward over one token of each row; checkpoints that are due get copies of the updated states."""
        self.num_decode_forwards += 1
        with self._autocast_off():
            outputs = StepOutputs(*self._decode_runner.run(decode.fields_FB))
        due = decode.checkpoints
        if due is not None:
            self.memory.state_pool.copy(self._indices(due.sources), self._indices(due.destinations))
        return self._choose(outputs, decode.fields_FB[_ROWS], decode.requests, decode.sampled, ())

    def _verify(self, verify: PreparedVerify) -> LaunchedVerify:
        """One forward over the draft trees of all rows."""
        self.num_verify_forwards += 1
        assert self._verify_runner is not None
        with self._autocast_off():
            outputs = VerifyOutputs(*self._verify_runner.run(verify.batch.arrays()))
        token_ids_N = outputs.token_ids_N
        if verify.sampling is not None:
            nodes_M = torch.tensor(verify.sampling.nodes, device=self.model.device)
            logits_MV = outputs.logits_NV[nodes_M]
            options = SamplingInputs.build(verify.sampling.rows, logits_MV.shape[-1], logits_MV.device)
            chosen_M, _ = sample(logits_MV, options, token_ids_N[nodes_M], self.model.kernels.draw_tokens)
            token_ids_N = token_ids_N.index_put((nodes_M,), chosen_M)
        return LaunchedVerify(verify, outputs, token_ids_N, ReadBack(token_ids_N, outputs.is_invalid_N))

    def _run_commit(self, inputs: CommitInputs) -> None:
        assert self._commit_runner is not None
        with self._autocast_off():
            self._commit_runner.run(inputs)

    def _choose(
        self,
        outputs: StepOutputs,
        request_rows_B: Indices,
        requests: tuple[Request, ...],
        sampled: SampledRows,
        scored: tuple[tuple[ScoredSpan, GatheredLogprobs], ...],
    ) -> LaunchedForward:
        """Starts to read the results back, and does before what the step does not: change logits, find logprobs."""
        places, token_ids_B, logprobs = sampled.places, None, None
        if places:
            is_all = len(places) == len(requests)
            chosen = slice(None) if is_all else torch.tensor(places, device=self.model.device)
            token_ids_B = outputs.token_ids_B[chosen]
            if sampled.sampling is not None:
                logits_BV = outputs.logits_BV[chosen]
                options = SamplingInputs.build(sampled.sampling, logits_BV.shape[-1], logits_BV.device)
                drawn_B = token_ids_B
                token_ids_B, logprobs = sample(logits_BV, options, drawn_B, self.model.kernels.draw_tokens)
                if token_ids_B is not drawn_B:
                    self.last_token_R.index_put_((self._indices(request_rows_B)[chosen],), token_ids_B)
        return LaunchedForward(
            requests,
            ReadBack(outputs.is_invalid_B),
            sampled,
            None if token_ids_B is None else ReadBack(token_ids_B),
            logprobs,
            scored,
        )

    def _score(self, logits_MV: Tensor, span: ScoredSpan) -> GatheredLogprobs:
        rows = slice(span.first_row, span.first_row + len(span.token_ids))
        token_ids = torch.tensor(span.token_ids, device=logits_MV.device)
        return gather_logprobs(logits_MV[rows], token_ids, _num_prompt_logprobs(span))

    def _autocast_off(self) -> torch.autocast:
        """The dtypes are the runtime's business, whatever block of its user's the call stands in."""
        return torch.autocast(self.model.device.type, enabled=False)

    def _indices(self, values: Indices) -> Tensor:
        return to_device(values, self.model.device)


def _num_prompt_logprobs(span: ScoredSpan) -> int:
    return span.request.params.prompt_logprobs or 0


def _scored_tokens(span: ScoredSpan, gathered: GatheredLogprobs) -> list[ScoredToken]:
    ranked = rank_logprobs(gathered, [_num_prompt_logprobs(span)] * len(span.token_ids))
    return [ScoredToken(span.request, *fields) for fields in zip(span.token_ids, ranked, strict=True)]
