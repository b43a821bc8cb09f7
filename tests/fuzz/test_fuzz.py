"""Short run of the fuzzer; `tests/fuzz/run.py` is the long one. A minute, most of it for files that load and decode."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.campaign import run


@pytest.mark.parametrize(
    ("kind", "n", "part"),
    [
        ("headers", 1000, 50),
        ("coherent", 300, 50),
        ("safetensors", 500, 50),
        ("experts", 60, 10),
        ("expert_headers", 600, 200),
        ("windows", 80, 10),
        ("window_headers", 300, 100),
    ],
)
def test_no_file_ends_the_process(kind: str, n: int, part: int) -> None:
    """And of all cases more than that part load, and as many are refused."""
    outcome = run(kind, 0, n)
    assert not outcome.findings
    assert outcome.counts.total() == n
    assert min(outcome.counts[word] for word in ("loads", "refused")) > n / part


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


def test_no_request_ends_the_server() -> None:
    pytest.importorskip("starlette", reason="the server extra is not installed")
    from fuzz import hostile

    outcome = hostile.run(0, 150)
    assert not outcome.findings
    assert outcome.counts.total() == 150 and min(outcome.counts[word] for word in ("loads", "refused")) > 10


def test_a_server_that_ends_fails_or_hangs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign itself, with a server that misbehaves."""
    pytest.importorskip("starlette", reason="the server extra is not installed")
    from fuzz import hostile

    class Bad:
        before = 0

        def ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
            if path == "/late":
                raise TimeoutError
            if path == "/gone":
                raise ConnectionResetError
            return (500, b"x") if path == "/bad" else (200, b"{}")

        def ended(self) -> str:
            return "exit code -11" if path == "/gone" else ""

        def most(self) -> int:
            return 400 << 20 if path == "/large" else 0

    found = {
        "/late": "hang",
        "/gone": "abort",
        "/bad": "wrong exception",
        "/large": "over 300 MB",
        "/": "loads",
    }
    for path, what in found.items():
        assert hostile._one(Bad(), "POST", path, b"", {})[0] == what  # type: ignore[arg-type]
