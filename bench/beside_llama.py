"""Time of the target's passes against llama.cpp's on the same file and device, alternating: plain, verify, prefill.

    python bench/beside_llama.py -m TARGET (--driver PROGRAM | --source LLAMA_CPP --libs FOLDER) [--rounds 2] [--json FILE]

`--driver` is the compiled beside_llama.cpp; without it, it is compiled here, with llama.cpp's headers from `--source` and its
shared libraries from `--libs`. Its passes are consecutive tokens of one sequence with the logits of each, ours trees of as many
nodes with the target's choice for each: what either needs to verify a draft. Both times are of whole calls, with inputs,
launches and read-back. Each side has the device to itself, `--rounds` times; the smallest median of each is compared. Prompts:
llama.cpp's best ubatch of 512, 2048 and 4096. With -sm both split the model so. Random weights (see shapes.py) are valid for
timing only.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from common import Solo, add_engine_options, header, memory_options, save
from step_time import call_ms, random_tree

from dflash_ggml.bench.facts import gpu_facts
from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.forest import Forest

HERE = Path(__file__).resolve().parent
WIDTHS = (1, 2, 4, 8, 16, 24)
DEPTH = 15  # of the trees
Times = dict[str, float]  # milliseconds by pass


def compile_driver(source: Path, libs: Path, out: Path) -> None:
    """Build beside_llama.cpp against these headers and libraries."""
    include = [f"-I{source / part}" for part in ("include", "ggml/include")]
    link = [f"-L{libs}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libs}"]
    subprocess.run(
        ["g++", "-O2", "-std=c++17", *include, str(HERE / "beside_llama.cpp"), *link, "-o", str(out)],
        check=True,
    )


def theirs(driver: Path, model: str, options: list[str]) -> Times:
    """llama.cpp's times, from a process of its own."""
    text = subprocess.run(
        [str(driver), model, *options], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    found = {name(int(n)): float(ms) for n, ms in re.findall(r"(\d+) columns, all logits: ([\d.]+) ms", text)}
    found["prompt"] = min(float(ms) for ms in re.findall(r"prompt of \d+, ubatch \d+: ([\d.]+) ms", text))
    return found


def ours(config: EngineConfig, prompt: int, repeat: int) -> Times:
    """Our times of the same passes."""
    rng, found = np.random.default_rng(1), Times()
    with Solo.load(config) as engine:
        ids, prefill = rng.integers(0, engine.n_vocab, prompt).tolist(), []
        for _ in range(4):
            engine.reset()
            engine.device.synchronize()
            began = time.perf_counter()
            engine.prefill(ids)
            prefill.append((time.perf_counter() - began) * 1e3)
        engine.reset()
        engine.prefill(ids[: prompt // 2])
        passes, sequence = engine.passes, engine.sequence
        for width in WIDTHS:
            forest = Forest([sequence], [random_tree(rng, width, engine.n_vocab, DEPTH)])

            def run(forest=forest):
                return passes.choices(passes.verify(forest))

            found[name(width)] = call_ms(run, repeat)
        found["prompt"] = min(prefill)
    return found


def name(width: int) -> str:
    return "plain" if width == 1 else f"verify {width}"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", required=True)
    p.add_argument("--driver", type=Path)
    p.add_argument("--source", type=Path)
    p.add_argument("--libs", type=Path)
    p.add_argument("--prompt", type=int, default=4096)
    p.add_argument("--repeat", type=int, default=20)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument(
        "--no-repack", action="store_true", help="llama.cpp's weights as they are: its AMX path may crash"
    )
    add_engine_options(p)
    a = p.parse_args()
    if a.driver is None and (a.source is None or a.libs is None):
        p.error("name --driver, or --source and --libs")
    config = EngineConfig(
        Path(a.model),
        n_ctx=2 * a.prompt + 2048,
        budget=max(WIDTHS) - 1,
        n_threads=a.threads,
        n_gpu_layers=a.gpu_layers,
        parallel=1,
        **memory_options(a),
    )
    layers, split = 999 if a.gpu_layers < 0 else a.gpu_layers, a.split_mode or "none"
    options = list(map(str, (layers, a.prompt, a.repeat, a.threads or 0, int(not a.no_repack), split)))
    found: dict[str, list[Times]] = {"ours": [], "llama.cpp": []}
    with tempfile.TemporaryDirectory() as folder:
        driver = a.driver or Path(folder) / "beside_llama"
        if a.driver is None:
            compile_driver(a.source, a.libs, driver)
        for i in range(a.rounds):
            found["ours"].append(ours(config, a.prompt, a.repeat))
            found["llama.cpp"].append(theirs(driver, a.model, options))
            print(f"round {i + 1} of {a.rounds} done", flush=True)
    facts = header(gpu=gpu_facts(), model=Path(a.model).name, prompt=a.prompt, threads=a.threads)
    print(
        f"{Path(a.model).name}, behind {a.prompt // 2} tokens, commit {facts['commit']}; {facts['gpu'] or facts['cpu']}"
    )
    print(
        f"{'ms':<10}{'ours':>10}{'llama.cpp':>11}  ours / llama.cpp, ours of each round, llama.cpp's of each round"
    )
    for what in found["ours"][0]:
        mine, other = ([times[what] for times in found[side]] for side in ("ours", "llama.cpp"))
        rounds = "; ".join(", ".join(f"{ms:.2f}" for ms in side) for side in (mine, other))
        print(f"{what:<10}{min(mine):>10.2f}{min(other):>11.2f}  {min(mine) / min(other):.3f}  ({rounds})")
    best = [a.prompt / min(times["prompt"] for times in sides) * 1e3 for sides in found.values()]
    print(f"a prompt of {a.prompt}: ours {best[0]:.0f}, llama.cpp {best[1]:.0f} tokens/s")
    save(a.json, {**facts, "ms": found})


if __name__ == "__main__":
    main()
