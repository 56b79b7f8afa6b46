"""Warm prompts: everything of theirs is skipped afterwards, in tokens and in text, and nothing else has happened."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hybrid_runtime import HybridRuntime
from hybrid_runtime.engine import runner
from hybrid_runtime.engine.prompts import read_prompts_file
from hybrid_runtime.text.chat import stable_prompt_length
from tests.engine.cache_content import assert_content, num_computed, states_of
from tests.engine.chat_tokenizer import SYSTEM, chat_tokenizer, ids_of
from tests.engine.helpers import MIXER_KINDS, assert_idle, greedy, random_tokens, runtime_of, solo_tokens, tokens_of
from tests.engine.loop_helpers import drain

SEAMS = [
    ("it'l", "l be fine"),
    (SYSTEM, " And so on."),
    (SYSTEM + " 12", "345"),
    (SYSTEM + "  ", "  two"),
    (SYSTEM + "\n", "\n\nthe cat"),
    (SYSTEM + "<|im_en", "d|>\n"),
    ("the   <|im_", "end|>the"),
    (SYSTEM + "<|im_end|>", "the"),
]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(81)


def hit(rt: HybridRuntime, prompt: list[int] | str) -> tuple[int, str | None]:
    output = rt.generate(prompt, greedy(1))[0]
    return output.num_cached_tokens, output.checkpoint_origin


@pytest.mark.parametrize("kind", MIXER_KINDS)
@pytest.mark.parametrize(
    ("length", "budget"), [(1, 2048), (2, 2048), (40, 2048), (64, 2048), (65, 64), (130, 16), (12, 1)]
)
def test_what_starts_with_a_warm_prompt_hits_all_of_it(
    kind: str, length: int, budget: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An equal prompt hits all but one token. Nothing is sampled for that, and it takes no more than the tokens."""
    prompt = random_tokens(rng, length)
    longer = [*prompt, *random_tokens(rng, 7)]
    with runtime_of(kind, max_num_batched_tokens=budget) as rt:
        with monkeypatch.context() as patch:
            patch.setattr(runner, "SampledToken", None)
            rt.warmup(prompt)
        assert not rt.has_unfinished
        assert rt.step() == []
        assert rt.stats().state.in_use == rt.stats().kv.in_use == 0
        assert num_computed(rt) == length
        assert rt.stats().cache.num_requests == 0
        assert states_of(rt) == {n: "hint" for n in (length - 1, length) if n}
        assert_content(rt)
        outputs = rt.generate([longer, prompt], greedy(3))
        hits = [(output.num_cached_tokens, output.checkpoint_origin) for output in outputs]
        assert hits == [(length, "hint"), (length - 1, "hint" if length > 1 else None)]
        assert tokens_of(outputs) == solo_tokens(kind, [longer, prompt], [3, 3])
        assert_idle(rt)


@pytest.mark.parametrize("with_start_token", [False, True])
@pytest.mark.parametrize(("text", "continuation"), SEAMS)
def test_a_text_that_goes_on_hits_up_to_the_stable_border(text: str, continuation: str, with_start_token: bool) -> None:
    tokenizer = chat_tokenizer(with_start_token=with_start_token)
    stable = stable_prompt_length(tokenizer, text)
    before = ids_of(text, with_start_token=with_start_token)
    after = ids_of(text + continuation, with_start_token=with_start_token)
    assert after[:stable] == before[:stable]
    with runtime_of("kda", tokenizer=tokenizer) as rt:
        rt.warmup(text)
        assert states_of(rt) == {n: "hint" for n in sorted({stable, len(before) - 1, len(before)}) if n}
        output = rt.generate(text + continuation, greedy(3))[0]
        is_extended = after[: len(before)] == before
        assert output.num_cached_tokens >= (len(before) if is_extended else stable)
        assert tokens_of([output]) == solo_tokens("kda", [after], [3])
        rt.reset_prefix_cache()
        rt.warmup(text)
        assert hit(rt, text) == (len(before) - 1, "hint")
        assert_idle(rt)


def test_several_that_share_their_beginnings(rng: np.random.Generator) -> None:
    """Nothing is computed twice, and each is warm afterwards."""
    first = random_tokens(rng, 90)
    prompts = [first, first[:60], [*first[:50], *random_tokens(rng, 40)], [*first, *random_tokens(rng, 9)], first]
    with runtime_of("kda", max_num_batched_tokens=32) as rt:
        rt.warmup(prompts)
        assert num_computed(rt) <= 90 + 1 + 40 + 9 + 1
        assert_content(rt)
        for prompt in prompts:
            assert hit(rt, [*prompt, 3, 4])[0] >= len(prompt)
            assert hit(rt, prompt)[0] == len(prompt) - 1
        assert_idle(rt)


def test_warming_up_again_costs_a_token_each(rng: np.random.Generator) -> None:
    prompts: list[str | list[int]] = [SYSTEM, random_tokens(rng, 40), random_tokens(rng, 1)]
    with runtime_of("kda", tokenizer=chat_tokenizer()) as rt:
        rt.warmup(prompts)
        nodes = {node.length for node in rt.prefix_cache.nodes()}
        computed, in_tree = num_computed(rt), rt.stats().state.cached
        rt.warmup(prompts)
        assert num_computed(rt) - computed == 3
        assert rt.stats().state.cached == in_tree
        assert {node.length for node in rt.prefix_cache.nodes()} == nodes
        assert_idle(rt)


def test_a_prompt_that_a_request_has_left_already(rng: np.random.Generator) -> None:
    prompt = random_tokens(rng, 40)
    with runtime_of("kda") as rt:
        rt.generate([*prompt, *random_tokens(rng, 20)], greedy(4))
        rt.generate(prompt, greedy(4))
        rt.warmup(prompt)
        assert hit(rt, [*prompt, 3, 4]) == (40, "hint")
        assert_idle(rt)


def test_while_others_run(rng: np.random.Generator) -> None:
    """Their outputs are kept for `step()`, and both have the right tokens."""
    prompts, warm = [random_tokens(rng, length) for length in (30, 50)], random_tokens(rng, 60)
    with runtime_of("mamba2", max_num_batched_tokens=20) as rt:
        ids = [rt.add_request(prompt, greedy(12)) for prompt in prompts]
        rt.step()
        rt.warmup(warm)
        rt.warmup(warm)  # one token now: a row among those that decode
        assert rt.has_unfinished
        assert hit(rt, [*warm, 3, 4]) == (60, "hint")
        delivered = drain(rt)
        assert delivered.keys() == set(ids)
        outputs = [delivered[request_id][-1] for request_id in ids]
        assert tokens_of(outputs) == solo_tokens("mamba2", prompts, [12, 12])
        assert_idle(rt)


def test_with_no_room_for_more_than_the_last_state(rng: np.random.Generator) -> None:
    prompt = random_tokens(rng, 40)
    with runtime_of("kda", num_state_slots=1, max_num_seqs=1) as rt:
        rt.warmup(prompt)
        assert states_of(rt) == {40: "hint"}
        assert rt.stats().cache.num_skipped_checkpoints == {"hint": 1}
        assert_idle(rt)


def test_what_is_refused_is_refused_before_anything_is_queued(rng: np.random.Generator) -> None:
    good = random_tokens(rng, 10)
    with runtime_of("kda", max_model_len=50) as rt:
        for bad in ([], [good, []], [good, [-1]], [good, [10**6]], [good, [3] * 50], "text", [good, None], None, 5):
            with pytest.raises(ValueError, match=r"prompt|token"):
                rt.warmup(bad)  # type: ignore[arg-type]
            assert not rt.has_unfinished
            assert rt.stats().scheduler.num_waiting == 0
        assert rt.prefix_cache.num_nodes == 0
    with pytest.raises(RuntimeError, match="closed"):
        rt.warmup(good)
    with (
        runtime_of("kda", enable_prefix_cache=False) as rt,
        pytest.raises(ValueError, match="enable_prefix_cache"),
    ):
        rt.warmup(good)


def test_a_forward_that_fails_is_an_error(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other prompts are warm, the requests beside it go on, and the next warm-up works."""
    bad, good, other = ([3, *random_tokens(rng, 30)], [4, *random_tokens(rng, 30)], [5, *random_tokens(rng, 30)])
    with runtime_of("kda") as rt:
        request_id = rt.add_request(other, greedy(6))
        prefill = rt.model.prefill

        def fail(inputs: object, memory: object) -> torch.Tensor:
            if (inputs.token_ids_L[inputs.positions_L == 0] == 3).any():  # type: ignore[attr-defined]
                raise RuntimeError("planted")
            return prefill(inputs, memory)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(rt.model, "prefill", fail)
            with pytest.raises(RuntimeError, match="planted"):
                rt.warmup([bad, good])
        assert hit(rt, [*good, 3]) == (31, "hint")
        rt.warmup(bad)
        assert hit(rt, [*bad, 3]) == (31, "hint")
        assert tokens_of(drain(rt)[request_id][-1:]) == solo_tokens("kda", [other], [6])
        assert_content(rt)
        assert_idle(rt)


def test_a_prompts_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    for prompts in (["the cat", "über 🚀"], [[5, 6], "the"], [[7]], []):
        path.write_text(json.dumps(prompts), encoding="utf-8")
        assert read_prompts_file(path) == read_prompts_file(str(path)) == prompts


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '"the cat"',
        "5",
        "null",
        '{"prompts": []}',
        "[5, 6]",
        '["the", 5]',
        "[null]",
        b"\xff\xfe[",
        "[" * 100_000,
    ],
)
def test_a_file_of_something_else(content: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"prompts\.json"):
        read_prompts_file(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_prompts_file(tmp_path / "none.json")


@pytest.mark.parametrize("with_start_token", [False, True])
def test_a_text_that_a_request_has_left_already(with_start_token: bool) -> None:
    """Its states lie behind the stable border: the warm-up starts again before that, and leaves one there."""
    tokenizer = chat_tokenizer(with_start_token=with_start_token)
    text, continuation = SYSTEM + "<|im_en", "d|>\n"
    stable, length = stable_prompt_length(tokenizer, text), len(ids_of(text, with_start_token=with_start_token))
    assert 0 < stable < length - 1
    with runtime_of("kda", tokenizer=tokenizer) as rt:
        rt.generate(text, greedy(4))
        rt.warmup(text)
        assert states_of(rt) == {stable: "hint", length - 1: "tail", length: "hint", length + 3: "final"}
        assert hit(rt, text + continuation) == (stable, "hint")
        computed = num_computed(rt)
        rt.warmup(text)
        assert num_computed(rt) - computed == 1
        assert_content(rt)
        assert_idle(rt)
