"""How a request chooses its tokens and when it stops. Names and defaults are vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hybrid_runtime.field_checks import (
    INT64_MAX,
    invalid,
    normalize_integers,
    require_bool,
    require_int,
    require_known,
    require_number,
)

MAX_SAMPLES = 16384  # of one prompt, as in vLLM
_SHORTHANDS = {"max_new_tokens": "max_tokens"}


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options of one request; they are checked once, here.

    `stop` may be given as one string or several, `stop_token_ids` and `checkpoint_positions` as any collection; all
    are kept as tuples, and `logit_bias` as a copy. Raises ValueError, naming the field and the value, for a value of
    the wrong type or out of range, for duplicates, and for what cannot be meant (`min_tokens > max_tokens`, several
    greedy samples).

    Fields:
    max_tokens: new tokens at most; None: until the context is full
    min_tokens: no stop token before that many; stop strings are not looked for either
    temperature: divides the logits; 0: greedy
    top_k: keep that many of the most likely tokens; 0 or -1: all
    top_p: keep the most likely tokens whose probabilities add up to it
    min_p: keep tokens at least this many times as likely as the most likely one
    n: samples of the same prompt
    seed: of the random draws; None: drawn from the runtime's
    stop: strings that end the output; not part of it unless `include_stop_str_in_output`
    stop_token_ids: tokens that end the output, beside the model's end-of-sequence tokens
    ignore_eos: go on behind an end-of-sequence token
    include_stop_str_in_output: keep the stop string, or the stop token's text
    presence_penalty: subtracted from the logits of tokens that the output has
    frequency_penalty: the same, times how often it has them
    repetition_penalty: divides positive logits, and multiplies negative ones, of tokens of prompt and output
    logit_bias: token id -> number added to its logit
    logprobs: that many most likely tokens beside the sampled one
    prompt_logprobs: the same for each token of the prompt; all of it is computed then
    checkpoint_positions: prompt lengths in tokens after which later prompts will part ways
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    checkpoint_positions: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_numbers()
        for name in ("ignore_eos", "include_stop_str_in_output"):
            require_bool(name, getattr(self, name))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        object.__setattr__(self, "checkpoint_positions", _checkpoint_positions(self.checkpoint_positions))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        normalize_integers(self)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            require_int("max_tokens", self.max_tokens, minimum=1)
        require_int("min_tokens", self.min_tokens, minimum=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid("min_tokens", self.min_tokens, f"must be at most max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), minimum=0)

    def _check_numbers(self) -> None:
        require_number("temperature", self.temperature, minimum=0.0)
        require_int("top_k", self.top_k, minimum=-1)
        require_number("top_p", self.top_p, minimum=0.0, maximum=1.0)
        if self.top_p == 0:
            raise invalid("top_p", self.top_p, "must be above 0")
        require_number("min_p", self.min_p, minimum=0.0, maximum=1.0)
        require_number("presence_penalty", self.presence_penalty, minimum=-2.0, maximum=2.0)
        require_number("frequency_penalty", self.frequency_penalty, minimum=-2.0, maximum=2.0)
        require_number("repetition_penalty", self.repetition_penalty, minimum=0.0)
        if self.repetition_penalty == 0:
            raise invalid("repetition_penalty", self.repetition_penalty, "must be above 0")
        if self.seed is not None:
            require_int("seed", self.seed, minimum=-INT64_MAX - 1, maximum=INT64_MAX)
        require_int("n", self.n, minimum=1, maximum=MAX_SAMPLES)
        if self.n > 1 and self.temperature == 0:
            raise invalid("n", self.n, "must be 1 with temperature 0, whose samples are all the same")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken instead of a random one."""
        return self.temperature == 0

    @property
    def has_penalty(self) -> bool:
        """Whether tokens that occurred count for or against themselves."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def only_draws(self) -> bool:
        """Whether the next token is drawn from the model's own logits, and nothing else is asked for."""
        return not self.has_penalty and not self.logit_bias and self.logprobs is None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it is kept: a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @classmethod
    def from_kwargs(cls, base: SamplingParams | None, kwargs: Mapping[str, Any]) -> SamplingParams:
        """`base` (None: the defaults) with some fields replaced; `max_new_tokens` is another name of `max_tokens`.

        Raises ValueError for a name that is no field, and for a field that is given under both of its names.
        """
        if not (base is None or isinstance(base, SamplingParams)):
            raise invalid("sampling_params", base, "must be a SamplingParams or None")
        require_known(kwargs, [*(field.name for field in dataclasses.fields(cls)), *_SHORTHANDS], "SamplingParams")
        changes = {name: value for name, value in kwargs.items() if name not in _SHORTHANDS}
        for shorthand in _SHORTHANDS.keys() & kwargs.keys():
            field = _SHORTHANDS[shorthand]
            if field in changes:
                raise ValueError(
                    f"{field} is given twice: {changes[field]!r}, and as {shorthand} {kwargs[shorthand]!r}"
                )
            changes[field] = kwargs[shorthand]
        params = cls() if base is None else base
        return dataclasses.replace(params, **changes) if changes else params

    def validate_for_vocab(self, vocab_size: int) -> None:
        """Raises ValueError for a token id outside `0..vocab_size - 1`, or for more logprobs than there are tokens."""
        for name in ("stop_token_ids", "logit_bias"):
            for token_id in getattr(self, name) or ():
                if token_id >= vocab_size:
                    raise invalid(name, token_id, f"must name tokens below the vocabulary's size {vocab_size}")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise invalid(name, getattr(self, name), f"must be at most the vocabulary's size {vocab_size}")

    def validate_for_prompt(self, prompt_len: int) -> None:
        """Raises ValueError for a checkpoint position behind the end of a prompt of `prompt_len` tokens."""
        for length in self.checkpoint_positions:
            if length > prompt_len:
                raise invalid("checkpoint_positions", length, f"must be at most the prompt's {prompt_len} tokens")


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else _as_tuple("stop", () if stop is None else stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise invalid("stop", stop, "must be non-empty strings")
    _require_distinct("stop", strings)
    return strings


def _stop_token_ids(token_ids: object) -> tuple[int, ...]:
    ids = _as_tuple("stop_token_ids", () if token_ids is None else token_ids)
    for token_id in ids:
        require_int("stop_token_ids", token_id, minimum=0)
    _require_distinct("stop_token_ids", ids)
    return tuple(int(token_id) for token_id in ids)


def _checkpoint_positions(positions: object) -> tuple[int, ...]:
    lengths = _as_tuple("checkpoint_positions", positions)
    for length in lengths:
        require_int("checkpoint_positions", length, minimum=1)
    _require_distinct("checkpoint_positions", lengths)
    return tuple(int(length) for length in lengths)


def _logit_bias(logit_bias: object) -> dict[int, float]:
    if not isinstance(logit_bias, Mapping):
        raise invalid("logit_bias", logit_bias, "must map token ids to numbers")
    for token_id, bias in logit_bias.items():
        require_int("logit_bias", token_id, minimum=0)
        require_number(f"logit_bias[{token_id}]", bias, minimum=-100.0, maximum=100.0)
    return {int(token_id): float(bias) for token_id, bias in logit_bias.items()}


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise invalid(name, value, "must be a sequence")
    return tuple(value)


def _require_distinct(name: str, values: tuple[Any, ...]) -> None:
    if len(set(values)) < len(values):
        raise invalid(name, values, "must not contain duplicates")
