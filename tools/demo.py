"""Demonstration behind `make demo`: a real model answers a question, and a line shows what drafting gained. Where the model
cannot be downloaded, the embedded pair completes a class instead.

    python tools/demo.py [--prompt FILE] [options of dflash-run]

With --prompt the embedded pair continues that file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from dflash_ggml.files.hub import HubError
from dflash_ggml.files.named import model_path

QUESTION = "Write a Python function that returns the n-th Fibonacci number, with a docstring."
CLASS = Path(__file__).parents[1] / "examples" / "matrix.txt"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=Path, metavar="FILE")
    args, options = parser.parse_known_args()
    prompt: Path | None = args.prompt
    if prompt is None:
        try:
            found = ["-m", model_path("smollm2"), "--chat", "--predict", "160", "--prompt", QUESTION]
            print(f"SmolLM2-135M, asked: {QUESTION}\n", flush=True)
        except HubError as error:
            print(f"{error}\nThe embedded pair completes a class instead.\n", flush=True)
            prompt = CLASS
    if prompt is not None:
        print(prompt.read_text(encoding="utf-8"), end="", flush=True)
        found = ["--repeat-penalty", "1.1", "--predict", "192", "--file", str(prompt)]
    run = Path(sys.executable).with_name("dflash-run")
    return subprocess.call([run, "--temp", "0", "--versus-plain", *found, *options])


if __name__ == "__main__":
    sys.exit(main())
