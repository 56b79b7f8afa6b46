"""Prompts, options and short forms for the tests that drive a runtime by its public methods."""

from __future__ import annotations

from typing import Any

from hybrid_runtime import HybridRuntime, RequestOutput

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "max_model_len": 100,
    "num_kv_slots": 400,
    "num_state_slots": 14,
    "debug_checks": True,
    "compile": "off",
}
LONG: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [5, 6, 7, 13], [14]]
LONG_PROMPT = [3 + i % 140 for i in range(60)]  # four steps of prefill


def drain(rt: HybridRuntime) -> dict[str, list[RequestOutput]]:
    """Steps until nothing is left; returns what was delivered, by request."""
    delivered: dict[str, list[RequestOutput]] = {}
    while rt.has_unfinished:
        for output in rt.step():
            delivered.setdefault(output.request_id, []).append(output)
    return delivered


def token_ids_of(output: RequestOutput) -> tuple[int, ...]:
    """The token ids of the first sample; unlike `helpers.tokens_of`, of one output, however it ended."""
    return output.outputs[0].token_ids


def reason_of(output: RequestOutput) -> str | None:
    return output.outputs[0].finish_reason


def num_queued(rt: HybridRuntime) -> int:
    scheduler = rt.stats().scheduler
    return scheduler.num_waiting + scheduler.num_running
