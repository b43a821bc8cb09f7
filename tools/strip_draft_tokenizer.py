"""Tool that rewrites a DFlash draft GGUF without its copy of the target's tokenizer.

Upstream `dflash` files carry the whole vocabulary of the target, which the engine never reads: a draft
borrows embedding, head and tokenizer from its target. For a small draft that copy is a tenth of the file.

    python tools/strip_draft_tokenizer.py draft.gguf draft-stripped.gguf

All other metadata and every tensor byte stay as they are. Three keys record it:
`tokenizer.ggml.model` becomes "none", `dflash.vocab_size` holds the length of the dropped token list, so that
a loader can still compare it with the target, and `tokenizer.ggml.mask_token_id` is kept because drafting
needs it. Needs the PyPI package `gguf`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, ReaderField

MASK_KEY = "tokenizer.ggml.mask_token_id"
TOKENS_KEY = "tokenizer.ggml.tokens"


def _add(writer: GGUFWriter, field: ReaderField) -> None:
    value_type = field.types[0]
    if value_type == GGUFValueType.ARRAY:
        writer.add_key_value(field.name, field.contents(), value_type, sub_type=field.types[-1])
    else:
        writer.add_key_value(field.name, field.contents(), value_type)


def strip(source: Path, target: Path) -> None:
    """Copy the draft `source` to `target` without its tokenizer. Raises ValueError on any other file."""
    reader = GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    if arch != "dflash":
        raise ValueError(f"{source}: general.architecture is {arch!r}, expected 'dflash'")
    for key in (MASK_KEY, TOKENS_KEY):
        if key not in reader.fields:
            raise ValueError(f"{source}: key {key} is missing")

    writer = GGUFWriter(target, arch)  # the writer adds general.architecture itself
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "tokenizer.")) or name == "general.architecture":
            continue
        _add(writer, field)
    writer.add_uint32(f"{arch}.vocab_size", len(reader.fields[TOKENS_KEY].data))
    writer.add_string("tokenizer.ggml.model", "none")
    _add(writer, reader.fields[MASK_KEY])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _verify(reader, GGUFReader(target))


def _verify(before: GGUFReader, after: GGUFReader) -> None:
    if [t.name for t in before.tensors] != [t.name for t in after.tensors]:
        raise ValueError("the copy has other tensors than the source")
    for a, b in zip(before.tensors, after.tensors):
        same = a.tensor_type == b.tensor_type and a.shape.tolist() == b.shape.tolist()
        if not (same and np.array_equal(a.data.view(np.uint8), b.data.view(np.uint8))):
            raise ValueError(f"tensor {a.name} differs in the copy")


def main() -> int:
    parser = argparse.ArgumentParser(description="Drop the tokenizer from a dflash draft GGUF.")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    try:
        strip(args.source, args.target)
    except (OSError, ValueError) as error:
        print(f"strip_draft_tokenizer: {error}", file=sys.stderr)
        return 2
    print(f"{args.source.stat().st_size:,} -> {args.target.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
