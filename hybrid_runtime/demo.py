"""`make demo`: code prompts that share a long header, generated twice on the bundled model, cold and then warm."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hybrid_runtime import HybridRuntime, RequestOutput, SamplingParams
from hybrid_runtime.cli import add_warmup_option, warm_up
from hybrid_runtime.outputs import RuntimeStats

HEADER = '''"""A small inventory: items, their stock, and the orders that change it."""

import json
import logging
import os
from collections import defaultdict
from dataclasses import dataclass

logger = logging.getLogger(__name__)

DEFAULT_PATH = os.path.join(os.path.expanduser("~"), "inventory.json")


class InventoryError(Exception):
    """Base class of everything that can go wrong here."""


class OutOfStock(InventoryError):
    """Raised when an order asks for more than there is."""

    def __init__(self, name, wanted, available):
        super().__init__(f"{wanted} of {name} wanted, {available} available")
        self.name = name
        self.wanted = wanted
        self.available = available


@dataclass
class Item:
    name: str
    price: float
    count: int = 0


class Inventory:
    """Items by name."""

    def __init__(self, path=DEFAULT_PATH):
        self.path = path
        self.items = {}
        self.history = defaultdict(list)

    def add(self, name, price, count=1):
        """Add an item, or more of one that is there already."""
        if name in self.items:
            self.items[name].count += count
        else:
            self.items[name] = Item(name, price, count)
        self.history[name].append(count)

'''

ENDINGS = {
    "remove": "    def remove(self, name, count=1):\n",
    "load": "    def load(self):\n        with open(self.path) as f:\n",
    "repr": "    def __repr__(self):\n        return ",
    "iterate": "    def __iter__(self):\n",
    "main": 'def main():\n    inventory = Inventory()\n    inventory.add("apple", ',
}

MAX_TOKENS = 48


def main() -> None:
    """Generates, measures, and prints what was measured and what was generated."""
    parser = argparse.ArgumentParser(prog="python -m hybrid_runtime.demo", description=__doc__)
    add_warmup_option(parser)
    options = parser.parse_args()
    console = Console()
    prompts = [HEADER + ending for ending in ENDINGS.values()]
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, top_p=0.9, seed=1)
    torch.set_num_threads(1)  # the model is too small to gain from more
    started = time.perf_counter()
    with HybridRuntime("tiny", max_num_seqs=len(prompts)) as rt:
        assert rt.tokenizer is not None
        console.print(
            f"Loaded tiny ({rt.model.spec.name}) in {time.perf_counter() - started:.1f} s.\n"
            f"Pools: {rt.plan.describe()}.\n"
            f"{len(prompts)} prompts that share a header of {len(rt.tokenizer(HEADER).input_ids)} tokens, "
            f"{MAX_TOKENS} new tokens each, all at once; then the same again. In the cold run one request computes the "
            "header and leaves a checkpoint where the others part ways, a junction; they wait for it and resume there. "
            "Each prompt leaves a checkpoint at its end, the tail, from which the warm run resumes."
        )
        num_warm = warm_up(rt, options)
        if num_warm:
            console.print(f"{num_warm} warm-up prompts are in the prefix cache.")
        table = _new_table()
        runs: list[list[RequestOutput]] = []
        pool_use: list[str] = []
        for name in ("cold", "warm"):
            started = time.perf_counter()
            outputs = rt.generate(prompts, params, use_tqdm=True)
            seconds = time.perf_counter() - started
            _add_run(table, name, outputs, seconds)
            runs.append(outputs)
            pool_use.append(f"Pools after the {name} run: {_pool_use(rt.stats())}.")
    console.print(table)
    console.print("\n".join(pool_use))
    num_equal = sum(a.outputs[0].text == b.outputs[0].text for a, b in zip(*runs, strict=True))
    console.print(f"{num_equal} of {len(prompts)} completions are the same cold and warm. They are:")
    for name, output in zip(ENDINGS, runs[-1], strict=True):
        completion = Text(ENDINGS[name], style="dim").append(output.outputs[0].text, style="bold")
        console.print(Panel(completion, title=name, title_align="left"))


def _new_table() -> Table:
    table = Table(title="Prefix cache, cold and warm")
    table.add_column("run")
    table.add_column("prompt")
    for column in ("tokens", "cached"):
        table.add_column(column, justify="right")
    table.add_column("checkpoint")
    for column in ("first token", "tokens/s"):
        table.add_column(column, justify="right")
    return table


def _add_run(table: Table, run: str, outputs: Sequence[RequestOutput], seconds: float) -> None:
    """A row per request, then one for the whole run."""
    for name, output in zip(ENDINGS, outputs, strict=True):
        metrics = output.metrics
        num_tokens = len(output.outputs[0].token_ids)
        table.add_row(
            run,
            name,
            str(len(output.prompt_token_ids)),
            str(output.num_cached_tokens),
            output.checkpoint_origin or f"none: {output.cache_miss_reason}",
            f"{1000 * (metrics.time_to_first_token or 0):.0f} ms",
            f"{num_tokens / metrics.latency:.0f}" if metrics.latency else "",
        )
    table.add_row(
        run,
        "all",
        str(sum(len(output.prompt_token_ids) for output in outputs)),
        str(sum(output.num_cached_tokens for output in outputs)),
        "",
        f"run {seconds:.2f} s",
        f"{sum(len(output.outputs[0].token_ids) for output in outputs) / seconds:.0f}",
        end_section=True,
    )


def _pool_use(stats: RuntimeStats) -> str:
    return ", ".join(
        f"{pool.total - pool.free:,} of {pool.total:,} {name} slots"
        for name, pool in (("KV", stats.kv), ("state", stats.state))
    )


if __name__ == "__main__":
    main()
