"""`dflash-doctor`: checks build, machine, model files and memory, and decodes for a second; one verdict per line."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata as distributions
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import FILES, EngineConfig
from ..decode.sampling_params import SamplingParams
from ..errors import ConfigError, DflashError
from . import checks as made
from .arguments import add_model_options, engine_config
from .checks import Check, Speed, failed
from .parser import Parser
from .streams import can_write, end_output, write_out
from .wording import count

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.slot import Slot
    from ..ggml.device import DeviceInfo

SECONDS = 0.5  # seconds of decoding in each mode
PROMPT = "def fibonacci(n):\n"
_SHOWN = ("topic", "verdict", "text", "advice")
_BROKEN = (DflashError, OSError, MemoryError)


def build_parser() -> argparse.ArgumentParser:
    """The command line: the options of `dflash-run` that name and load models."""
    parser = Parser(
        prog="dflash-doctor",
        description="Check the build, the devices, the model files and the memory plan, and time a short decoding run.",
        epilog="Each line is ok, note, or bad with a remedy. The exit code is 1 if one is bad.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_options(parser)
    return parser


def examine(args: argparse.Namespace) -> Iterator[Check]:
    """Yield all checks; those that depend on a failed one are left out."""
    try:
        from ..decode import native  # noqa: F401 - only checks that it loads
        from ..ggml import bindings, device
    except (ImportError, AttributeError) as error:  # AttributeError: a binding built from other sources
        yield made.no_binding(" ".join(str(error.__cause__ or error).split()))
        return
    patches = getattr(bindings.lib, "DFLASH_PATCHES", None)
    if patches is None:
        yield made.no_binding("it was built from other sources than these Python files")
        return
    backends, features = device.built_backends(), device.cpu_features()
    ggml = bindings.ffi.string(bindings.lib.ggml_version()).decode()
    yield made.build_check(distributions.version("dflash-ggml"), ggml, patches, backends, features)
    yield made.cpu_check(features, cpu_flags())
    cores = device.physical_cores()
    yield made.threads_check(args.threads or cores, cores, os.getloadavg()[0])
    seen = device.list_devices()
    layers = 0 if args.device == ("none",) else args.gpu_layers
    devices = made.device_checks(seen, backends, nvidia_driver(), layers, args.main_gpu, sharing(args, seen))
    yield from devices
    try:
        config = engine_config(args)
    except _BROKEN as error:
        yield failed("options", error, "name files that are there (-m, -md), and numbers within their bounds")
        return
    fits = True
    for check in examine_files(config):
        fits = fits and check.verdict != "bad"
        yield check
    if not fits or any(check.verdict == "bad" for check in devices):
        return
    usable = device.usable_cpus()
    if config.n_threads and config.n_threads > usable:
        text = f"not tried: with {count(config.n_threads, 'thread')} on {count(usable, 'CPU')} a pass can take seconds"
        yield Check("decoding", "note", text, f"-t {cores}")
        return
    yield from examine_decoding(config)


def sharing(args: argparse.Namespace, seen: Sequence[DeviceInfo]) -> tuple[str, ...]:
    """Names of the GPUs that share the layers by the options; empty if one has all."""
    names = {name.lower() for name in args.device or ()}
    named = [d.name for d in seen if d.is_gpu and (not names or d.name.lower() in names)]
    if args.split_mode == "none" and names:
        return tuple(named[args.main_gpu : args.main_gpu + 1])
    is_shared = args.split_mode not in (None, "none") or args.tensor_split or names
    return tuple(named) if is_shared else ()


def examine_files(config: EngineConfig) -> Iterator[Check]:
    """Check both files, whether they match, and their memory needs."""
    from ..drafts.registry import open_chosen, open_draft
    from ..engine.loading import read_tokenizer
    from ..files.gguf import GGUFFile
    from ..models.registry import read_target

    target = draft = file = None
    is_found = config.draft_found and config.mode == "auto"  # with a bad draft, decoding is plain
    advice = "name another file, or fetch or convert this one again"
    try:
        file = GGUFFile(config.model)
        target = read_target(file)
        read_tokenizer(file, target)
        size = sum(info.nbytes for info in file.tensors.values()) / 2**20
        text = (
            f"{config.model}: {file.arch}, {target.n_layers} layers, {target.n_vocab} tokens, {size:.0f} MiB"
        )
        yield Check("target", "ok", text)
    except _BROKEN as error:
        target = None
        yield failed("target", error, advice)
    is_own = config.draft is None  # the prediction head of the target's file, if it has one
    try:
        if file is not None and target is not None:
            draft, notes = open_chosen(config, file, target)
            yield from (Check("draft", "note", note, "leave the option away") for note in notes)
        elif config.draft is not None:
            draft = open_draft(config.draft, config.draft_window, config.draft_type, config.candidates)
        if draft is None:
            yield no_draft(config, target is not None)
        else:
            what = f"{draft.title} of the target" if is_own else f"{config.draft}, {draft.name}"
            taps = "" if is_own else f", taps {count(len(draft.taps), 'layer')}"
            yield Check("draft", "ok", f"{what}: {count(draft.depth, 'token')} ahead{taps}")
    except _BROKEN as error:
        is_spare = is_found or (is_own and not isinstance(error, ConfigError) and config.mode == "auto")
        yield left_out(error) if is_spare else failed("draft", error, advice)
    if target is not None and draft is not None and config.draft is not None:
        try:
            warnings = draft.check(target, str(config.model))
            for warning in warnings:
                yield Check("pair", "note", warning, "ask the publisher of the draft which one is right")
            if not warnings:
                yield Check("pair", "ok", "sizes, vocabulary, tapped layers, mask token and rope base agree")
        except _BROKEN as error:
            draft = None
            how = "name the draft that was trained for this target with -md"
            yield left_out(error) if is_found else failed("pair", error, how)
    is_whole = draft is not None or config.draft is None or is_found
    if file is not None and target is not None and is_whole:
        made_of, scorer = examine_scorer(config, file)
        yield from made_of
        config = replace(
            config, draft=config.draft if draft else None, scorer=config.scorer if scorer else None
        )
        yield from examine_memory(config, file, target, draft, scorer)


def examine_scorer(config: EngineConfig, file: Any) -> tuple[list[Check], Any]:
    """Check the prompt scorer, if prompts may be shortened; also its open file, if it has one."""
    from ..engine.scorer import ScorerSource

    if config.prompt_keep is None:
        return [], None
    by_words = "where requests want a part of a long prompt read, the question's words choose it"
    if config.scorer is None:
        return [Check("scorer", "ok", by_words)], None
    how = "name another one with -mp, or lexical"
    try:
        tokens = file.metadata.get("tokenizer.ggml.tokens", ())
        found = ScorerSource(config.scorer, config.prompt_keep, tokens)
        return [Check("scorer", "ok", f"prompts are scored by {found}")], found
    except _BROKEN as error:
        if not config.scorer_found:
            return [failed("scorer", error, how)], None
        return [Check("scorer", "note", f"{by_words}: {' '.join(str(error).split())}", how)], None


def no_draft(config: EngineConfig, has_target: bool) -> Check:
    """The check for a pair without a draft model.

    Args:
        has_target: Whether the target can be read.
    """
    from ..drafts.beside import NAME_ONE, draft_beside

    why, how = f"none beside {config.model}", NAME_ONE
    if config.mode == "plain":
        why = "mode plain"
    elif config.spec is not None and not any(config.wants(name) for name in FILES):
        why, how = f"--spec {','.join(config.spec) or 'none'}", "leave --spec away"
    elif has_target:
        beside = draft_beside(config.model)
        why, how = beside.why, beside.advice
    what = "prompt lookup alone drafts" if config.prompt_lookup else "decoding is plain"
    return Check("draft", "note", f"no draft model, {what}: {why}", how)


def left_out(error: BaseException) -> Check:
    """Line for an unusable draft that was found, not named."""
    text = f"no draft, decoding is plain: {' '.join(str(error).split())}"
    return Check("draft", "note", text, "name another one with -md or -hfd")


def examine_memory(
    config: EngineConfig, file: Any, target: Any, draft: Any, scorer: Any = None
) -> Iterator[Check]:
    """Check the memory plan on the device to be used."""
    from ..engine.kernel_tuning import fp8_matrices
    from ..engine.kv_types import SMALLER
    from ..engine.memory_planner import Opened, fitting_needs
    from ..engine.placement import as_computed, choose_device
    from ..ggml.stock import lacking

    try:
        with closing(choose_device(config)) as device:
            opened = Opened(device, config, file, as_computed(target, file, device), draft, scorer)
            if composed := made.composed_check(device.info.name, lacking(device)):
                yield composed
            wanted = fitting_needs(opened)
            with closing(wanted.weights), closing(scorer) if scorer else nullcontext():
                for note in wanted.notes:
                    yield Check("memory", "note", note, "it works; smaller files need no such thing")
                kv, n_batch, memory = wanted.plan(config.n_ctx, opened.free, device.is_gpu)
                n_ctx = memory.n_ctx
                layers = 0 if memory.fits else wanted.layers_to_keep()
                yield made.memory_check(memory, device.info.name, device.is_gpu, layers)
                if config.prefill_fp8:
                    yield made.fp8_check(fp8_matrices(device, wanted.weights, n_batch)[1])
                if kv.note:
                    how = f"a smaller -c, or -ctk {SMALLER[0]} -ctv {SMALLER[1]} to ask for them"
                    yield Check("memory", "note", kv.note, how)
                if config.n_ctx and n_ctx > target.n_ctx_train:
                    text = f"-c {n_ctx}: the target was trained for {target.n_ctx_train} tokens"
                    yield Check("memory", "note", text, f"-c {target.n_ctx_train} or less")
    except _BROKEN as error:
        yield failed("memory", error, "lower -c, --budget or -b, or stay on the CPU (-ngl 0)")


def examine_decoding(config: EngineConfig) -> Iterator[Check]:
    """Load, decode for a while in each mode, and report pass costs."""
    from ..engine.engine import Engine
    from ..policy.break_even import break_even

    try:
        with Engine.load(config) as engine:
            slot = engine.open()
            plain = decode(slot, "plain")
            auto = decode(slot, "auto") if engine.sources else None
            context = slot.n_tokens
            if engine.has_draft:
                depth = engine.drafter.depth if engine.drafter else 0
                steps = break_even(engine.costs, config.budget, depth, context)
                device = engine.device.info.description
                yield made.costs_check(known_costs(engine, context), context, steps, device)
            yield Check("allocated", "ok", engine.memory.against(engine.nbytes))
            yield from made.speed_checks(plain, auto)
    except _BROKEN as error:
        yield failed("decoding", error, "lower -c, --budget or -b, or stay on the CPU (-ngl 0)")


def decode(slot: Slot, mode: Any, seconds: float = SECONDS) -> Speed:
    """Decode greedily for so long, after warm-up steps."""
    from ..decode.sampling import Sampler

    began = tokens = drafted = drafted_tokens = 0.0
    slot.reset()
    slot.forget()
    slot.prefill(slot.tokenizer.encode(PROMPT)[: slot.n_ctx - 1])
    sampler = Sampler(SamplingParams(temperature=0), slot.n_vocab)
    first = time.perf_counter()
    with closing(slot.generate(sampler, mode=mode, stop=lambda token: False)) as steps:
        for step in steps:
            now = time.perf_counter()
            if not began:  # the prefill step, and some that build graphs
                began = now if now - first > seconds / 5 else 0.0
                continue
            tokens += len(step.tokens)
            if step.mode != "plain":
                drafted += 1
                drafted_tokens += len(step.tokens)
            if now - began > seconds:
                break
    elapsed = time.perf_counter() - began if began else 0.0
    return Speed(int(tokens), elapsed, int(drafted), int(drafted_tokens))


def known_costs(engine: Engine, context: int) -> list[tuple[str, int, float]]:
    """Known pass costs at `context` tokens: (kind, columns, milliseconds)."""
    widths = sorted({*range(1, 9), *range(16, engine.passes.max_width + 1, 8)})
    asked = [("plain", 1), *(("verify", w) for w in widths), *(("draft", w) for w in widths)]
    asked += [("commit", 1), ("host", 1)]
    found = ((kind, width, engine.costs.of(kind, width, context)) for kind, width in asked)  # type: ignore[arg-type]
    return [(kind, width, ms) for kind, width, ms in found if ms is not None]


def cpu_flags() -> list[str]:
    """Flags of the first CPU in /proc/cpuinfo; empty without such a file or line."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])


def nvidia_driver() -> str | None:
    """Problem of the NVIDIA driver, "" for none, None without a driver."""
    try:
        code = ctypes.CDLL("libcuda.so.1").cuInit(0)
    except (OSError, AttributeError):
        return None
    return f"the driver reports error {code}" if code else ""


def line(check: Check) -> str:
    """A check as text; advice is on a separate line."""
    shown = f"{check.verdict:5} {check.topic:9} {check.text}"
    return f"{shown}\n{'':16}-> {check.advice}" if check.advice and check.verdict != "ok" else shown


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit codes: 0 nothing is bad, 1 something is bad or output failed, 2 bad option, 130 interrupted."""
    if not can_write("dflash-doctor"):
        return 1
    args = build_parser().parse_args(argv)
    logging.basicConfig(format="dflash-doctor: %(message)s", level=logging.ERROR)
    checks = []
    try:
        for check in examine(args):
            checks.append(check)
            if not args.json:
                write_out(line(check) + "\n", "surrogateescape")  # file names may be arbitrary bytes
        is_bad = any(check.verdict == "bad" for check in checks)
        if args.json:
            shown = [{name: getattr(c, name) for name in _SHOWN} | dict(c.data) for c in checks]
            whole = {"ok": not is_bad, "checks": shown}
            write_out(json.dumps(whole, ensure_ascii=False) + "\n", "surrogateescape")
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if end_output("dflash-doctor", error):
            return 1
        is_bad = any(check.verdict == "bad" for check in checks)  # the reader closed the pipe
    return 1 if is_bad else 0


if __name__ == "__main__":
    sys.exit(main())
