"""Search for the draft in a target's folder, by name and by the metadata of both."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from ..errors import DflashError, ModelFileError
from ..files.gguf import GGUFFile, part_names
from ..files.hub import draft_rank
from ..files.named import NAMED
from ..files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET, ModelName, find_pair
from ..models.registry import read_target
from .registry import open_draft, open_own

log = logging.getLogger("dflash_ggml")


NAME_ONE = "name one with -md or -hfd"


@dataclass(frozen=True, slots=True)
class Beside:
    """Result of the search: the draft to use, or None and `why`.

    Attributes:
        path: File or folder of the draft.
        why: Reason why there is none.
        advice: How to get one.
        is_useless: There is one, but it cannot be used.
        own: The target's prediction head, which drafts instead; empty if it has none.
    """

    path: Path | None
    why: str = ""
    advice: str = NAME_ONE
    is_useless: bool = False
    own: str = ""


def draft_beside(model: Path) -> Beside:
    """The draft in the target's folder: a GGUF file, or a checkpoint's folder, with `dflash` or `dspark` in its name.

    It must fit the target in hidden size, taps and vocabulary, and its name must not contain another model's. Of several,
    one named after this target is preferred, then by quantisation (see `draft_rank`). Otherwise the draft included in this
    package for a target of that file name.

    Raises:
        ModelFileError: The target is damaged.
    """
    if model == EMBEDDED_TARGET:
        return Beside(EMBEDDED_DRAFT)
    with GGUFFile(model) as file:
        title = str(file.metadata.get("general.name", ""))
        target = read_target(file)
        try:
            head = open_own(file, target)
        except ModelFileError:  # reported by loading
            head = None
    name = ModelName.of(model.name, title)
    fitting: list[tuple[bool, tuple[int, int, str], Path]] = []
    reasons: list[str] = []
    for path in _candidates(model):
        own = ModelName.of(path.name)
        if not own.contradicts(name):
            try:
                draft = open_draft(path)
                draft.check(target, str(model))
            except (DflashError, OSError) as error:
                reasons.append(str(error).replace(f"{model.parent}/", ""))
                continue
            own = ModelName.of(path.name, draft.title)
        if own.contradicts(name):
            reasons.append(f"{path.name} is for {own} by its name")
        else:
            fitting.append((not (own.is_whole and own == name), draft_rank(path.name), path))
    if fitting:
        chosen = min(fitting)[2]
        if len(fitting) > 1:
            log.info("%d drafts fit %s: taking %s, -md names another", len(fitting), model.name, chosen.name)
        return Beside(chosen)
    if (ours := next((m.draft for m in NAMED if m.draft and m.file == model.name), None)) is not None:
        return Beside(ours)
    why, pair, advice = f"no draft beside {model}", find_pair(model.name, title), NAME_ONE
    if reasons:
        why += f" can be used ({'; '.join(reasons)})"
    if pair is not None and pair.draft is None:
        advice = f"{pair.name} has none that can be used: {pair.note}"
    elif pair is not None and pair.draft and pair.draft not in why:
        advice = f"-hfd {pair.draft} fetches the one of {pair.name}"
    instead = f"drafting with {model.name}'s own {head.title}, {head.depth} tokens ahead" if head else ""
    return Beside(None, why, advice, bool(reasons), instead)


def _candidates(model: Path) -> list[Path]:
    found = []
    for path in sorted(model.parent.iterdir()):
        lower = path.name.lower()
        if not ("dflash" in lower or "dspark" in lower) or path.name in part_names(model.name):
            continue
        if "mmproj" in lower or "imatrix" in lower:
            continue
        is_first = part_names(path.name)[0] == path.name
        if (lower.endswith(".gguf") and is_first) or (path / "config.json").is_file():
            found.append(path)
    return found
