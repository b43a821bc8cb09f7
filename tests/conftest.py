"""Model files shared by all tests. Variants are written once per session, on first use."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from dflash_ggml.engine import known_costs
from dflash_ggml.files.pairs import EMBEDDED_DRAFT, EMBEDDED_TARGET

# a busy machine is no failure: no test depends on time
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# a shell's background job inherits an ignored Ctrl-C, and so would every process that the tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Keep what collecting the tests has made, which lives to the end, out of garbage collections: each takes 0.25 s with it."""
    gc.collect()
    gc.freeze()


def _encodable(value: Any) -> Any:
    """The value with every lone surrogate in its strings escaped."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _encodable(inner) for key, inner in value.items()}
    return type(value)(map(_encodable, value)) if isinstance(value, (list, tuple)) else value


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Let no name that is not UTF-8, in what a test printed, end the process that would send its report."""
    return _encodable((yield))


@pytest.fixture(scope="session", autouse=True)
def _hasty_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines of this process keep what they measure away from the user's, and measure next to nothing: that takes time."""
    folder = tmp_path_factory.mktemp("costs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_costs, "default_folder", lambda: folder)
        patch.setattr(known_costs, "SECONDS", {True: 1.5, False: 0.02})
        patch.setattr(known_costs, "WARM_SECONDS", 0.0)
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory for model files that live as long as the session."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """The embedded target, Q8_0."""
    return EMBEDDED_TARGET


@pytest.fixture(scope="session")
def demo_draft() -> Path:
    """The embedded draft, Q8_0."""
    return EMBEDDED_DRAFT


@pytest.fixture(scope="session")
def f32_target(demo_target: Path, model_dir: Path) -> Path:
    """The embedded target with every weight as float32 (81 MB)."""
    from reference import model_files

    return model_files.f32(demo_target, model_dir / "target-f32.gguf")


@pytest.fixture(scope="session")
def f32_draft(demo_draft: Path, model_dir: Path) -> Path:
    """The embedded draft with every weight as float32."""
    from reference import model_files

    return model_files.f32(demo_draft, model_dir / "draft-f32.gguf")


@pytest.fixture(scope="session")
def q4km_target(demo_target: Path, model_dir: Path) -> Path:
    """The embedded target requantised to the stock Q4_K_M mix."""
    from reference import model_files

    return model_files.q4_k_m(demo_target, model_dir / "target-q4_k_m.gguf")


@pytest.fixture(scope="session")
def toy_pair(model_dir: Path) -> tuple[Path, Path]:
    """A random target and draft with 64 tokens, in float32: fast enough for statistics and stress."""
    from reference import toys

    return toys.write_pair(model_dir, seed=1)


@pytest.fixture(scope="session")
def moe_pair(model_dir: Path) -> tuple[Path, Path]:
    """The same with layers of experts, and value heads in the order of `qwen3next`."""
    from reference import toys

    return toys.write_pair(model_dir, 5, arch="qwen3next", n_experts=12, n_used=3, n_ff=32, ssm_v_heads=6)
