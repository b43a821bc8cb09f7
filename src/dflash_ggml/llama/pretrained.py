"""Llama.from_pretrained: one model file of a hub repository by name or glob, and the draft beside it."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from ..errors import ConfigError
from ..files.gguf import part_names
from ..files.hub import Hub, pick_sidecar, published
from .options import FoundDraft


def fetch_pretrained(
    repo_id: str,
    filename: str | None,
    additional_files: Sequence[str],
    local_dir: str | os.PathLike[str] | None,
    cache_dir: str | os.PathLike[str] | None,
    want_draft: bool,
) -> tuple[str, FoundDraft | None]:
    """Fetch a model and, if wanted, its draft, unless they are there.

    Args:
        repo_id: The repository.
        filename: Name of the model's file, or a pattern that matches one.
        additional_files: Names or patterns of further files.
        local_dir: Folder to put the files in.
        cache_dir: The hub's cache, if not the usual one.
        want_draft: Fetch a draft too.

    Returns:
        Path of the model, and the draft beside it, or the published one, or None.

    Raises:
        ConfigError: A pattern matches no file or several.
        HubError: The hub does not deliver the model, or, before anything is fetched, a published model cannot be loaded yet.
    """
    hub = Hub(cache_dir=Path(cache_dir) if cache_dir is not None else None)
    files = hub.files(repo_id)
    target = _only_match(repo_id, files, filename or "*.gguf")
    others = [_only_match(repo_id, files, pattern) for pattern in additional_files]
    pair = published(repo_id, target)
    has_usable = pair is None or pair.draft is not None
    draft = pick_sidecar(files, target) if want_draft and has_usable else None
    wanted = dict.fromkeys([*_parts(target), *others, *(_parts(draft) if draft else [])])
    paths = {name: _fetch(hub, repo_id, name, local_dir) for name in wanted}
    if want_draft and draft is None and (known := hub.draft_for(repo_id, target, files)):
        return paths[target], FoundDraft(known)
    return paths[target], FoundDraft(paths[draft]) if draft else None


def _parts(name: str) -> list[str]:
    path = PurePosixPath(name)
    return [str(path.parent / part) for part in part_names(path.name)]


def _only_match(repo_id: str, files: Sequence[str], pattern: str) -> str:
    found = [f for f in files if fnmatch.fnmatch(f, pattern)]
    models = {str(PurePosixPath(f).with_name(part_names(PurePosixPath(f).name)[0])) for f in found}
    if len(models) == 1:  # perhaps in parts
        found = found[:1]
    if len(found) != 1:
        problem = "Multiple files" if found else "No file"
        listed = ", ".join(found or files)
        raise ConfigError(f"{problem} found in {repo_id} matching {pattern}; available: {listed}")
    return found[0]


def _fetch(hub: Hub, repo_id: str, name: str, local_dir: str | os.PathLike[str] | None) -> str:
    if local_dir is None:
        return str(hub.fetch(repo_id, name))
    from huggingface_hub import hf_hub_download

    path = PurePosixPath(name)
    folder = None if str(path.parent) == "." else str(path.parent)
    return hf_hub_download(repo_id=repo_id, filename=path.name, subfolder=folder, local_dir=Path(local_dir))
