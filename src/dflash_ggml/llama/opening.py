"""Choosing the draft and opening the engine of a `Llama`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import FILES
from ..errors import ConfigError, DflashError
from .lenient import warn
from .options import FoundDraft, LlamaOptions

if TYPE_CHECKING:
    from ..engine.engine import Engine


def open_engine(options: LlamaOptions) -> Engine:
    """Open the engine with the given draft, the one in the target's folder, or none; logs the choice."""
    from ..engine.engine import Engine

    options.engine_config(None)  # check values before opening files
    draft, found, own = _choose_draft(options)
    config = options.engine_config(draft, own)
    try:
        return Engine.load(config)
    except DflashError as error:
        if draft is None or not found or config.mode != "auto":  # any other mode needs a draft
            raise
        reason = str(error)
    engine = Engine.load(options.engine_config(None, True))  # use the target's prediction head, if it has one
    head = "drafting with the target's prediction head"
    how = head if engine.has_draft else "decoding without a draft model"
    warn([f"the draft that was found is not used, {how}: {reason}"])
    return engine


def _choose_draft(options: LlamaOptions) -> tuple[Path | None, bool, bool]:
    """(draft path or None, whether it was found rather than named, whether the target's prediction head drafts in its place).

    Raises ConfigError if a named one is missing."""
    named, spec, mode = options.draft_model, options.spec, options.mode
    if isinstance(named, (str, os.PathLike)):
        path = Path(named)
        if not path.exists():
            raise ConfigError(f"draft_model: {path} does not exist")
        return path, isinstance(named, FoundDraft), False
    if named is False or mode == "plain" or options.lookup:
        return None, False, False
    if spec is not None and not any(name in FILES for name in spec):
        return None, False, "mtp" in spec
    from ..drafts.beside import draft_beside

    beside = draft_beside(Path(options.model_path))
    none = beside.path is None and not beside.own
    if none and mode in ("chain", "tree") and "suffix" not in (spec or ()):
        raise ConfigError(f"mode {mode} needs a draft: {beside.why}; pass draft_model=PATH")
    if named is not None:  # another Python drafter
        drafts = f"drafting with {beside.path.name}" if beside.path else beside.own
        warn(
            [
                f"draft_model: a {type(named).__name__} does not draft here, pass the path of a DFlash draft; "
                f"{drafts or 'decoding without a draft model'}"
            ]
        )
    elif none:
        why = beside.why.replace("draft", "DFlash draft", 1)
        advice = "pass draft_model=PATH for speculation, draft_model=False to silence this"
        warn([f"{why}: decoding without a draft model; {advice}"])
    return beside.path, True, bool(beside.own)
