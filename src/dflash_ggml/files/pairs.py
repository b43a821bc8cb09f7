"""Targets and their drafts as files: the embedded pair, and the draft that lies beside a target."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError

_DATA = Path(__file__).parents[1] / "data"
EMBEDDED_TARGET = _DATA / "demo-target-q8_0.gguf"
EMBEDDED_DRAFT = _DATA / "demo-draft-q8_0.gguf"


def draft_beside(model: Path) -> Path | None:
    """The draft that lies in the target's folder: the one sibling GGUF with `dflash` in its name.

    The embedded target has the embedded draft. None when there is none; ConfigError when there are several.
    """
    if model == EMBEDDED_TARGET:
        return EMBEDDED_DRAFT
    found = [f for f in model.parent.glob("*.gguf") if "dflash" in f.name.lower() and f.name != model.name]
    if len(found) > 1:
        raise ConfigError(
            f"several drafts beside {model}: {', '.join(sorted(f.name for f in found))}; name one with -md"
        )
    return found[0] if found else None
