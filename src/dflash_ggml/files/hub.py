"""Models by name: `user/repo[:quant]` resolved and fetched through huggingface_hub, into its own cache.

HF_HOME, HF_TOKEN and HF_HUB_OFFLINE are honoured by that library; its progress bars are shown.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Literal

from ..errors import ConfigError, DflashError
from .gguf import PART_NAME, part_names
from .pairs import ModelName, Pair, find_pair

DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
# preferred quantisations of drafts: small types cost acceptance and save little; then larger ones first
DRAFT_QUANTS = ("Q8_0", "BF16", "F16")
_SIDE_FILE = re.compile(r"^(mmproj|imatrix|mtp-|eagle3-|dflash-|dspark-)|imatrix|mmproj", re.IGNORECASE)
_NO_MODEL = re.compile("mmproj|imatrix", re.IGNORECASE)
_DRAFT_FILE = re.compile(r"(^|[-_.])(dflash2?|dspark)([-_.]|$)", re.IGNORECASE)
_BITS = re.compile(r"(?:^|[-_.])(?:UD-)?(?:I?Q|TQ|F|MXFP|NVFP)(\d+)(?:_|[-.]|$)", re.IGNORECASE)
_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$", re.ASCII)

log = logging.getLogger("dflash_ggml")


class HubError(DflashError):
    """A model could not be fetched from the hub; the message has the reason and what to do."""


@dataclass(frozen=True, slots=True)
class RepoSpec:
    """A repository on the hub, optionally with a quantisation."""

    repo: str
    quant: str | None = None

    @classmethod
    def parse(cls, text: str) -> RepoSpec:
        """Parse `user/repo[:quant]`.

        Raises:
            ConfigError: The text has another form.
        """
        repo, colon, quant = text.partition(":")
        if not _NAME.match(repo) or ".." in repo or (colon and not quant):
            raise ConfigError(f"{text!r} does not name a repository: expected user/repo or user/repo:quant")
        return cls(repo, quant or None)


def pick_target(files: Iterable[str], spec: RepoSpec) -> str:
    """The main model among a repository's files.

    Without a quantisation: Q4_K_M, else Q8_0, else the first file by name.

    Raises:
        HubError: There is none (with that quantisation).
    """
    models = sorted(
        f for f in _gguf(files) if not _SIDE_FILE.search(PurePosixPath(f).name) and not is_draft(f)
    )
    first = (f for quant in DEFAULT_QUANTS for f in models if _has_quant(f, quant))
    return _pick(models, spec, "a model", [*first, *models])


def pick_draft(files: Sequence[str], spec: RepoSpec) -> str | None:
    """The draft's GGUF in a repository of drafts; None if it is stored as safetensors."""
    drafts = sorted(f for f in _gguf(files) if is_draft(f) and not _NO_MODEL.search(f))
    if not drafts:  # in a repository of drafts, file names need not say "draft"
        drafts = sorted(f for f in _gguf(files) if not _SIDE_FILE.search(PurePosixPath(f).name))
    if (
        not drafts
        and "config.json" in files
        and any(f.endswith(".safetensors") and "/" not in f for f in files)
    ):
        return None
    return _pick(drafts, spec, "a draft", sorted(drafts, key=draft_rank))


def pick_sidecar(files: Iterable[str], target: str) -> str | None:
    """A draft in the folder of `target` in its repository, unless its name contains another model's."""
    folder, own = PurePosixPath(target).parent, ModelName.of(PurePosixPath(target).name)
    beside = [
        f
        for f in _gguf(files)
        if PurePosixPath(f).parent == folder and is_draft(f) and f != target and not _NO_MODEL.search(f)
    ]
    fitting = [f for f in beside if not ModelName.of(PurePosixPath(f).name).contradicts(own)]
    return min(fitting, key=draft_rank, default=None)


def draft_rank(file: str) -> tuple[int, int, str]:
    """Sort key of drafts: Q8_0, BF16, F16, then more bits per weight first, by file name."""
    for rank, quant in enumerate(DRAFT_QUANTS):
        if _has_quant(file, quant):
            return rank, 0, file
    bits = _BITS.search(PurePosixPath(file).stem)
    return len(DRAFT_QUANTS), -int(bits[1]) if bits else 0, file


def published(repo: str, name: str) -> Pair | None:
    """The published pair with this repository's file as target.

    Raises:
        HubError: The model is not supported yet.
    """
    pair = find_pair(PurePosixPath(name).name, repo)
    if pair is not None and not pair.loads:
        raise HubError(f"{repo}: {pair.name} {pair.note}")
    return pair


def is_draft(file: str) -> bool:
    """Whether a file name denotes a DFlash, DFlash2 or DSpark draft."""
    return _DRAFT_FILE.search(PurePosixPath(file).stem) is not None


def _gguf(files: Iterable[str]) -> Iterator[str]:
    """The GGUF files; only the first part of split ones."""
    for f in files:
        if f.lower().endswith(".gguf"):
            part = PART_NAME.match(PurePosixPath(f).name)
            if part is None or int(part["number"]) == 1:
                yield f


def _has_quant(file: str, quant: str) -> bool:
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", PurePosixPath(file).stem)
    folders = "/".join(PurePosixPath(file).parent.parts)
    return (
        re.search(rf"(^|[-_./]){re.escape(quant)}($|[-./])", f"{folders}/{stem}", re.IGNORECASE) is not None
    )


def _pick(models: Sequence[str], spec: RepoSpec, what: str, ranked: Sequence[str]) -> str:
    """The file with the requested quantisation, else the first of `ranked`."""
    if not models:
        raise HubError(f"{spec.repo} holds no GGUF file of {what}")
    if spec.quant is None:
        return ranked[0]
    found = next((f for f in models if _has_quant(f, spec.quant)), None)
    if found is None:
        raise HubError(f"{spec.repo} holds no {spec.quant} file; it has: {', '.join(models)}")
    return found


class Hub:
    """Fetches files of the hub.

    Args:
        offline: Use the cache only.
        endpoint: Address of another hub.
    """

    def __init__(
        self,
        *,
        offline: bool = False,
        token: str | None = None,
        cache_dir: Path | None = None,
        endpoint: str | None = None,
    ) -> None:
        self._lib = _library()
        self._offline = offline or bool(self._lib.constants.HF_HUB_OFFLINE)
        self._token = token
        self._cache = cache_dir
        self._endpoint = endpoint

    def silence_retries(self) -> None:
        """Silence the library's retry messages; its last error is reported."""
        self._lib.utils.logging.set_verbosity_error()

    def target(
        self, spec: RepoSpec, file: str | None = None, *, want_draft: bool = True
    ) -> tuple[Path, Path | None]:
        """Fetch the main model (`file` overrides the choice) and, if wanted, its draft: the one that `draft_for` finds.

        Raises:
            HubError: A file cannot be fetched, or (checked first) a published model is not supported yet.
        """
        files = self.files(spec.repo)
        name = file if file is not None else pick_target(files, spec)
        published(spec.repo, name)
        model = self.fetch_parts(spec.repo, name, files)
        return model, self.draft_for(spec.repo, name, files) if want_draft else None

    def draft_for(self, repo: str, name: str, files: Sequence[str]) -> Path | None:
        """Fetch the draft in a repository's folder of the model, else the one published for it. None, with a warning, if there is
        none or it cannot be fetched, since it was not named explicitly."""
        title = PurePosixPath(name).name
        pair = find_pair(title, repo)
        if pair is not None and pair.draft is None:
            log.warning("no draft for %s: %s; decoding without a draft model", pair.name, pair.note)
            return None
        try:
            if side := pick_sidecar(files, name):
                return self.fetch_parts(repo, side, files)
            if pair is None or pair.draft is None:
                log.warning(
                    "no draft is known for %s, decoding without a draft model; name one with -md or -hfd",
                    title,
                )
                return None
            log.warning("%s: its draft is %s; -hfd names another, --mode plain none", title, pair.draft)
            return self.draft(RepoSpec.parse(pair.draft))
        except HubError as error:
            log.warning("no draft for %s: %s; decoding without a draft model", title, error)
            return None

    def draft(self, spec: RepoSpec, file: str | None = None) -> Path:
        """Fetch a draft: a GGUF file, or the folder of a safetensors draft with its config.json."""
        files = self.files(spec.repo)
        name = file if file is not None else pick_draft(files, spec)
        if name is not None:
            return self.fetch_parts(spec.repo, name, files)
        ends = (".safetensors", ".safetensors.index.json")
        wanted = [f for f in files if f in ("config.json", "mask_embedding.pt") or f.endswith(ends)]
        fetched = [self.fetch(spec.repo, f) for f in wanted if "/" not in f]
        return fetched[0].parent

    def fetch_parts(self, repo: str, name: str, files: Sequence[str]) -> Path:
        """Fetch a file, with all parts if it is part of a split model.

        Raises:
            HubError: The repository lacks a part.
        """
        folder = PurePosixPath(name).parent
        parts = [str(folder / part) for part in part_names(PurePosixPath(name).name)]
        missing = next((part for part in parts if len(parts) > 1 and part not in files), None)
        if missing is not None:
            raise HubError(f"{repo} lacks {missing}, one of the {len(parts)} parts of {name}")
        return {part: self.fetch(repo, part) for part in parts}[str(PurePosixPath(name))]

    def files(self, repo: str) -> list[str]:
        """Sorted names of a repository's files; offline, of those in the cache."""
        with _plain_words(repo, None):
            if self._offline:
                names = sorted(self._cached_files(repo))
                if not names:
                    raise HubError(f"{repo} is not in the cache, and offline mode is on")
                return names
            about = self._lib.HfApi(endpoint=self._endpoint, token=self._token).model_info(repo)
            return sorted(s.rfilename for s in about.siblings or ())

    def _cached_files(self, repo: str) -> Iterator[str]:
        try:
            cache = self._lib.scan_cache_dir(self._cache)
        except self._lib.errors.CacheNotFound:
            return
        for entry in cache.repos:
            if entry.repo_id == repo and entry.repo_type == "model":
                newest = max(entry.revisions, key=lambda r: ("main" in r.refs, r.last_modified))
                yield from (f.file_path.relative_to(newest.snapshot_path).as_posix() for f in newest.files)

    def fetch(self, repo: str, file: str, kind: Literal["model", "dataset"] = "model") -> Path:
        """Fetch one file into the cache (once) and return its path."""
        with _plain_words(repo, file):
            return Path(
                self._lib.hf_hub_download(
                    repo,
                    file,
                    repo_type=kind,
                    cache_dir=self._cache,
                    token=self._token,
                    local_files_only=self._offline,
                    endpoint=self._endpoint,
                )
            )


def _library() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise HubError(
            "models and prompts by name need huggingface_hub: pip install 'dflash-ggml[hub]'"
        ) from None
    return huggingface_hub


@contextmanager
def _plain_words(repo: str, file: str | None) -> Iterator[None]:
    """Turn the hub library's exceptions into one line that says what to do."""
    from huggingface_hub import errors

    what = f"{repo}/{file}" if file else repo
    try:
        yield
    except errors.GatedRepoError:
        raise HubError(
            f"{repo} is gated: accept its terms on its page, then set HF_TOKEN to a token of that account"
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"{repo} is not on the hub, or it is private: check the name, or set HF_TOKEN for a private one"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{repo} has no main branch") from None
    except errors.LocalEntryNotFoundError as error:
        if "offline" in str(error).lower() or "local_files_only" in str(error):
            raise HubError(f"{what} is not in the cache, and offline mode is on") from None
        raise HubError(f"{what}: the hub could not be reached, and the file is not in the cache") from None
    except errors.EntryNotFoundError:
        raise HubError(f"{repo} has no file {file}") from None
    except errors.OfflineModeIsEnabled:
        raise HubError(f"{what} is not in the cache, and offline mode is on") from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "?")
        raise HubError(f"{what}: the hub answered with status {status}; try again later") from None
    except errors.HTTPError as error:
        raise HubError(
            f"{what}: the hub could not be reached ({error}); --offline uses what is in the cache"
        ) from None
    except OSError as error:
        raise HubError(f"{what}: {error}") from None
