"""`dflash-convert`: a draft's safetensors folder as a GGUF file, for this package and for llama.cpp.

A folder with a prediction head (tensors `mtp.*`) gives the target's file with that head in it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

from ..config import DraftType
from ..errors import DflashError
from .option_table import add_table
from .parser import Parser, Version
from .streams import can_write

_OPTIONS = f"""
-m --model FILE file | the target's GGUF, whose vocabulary goes along
-o --output FILE file | the file to write
--type TYPE weights | what float matrices become, one of {", ".join(get_args(DraftType))} (default: as published)
--force | write over a file that is there
"""


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="dflash-convert",
        description="Convert a draft's safetensors folder to GGUF, for this package and for llama.cpp."
        " A folder with a prediction head (tensors mtp.*) gives the target's file with that head in it.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    what = "the draft: a folder with config.json and safetensors, or a GGUF file"
    parser.add_argument("draft", type=Path, help=what)
    kinds: dict[str, Any] = {
        "file": {"type": Path, "required": True},
        "weights": {"choices": get_args(DraftType)},
    }
    add_table(parser.add_argument, _OPTIONS, **kinds)
    return parser


def convert(args: argparse.Namespace) -> list[str]:
    """Check the pair and write the file.

    Returns:
        Notes for people.

    Raises:
        DflashError: The pair cannot be converted.
        OSError: The file cannot be written.
    """
    from ..drafts.convert import write_gguf
    from ..drafts.dflash.file import DraftFile
    from ..drafts.dflash.params import check_pair
    from ..drafts.mtp.convert import has_head, write_with_head
    from ..files.gguf import GGUFFile
    from ..models.registry import read_target

    with GGUFFile(args.model) as file:
        if has_head(args.draft):
            n = write_with_head(args.draft, file, args.output, args.type)
            return [f"{args.output}: the target with its prediction head, {n} tensors of it"]
        draft = DraftFile.open(args.draft)
        notes = check_pair(read_target(file), draft.params, str(args.model), str(args.draft))
        notes += write_gguf(draft, file, args.output, args.type)
    size = args.output.stat().st_size / 2**20
    return [*notes, f"{args.output}: {len(draft.published)} tensors of the draft, {size:.0f} MiB"]


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit codes: 0 written, 1 failed, 2 bad option, 130 interrupted."""
    if not can_write("dflash-convert"):
        return 1
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.output.exists() and not args.force:
        parser.error(f"-o: {args.output} is there already; --force writes over it")
    try:
        for note in convert(args):
            print(note)
    except (DflashError, OSError) as error:
        print(f"dflash-convert: {error}", file=sys.stderr)
        return 1
    return 0
