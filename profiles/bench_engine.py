"""Prefill, decode and shared prefixes through `HybridRuntime.generate`, beside other engines and the machine's limits.

    python profiles/bench_engine.py [--peer-json vllm.jsonl transformers.jsonl] [--out FILE.json]

A model of the shape of a config folder with random weights. One JSON line per case, with the keys of the scripts in
`profiles/peers/`, whose output `--peer-json` reads; then a table. Medians over `--repeat` runs after one that is not
counted, with fresh random prompts, so that no prefix hits by accident. Decode time per step is the difference of a run
of N + 1 tokens and a run of one token, over N. Time to first token is that of a whole call for one token.
`share_of_limit` compares with what the same run measured: of a decode, bytes moved (weights, states, keys and values)
per second with reading memory; of a prefill, flops of the matrix products and the attention with a large product. Run
it when nothing else runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from limits import MachineLimits, decode_traffic, measure_limits, prefill_flops
from measuring import median, write_results
from peer_rows import Row, comparison, read_rows
from random_model import GRANITE, random_model
from rich.console import Console

from hybrid_runtime import HybridRuntime, RequestOutput, SamplingParams

CASES = ("prefill", "decode", "shared", "again", "partial")
NUM_NEW = 32  # tokens behind a shared prefix
PARTIAL = 1500 / 2048  # of a prompt that another one shares


def main() -> None:
    options = _parser().parse_args()
    torch.set_num_threads(options.threads)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    limits = measure_limits(device, dtype, num_bytes=options.buffer_mib and options.buffer_mib * 2**20)
    start = time.perf_counter()
    model = random_model(options.config, dtype, device)
    built = time.perf_counter()
    with HybridRuntime(
        model,
        compile=options.compile,
        overlap=options.overlap,
        max_num_seqs=max(options.batch),
        max_model_len=2 * max(options.shared, *options.prompt),
        memory_bytes=int(options.memory_gib * 2**30),
    ) as rt:
        ready = {"case": "ready", "seconds": time.perf_counter() - built, "model_seconds": built - start}
        bench = EngineBench(rt, limits, options.repeat)
        rows: list[Row] = []
        for row in (ready, *bench.run(options)):
            rows.append({"engine": "hybrid_runtime", **row})
            print(json.dumps(rows[-1]), flush=True)
    peers = [row for path in options.peer_json for row in read_rows(path)]
    Console().print(comparison(rows, peers))
    write_results(options.out, {"rows": rows, "limits": dataclasses.asdict(limits), "peers": peers})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=GRANITE, help="folder with the config.json of a model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--compile", default="auto", choices=["auto", "off"])
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, help="default: on CUDA")
    parser.add_argument("--memory-gib", type=float, default=4.0, help="for the pools of KV and states")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--prompt", type=int, nargs="+", default=[512, 2048], help="tokens of each prefill")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--decode-prompt", type=int, default=64)
    parser.add_argument("--decode", type=int, default=64, help="steps of each decode")
    parser.add_argument("--shared", type=int, default=2048, help="tokens of a shared prefix")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--buffer-mib", type=int, help="size of the buffers that bandwidth is measured with")
    parser.add_argument("--peer-json", type=Path, nargs="*", default=[], help="what the peers' scripts printed")
    parser.add_argument("--out", type=Path, help="also write the rows to this JSON file")
    return parser


class EngineBench:
    """Measures one runtime; every method that measures returns a row without the engine's name."""

    def __init__(self, rt: HybridRuntime, limits: MachineLimits, repeats: int) -> None:
        self.rt = rt
        self.limits = limits
        self.repeats = repeats
        self._rng = np.random.default_rng(0)

    def run(self, options: argparse.Namespace) -> Iterator[Row]:
        """The cases that were asked for, one by one."""
        if "prefill" in options.cases:
            for num_tokens in options.prompt:
                yield self.prefill(num_tokens)
        if "decode" in options.cases:
            for batch in options.batch:
                yield self.decode(batch, options.decode_prompt, options.decode)
        if "shared" in options.cases:
            yield self.shared(options.shared)
        if "again" in options.cases:
            yield self.again(options.shared)
        if "partial" in options.cases:
            yield self.partial(options.shared, int(PARTIAL * options.shared))

    def prefill(self, num_tokens: int) -> Row:
        seconds = median(lambda: self._seconds([self._draw(num_tokens)]), self.repeats)
        gflop_s = 1e-9 * prefill_flops(self.rt.model, num_tokens) / seconds
        return {
            "case": "prefill",
            "tokens": num_tokens,
            "tok_s": num_tokens / seconds,
            "gflop_s": gflop_s,
            "share_of_limit": gflop_s / self.limits.gemm_gflop_s,
        }

    def decode(self, batch: int, prompt_len: int, num_steps: int) -> Row:
        def step_seconds() -> float:
            first, whole = (self._seconds(self._draw_batch(batch, prompt_len), n) for n in (1, num_steps + 1))
            return (whole - first) / num_steps

        seconds = median(step_seconds, self.repeats)
        plan = self.rt.plan
        context_len = prompt_len + num_steps / 2
        traffic = decode_traffic(self.rt.model, batch, context_len, plan.kv_slot_bytes, plan.state_slot_bytes)
        gb_s = 1e-9 * traffic.total / seconds
        return {
            "case": "decode",
            "batch": batch,
            "ms_step": 1e3 * seconds,
            "gb_s": gb_s,
            "share_of_limit": gb_s / self.limits.read_gb_s,
            "limit_ms": 1e3 * self.limits.seconds(traffic),
        }

    def shared(self, prefix_len: int) -> Row:
        """A prefix in the cache and a few new tokens, beside these tokens alone."""
        cold = median(lambda: self._seconds([self._draw(prefix_len + NUM_NEW)]), self.repeats)
        bare = median(lambda: self._seconds([self._draw(NUM_NEW)]), self.repeats)
        prefix = self._draw(prefix_len)
        self.rt.warmup(prefix)
        warm = median(lambda: self._hit_seconds(prefix + self._draw(NUM_NEW), prefix_len), self.repeats)
        return {
            "case": "shared",
            "prefix": prefix_len,
            "new_tokens": NUM_NEW,
            "ttft_cold_s": cold,
            "ttft_warm_s": warm,
            "ttft_bare_s": bare,
            "warm_over_bare": warm / bare,
        }

    def again(self, prompt_len: int) -> Row:
        """The same prompt a second time."""
        prompt = self._draw(prompt_len)
        cold = self._seconds([prompt])
        warm = median(lambda: self._hit_seconds(prompt, prompt_len - 1), self.repeats)
        return {"case": "again", "prefix": prompt_len, "ttft_cold_s": cold, "ttft_warm_s": warm}

    def partial(self, prompt_len: int, shared_len: int) -> Row:
        """Prompts that share their start with one that came before; no state is kept there until the second one."""
        prompt = self._draw(prompt_len)
        cold = self._seconds([prompt])

        def visit() -> float:
            return self._hit_seconds(prompt[:shared_len] + self._draw(prompt_len - shared_len), shared_len)

        [second] = self._run([prompt[:shared_len] + self._draw(prompt_len - shared_len)], 1)
        later = statistics.median(visit() for _ in range(self.repeats))
        return {
            "case": "partial",
            "prefix": shared_len,
            "tokens": prompt_len,
            "ttft_cold_s": cold,
            "ttft_second_s": second.metrics.time_to_first_token,
            "ttft_warm_s": later,
        }

    def _draw(self, length: int) -> list[int]:
        return self._rng.integers(3, self.rt.model.spec.vocab_size, size=length).tolist()

    def _draw_batch(self, batch: int, length: int) -> list[list[int]]:
        return [self._draw(length) for _ in range(batch)]

    def _seconds(self, prompts: Sequence[list[int]], num_tokens: int = 1) -> float:
        start = time.perf_counter()
        self._run(prompts, num_tokens)
        return time.perf_counter() - start

    def _hit_seconds(self, prompt: list[int], num_cached: int) -> float:
        """Of one token behind a prompt. Raises RuntimeError unless so many tokens came from the cache."""
        start = time.perf_counter()
        [output] = self._run([prompt], 1)
        seconds = time.perf_counter() - start
        if output.num_cached_tokens != num_cached:
            raise RuntimeError(f"{output.num_cached_tokens} tokens were cached, not {num_cached}")
        return seconds

    def _run(self, prompts: Sequence[list[int]], num_tokens: int) -> list[RequestOutput]:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        return self.rt.generate(list(prompts), params)


if __name__ == "__main__":
    main()
