"""`python -m hybrid_runtime.training`: build the bundled checkpoint and its drafting head, or measure them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import KimiLinearForCausalLM, PreTrainedTokenizerFast

from hybrid_runtime.training.corpus import read_corpus, xz_bits_per_byte
from hybrid_runtime.training.data import encode_files
from hybrid_runtime.training.evaluate import bits_per_byte
from hybrid_runtime.training.mtp_evaluate import NUM_CANDIDATES, Acceptance, evaluate_mtp
from hybrid_runtime.training.mtp_train import MtpOptions, train_mtp
from hybrid_runtime.training.train import Options, train


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hybrid_runtime.training",
        description="Train the bundled `tiny` checkpoint from scratch on the Python standard library's sources, "
        "or a head that drafts for it, or measure either on the held-out tenth of them.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "train",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="train a tokenizer and a model, write a transformers folder",
        description="Train a tokenizer and a model on the training nine tenths and write a transformers folder. The "
        "folder is usable after every save; the optimizer's state lies beside it as OUT.training.pt.",
    )
    run.add_argument("--out", type=Path, required=True, help="folder to write")
    budget = run.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="time budget; the learning rate falls along it")
    budget.add_argument("--steps", type=int, help="budget in optimizer steps; repeatable bit by bit on one machine")
    run.add_argument("--batch-size", type=int, default=Options.batch_size, help="sequences per step")
    run.add_argument("--length", type=int, default=Options.length, help="tokens per sequence")
    run.add_argument("--matrix-lr", type=float, default=Options.matrix_lr, help="peak learning rate of Muon")
    run.add_argument("--other-lr", type=float, default=Options.other_lr, help="peak learning rate of AdamW")
    run.add_argument("--seed", type=int, default=Options.seed, help="seed of weights and order of files")
    run.add_argument("--save-every", type=float, default=Options.save_every_minutes, help="minutes between saves")
    run.add_argument("--resume", action="store_true", help="continue from OUT.training.pt, under the given budget")
    run.add_argument("--float32", action="store_true", help="float32 matrix products, for CPUs without bfloat16")
    run.add_argument("--eager", action="store_true", help="do not compile; needs no C++ compiler")
    measure = commands.add_parser(
        "evaluate",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="bits per byte of a folder on the held-out files, next to xz -9",
        description="Bits per byte on the held-out files, each read from a fresh state, next to `xz -9` of one "
        "tar of them.",
    )
    measure.add_argument("folder", type=Path, help="transformers folder of a kimi_linear model")
    measure.add_argument("--window", type=int, default=512, help="tokens read at once; windows overlap by half")
    measure.add_argument("--every", type=int, default=1, help="measure on every n-th held-out file only")
    _add_mtp_commands(commands)
    return parser


def _add_mtp_commands(commands: Any) -> None:
    run = commands.add_parser(
        "train-mtp",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="train a head that drafts for a folder, write mtp.safetensors into it",
        description="Train a multi-token-prediction head on the training nine tenths, against the folder's model as it "
        "is, and write it into the folder as mtp.safetensors.",
    )
    run.add_argument("folder", type=Path, help="transformers folder of a kimi_linear model")
    budget = run.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="time budget; the learning rate falls along it")
    budget.add_argument("--steps", type=int, help="budget in optimizer steps; repeatable bit by bit on one machine")
    run.add_argument(
        "--kv-layers",
        type=int,
        nargs="+",
        metavar="LAYER",
        help="attention layers, from 0, whose KV the blocks read, one block each; default: the last layer alone",
    )
    run.add_argument("--num-steps", type=int, default=MtpOptions.num_steps, help="depth of the drafts in training")
    run.add_argument("--batch-size", type=int, default=MtpOptions.batch_size, help="sequences per step")
    run.add_argument("--length", type=int, default=MtpOptions.length, help="tokens per sequence")
    run.add_argument("--matrix-lr", type=float, default=MtpOptions.matrix_lr, help="peak learning rate of Muon")
    run.add_argument("--other-lr", type=float, default=MtpOptions.other_lr, help="peak learning rate of AdamW")
    run.add_argument("--seed", type=int, default=MtpOptions.seed, help="seed of weights and order of files")
    run.add_argument("--save-every", type=float, default=MtpOptions.save_every_minutes, help="minutes between saves")
    run.add_argument("--go-on", action="store_true", help="start from the folder's head, with a fresh optimizer")
    run.add_argument("--float32", action="store_true", help="float32 matrix products, for CPUs without bfloat16")
    run.add_argument("--eager", action="store_true", help="do not compile; needs no C++ compiler")
    measure = commands.add_parser(
        "evaluate-mtp",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="share of a folder's drafts that its model accepts, per depth",
        description="Greedy chains of drafts, from the ends of held-out prompts and from inside the model's own greedy "
        "continuations of them: how many of each depth are what the model itself would write.",
    )
    measure.add_argument("folder", type=Path, help="transformers folder of a kimi_linear model, with its head")
    measure.add_argument("--prompts", type=int, default=512, help="held-out prompts")
    measure.add_argument("--depth", type=int, default=6, help="tokens of a chain")
    measure.add_argument("--seed", type=int, default=0, help="seed of where the prompts are cut")
    measure.add_argument("--eager", action="store_true", help="do not compile; needs no C++ compiler")


def _train(args: argparse.Namespace) -> None:
    options = Options(
        out=args.out,
        minutes=args.minutes,
        steps=args.steps,
        length=args.length,
        batch_size=args.batch_size,
        matrix_lr=args.matrix_lr,
        other_lr=args.other_lr,
        seed=args.seed,
        save_every_minutes=args.save_every,
        resume=args.resume,
        matmul_dtype=torch.float32 if args.float32 else torch.bfloat16,
        compiled=not args.eager,
    )
    train(options, read_corpus(), log=lambda line: print(line, flush=True))


def _evaluate(args: argparse.Namespace) -> None:
    held_out = read_corpus().held_out[:: args.every]
    model = KimiLinearForCausalLM.from_pretrained(args.folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.folder)
    result = bits_per_byte(model, tokenizer, held_out, window=args.window)
    print(f"{len(held_out)} held-out files, {result.num_bytes:,} bytes, {result.num_tokens:,} tokens")
    print(f"model: {result.value:.4f} bits per byte ({result.nats / result.num_tokens:.4f} nats per token)")
    print(f"xz -9: {xz_bits_per_byte(held_out):.4f} bits per byte")


def _train_mtp(args: argparse.Namespace) -> None:
    options = MtpOptions(
        folder=args.folder,
        minutes=args.minutes,
        steps=args.steps,
        kv_layers=None if args.kv_layers is None else tuple(args.kv_layers),
        num_steps=args.num_steps,
        length=args.length,
        batch_size=args.batch_size,
        matrix_lr=args.matrix_lr,
        other_lr=args.other_lr,
        seed=args.seed,
        save_every_minutes=args.save_every,
        go_on=args.go_on,
        matmul_dtype=torch.float32 if args.float32 else torch.bfloat16,
        compiled=not args.eager,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.folder)
    train_mtp(options, encode_files(tokenizer, read_corpus().train), log=lambda line: print(line, flush=True))


def _evaluate_mtp(args: argparse.Namespace) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.folder)
    files = encode_files(tokenizer, read_corpus().held_out)
    results = evaluate_mtp(
        args.folder, files, num_prompts=args.prompts, depth=args.depth, seed=args.seed, compiled=not args.eager
    )
    print(f"{args.prompts} held-out prompts; of the chains whose shallower tokens were all accepted, accepted at depth")
    print(f"{'':26}" + "".join(f"{depth:>7}" for depth in range(1, args.depth + 1)))
    for title, result in zip(("from the prompts' ends", "from own continuations"), results, strict=True):
        _print_acceptance(title, result)


def _print_acceptance(title: str, result: Acceptance) -> None:
    print(f"{title:26}" + "".join(f"{share:7.3f}" for share in result.per_depth))
    print(
        f"{'':26}  {result.num_positions:,} chains, {result.mean_accepted:.3f} tokens accepted on average, "
        f"the first among the best {NUM_CANDIDATES} in {result.candidate_hit_rate:.3f}"
    )


def main() -> None:
    """Parse the command line and run the command."""
    args = _parser().parse_args()
    commands = {"train": _train, "evaluate": _evaluate, "train-mtp": _train_mtp, "evaluate-mtp": _evaluate_mtp}
    commands[args.command](args)


if __name__ == "__main__":
    main()
