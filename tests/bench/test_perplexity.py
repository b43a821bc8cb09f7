"""Tests of perplexity: llama.cpp's windows, against a plain sum over the engine's own logits."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from dflash_ggml.bench import perplexity
from dflash_ggml.bench.cli import main
from dflash_ggml.bench.perplexity import Score, kv_pairs, read_text, score, windows_of
from dflash_ggml.errors import ConfigError
from reference import kv_toys
from reference.engine_kit import EXACT, Solo


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kv_toys.write_target(tmp_path_factory.mktemp("ppl"), 43, **kv_toys.VARIANTS[43])


def test_windows() -> None:
    """What does not fill one is left out."""
    assert windows_of(range(11), 4, None) == [range(4), range(4, 8)]
    assert windows_of(range(12), 4, 2) == [range(4), range(4, 8)]
    with pytest.raises(ConfigError, match="has 3 tokens, a window takes 4"):
        windows_of(range(3), 4, None)
    with pytest.raises(ConfigError, match="--window: 3 is below 4"):
        windows_of(range(30), 3, None)


@pytest.mark.parametrize("begin", [None, 7])
@pytest.mark.parametrize("window", [16, 17])
def test_the_second_half_is_scored(
    target: Path, begin: int | None, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens half + 1 to the last, each by the logits of the one before, in passes of few rows or of many."""
    from dflash_ggml.config import EngineConfig

    ids = np.random.default_rng(1).integers(0, 60, 3 * window).tolist()
    windows, reports = windows_of(ids, window, None), list[int]()
    with Solo.load(EngineConfig(target, n_ctx=64, **EXACT)) as engine:
        expected = n = 0.0
        for text in windows:
            rows: list[np.ndarray] = []
            engine.reset()
            engine.prefill([*text] if begin is None else [begin, *text[1:]], take_row=rows.append)
            for at in range(window // 2, window - 1):
                x = rows[at].astype(np.float64)
                expected += math.log(np.exp(x).sum()) - x[text[at + 1]]
                n += 1
        found = score(engine.slot, windows, begin, reports.append)
        monkeypatch.setattr(perplexity, "_LOGITS_BYTES", 3 * 4 * engine.n_vocab)
        few = score(engine.slot, windows, begin, lambda done: None)
    assert (len(found.lost), found.windows, reports) == (n, 3, [0, 1, 2, 3])
    assert sum(found.lost) == pytest.approx(expected, rel=1e-5) == sum(few.lost)


def test_rows() -> None:
    first, other = Score([0.5, 1.5], 1, 1.0), Score([0.5, 1.7], 1, 0.0)
    row = other.row("f16", first, 8)
    assert row["perplexity"] == pytest.approx(math.exp(1.1))
    assert row["change"] == pytest.approx(100 * (math.exp(0.1) - 1)) and row["per_second"] is None
    assert row["change_error"] == pytest.approx(100 * math.exp(0.1) * 0.1), "of the differences 0 and 0.2"
    assert first.row("f32", None, 8)["error"] == pytest.approx(math.e * 0.5)


def test_kv_types() -> None:
    assert kv_pairs("f16, q8_0/q4_0") == [("f16", "f16"), ("q8_0", "q4_0")]
    with pytest.raises(ConfigError, match="--kv: q9 is not K/V of auto, f32"):
        kv_pairs("f16,q9")


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\xfe")
    for name, message in (("a", "it is not UTF-8 text"), ("none", "No such file")):
        with pytest.raises(ConfigError, match=f"can't read .*{name}: {message}"):
            read_text(tmp_path / name)


def test_the_command(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefghij" * 20, encoding="utf-8")
    words = [str(text), "-m", str(target), "--window", "32", "--limit", "2", "--kv", "f32,q8_0", "-ngl", "0"]
    assert main(["perplexity", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Perplexity" and [line.split()[0] for line in lines[2:4]] == ["f32", "q8_0"]
    assert main(["perplexity"]) == 2 and main(["calibrate", "x"]) == 2
    assert "dflash-bench perplexity FILE" in capsys.readouterr().err
