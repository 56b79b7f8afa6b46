"""`HybridRuntime`: the public face of the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from tqdm import tqdm

from hybrid_runtime.config import RuntimeConfig
from hybrid_runtime.engine.build import build_engine, start_building_kernels
from hybrid_runtime.engine.cache_file import load_cache, save_cache
from hybrid_runtime.engine.intake import RequestIntake
from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.engine.prompts import PromptLike
from hybrid_runtime.engine.request_factory import RequestFactory
from hybrid_runtime.engine.request_group import Prompt, RequestGroup
from hybrid_runtime.engine.speculation import SpeculationPlan
from hybrid_runtime.engine.stats import collect_stats
from hybrid_runtime.field_checks import invalid, require_int
from hybrid_runtime.inspection.view import PrefixCacheView
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.outputs import PrefixCacheFile, RequestOutput, RuntimeStats
from hybrid_runtime.sampling_params import SamplingParams
from hybrid_runtime.speculative.draft import Drafter
from hybrid_runtime.text.chat import ChatOptions, Message

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HybridRuntime:
    """Serves many requests at once on one hybrid model, reusing common prefixes of KV and recurrent states.

    `model`: a transformers model in memory (its parameters are shared, not copied), a checkpoint folder or hub id, or
    "tiny", the bundled checkpoint. Change its weights in place only, and call `reset_prefix_cache` then. `tokenizer`: a
    transformers tokenizer; by default the checkpoint's. `overrides` are fields of `RuntimeConfig`. Not safe for use
    from several threads at once.

    Raises ValueError for a wrong option or for pools that do not fit, UnsupportedModelError for an unknown
    architecture, FileNotFoundError for a missing folder.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | os.PathLike[str],
        config: RuntimeConfig | None = None,
        *,
        tokenizer: Any | None = None,
        drafter: Drafter | None = None,
        **overrides: Any,
    ) -> None:
        self.config = RuntimeConfig.with_overrides(config, overrides)
        if drafter is not None and not callable(getattr(drafter, "draft", None)):
            raise invalid("drafter", drafter, "must have a method draft(rows)")
        if drafter is not None and self.config.speculative is None:
            raise ValueError("a drafter needs speculative=SpeculativeConfig(...)")
        if tokenizer is not None and not hasattr(tokenizer, "decode"):
            raise invalid("tokenizer", tokenizer, "must be a transformers tokenizer")
        device = _device(self.config.device)
        if _is_at_hand(model):
            start_building_kernels(self.config, device)
        # Here: it imports transformers, which takes two seconds, and the compiler is at work meanwhile.
        from hybrid_runtime.models.loading import load_model

        dtype = None if self.config.dtype is None else getattr(torch, self.config.dtype)
        loaded = load_model(model, dtype, device, needs_tokenizer=tokenizer is None)
        self.model = loaded.hybrid_model
        self.tokenizer = tokenizer if tokenizer is not None else loaded.tokenizer
        speculation = None
        if self.config.speculative is not None:
            speculation = SpeculationPlan.load(self.config.speculative, self.model, loaded.folder, drafter)
        self.plan, self._engine = build_engine(self.config, self.model, self.tokenizer, speculation)
        self._intake = RequestIntake(
            self.tokenizer,
            RequestFactory(
                self.tokenizer,
                max_model_len=self.plan.max_model_len,
                eos_token_ids=frozenset(loaded.eos_token_ids),
                seed=self.config.seed,
            ),
            vocab_size=self.model.spec.vocab_size,
            max_model_len=self.plan.max_model_len,
            min_saving=self.config.min_saving,
            is_taken=self._is_known,
        )
        self._driven: set[str] = set()  # unfinished requests whose outputs `step()` delivers
        self._undelivered: dict[str, RequestGroup] = {}  # of those, what came up while another call drove the loop
        self._is_closed = False

    # Whole requests.

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Completes prompts; returns their outputs in order.

        `prompts`: a string, a list of token ids, or a list of either. `sampling_params`: one for all, or one per
        prompt; `sampling` replaces fields of it (`max_new_tokens` is another name of `max_tokens`). `use_tqdm` shows a
        progress bar. Requests that were added before run along; their outputs are kept for the next `step()`.

        Raises ValueError for bad input before anything is queued. An interrupt aborts these requests.
        """
        self._require_open()
        groups = self._intake.completions(prompts, sampling_params, sampling)
        return self._complete(groups, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Answers conversations; returns their outputs in order. Leaves checkpoints where their turns end.

        `messages`: a list of `{"role": ..., "content": ...}`, or a list of such lists. They become text by the
        tokenizer's chat template, or by `chat_template`; `tools` and `chat_template_kwargs` are passed on to it. The
        other arguments are those of `generate`. A conversation that goes on resumes at the end of the last answer if
        the template writes its text again and the tokenizer its tokens (special tokens around turns see to that), else
        at the last checkpoint before the first token that differs; another one with the same first turns, say a system
        message, at the end of these.

        Raises ValueError for bad input, a missing template, or messages that the template refuses.
        """
        self._require_open()
        options = ChatOptions(chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        groups = self._intake.chats(messages, options, sampling_params, sampling)
        return self._complete(groups, use_tqdm=use_tqdm)

    def warmup(self, prompts: PromptLike | Sequence[PromptLike]) -> None:
        """Computes prompts and leaves them in the prefix cache; nothing is sampled.

        Afterwards a request whose tokens start with one of them skips all its tokens; one that equals it all but the
        last, which must run. Where a request's text starts with that of a prompt, the tokens at the seam may be others;
        then all tokens are skipped that no continuation of the text could have changed. That holds as far as the pools
        have room for the prompts and for two or three states of each, and until these are evicted.

        Raises ValueError for bad input or without a prefix cache, RuntimeError if a prompt's forward fails.
        """
        self._require_open()
        if not self.config.enable_prefix_cache:
            raise ValueError("warmup needs enable_prefix_cache=True")
        for output in self._complete(self._intake.warmups(prompts), use_tqdm=False):
            if output.outputs[0].finish_reason == "error":
                raise RuntimeError(f"a warm-up prompt failed: {output.outputs[0].stop_reason}")

    def _complete(self, groups: Sequence[RequestGroup], *, use_tqdm: bool) -> list[RequestOutput]:
        """Runs requests until all have ended."""
        try:
            for group in groups:
                self._engine.add(group)
            with tqdm(total=len(groups), desc="requests", unit="request", disable=not use_tqdm) as bar:
                unfinished = groups
                while unfinished := [group for group in unfinished if not group.finished]:
                    self._advance()
                    if use_tqdm:
                        _show_progress(bar, groups)
        finally:
            self._abandon(groups)
        return [group.output() for group in groups]

    def stream(
        self, prompt: PromptLike, sampling_params: SamplingParams | None = None, **sampling: Any
    ) -> Generator[RequestOutput, None, None]:
        """Completes one prompt; yields an output per step that brought something, each holding only what is new.

        Bad input raises ValueError here; the request is queued when the first item is asked for. Closing the iterator
        aborts the request.
        """
        self._require_open()
        params = SamplingParams.from_kwargs(sampling_params, sampling)
        return self._stream(self._intake.check(prompt, params), params)

    # The engine loop, for those who drive it.

    def add_request(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **sampling: Any,
    ) -> str:
        """Queues one request; returns its id. A lower `priority` value is served earlier.

        Raises ValueError for bad input, and for an id that an unfinished or undelivered request has.
        """
        self._require_open()
        params = SamplingParams.from_kwargs(sampling_params, sampling)
        require_int("priority", priority, minimum=-(2**63), maximum=2**63 - 1)
        if request_id is not None:
            if not isinstance(request_id, str) or not request_id:
                raise invalid("request_id", request_id, "must be a non-empty string")
            if self._is_known(request_id):
                raise ValueError(f"request_id {request_id!r} is in use already")
        group = self._intake.new_group(self._intake.check(prompt, params), params, request_id, priority)
        self._driven.add(group.request_id)
        try:
            self._engine.add(group)
        except BaseException:
            self._driven.discard(group.request_id)
            self._abandon([group])
            raise
        return group.request_id

    def step(self) -> list[RequestOutput]:
        """One engine iteration; returns every request that has something new, with everything it has so far."""
        self._require_open()
        self._advance()
        groups = list(self._undelivered.values())
        outputs = [group.output() for group in groups]
        # What an interrupt finds here undone is delivered by the next call, as is what ended since it was looked at.
        self._driven -= {output.request_id for output in outputs if output.finished}
        self._undelivered = {
            group.request_id: group
            for group, output in zip(groups, outputs, strict=True)
            if group.finished and not output.finished
        }
        return outputs

    def abort(self, request_id: str) -> None:
        """Ends a request at any moment; what it computed stays in the cache.

        The next `step()` delivers it with `finish_reason="abort"`. An id that no unfinished request has is ignored.
        """
        self._require_open()
        if not isinstance(request_id, str):
            raise invalid("request_id", request_id, "must be a string")
        self._engine.abort(request_id)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step()` has something to do or to deliver."""
        return self._engine.has_unfinished or bool(self._undelivered)

    # Cache and counters.

    @property
    def prefix_cache(self) -> PrefixCacheView:
        """What is cached, to look at: counters, matches, and `render()`, which draws the tree as text and as a page."""
        return PrefixCacheView(lambda: self._engine.memory.cache, self.tokenizer)

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache. Raises RuntimeError while requests are running."""
        self._require_open()
        self._engine.reset_prefix_cache()

    def save_prefix_cache(self, path: str | os.PathLike[str]) -> PrefixCacheFile:
        """Writes all checkpoints and their KV, those of the host tier included, to one safetensors file.

        May be called while requests run. Raises OSError where the file cannot be written; an older one is left then.
        """
        return self._run_on_cache("save_prefix_cache()", save_cache, path, harmless=(BaseException,))

    def load_prefix_cache(self, path: str | os.PathLike[str]) -> PrefixCacheFile:
        """Adds what `save_prefix_cache` wrote to the cache, as far as there are free slots, the most useful first.

        Nothing that is cached is evicted for it; the host tier, if there is one, takes what does not fit the pools. May
        be called while requests run. Raises ValueError, with nothing changed, for a file that is truncated or
        corrupted or that other weights, dtypes or pool layouts left, and OSError for one that cannot be read.
        """
        return self._run_on_cache("load_prefix_cache()", load_cache, path, harmless=(ValueError, OSError))

    def stats(self) -> RuntimeStats:
        """Counters of pools, cache and scheduler, now."""
        self._require_open()
        self._engine.settle()
        return collect_stats(self._engine)

    def close(self) -> None:
        """Aborts what is unfinished and gives the pools' memory back. May be called any number of times."""
        if not self._is_closed:
            self._engine.require_idle("close()")
            self._driven.clear()
            self._undelivered.clear()
            self._abandon(list(self._engine.groups.values()))
            self._engine.close()
            self._is_closed = True

    def __enter__(self) -> HybridRuntime:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, prompt: Prompt, params: SamplingParams) -> Generator[RequestOutput, None, None]:
        group = self._intake.new_group(prompt, params)
        try:
            self._require_open()
            self._engine.add(group)
            while group.has_news or not group.finished:
                if group.has_news:
                    yield group.take_delta()
                else:
                    self._advance()
        finally:
            self._abandon([group])

    def _advance(self) -> None:
        """One engine step; keeps what it brought for those who drive the loop."""
        self._require_open()
        self._engine.step()
        self._take_progressed()

    def _take_progressed(self) -> None:
        progressed = self._engine.progressed
        for request_id, group in list(progressed.items()):
            if request_id in self._driven:
                self._undelivered[request_id] = group
            progressed.pop(request_id, None)

    def _abandon(self, groups: Sequence[RequestGroup]) -> None:
        """Aborts requests whose outputs nobody waits for any more, unless they have ended."""
        for group in groups:
            if not group.finished:
                self._engine.abort(group.request_id)
        self._take_progressed()

    def _is_known(self, request_id: str) -> bool:
        engine = self._engine
        return any(request_id in known for known in (engine.groups, engine.progressed, self._driven, self._undelivered))

    def _run_on_cache(
        self,
        call: str,
        work: Callable[[str | os.PathLike[str], EngineMemory, HybridModel], PrefixCacheFile],
        path: str | os.PathLike[str],
        *,
        harmless: tuple[type[BaseException], ...],
    ) -> PrefixCacheFile:
        self._require_open()
        if not self.config.enable_prefix_cache:
            raise ValueError(f"{call} needs a prefix cache: enable_prefix_cache is False")
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise invalid("path", path, "must be the path of a file")
        return self._engine.run_between_steps(
            call, lambda: work(path, self._engine.memory, self.model), harmless=harmless
        )

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the runtime is closed")


def _is_at_hand(model: object) -> bool:
    """Whether it is a model in memory or a folder, and neither a hub id, which may be long in coming, nor a mistake."""
    if isinstance(model, str | os.PathLike):
        return model == "tiny" or os.path.isdir(os.path.expanduser(model))
    return isinstance(model, torch.nn.Module)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= num_devices:
        has = f"the CUDA devices are 0 to {num_devices - 1}" if num_devices else "there is no CUDA device here"
        raise ValueError(f"device {name!r} cannot be used: {has}")
    return device


def _show_progress(bar: tqdm[NoReturn], groups: Sequence[RequestGroup]) -> None:
    num_tokens = sum(completion.num_tokens for group in groups for completion in group.completions)
    bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
    bar.update(sum(group.finished for group in groups) - bar.n)
