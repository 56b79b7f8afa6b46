"""`generate` of transformers with random weights, as a peer of `bench_engine.py`. One JSON line per case.

    python profiles/peers/bench_transformers.py --batch 1 8 > transformers.jsonl

Runs in this project's environment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cases import measure, parse_options
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    options = parse_options(str(__doc__))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(options.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def generate(prompts: Sequence[list[int]], num_tokens: int) -> None:
        ids = torch.tensor(prompts)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )

    measure("transformers", generate, config.vocab_size, options, has_cache=False)


if __name__ == "__main__":
    main()
