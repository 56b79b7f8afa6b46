"""Puts an engine together from a config and a model."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

import torch
from torch import Tensor
from tqdm import tqdm

from hybrid_runtime.config import RuntimeConfig
from hybrid_runtime.engine.compiled_steps import NUM_PARTS, NUM_SPECULATIVE_PARTS, CompiledSteps
from hybrid_runtime.engine.engine import Engine
from hybrid_runtime.engine.host_cache import build_host_tier
from hybrid_runtime.engine.launching import DirectLauncher, StepLauncher, ThreadLauncher
from hybrid_runtime.engine.memory import EngineMemory
from hybrid_runtime.engine.runner import ModelRunner
from hybrid_runtime.engine.speculation import SpeculationPlan
from hybrid_runtime.engine.steps import EagerSteps, SpeculativeSteps, Steps
from hybrid_runtime.graphs.inductor import start_precompiling_headers
from hybrid_runtime.graphs.step_inputs import StepMemory
from hybrid_runtime.memory.available import available_bytes
from hybrid_runtime.memory.plan import MemoryPlan, plan_memory
from hybrid_runtime.models.hybrid_model import HybridModel
from hybrid_runtime.ops.kernels import REFERENCE, compiled_kernels
from hybrid_runtime.scheduling.drafting import Drafting
from hybrid_runtime.scheduling.placement import CheckpointPolicy
from hybrid_runtime.scheduling.residency import Residency
from hybrid_runtime.scheduling.scheduler import Scheduler
from hybrid_runtime.speculative.draft import Drafter
from hybrid_runtime.text.detokenizer import TokenDecoder

_LOGGER = logging.getLogger(__name__)


def start_building_kernels(config: RuntimeConfig, device: torch.device) -> None:
    """Has the kernels that compiled steps run on a CPU built in other threads, while a model is loaded.

    What is wrong with the compiler is said when the engine is built.
    """
    if config.compile == "auto" and device.type == "cpu":
        with suppress(RuntimeError):
            compiled_kernels(device)


def build_engine(
    config: RuntimeConfig,
    model: HybridModel,
    tokenizer: TokenDecoder | None,
    speculation: SpeculationPlan | None = None,
) -> tuple[MemoryPlan, Engine]:
    """Plans the memory, allocates it on the model's device, and wires the engine's parts together.

    `speculation`: None: tokens are decoded one by one. Raises ValueError, with the arithmetic, for pools that do not
    fit.
    """
    compilable = _compilable(model) if config.compile == "auto" else None
    model = compilable or model  # before the plan: copies of the weights take memory, too
    kv_layers = model.kv_layers(None if config.kv_dtype is None else getattr(torch, config.kv_dtype))
    state_layers = model.state_layers(torch.promote_types(getattr(torch, config.state_dtype), model.dtype))
    state_dtype = torch.promote_types(getattr(torch, config.state_dtype), model.dtype)
    records = None if speculation is None else speculation.records(model, state_dtype, config.max_num_seqs)
    plan = plan_memory(
        config,
        kv_layers,
        state_layers,
        model_max_len=model.spec.max_position_embeddings,
        available_bytes=available_bytes(model.device),
        record_bytes=0 if records is None else records.num_bytes,
    )
    if config.max_model_len is None and plan.max_model_len < model.spec.max_position_embeddings:
        _LOGGER.info(
            "max_model_len is %d, as the KV pool allows; the model's limit is %d",
            plan.max_model_len,
            model.spec.max_position_embeddings,
        )
    is_cuda = model.device.type == "cuda"
    overlaps = is_cuda and speculation is None if config.overlap is None else config.overlap
    memory = EngineMemory(
        plan,
        kv_layers,
        state_layers,
        max_num_seqs=config.max_num_seqs,
        eviction=config.eviction,
        device=model.device,
        table_is_shared=not is_cuda and not overlaps,
        records=records,
    )
    policy = CheckpointPolicy(
        config.min_saving,
        config.checkpoint_interval,
        config.track_interval,
        num_track_slots=2 if overlaps else 1,
    )
    if config.host_cache_bytes and config.enable_prefix_cache:
        memory.attach_tier(build_host_tier(config, plan, memory, kv_layers, state_layers))
    residency = Residency(
        memory.supply, memory.table, enabled=config.enable_prefix_cache, policy=policy, tier=memory.tier
    )
    runner = ModelRunner(
        model, memory, make_steps=EagerSteps if compilable is None else _compiled_steps, speculation=speculation
    )
    residency.lagging = runner.commits
    scheduler = Scheduler(
        residency,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        drafting=None if speculation is None else _drafting(speculation, runner, residency),
    )
    launcher: StepLauncher = ThreadLauncher(runner) if overlaps and not is_cuda else DirectLauncher(runner)
    engine = Engine(
        scheduler,
        runner,
        memory,
        tokenizer=tokenizer,
        debug_checks=config.debug_checks,
        launcher=launcher,
        overlaps=overlaps,
    )
    return plan, engine


def _drafting(speculation: SpeculationPlan, runner: ModelRunner, residency: Residency) -> Drafting:
    # As the steps: what is compiled is kept, and must not depend on modes that happen to be on around this call.
    with torch.inference_mode(False), torch.autocast(runner.model.device.type, enabled=False):
        drafter = _drafter(speculation, runner)
    return Drafting(
        drafter,
        residency,
        tree_size=speculation.config.tree_size,
        is_adaptive=speculation.config.adaptive,
        vocab_size=runner.model.spec.vocab_size,
    )


def _drafter(speculation: SpeculationPlan, runner: ModelRunner) -> Drafter:
    """Compiled if the steps are. As with these, one that runs eagerly is worth more than none."""
    assert runner.speculative is not None
    memory, speculative = runner.memory.step_memory, runner.speculative
    if isinstance(runner.steps, CompiledSteps):
        try:
            return speculation.make_drafter(runner.model, memory, speculative, compiles=True)
        except Exception as error:
            _warn_of_eager("drafts", error)
    return speculation.make_drafter(runner.model.with_kernels(REFERENCE), memory, speculative, compiles=False)


def _compilable(model: HybridModel) -> HybridModel | None:
    """The model in the forms that compiled steps run; None, with a warning, on a machine that cannot compile."""
    try:
        kernels = compiled_kernels(model.device)
        if model.device.type == "cpu":
            start_precompiling_headers()
        _LOGGER.info("packing weights for %s", model.device)
        return model.with_kernels(kernels)
    except RuntimeError as error:  # no compiler, or one that does not work
        _warn_of_eager("steps", error)
        return None


def _compiled_steps(
    model: HybridModel, memory: StepMemory, last_token_R: Tensor, speculative: SpeculativeSteps | None
) -> Steps:
    """Compiles; meanwhile a line on standard error says what is being done.

    Whatever goes wrong, a model that runs eagerly is worth more than none: a warning says so.
    """
    start = time.perf_counter()
    num_parts = NUM_PARTS + (NUM_SPECULATIVE_PARTS if speculative is not None else 0)
    with tqdm(total=num_parts, unit="part", leave=False) as bar:

        def report(part: str) -> None:
            _LOGGER.info("compiling: %s", part)
            bar.set_description(f"compiling steps, once per model and machine: {part}")
            bar.update()

        try:
            steps = CompiledSteps(model, memory, last_token_R, speculative, report=report)
        except Exception as error:
            _warn_of_eager("steps", error)
            return EagerSteps(model.with_kernels(REFERENCE), memory, last_token_R, speculative)
    _LOGGER.info("compiled in %.1f s", time.perf_counter() - start)
    return steps


def _warn_of_eager(what: str, error: Exception) -> None:
    reason = str(error).strip().partition("\n")[0]
    _LOGGER.warning("%s are not compiled and run several times slower: %s: %s", what, type(error).__name__, reason)
    _LOGGER.info("%s are not compiled", what, exc_info=error)
