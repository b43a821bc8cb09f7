"""Export of a trained draft in the published form: config.json and model.safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ..errors import ModelFileError
from ..files.safetensors import read_json
from .block_net import Tables

WEIGHTS = "model.safetensors"


def publish(
    folder: Path, net: nn.Module, config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write the network's parameters as `dtype`; each file is written atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().to(dtype).contiguous().cpu() for name, p in net.state_dict().items()}
    save_file(weights, folder / f"{WEIGHTS}.part", metadata={"format": "pt"})
    (folder / "config.json.part").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for name in (WEIGHTS, "config.json"):
        os.replace(folder / f"{name}.part", folder / name)


def start_from(folder: Path, net: nn.Module, tables: Tables | None = None) -> list[str]:
    """Load the network's parameters from a published draft.

    Returns:
        Names of the missing ones.

    Raises:
        ModelFileError: It has another shape, nothing of the network, or, given the target's tables, an embedding or output
            matrix of its own: a trained draft borrows the target's.
    """
    read_json(folder / "config.json")
    try:
        found = {name.removeprefix("model."): x for name, x in load_file(folder / WEIGHTS).items()}
    except (OSError, ValueError) as reason:
        raise ModelFileError(f"{folder / WEIGHTS}: {reason}") from None
    own = dict(net.named_parameters())
    if tables is not None:
        _refuse_tables(folder, found, tables)
    for name, p in own.items():
        x = found.get(name)
        if x is None:
            continue
        if x.shape != p.shape:
            raise ModelFileError(
                f"{folder}: tensor {name!r} has shape {list(x.shape)}, this draft {list(p.shape)}; give the same sizes"
            )
        with torch.no_grad():
            p.copy_(x)
    missing = [name for name in own if name not in found]
    if len(missing) == len(own):
        raise ModelFileError(f"{folder}: no tensor of it belongs to a draft of this kind")
    return missing


def _refuse_tables(folder: Path, found: Mapping[str, torch.Tensor], tables: Tables) -> None:
    """Refuse own tables, except copies of the target's; a DSpark draft's output matrix is such a copy, or unused."""
    borrowed = {"embed_tokens.weight": tables.embedding}
    if "markov_head.markov_w1.weight" not in found:
        borrowed["lm_head.weight"] = tables.head
    for name, of_target in borrowed.items():
        x = found.get(name)
        if x is None or torch.equal(x.bfloat16(), of_target.detach().cpu().bfloat16()):
            continue
        raise ModelFileError(
            f"{folder}: tensor {name!r} is not the target's, and a draft that is trained from it would borrow the target's; "
            "begin without --start-from"
        )
