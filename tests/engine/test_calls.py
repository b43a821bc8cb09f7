"""Tests of calls that used to end the interpreter: in a forked child, with invalid ids, from two threads, after closing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.errors import ConfigError, DeviceError, DflashError
from reference.engine_kit import PROMPT, Solo, fresh, generate, sampler, steps
from reference.toys import write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("calls"), 11)


@pytest.fixture
def engine(pair: tuple[Path, Path]):
    with Solo.load(EngineConfig(*pair, n_threads=2, n_gpu_layers=0)) as opened:
        yield opened


def in_a_child(work: Callable[[], bool]) -> int:
    """Exit code of a forked child: 0 if `work` gave True; one that hangs is ended."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 1)
        except BaseException:  # noqa: BLE001
            os._exit(2)
    for _ in range(600):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 3


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_decodes_and_so_does_its_parent(engine: Solo) -> None:
    expected = generate(fresh(engine), max_tokens=20, mode="tree")

    def work() -> bool:
        same = generate(fresh(engine), max_tokens=20, mode="tree") == expected
        engine.close()
        return same

    assert in_a_child(work) == 0
    assert generate(fresh(engine), max_tokens=20, mode="tree") == expected


@pytest.mark.parametrize("bad", [-1, 64, 1 << 40])
@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_a_sampler_that_gives_no_token(engine: Solo, mode, bad: int) -> None:
    fresh(engine)
    choose = sampler(engine, temperature=1.0)
    calls, sample = 0, choose.sample

    def failing(row: np.ndarray, history=()) -> int:
        nonlocal calls
        calls += 1
        return bad if calls == 5 else sample(row, history)

    choose.sample = failing
    with pytest.raises(
        ConfigError, match=f"the sampler gave token {bad}, which is outside the vocabulary of 64"
    ):
        list(engine.generate(choose, max_tokens=40, mode=mode, keep_logits=True, stop=lambda token: False))
    assert len(generate(fresh(engine), max_tokens=5)) == 5  # it is whole


def test_closing_while_another_thread_decodes(pair: tuple[Path, Path]) -> None:
    for wait in (0.0, 0.002, 0.01, 0.05):
        engine = Solo.load(EngineConfig(*pair, n_threads=1, n_gpu_layers=0, calibrate="never"))
        began, ended = threading.Event(), []

        def decode(engine=engine, began=began, ended=ended) -> None:
            try:
                fresh(engine)
                for _ in steps(engine, max_tokens=3000, mode="tree"):
                    began.set()
            except DflashError as error:
                ended.append(error)

        thread = threading.Thread(target=decode)
        thread.start()
        began.wait(60)
        time.sleep(wait)
        engine.close()
        thread.join(60)
        assert not thread.is_alive()
        assert len(ended) == 1 and isinstance(ended[0], DeviceError) and "closed" in str(ended[0])


def test_two_threads(engine: Solo) -> None:
    """One call is served; the other raises and names the running one."""
    fresh(engine)
    done, errors = [], []

    def decode() -> None:
        try:
            done.append(generate(fresh(engine), max_tokens=200, mode="tree"))
        except ConfigError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) + len(errors) == 4 and done
    assert all("is running on this engine" in words for words in errors)


def test_every_call_fails_by_name_after_closing(pair: tuple[Path, Path]) -> None:
    engine = Solo.load(EngineConfig(*pair, n_threads=1, n_gpu_layers=0, calibrate="never"))
    fresh(engine)
    kept = engine.snapshot()
    engine.close()
    engine.close()
    calls: list[Callable[[], object]] = [
        engine.reset,
        lambda: engine.prefill(PROMPT),
        lambda: next(steps(engine)),
        engine.snapshot,
        lambda: engine.restore(kept),
    ]
    for call in calls:
        with pytest.raises(DeviceError, match="the engine is closed"):
            call()


@pytest.mark.parametrize("where", ["a pass", "a snapshot", "the next graph"])
def test_memory_that_ends_is_an_error_by_name(engine: Solo, monkeypatch, where: str) -> None:
    expected = generate(fresh(engine), max_tokens=20, mode="tree")

    def none_left(*args: object, **more: object) -> None:
        raise MemoryError

    fresh(engine)
    with monkeypatch.context() as patch:
        if where == "a snapshot":
            patch.setattr(engine.device, "read_pieces", none_left)
            with pytest.raises(
                DeviceError, match="^snapshot: this process can get no more memory; lower the context"
            ):
                engine.snapshot()
        else:
            patch.setattr(
                *((engine.passes, "verify") if where == "a pass" else (type(engine.passes.target), "build")),
                none_left,
            )
            engine.passes.graphs.clear()
            with pytest.raises(DeviceError, match="^a generation: this process can get no more memory"):
                generate(engine, max_tokens=20, mode="tree")
    assert generate(fresh(engine), max_tokens=20, mode="tree") == expected


def test_memory_that_ends_while_loading(pair: tuple[Path, Path], monkeypatch) -> None:
    def none_left(*args: object, **more: object) -> None:
        raise MemoryError

    monkeypatch.setattr("dflash_ggml.engine.loading.TargetPasses", none_left)
    with pytest.raises(DeviceError, match="^loading: this process can get no more memory"):
        Solo.load(EngineConfig(*pair, n_threads=1, n_gpu_layers=0))
