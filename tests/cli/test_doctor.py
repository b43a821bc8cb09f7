"""Tests of `dflash-doctor`: every check on plain facts, then whole runs on good, wrong and broken files. 20 seconds."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_ggml.cli import checks
from dflash_ggml.cli.checks import Speed
from dflash_ggml.cli.doctor import line, main
from dflash_ggml.config import EngineConfig
from dflash_ggml.files.pairs import EMBEDDED_CONTEXT
from dflash_ggml.ggml.device import DeviceInfo
from dflash_ggml.policy.break_even import BreakEven
from dflash_ggml.state.memory import HOST_MARGIN, MARGIN, MIB, HostExperts, MemoryPlan
from reference import tiny_models as tiny
from reference import toys
from reference.fake_engine import FakeEngine

CPU = DeviceInfo("CPU", "some CPU", False, 0, 0, None)
GPUS = [DeviceInfo(f"CUDA{i}", "some GPU", True, 8 * MIB, 8 * MIB, None) for i in (0, 1)]

Doctor = Callable[..., tuple[int, list[dict[str, Any]]]]


def verdicts(found: list[checks.Check]) -> list[str]:
    return [check.verdict for check in found]


# ---- judgements


def test_a_build_without_patches_is_bad() -> None:
    assert checks.build_check("1", "2", 22, ["CPU"], ["AVX2"]).verdict == "ok"
    bad = checks.build_check("1", "2", 0, ["CPU"], ["AVX2"])
    assert bad.verdict == "bad" and "0 patches" in bad.text and "make build" in bad.advice


@pytest.mark.parametrize(
    ("features", "flags", "verdict"),
    [
        (["AVX2", "AVX512"], ["avx2", "avx512f", "sse"], "ok"),
        (["AVX2"], ["avx2", "avx512f"], "note"),
        (["NEON"], [], "ok"),
    ],
)
def test_unused_instruction_sets(features: list[str], flags: list[str], verdict: str) -> None:
    check = checks.cpu_check(features, flags)
    assert check.verdict == verdict
    assert ("AVX512" in check.text.partition(";")[2]) == (verdict == "note")


@pytest.mark.parametrize(
    ("n_threads", "cores", "load", "verdict"),
    [
        (2, 2, 0.1, "ok"),
        (4, 2, 0.1, "note"),
        (2, 2, 2.0, "note"),
        (2, 2, 0.9, "ok"),
        (1, 2, 1.9, "ok"),
        (8, 16, 4.0, "ok"),
    ],
)
def test_threads(n_threads: int, cores: int, load: float, verdict: str) -> None:
    assert checks.threads_check(n_threads, cores, load).verdict == verdict


@pytest.mark.parametrize(
    ("devices", "backends", "driver", "ngl", "gpu", "expected", "message"),
    [
        ([CPU], [], None, -1, 0, ["ok"], "runs the model"),
        ([CPU], [], "", -1, 0, ["note", "ok"], "no CUDA backend"),
        ([CPU], [], None, 99, 0, ["bad", "ok"], "no NVIDIA driver"),
        ([CPU], ["Vulkan"], None, -1, 0, ["note", "ok"], "drivers for Vulkan list no device"),
        ([CPU], ["Vulkan"], "", 99, 0, ["bad", "ok"], "drivers for Vulkan list no device"),
        ([*GPUS, CPU], ["Vulkan"], "", -1, 0, ["ok", "note", "note", "ok"], "without the kernels for NVIDIA"),
        ([CPU], ["CUDA"], None, -1, 0, ["note", "ok"], "libcuda.so.1"),
        ([CPU], ["CUDA"], "the driver reports error 100", 99, 0, ["bad", "ok"], "error 100"),
        ([CPU], ["CUDA"], "", -1, 0, ["note", "ok"], "lists no device"),
        ([*GPUS, CPU], ["CUDA"], "", -1, 0, ["ok", "note", "ok"], "-mg names 0"),
        ([*GPUS, CPU], ["CUDA"], "", -1, 1, ["note", "ok", "ok"], "only feeds the GPU"),
        ([*GPUS, CPU], ["CUDA"], "", 0, 0, ["note", "note", "ok"], "-ngl 0"),
        ([*GPUS, CPU], ["CUDA"], "", -1, 2, ["note", "note", "bad", "ok"], "there are 2 GPUs"),
    ],
)
def test_devices(
    devices: list[DeviceInfo],
    backends: list[str],
    driver: str | None,
    ngl: int,
    gpu: int,
    expected: list[str],
    message: str,
) -> None:
    found = checks.device_checks(devices, ["CPU", *backends], driver, ngl, gpu)
    assert verdicts(found) == expected
    assert any(message in check.text for check in found)
    assert all(check.advice for check in found if check.verdict != "ok")


def test_gpus_that_share_the_layers() -> None:
    devices = [DeviceInfo(f"CUDA{i}", "a card", True, 1 << 33, 1 << 33, None) for i in range(3)]
    found = checks.device_checks(devices, ["CPU", "CUDA"], "", -1, 0, ("CUDA2", "CUDA0"))
    assert [dict(check.data)["used"] for check in found] == [True, False, True]
    assert "shares the layers with 1 more" in found[0].text and "--device names others" in found[1].text


def test_memory_of_several_devices() -> None:
    beside = MemoryPlan(512, {"target weights": 50 * MIB}, MARGIN, where="CUDA1: layers 4 to 7")
    plan = MemoryPlan(
        512, {"target weights": 30 * MIB}, MARGIN + 30 * MIB, beside=(beside,), where="CUDA0: layers 0 to 3"
    )
    check = checks.memory_check(plan, "CUDA0", True)
    assert check.verdict == "bad" and "target weights on CUDA1" in check.advice
    assert (
        "on CUDA0 (layers 0 to 3): target weights 30" in check.text and "CUDA1 (layers 4 to 7)" in check.text
    )
    assert [one["where"] for one in dict(check.data)["devices"]] == [plan.where, beside.where]


@pytest.mark.parametrize(
    ("free", "is_gpu", "verdict"),
    [
        (MARGIN + 40 * MIB, True, "ok"),
        (MARGIN + 39 * MIB, True, "bad"),
        (MARGIN + 39 * MIB, False, "note"),
        (39 * MIB, False, "bad"),
    ],
)
def test_memory(free: int, is_gpu: bool, verdict: str) -> None:
    plan = MemoryPlan(512, {"target weights": 30 * MIB, "target K/V": 10 * MIB}, free)
    check = checks.memory_check(plan, "CUDA0", is_gpu)
    assert check.verdict == verdict
    assert check.verdict != "bad" or "target weights" in check.advice


def test_host_memory_is_reported_separately() -> None:
    kept = HostExperts(3, 900 * MIB, 4096 * MIB)
    plan = MemoryPlan(512, {"target weights": 30 * MIB}, MARGIN + 30 * MIB, kept)
    check = checks.memory_check(plan, "CUDA0", True)
    assert check.verdict == "ok" and check.text.endswith(
        "experts of 3 layers on the host, 900 of 4096 MiB free"
    )
    assert check.data["kept"] == {"layers": 3, "nbytes": 900 * MIB, "free": 4096 * MIB}
    assert checks.memory_check(MemoryPlan(512, plan.parts, 0), "CUDA0", True).data["kept"] is None
    advice = checks.memory_check(MemoryPlan(512, plan.parts, 0), "CUDA0", True, layers=7).advice
    assert advice.startswith("--n-cpu-moe 7 fits; or ")


def test_cpu_offload_needs_host_memory_with_a_margin() -> None:
    size = 900 * MIB
    assert not HostExperts(3, size, size + HOST_MARGIN).note
    short = HostExperts(3, size, size + HOST_MARGIN - 1)
    assert short.is_short and "900 MiB" in short.note


def test_speed() -> None:
    plain = Speed(100, 1.0)
    assert verdicts(checks.speed_checks(plain, None)) == ["ok"]
    assert verdicts(checks.speed_checks(plain, Speed(250, 1.0, 50, 250))) == ["ok", "ok"]
    slow = checks.speed_checks(plain, Speed(50, 1.0, 25, 50))[1]
    assert slow.verdict == "note" and "--mode plain" in slow.advice and slow.data["acceptance_length"] == 2
    misses = checks.speed_checks(plain, Speed(99, 1.0, 20, 21))[1]
    assert misses.verdict == "note" and "hardly ever hits" in misses.advice
    assert "nothing drafted" in checks.speed_checks(plain, Speed(100, 1.0))[1].text
    for auto in (None, Speed(0, 0.0)):
        (short,) = checks.speed_checks(Speed(0, 0.0), auto)
        assert short.verdict == "note" and "context ends" in short.text and "-c 512" in short.advice


def test_costs() -> None:
    assert checks.costs_check([], 0, [], "CPU").verdict == "note"
    points = [("plain", 1, 1.0), ("verify", 8, 2.5)]
    check = checks.costs_check(points, 64, [BreakEven(7, 8, 8, 3.0, 3.0, 8)], "CPU")
    assert check.verdict == "ok" and "plain 1.00, verify 8 2.50" in check.text
    assert check.data["ms"][1] == {"kind": "verify", "width": 8, "ms": 2.5}
    assert check.text.startswith("drafting pays from 3.00 tokens a step on with 7 nodes; ms per pass")
    assert check.data["steps"][0]["length"] == 3.0
    dear = checks.costs_check(points, 64, [BreakEven(7, 8, 8, 9.0, 9.0, 8)], "some CPU")
    assert dear.verdict == "note" and "cannot pay" in dear.text and "some CPU" in dear.advice
    unknown = checks.costs_check(points, 64, [], "CPU")
    assert unknown.verdict == "ok" and unknown.text.startswith("ms per pass")


def test_advice_stands_below_what_is_not_ok() -> None:
    bad = checks.failed("files", OSError("two\nlines"), "do this")
    assert line(bad).splitlines()[0].split() == ["bad", "files", "two", "lines"]
    assert line(bad).splitlines()[1].strip() == "-> do this"
    assert "\n" not in line(checks.Check("x", "ok", "y", "z"))


# ---- whole runs


@pytest.fixture()
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """doctor(*flags): exit code, and the checks that it prints with --json; nothing else may be printed."""
    monkeypatch.setattr("dflash_ggml.cli.doctor.SECONDS", 0.01)

    def call(*flags: str) -> tuple[int, list[dict[str, Any]]]:
        code = main(["--json", "-t", "1", "-ngl", "0", *flags])
        out, err = capsys.readouterr()
        shown = json.loads(out)
        assert not err and shown["ok"] == (code == 0)
        assert all(check["advice"] for check in shown["checks"] if check["verdict"] != "ok")
        assert all("\n" not in check["text"] for check in shown["checks"])
        return code, shown["checks"]

    return call


def of(found: list[dict[str, Any]], topic: str) -> list[dict[str, Any]]:
    return [check for check in found if check["topic"] == topic]


def bad(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [check for check in found if check["verdict"] == "bad"]


def needs_binding() -> None:
    pytest.importorskip("dflash_ggml.ggml.bindings")


def test_the_embedded_pair(doctor: Doctor) -> None:
    needs_binding()
    code, found = doctor()
    assert code == 0
    (build_line,) = of(found, "build")
    assert build_line["patches"] == len(list((Path(__file__).parents[2] / "patches").glob("*.patch")))
    assert {check["topic"] for check in found} >= {
        "cpu",
        "threads",
        "target",
        "draft",
        "pair",
        "memory",
        "costs",
    }
    (memory,) = of(found, "memory")
    assert memory["n_ctx"] == EMBEDDED_CONTEXT and sum(memory["parts"].values()) == memory["total"] > 20 * MIB
    (allocated,) = of(found, "allocated")
    assert "MiB allocated as planned; scratch" in allocated["text"]
    plain, auto = of(found, "decoding")
    assert plain["tokens_per_second"] > 0 and auto["mode"] == "auto"


def test_lines_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    needs_binding()
    monkeypatch.setattr("dflash_ggml.cli.doctor.SECONDS", 0.01)
    assert main(["-t", "1", "-ngl", "0", "--mode", "plain"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert any(text.startswith("note  draft     no draft") for text in out)
    assert out[-1].startswith("ok    decoding  plain: ")


@pytest.mark.parametrize("json_too", ["", "--json"])
@pytest.mark.parametrize(("redirection", "code"), [(">&-", 1), (">/dev/full", 1), ("| true", 0), ("2>&-", 0)])
def test_standard_streams_closed_or_full(redirection: str, code: int, json_too: str) -> None:
    needs_binding()
    command = f"{sys.executable} -m dflash_ggml.cli.doctor -t 1 -ngl 0 -c 64 {json_too} {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == code and "Traceback" not in done.stderr
    expected = {
        ">&-": "standard output is closed",
        ">/dev/full": "standard output: No space left",
    }.get(redirection)
    assert expected is None or f"dflash-doctor: {expected}" in done.stderr


def test_it_starts_without_a_binding() -> None:
    """And reports so: nothing that it imports at its start may need what is missing."""
    program = (
        "import sys; sys.modules['dflash_ggml.ggml.bindings'] = None; from dflash_ggml.cli.doctor import main"
    )
    command = [sys.executable, "-c", f"{program}; sys.exit(main([]))"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stdout.startswith(
        "bad   build     the compiled binding does not load"
    )


def test_without_a_binding(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever prevents the import is reported, and nothing that needs it is tried."""
    usual = builtins.__import__

    def fails(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level and "bindings" in (fromlist or ()):
            raise ImportError("libsomething.so: cannot open shared object file")
        return usual(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", fails)
    code, found = doctor()
    assert code == 1 and [check["topic"] for check in found] == ["build"]
    assert "libsomething.so" in found[0]["text"] and "make build" in found[0]["advice"]


def test_more_threads_than_cpus_are_not_tried(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for each other at every operation: it would look as if it hung."""
    needs_binding()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    code, found = doctor("-t", "2")
    (decoding,) = of(found, "decoding")
    assert (
        code == 0
        and decoding["verdict"] == "note"
        and "not tried: with 2 threads on 1 CPU a pass" in decoding["text"]
    )


def test_numbers_out_of_bounds(doctor: Doctor) -> None:
    needs_binding()
    code, found = doctor("--budget", "999")
    (check,) = bad(found)
    assert code == 1 and check["topic"] == "options" and check["text"] == "budget: 999 is outside 1..256"


def test_files_that_are_not_there(doctor: Doctor, tmp_path: Path) -> None:
    needs_binding()
    code, found = doctor("-m", str(tmp_path / "none.gguf"))
    assert code == 1 and "none.gguf does not exist" in bad(found)[0]["text"]


def test_both_broken_files_are_named(doctor: Doctor, tmp_path: Path) -> None:
    needs_binding()
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    target.write_bytes(b"GGUF\x03\x00")
    draft.write_bytes(b"")
    code, found = doctor("-m", str(target), "-md", str(draft))
    assert code == 1 and [(check["topic"], check["verdict"]) for check in found[-2:]] == [
        ("target", "bad"),
        ("draft", "bad"),
    ]
    assert "target.gguf" in found[-2]["text"] and "draft.gguf" in found[-1]["text"]


def test_a_cut_file(doctor: Doctor, tmp_path: Path, demo_target: Path) -> None:
    needs_binding()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(demo_target.read_bytes()[: 1 << 20])
    code, found = doctor("-m", str(cut))
    assert code == 1 and [check["topic"] for check in bad(found)] == ["target"]
    assert not of(found, "memory") and not of(found, "decoding")


def test_a_draft_beside_that_is_no_use(doctor: Doctor, tmp_path: Path, demo_target: Path) -> None:
    needs_binding()
    (tmp_path / "target.gguf").symlink_to(demo_target)
    (tmp_path / "a-dflash.gguf").write_bytes(b"GGUF nonsense")
    code, found = doctor("-m", str(tmp_path / "target.gguf"))
    (draft,) = of(found, "draft")
    assert code == 0 and draft["verdict"] == "note" and "can be used (a-dflash.gguf: " in draft["text"]


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_draft_that_was_fetched_unasked_and_is_no_use(
    doctor: Doctor,
    tmp_path: Path,
    demo_target: Path,
    toy_pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    is_damaged: bool,
) -> None:
    """Damaged, or of another model: a note, as the start decodes plainly without it."""
    draft = toy_pair[1]
    if is_damaged:
        draft = tmp_path / "dflash.gguf"
        draft.write_bytes(b"GGUF nonsense")
    found_one = EngineConfig(demo_target, draft, n_threads=1, n_gpu_layers=0, draft_found=True)
    monkeypatch.setattr("dflash_ggml.cli.doctor.engine_config", lambda args: found_one)
    code, found = doctor()
    notes = [check for check in of(found, "draft") if check["verdict"] == "note"]
    assert code == 0 and len(notes) == 1 and draft.name in notes[0]["text"] and "plain" in notes[0]["text"]
    assert of(found, "memory") and of(found, "decoding")


@pytest.mark.parametrize(
    ("spec", "named", "verdict", "words"),
    [
        ("none", False, "note", "no draft model, decoding is plain: --spec none"),
        ("suffix", False, "note", "no draft model, prompt lookup alone drafts: --spec suffix"),
        ("mtp", False, "ok", "prediction head of the target: 3 tokens ahead"),
        ("dflash", True, "ok", "draft.gguf, dflash: 7 tokens ahead"),
        ("dflash,mtp", True, "ok", "draft.gguf, dflash+mtp: 7 tokens ahead"),
        ("dflash,suffix", False, "note", "no draft model, prompt lookup alone drafts: no draft beside"),
        ("dspark", True, "bad", "is a dflash draft, which it leaves out"),
    ],
)
def test_it_follows_spec(
    doctor: Doctor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spec: str,
    named: bool,
    verdict: str,
    words: str,
) -> None:
    """The draft that is reported and planned for is the one that will be loaded."""
    needs_binding()
    monkeypatch.setattr("dflash_ggml.cli.doctor.examine_decoding", lambda config: ())
    target, draft = toys.write_pair(tmp_path, 3, nextn=True)
    code, found = doctor("-m", str(target), "--spec", spec, *(["-md", str(draft)] if named else []))
    (check,) = of(found, "draft")
    assert check["verdict"] == verdict and words in check["text"] and code == (verdict == "bad")
    for memory in of(found, "memory"):
        assert ("draft weights" in memory["parts"]) == (verdict == "ok")


def test_types_for_the_caches_of_no_draft(doctor: Doctor) -> None:
    needs_binding()
    code, found = doctor("--mode", "plain", "-ctkd", "q8_0")
    texts = [check["text"] for check in of(found, "draft")]
    assert code == 0 and texts[0] == "draft_type_k: q8_0: it is for a draft's caches, and there is no draft"


def test_a_draft_as_target_and_a_target_as_draft(
    doctor: Doctor, tmp_path: Path, demo_target: Path, demo_draft: Path
) -> None:
    needs_binding()
    code, found = doctor("-m", str(demo_draft), "-md", str(demo_target))
    assert code == 1 and [check["topic"] for check in bad(found)] == ["target", "draft"]


def test_every_mismatch_of_a_pair_is_reported(doctor: Doctor, tmp_path: Path, demo_draft: Path) -> None:
    """Hidden size, vocabulary and layers, in one line."""
    needs_binding()
    target = tmp_path / "tiny.gguf"
    target.write_bytes(bytes(tiny.gguf_file(tiny.target_keys(), tiny.target_shapes()).data))
    code, found = doctor("-m", str(target), "-md", str(demo_draft))
    (pair,) = bad(found)
    assert code == 1 and pair["topic"] == "pair"
    for word in ("hidden size", "taps layer", "mask token"):
        assert word in pair["text"]
    assert not of(found, "decoding")


def test_too_many_tokens_for_the_output(doctor: Doctor, tmp_path: Path) -> None:
    needs_binding()
    keys = tiny.target_keys()
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], "more"]
    keys["tokenizer.ggml.token_type"] = [*keys["tokenizer.ggml.token_type"], 1]
    path = tmp_path / "wide.gguf"
    path.write_bytes(bytes(tiny.gguf_file(keys, tiny.target_shapes()).data))
    code, found = doctor("-m", str(path))
    (wide,) = bad(found)
    assert code == 1 and wide["topic"] == "target" and f"{tiny.VOCAB + 1} tokens" in wide["text"]


def test_too_little_memory(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_binding()
    monkeypatch.setattr("dflash_ggml.engine.memory_planner.free_memory", lambda: 1 << 20)
    code, found = doctor()
    (memory,) = bad(found)
    assert code == 1 and memory["topic"] == "memory" and "-c" in memory["advice"]
    assert not of(found, "decoding")


def test_a_load_that_fails(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_binding()
    from dflash_ggml.engine.engine import Engine
    from dflash_ggml.errors import DeviceError

    def fails(config: EngineConfig) -> Engine:
        raise DeviceError("out of memory")

    monkeypatch.setattr(Engine, "load", fails)
    code, found = doctor()
    assert code == 1 and bad(found) == [found[-1]] and found[-1]["text"] == "out of memory"


def test_decoding_is_counted_in_drafted_steps() -> None:
    from dflash_ggml.cli.doctor import decode

    slot: Any = FakeEngine().open()
    plain, auto = decode(slot, "plain", 0.01), decode(slot, "auto", 0.01)
    assert plain.acceptance is None and plain.tokens > 0 and plain.seconds > 0
    assert auto.acceptance == auto.tokens / auto.drafted > 1


def test_a_gpu_that_is_asked_for_and_not_there(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_binding()
    from dflash_ggml.ggml import device

    cpus = [d for d in device.list_devices() if not d.is_gpu]
    monkeypatch.setattr(device, "list_devices", lambda: cpus)
    code, found = doctor("-ngl", "99")
    assert code == 1 and [check["topic"] for check in bad(found)] == ["device"]
    assert of(found, "target") and not of(found, "decoding")
