"""Registry of draft kinds, the only module that imports all of them: it opens the draft that a configuration names."""

from __future__ import annotations

from pathlib import Path

from ..config import DraftType, EngineConfig
from ..errors import ConfigError
from ..files.gguf import GGUFFile
from ..models.target import Target
from .combined import CombinedSource
from .dflash.file import DraftFile
from .dflash.source import DFlashSource
from .drafter import DraftSource
from .mtp.drafter import DEPTH, MtpSource


def open_draft(
    path: Path, window: int | None = None, type_: DraftType | None = None, candidates: int | None = None
) -> DraftSource:
    """The draft in a file or folder.

    Args:
        path: A GGUF or .safetensors file, or a folder with one.
        window: Replaces its attention window (see `DraftFile.open`).
        type_: Type of converted float matrices (None: unchanged).
        candidates: Candidates per depth, instead of the trained number.

    Raises:
        ModelFileError: It is damaged, or of an unknown kind.
    """
    return DFlashSource(DraftFile.open(path, window=window), window, type_, candidates)


def open_own(file: GGUFFile, target: Target, depth: int = DEPTH) -> DraftSource | None:
    """The prediction head in a target's file, None if it has none.

    Args:
        file: The target's open file.
        target: The target in it.
        depth: Tokens to draft ahead.

    Raises:
        ModelFileError: The head is damaged.
    """
    head = target.prediction_head(file)
    return None if head is None else MtpSource(file, head, depth)


def open_chosen(config: EngineConfig, file: GGUFFile, target: Target) -> tuple[DraftSource | None, list[str]]:
    """Open the drafts for a target: the configured draft, the file's prediction head, both, or none.

    Whether they fit the target is not checked yet.

    Args:
        config: The engine's options.
        file: The target's open file.
        target: The target in it.

    Returns:
        The draft, None without one, and notes on the choice.

    Raises:
        ConfigError: `spec` leaves out the configured draft, or names the only source of drafts and it is missing.
        ModelFileError: A file is damaged.
    """
    draft: DraftSource | None = None
    if config.draft is not None:
        draft = open_draft(config.draft, config.draft_window, config.draft_type, config.candidates)
        if not config.wants(draft.name):
            raise ConfigError(
                f"spec: {config.draft} is a {draft.name} draft, which it leaves out; name it there"
            )
        if config.names("mtp") and (head := open_own(file, target, config.draft_max)):
            # first: its error names taps beyond the target's layers
            draft.check(target, str(config.model))
            draft = CombinedSource([draft, head])
    elif config.own_draft and config.mode != "plain" and config.wants("mtp"):
        draft = open_own(file, target, config.draft_max)
    notes = []
    if config.names("mtp") and target.prediction_head(file) is None:
        missing = f"spec: {config.model} has no prediction head (mtp) to draft with"
        if draft is None and not config.names_prompt_lookup:
            raise ConfigError(missing)
        notes.append(f"{missing}; what else is named drafts")
    if draft is None and config.mode in ("chain", "tree") and not config.names_prompt_lookup:
        raise ConfigError(f"mode {config.mode} needs a draft model (-md)")
    if config.draft_type is not None and config.draft is None:
        notes.append(f"draft_type: {config.draft_type} is for a draft file, and there is none")
    types = [f"{name}: {kind}" for name, kind in config.draft_cache_types.items() if kind != "auto"]
    if types and draft is None:
        notes.append(f"{', '.join(types)}: it is for a draft's caches, and there is no draft")
    return draft, notes
