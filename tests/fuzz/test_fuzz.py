"""The short run of the fuzzer; `tests/fuzz/run.py` is the long one. 50 seconds, most of them for files that load and decode."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.campaign import run


@pytest.mark.parametrize(("kind", "n"), [("headers", 1000), ("coherent", 500), ("safetensors", 500)])
def test_no_file_ends_the_process(kind: str, n: int) -> None:
    outcome = run(kind, 0, n)
    assert not outcome.findings
    assert outcome.counts.total() == n and min(outcome.counts[word] for word in ("loads", "refused")) > n / 50


@pytest.mark.parametrize(
    ("case", "found"),
    [("sleep", "hang"), ("os.abort", "abort"), ("os._exit", "abort"), ("raise", "wrong exception")],
)
def test_what_is_found_is_counted_and_the_rest_goes_on(monkeypatch, tmp_path, case: str, found: str) -> None:
    """The campaign itself, with cases that misbehave."""
    do = {
        "sleep": "time.sleep(60)",
        "os.abort": "os.abort()",
        "os._exit": "os._exit(3)",
        "raise": "raise KeyError",
    }[case]
    (tmp_path / "fuzz").mkdir()
    (tmp_path / "fuzz" / "__init__.py").write_text("")
    (tmp_path / "fuzz" / "cases.py").write_text(
        "import os, time\n"
        "def case(seed, folder):\n"
        f"    if seed == 3: {do}\n"
        "    return 'loads'\n"
        "CASES = {'bad': case}\n"
    )
    from fuzz import campaign

    (tmp_path / "fuzz" / "campaign.py").write_text(Path(campaign.__file__).read_text())
    monkeypatch.setattr(campaign, "TESTS", tmp_path)
    outcome = run("bad", 0, 6, hangs_after=5.0)
    assert outcome.counts == {"loads": 5, found: 1}
    assert outcome.findings[0][:2] == (found, 3)
