"""`python -m hybrid_runtime`: complete prompts from the command line, and look at what the prefix cache did."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from hybrid_runtime.engine.prompts import read_prompts_file
from hybrid_runtime.errors import UnsupportedModelError
from hybrid_runtime.outputs import RequestOutput
from hybrid_runtime.runtime import HybridRuntime


def add_warmup_option(parser: argparse.ArgumentParser) -> None:
    """For every command that loads a model; `warm_up` does what it asks for."""
    parser.add_argument(
        "--warmup-prompts-file",
        type=Path,
        metavar="PROMPTS.json",
        help="compute these prompts first and keep them in the prefix cache: a JSON list of strings or token id lists",
    )


def warm_up(rt: HybridRuntime, options: argparse.Namespace) -> int:
    """Computes the prompts of `--warmup-prompts-file`, if it was given; returns how many there were.

    Raises OSError or ValueError for a file that cannot be used.
    """
    if options.warmup_prompts_file is None:
        return 0
    prompts = read_prompts_file(options.warmup_prompts_file)
    if prompts:
        rt.warmup(prompts)
    return len(prompts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hybrid_runtime", description=__doc__)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--model", default="tiny", help="a checkpoint folder, a hub id, or 'tiny' (the default)")
    parser.add_argument("--max-tokens", type=int, default=32, help="new tokens of each prompt (default: 32)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0)
    add_warmup_option(parser)
    parser.add_argument(
        "--prefix-cache-file",
        type=Path,
        metavar="FILE",
        help="load the prefix cache from this file if it exists, and save it there in the end",
    )
    parser.add_argument("--render", type=Path, metavar="PAGE.html", help="draw the prefix cache in the end")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1, with a message, for what the user can put right."""
    options = _parser().parse_args(arguments)
    console = Console()
    try:
        _run(options, console)
    except (OSError, ValueError, UnsupportedModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace, console: Console) -> None:
    for path in (options.prefix_cache_file, options.render):
        if path is not None and not os.access(path.parent, os.W_OK | os.X_OK):  # found before the work, not after it
            raise FileNotFoundError(f"{path.name!r} cannot be written: {str(path.parent)!r} is no folder for it")
    with HybridRuntime(options.model, seed=options.seed) as rt:
        if options.prefix_cache_file is not None and options.prefix_cache_file.exists():
            rt.load_prefix_cache(options.prefix_cache_file)
        warm_up(rt, options)
        outputs = rt.generate(
            options.prompts, max_tokens=options.max_tokens, temperature=options.temperature, use_tqdm=True
        )
        for output in outputs:
            console.print(_panel(output))
        if options.prefix_cache_file is not None:
            saved = rt.save_prefix_cache(options.prefix_cache_file)
            console.print(f"{saved.num_checkpoints} checkpoints are in {options.prefix_cache_file}.")
        if options.render is not None:
            rt.prefix_cache.render(options.render, console=console)
            console.print(f"The picture is in {options.render}.")


def _panel(output: RequestOutput) -> Panel:
    """A prompt with its completion, and what the prefix cache did for it."""
    sample = output.outputs[0]
    cached = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached"
    reason = output.checkpoint_origin or output.cache_miss_reason
    text = Text(output.prompt or "", style="dim").append(sample.text, style="bold")
    return Panel(text, title=f"{cached} ({reason})", title_align="left", subtitle=f"{sample.finish_reason}")
