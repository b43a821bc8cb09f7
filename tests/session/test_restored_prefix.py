"""Tests of a long prompt across a restart: a session's last prefix is restored from disk, and the output is the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.engine.engine import Engine
from dflash_ggml.session import slots
from dflash_ggml.session.disk_cache import DiskCache, state_identity
from dflash_ggml.session.events import Begin, TextDelta
from dflash_ggml.session.requests import CompletionRequest
from dflash_ggml.session.session import Session, run_completion

PROMPT = np.random.default_rng(5).integers(3, 60, 1300).tolist()


def opened(pair: tuple[Path, Path], folder: Path, **options: object) -> Session:
    engine = Engine.load(EngineConfig(*pair, n_ctx=2048, reference=True, n_gpu_layers=0, **options))  # type: ignore[arg-type]
    return Session(engine, disk=DiskCache(folder, 1 << 30, state_identity(engine)))


def ask(session: Session, prompt: list[int]) -> tuple[int, str]:
    """Tokens of the prompt that were known, and the answer."""
    request = CompletionRequest(prompt=prompt, sampling=SamplingParams(temperature=0.0), max_tokens=12)
    events = list(run_completion(session, request))
    (begin,) = (e for e in events if isinstance(e, Begin))
    return begin.cached_n, "".join(e.text for e in events if isinstance(e, TextDelta))


def test_a_restart_goes_on_from_the_disk(toy_pair: tuple[Path, Path], tmp_path: Path) -> None:
    first = opened(toy_pair, tmp_path)
    known, text = ask(first, PROMPT)
    assert known == 0
    first.close()
    again = opened(toy_pair, tmp_path)
    known, same = ask(again, PROMPT)
    assert known > 1200 and same == text
    again.close()
    # another form of the state is not offered, nor one that was made in another way
    for options in ({"type_k": "q8_0", "type_v": "q8_0"}, {"fa_window": 500}):
        other = opened(toy_pair, tmp_path, **options)
        assert ask(other, PROMPT)[0] == 0
        other.close()


def test_a_prefix_that_another_sequence_displaces_is_saved_too(
    toy_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    session = opened(toy_pair, tmp_path)
    text = ask(session, PROMPT)[1]
    ask(session, PROMPT[::-1])
    session.slots.cache.clear()  # as if memory had been short
    assert session.slots.disk is not None
    session.slots.disk.close()
    known, same = ask(session, PROMPT)
    assert known > 1200 and same == text
    session.close()


def test_a_prefix_that_does_not_fit_in_memory_goes_to_the_disk(
    toy_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    session = opened(toy_pair, tmp_path)
    text = ask(session, PROMPT)[1]
    cache, row = session.slots.cache, session.slots.all[0].slot.row_nbytes
    longest, *_ = cache.without_rows(PROMPT)
    cache.budget = longest.state_nbytes + row * len(longest.tokens) - 1
    ask(session, PROMPT[::-1])
    assert cache.nbytes <= cache.budget and not cache.rows(PROMPT)
    assert session.slots.disk is not None
    session.slots.disk.close()
    known, same = ask(session, PROMPT)
    assert known == len(longest.tokens) and same == text
    session.close()


def state_identity_of(pair: tuple[Path, Path]) -> list[str]:
    with Engine.load(EngineConfig(*pair, n_ctx=64, reference=True, n_gpu_layers=0)) as engine:
        return state_identity(engine)


def test_a_short_gain_is_not_worth_reading(
    toy_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(toy_pair, tmp_path)
    ask(session, PROMPT)
    session.close()
    monkeypatch.setattr(slots, "SHORTEST", 1400)
    session = opened(toy_pair, tmp_path)
    assert ask(session, PROMPT)[0] == 0
    session.close()


def test_the_identity_knows_the_bytes_of_the_models(toy_pair: tuple[Path, Path], tmp_path: Path) -> None:
    before = state_identity_of(toy_pair)
    copied = tuple(tmp_path / path.name for path in toy_pair)
    for path, copy in zip(toy_pair, copied, strict=True):
        copy.write_bytes(path.read_bytes())
    assert state_identity_of(copied) == before  # type: ignore[arg-type]
    raw = bytearray(copied[0].read_bytes())
    raw[-2] ^= 1
    copied[0].write_bytes(raw)
    assert state_identity_of(copied)[0] != before[0]  # type: ignore[arg-type]
