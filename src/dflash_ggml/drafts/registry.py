"""Registry of draft kinds: the only place that knows them all."""

from __future__ import annotations

from pathlib import Path

from ..config import DraftType, EngineConfig
from ..errors import ConfigError
from ..files.gguf import GGUFFile
from ..models.target import Target
from .dflash.file import DraftFile
from .dflash.source import DFlashSource
from .drafter import DraftSource
from .mtp.drafter import DEPTH, open_head
from .several import SeveralSource


def open_draft(
    path: Path, window: int | None = None, type_: DraftType | None = None, candidates: int | None = None
) -> DraftSource:
    """The draft in a file or folder; `window` replaces its attention window (see `DraftFile.open`), `type_` that of its matrices,
    `candidates` the number per depth that it was trained for.

    Raises ModelFileError for one that is damaged or of no kind that is known."""
    return DFlashSource(DraftFile.open(path, window=window), window, type_, candidates)


def open_own(file: GGUFFile, target: Target, depth: int = DEPTH) -> DraftSource | None:
    """The draft that a target's open file holds itself, to draft `depth` tokens ahead; None if it has none.

    Raises ModelFileError for one that is damaged."""
    return open_head(file, target, depth)


def open_chosen(config: EngineConfig, file: GGUFFile, target: Target) -> tuple[DraftSource | None, list[str]]:
    """What is to draft for a target's open file: the draft that is configured, the file's own, both, or none; and what to tell
    of the choice. Whether it fits the target is yet to be checked.

    Raises ConfigError where `spec` leaves out the draft that is configured or names what alone drafts and is not there,
    ModelFileError for one that is damaged."""
    draft: DraftSource | None = None
    if config.draft is not None:
        draft = open_draft(config.draft, config.draft_window, config.draft_type, config.candidates)
        if not config.wants(draft.name):
            raise ConfigError(
                f"spec: {config.draft} is a {draft.name} draft, which it leaves out; name it there"
            )
        if config.names("mtp") and (head := open_own(file, target, config.draft_max)):
            draft.check(
                target, str(config.model)
            )  # layers that the target lacks are contiguous with no others
            draft = SeveralSource([draft, head])
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
