"""`dflash-train`: trains a draft for a target (GGUF or transformers checkpoint) on texts or on the target's own output."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentTypeError, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..cli.interrupt import Interrupt
from ..cli.option_table import add_table
from ..cli.parser import Parser, Version
from ..cli.streams import can_write
from ..cli.wording import count
from ..errors import ConfigError, DflashError
from ..files.safetensors import read_json
from .corpus import Rows, Texts, answered_rows, beginnings, document_rows, joined, load_rows, read_texts
from .own_text import KEPT, write_rows, write_turns
from .recipe import KINDS, Run, Shape, check, check_head, default_shape, shape_of

CHECKPOINT = "training.pt"
_MORE = "give more text or a smaller --length"


_TEXT = """
--data PATH paths | text files, folders of them, .jsonl with text, prompt or messages, or own-text.npz of an earlier run
--suffix END words | file name endings to take from folders, such as .py .md
--max-bytes N int 400000000 | most bytes of text to read (default 400 MB)
--own-text TOKENS int 0 | let the target generate this many tokens first, after prompts or beginnings of the texts (saved as
    own-text.npz)
--own-turns P float | share of its rows that answer user turns which it generates itself first, in its chat format (default 0,
    without --data 1)
--own-share P float 0.7 | share of the target's own text in a batch (default 0.7)
--prompt N int 96 | tokens of a text that the target continues (default 96)
--temperature T float 0.8 | temperature of the target's own text (default 0.8)
--greedy P float 0.5 | share of rows that are generated greedily (default 0.5)
--write-batch N int 64 | rows that are generated at once (default 64)
"""
_DRAFT = """
--kind _ kind | kind of draft to train (default dflash, or that of --start-from)
--start-from FOLDER path | start from a published draft's weights and sizes
--layers N int | layers (default 5; for targets narrower than 1,024 3)
--ffn N int | width of the feed-forward layers (default: the target's; narrow 5/3 of its width)
--heads N int | query heads (default 32; narrow: as fill the width)
--kv-heads N int | key/value heads (default 8; narrow: a third of the query heads)
--head-dim N int | size of a head (default 128; narrow 64)
--block N int | columns of a block, the pending token's included (default 16; narrow 8)
--taps I,J,.. layers | tapped target layers, from 0 (default: five, spread)
--mask-id ID int | token of masked columns (default: the tokenizer's or an unused one)
--window N int | attention window of all layers but the last (default 0: none)
--rank N int | rank of pair scores, dflash2 and dspark (default 256; narrow 32)
--candidates K int | candidates per depth, dflash2 (default 16)
--group N int | channels that share a dynamic weight, dflash2 (default 16)
--draft-steps N int | tokens in a row that a prediction head learns (default 4)
--gated _ gated | a gated Markov head, dspark; llama.cpp does not read it
"""
_LOOP = """
--steps N int 0 | steps to train (default: as many as --minutes allows)
--minutes M float 0.0 | minutes to train, not counting text generation and evaluation
--batch N int {run.batch} | rows per step (default {run.batch})
--length N int {run.length} | tokens per row (default {run.length})
--anchors N int {run.anchors} | blocks per row (default {run.anchors})
--lr X float {run.lr} | highest learning rate (default {run.lr:g})
--warm-up N int {run.warm_up} | steps until the highest learning rate (default {run.warm_up})
--gamma G float 0.0 | depth at which a token's weight in the loss is 1/e (default: by the block)
--seed N int {run.seed} | random seed (default {run.seed})
--held N int {run.checked} | rows held out for evaluation (default {run.checked})
--save-minutes M float {run.save_minutes} | minutes between checkpoints (default 10)
--device NAME device | cpu, cuda or cuda:N (default: cuda if available)
--keep GIB float | GPU memory for cached target features in GiB (default: a quarter of what is free)
--resume | continue from the output folder's checkpoint, with the same options
--compile | compile the draft with torch.compile
--graph | replay steps as a CUDA graph: faster for drafts of a small target
"""


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="dflash-train",
        description="Train a draft for a target (GGUF or transformers checkpoint), on text or on the target's own output.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    parser.add_argument(
        "target",
        type=Path,
        help="the target: its GGUF file, or a folder with config.json, safetensors, tokenizer",
    )
    where = "where the draft and the checkpoint go"
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help=where)
    kinds: dict[str, Any] = {"layers": _layers, "device": _device, "kind": {"choices": KINDS}}
    kinds |= {"paths": {"type": Path, "nargs": "+", "default": []}, "words": {"nargs": "+", "default": []}}
    kinds["gated"] = {"action": "store_true", "default": None}
    for name, table in {"text": _TEXT, "draft": _DRAFT, "run": _LOOP.format(run=Run())}.items():
        add_table(parser.add_argument_group(name).add_argument, table, **kinds)
    return parser


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of layers such as 1,8,15") from None


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text):
        raise ArgumentTypeError(f"{text!r} is none of cpu, cuda, cuda:N")
    return text


def check_text(args: Namespace) -> None:
    """Refuse invalid options of the text.

    Raises:
        ConfigError: An option is invalid; the error names it.
    """
    for name, value, low, high in (
        ("--own-text", args.own_text, 0, 1 << 40),
        ("--own-turns", args.own_turns or 0, 0, 1),
        ("--own-share", args.own_share, 0, 1),
        ("--prompt", args.prompt, 1, max(1, args.length - 2) if args.own_text else 1 << 30),
        ("--temperature", args.temperature, 0, 100),
        ("--greedy", args.greedy, 0, 1),
        ("--write-batch", args.write_batch, 1, 1 << 16),
        ("--max-bytes", args.max_bytes, 1, 1 << 50),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value}, it must be from {low} to {high}")


def tell(line: str) -> None:
    """Print a line of progress."""
    print(line, flush=True)


def train(args: Namespace, interrupt: Interrupt) -> bool:
    """Generate text, train, check.

    Returns:
        False if it was interrupted.

    Raises:
        DflashError: The target, the text or the options are unusable.
        OSError: A file cannot be read or written.
    """
    path = args.target / "config.json"
    if args.kind == "mtp" and args.target.suffix == ".gguf":
        raise ConfigError("--kind mtp needs the transformers checkpoint, a GGUF file is not enough")
    if args.kind == "mtp" and path.exists():
        check_head(read_json(path), path)
    check_text(args)
    try:
        import torch

        if args.target.suffix != ".gguf":
            import transformers  # noqa: F401
    except ImportError as lack:
        raise ConfigError(f"the package {lack.name} is missing: pip install 'dflash-ggml[train]'") from None
    try:
        return _train(args, interrupt)
    except torch.OutOfMemoryError as full:
        first_line = str(full).splitlines()[0]
        less = "a smaller --batch, fewer --anchors or a smaller --write-batch takes less"
        raise ConfigError(f"the GPU's memory is full ({first_line}); {less}") from None


def _train(args, interrupt: Interrupt) -> bool:
    import torch

    from .block_net import BlockNet
    from .gguf_target import open_target
    from .head_net import HeadNet
    from .loop import Trainer
    from .publish import start_from

    run = _run(args)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu":
        n, index = torch.cuda.device_count(), torch.device(device).index or 0
        if index >= n:
            raise ConfigError(f"--device {device}: torch finds {count(n, 'GPU')} here")
        torch.cuda.set_device(index)
    torch.manual_seed(run.seed)
    torch.set_float32_matmul_precision("high")
    target = open_target(args.target, device, torch.float32 if device == "cpu" else torch.bfloat16)
    shape = _shape(args, target)
    check(shape, run, target.sizes)
    is_head = shape.kind == "mtp"
    net = HeadNet(shape, target.sizes, target.decoder) if is_head else BlockNet(shape, target.sizes)
    if args.start_from is not None and not args.resume:
        missing = start_from(args.start_from, net, target.tables)
        lack = count(len(missing), "tensor")
        tell(f"{args.start_from}: {lack} of this draft are not in it and begin at random")
    own, texts = _rows(args, run, target, interrupt)
    learnt, held = _split(own, texts, run, args.own_share)
    net = net.to(device)
    parameters = sum(p.numel() for p in net.parameters())
    rows = f"{len(learnt)} rows, {learnt.n_tokens} tokens to learn from"
    tell(f"{shape.kind}, {parameters / 1e6:.1f} M parameters; {rows}")
    if args.graph and device == "cpu":
        raise ConfigError("--graph needs a GPU")
    room = _room(args, device)
    trainer = Trainer(net, shape, run, target, learnt, held, args.output, room, args.compile, args.graph)
    if args.resume:
        trainer.resume()
        tell(f"going on from step {trainer.step}")
    done = trainer.fit(tell, lambda: interrupt.asked)
    if not done:
        tell(f"saved at step {trainer.step}; --resume goes on")
        return False
    tell(str(trainer.check()))
    tell(_next(args, shape))
    return True


def _next(args, shape: Shape) -> str:
    what = "target's GGUF with the head" if shape.kind == "mtp" else "draft as GGUF"
    return f"{args.output}: dflash-convert {args.output} -m TARGET.gguf -o OUT.gguf --type q8_0 writes the {what}"


def _run(args) -> Run:
    same = "steps minutes batch length anchors lr warm_up gamma seed save_minutes"
    return Run(checked=args.held, **{name: getattr(args, name) for name in same.split()})


def _shape(args, target) -> Shape:
    """The draft's sizes: given options, else those of --start-from, else defaults."""
    if args.start_from is not None and args.kind != "mtp":
        path = args.start_from / "config.json"
        shape = shape_of(read_json(path), path, target.sizes)
        shape = replace(shape, kind=args.kind or shape.kind)
    else:
        mask = 0 if args.kind == "mtp" else args.mask_id if args.mask_id is not None else target.mask_id()
        shape = default_shape(args.kind or "dflash", target.sizes, mask)
    fields = """layers=n_layers ffn=n_ff heads=n_heads kv_heads=n_kv_heads head_dim=head_dim block=block_size taps=taps
        mask_id=mask_id window=window rank=rank candidates=candidates group=group gated=gated draft_steps=n_steps"""
    names = dict(word.split("=") for word in fields.split())
    given = {field: getattr(args, name) for name, field in names.items() if getattr(args, name) is not None}
    return replace(shape, **given)


def _rows(args, run: Run, target, interrupt: Interrupt) -> tuple[Rows | None, Rows | None]:
    """Rows of the target's own output, and rows of other texts."""
    stored = [path for path in args.data if path.suffix == ".npz"]
    kept = args.output / KEPT
    if args.own_text and kept.exists() and kept not in stored:
        stored.append(kept)
        tell(f"text: {kept} is used, and nothing written; remove it to have it written again")
    elif args.own_text and stored:
        tell(f"text: {stored[0]} is used, and nothing written")
    own = [load_rows(path).cut(run.length) for path in stored]
    paths = [path for path in args.data if path.suffix != ".npz"]
    render = target.render if target.has_template else None
    read = read_texts(paths, args.max_bytes, render, args.suffix) if paths else Texts([], [], [])
    documents = document_rows(read.documents, target.encode, run.length, target.sizes.eos)
    if read.answered:
        own.append(answered_rows(read.answered, target.encode, run.length))
    if args.own_text and not stored:
        own.append(_own_rows(args, run, target, read.prompts, documents, interrupt))
    others = [documents] if len(documents) else []
    own = [rows for rows in own if len(rows)]
    if not own and not others:
        raise ConfigError(f"--data: no row of {run.length} tokens in it; {_MORE}")
    return (joined(own) if own else None), (joined(others) if others else None)


def _own_rows(args, run: Run, target, texts: list[str], documents: Rows, interrupt: Interrupt) -> Rows:
    """Rows that the target generates: after its own user turns, and after the prompts or else beginnings of documents."""
    import numpy as np

    rng = np.random.default_rng(run.seed)
    n = max(1, args.own_text // max(1, run.length - args.prompt))
    share = args.own_turns if args.own_turns is not None else float(target.has_template and not args.data)
    n_turns, most = round(n * share), run.length // 2
    how = args.write_batch, run.seed, tell, lambda: interrupt.asked
    prompts: list[list[int]] = []
    if n_turns:
        if not target.has_template:
            raise ConfigError("--own-turns needs a chat template, and the target's tokenizer has none")
        turns = write_turns(target, args.output, n_turns, most, *how)
        prompts += [turns[i % len(turns)] for i in range(n_turns)]
    if n > n_turns:
        given = [ids for ids in (target.encode(texts) if texts else []) if 0 < len(ids) <= most]
        if not given:
            if not len(documents):
                needs = "prompts, or texts of at least --length tokens, in --data, or --own-turns 1"
                raise ConfigError(f"--own-text needs {needs}")
            given = beginnings(documents, args.prompt, n - n_turns, rng)
        prompts += [given[i % len(given)] for i in range(n - n_turns)]
    heat = np.where(rng.random(n) < args.greedy, 0.0, args.temperature).tolist()
    return write_rows(target, args.output, prompts, run.length, heat, *how)


def _split(own: Rows | None, texts: Rows | None, run: Run, share: float) -> tuple[Rows, Rows]:
    """Training rows, with a share `share` of the target's own output, and held-out rows."""
    import numpy as np

    rng = np.random.default_rng(run.seed)
    source = own if own is not None else texts
    assert source is not None
    if len(source) < 2:
        raise ConfigError(f"one row of {run.length} tokens is too little; {_MORE}")
    order = rng.permutation(len(source))
    n = max(1, min(run.checked, len(source) // 4))
    held, learnt = source.take(order[:n]), source.take(order[n:])
    if own is not None and texts is not None and share < 1:
        wanted = int(len(learnt) * (1 - share) / max(share, 1e-6))
        learnt = joined([learnt, texts.take(rng.permutation(len(texts))[:wanted])])
    return learnt, held


def _room(args, device: str) -> float:
    """Bytes for cached features of the target."""
    if args.keep is not None:
        return args.keep * 2**30
    if device == "cpu":
        return 2.0**30
    import torch

    return torch.cuda.mem_get_info()[0] / 4


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit codes: 0 trained, 1 failed, 2 bad option, 130 interrupted."""
    if not can_write("dflash-train"):
        return 1
    parser = build_parser()
    args = parser.parse_args(argv)
    if not args.resume and (args.output / CHECKPOINT).exists():
        parser.error(f"-o: {args.output} has a checkpoint already; --resume goes on from it")
    try:
        with Interrupt() as interrupt:
            return 0 if train(args, interrupt) else 130
    except (DflashError, OSError) as error:
        print(f"dflash-train: {error}", file=sys.stderr)
        return 1
