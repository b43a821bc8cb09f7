"""All GPU checks in one run, with a table at the end: op tests, compute-sanitizer, engine tests.

    python bench/gpu_check.py --ops PATH/test-backend-ops [--jobs N] [--sanitize] [--json FILE]

Needs a build with a GPU's backend and with -C cmake.define.DFLASH_BUILD_TESTS=ON, which makes test-backend-ops. On other backends
than CUDA the operations checked are those that ours are composed of. Exit code 1 if any fails.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from common import ROOT, header, save
from step_time import gpu_facts

from dflash_ggml.ggml.device import list_devices

OPS = (
    "SSM_CONV_TREE",
    "SSM_CONV_TREE_COMMIT",
    "SSM_CONV_FOREST",
    "SSM_CONV_FOREST_COMMIT",
    "GATED_DELTA_NET_TREE_PERSIST",
    "GATED_DELTA_NET_TREE_COMMIT",
    "GATED_DELTA_NET_FOREST_PERSIST",
    "GATED_DELTA_NET_FOREST_ADVANCE",
    "GATED_DELTA_NET_FOREST_COMMIT",
    "DELTA_NET_FOREST_INPUT",
    "GATED_DELTA_NET",
    "DELTA_NET_INPUT",
    "ATTENTION_INPUT",
    "ATTENTION_QUANTS",
    "FLASH_ATTN_RANGES",
    "RANGE_MASK",
    "FOREST_MASK",
    "FLASH_ATTN_EXT_SEQS",
    "TOP_K_LOG_PROBS",
    "ARGMAX",
    "MUL_MAT",
    "MUL_MAT_RANGE",
    "MUL_MAT_ID",
    "MUL_MAT_ID_NARROW",
    "MUL_MAT_NARROW",
    "NORM_MUL_MAT_NARROW",
    "GATED_NORM_MUL_MAT_NARROW",
    "GATE_MUL_MAT_NARROW",
    "ADD_RMS_NORM_MUL",
    "ADD_SOFTPLUS_MUL",
    "FLASH_ATTN_EXT",
)
# what ours are composed of where a backend has no kernels of them
STOCK_OPS = (
    "SSM_CONV",
    "GATED_DELTA_NET",
    "SOLVE_TRI",
    "TOP_K",
    "ARGSORT",
    "ARGMAX",
    "CONCAT",
    "FILL",
    "GET_ROWS",
    "SET_ROWS",
    "REPEAT",
    "MUL_MAT_ID",
    "FLASH_ATTN_EXT",
)
TESTS = (
    "tests/ggml/test_stock.py",
    "tests/engine/test_gpu.py",
    "tests/engine/test_gpu_drafts.py",
    "tests/engine/test_gpu_several.py",
    "tests/engine/test_gpu_experts.py",
    "tests/engine/test_gpu_host_experts.py",
    "tests/engine/test_gpu_embedding.py",
    "tests/engine/test_gpu_rings.py",
    "tests/engine/test_gpu_kv_targets.py",
    "tests/state/test_kv_types.py",
    "tests/ggml/test_tree_ops.py",
)
ONLY = {"FLASH_ATTN_EXT": ("-p", "kv_heads=")}  # of an op with thousands of cases: those of few columns
# without the views that ggml-vulkan cannot bind, on which it ends the process; Operations.gated_delta_net copies such
STOCK_ONLY = {**ONLY, "GATED_DELTA_NET": ("-p", "^(?!.*first=[0-9])")}


def run(name: str, command: list[str], rows: list[dict]) -> None:
    """Run a check, keep its verdict and the line that sums it up."""
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    text = done.stdout + done.stderr
    tail = [line for line in text.splitlines() if re.search(r"passed|ERROR SUMMARY|failed|skipped", line)]
    clean = re.sub(r"\x1b\[[0-9;]*m", "", tail[-1] if tail else text.strip()[-200:])
    rows.append(
        {
            "check": name,
            "ok": done.returncode == 0,
            "seconds": round(time.perf_counter() - began, 1),
            "says": clean.strip(),
            # what the tests measured beside their verdict
            "figures": re.findall(
                r"^.*(?:difference of a logit|texts fork|tokens per pass).*$", text, re.MULTILINE
            ),
        }
    )
    if done.returncode:
        print(f"---- {name}\n{text[-4000:]}")
    print(f"{'ok  ' if done.returncode == 0 else 'FAIL'} {name}: {rows[-1]['says']}", flush=True)
    print("".join(f"     {line}\n" for line in rows[-1]["figures"]), end="", flush=True)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--ops", metavar="PATH", help="the test-backend-ops program")
    p.add_argument(
        "--sanitize", action="store_true", help="run the op tests under compute-sanitizer too (slow)"
    )
    p.add_argument("--jobs", type=int, default=1, help="checks that run at the same time")
    p.add_argument("--json", metavar="FILE")
    a = p.parse_args()
    device = next((d.name for d in list_devices() if d.is_gpu), None)
    if device is None:
        print("gpu_check: this build or machine has no GPU; nothing was checked", file=sys.stderr)
        return 2
    rows: list[dict] = []
    checks = [("engine on the GPU", [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS])]
    ops, only = (OPS, ONLY) if device.startswith("CUDA") else (STOCK_OPS, STOCK_ONLY)
    for op in ops if a.ops else ():
        test = [a.ops, "test", "-b", device, "-o", op, *only.get(op, ())]
        checks.append((f"{op} against the CPU", test))
        for tool in ("memcheck", "racecheck") if a.sanitize else ():
            sanitizer = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9"]
            checks.append((f"{tool} {op}", [*sanitizer, *test]))
    with ThreadPoolExecutor(a.jobs) as pool:
        for done in [pool.submit(run, *check, rows) for check in checks]:
            done.result()
    print(f"\n{'check':<48} {'':<5} {'s':>6}  summary")
    for r in rows:
        print(f"{r['check']:<48} {'ok' if r['ok'] else 'FAIL':<5} {r['seconds']:>6}  {r['says']}")
    save(a.json, {**header(gpu=gpu_facts()), "checks": rows})
    return 0 if all(r["ok"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
