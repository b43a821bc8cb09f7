"""Tests of the package order: imports go one way, without cycles, and the pure packages stay pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "src" / "dflash_ggml"
# From the ground up; a package imports only what stands before it. Imports inside functions and for types count.
ORDER = ["errors", "config", "ggml", "files", "state", "decode", "text", "policy"]
ORDER += ["models", "drafts", "engine", "session", "cli", "train", "bench", "server", "llama"]
# Every other module of models/ is an architecture.
SHARED_MODELS = {
    f"models.{name}"
    for name in (
        *("attention", "checks", "experts", "feed_forward", "layers"),
        *("prediction", "ranks", "reading", "recurrence", "registry", "rope", "scorer", "target", "tensors"),
    )
}


def modules() -> dict[str, ast.Module]:
    """Dotted name within the package -> its code; a package is the name of its `__init__`, "" the whole."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def imports(name: str) -> Iterator[str]:
    """Every import of a module: our own as in MODULES, others with "!" before the first part of their name."""
    folder = name.split(".") if (ROOT / name.replace(".", "/")).is_dir() else name.split(".")[:-1]
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ["dflash_ggml", *folder][: 1 + len(folder) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            targets = [f"{base}.{alias.name}" for alias in node.names]
            targets = [t if t.removeprefix("dflash_ggml.") in MODULES else base for t in targets]
        else:
            continue
        for target in targets:
            first, _, rest = target.partition(".")
            yield rest if first == "dflash_ggml" else f"!{first}"


MODULES = modules()
IMPORTS = {name: {target for target in imports(name) if target != name} for name in MODULES}
OWN = {name: {target for target in found if target[:1] != "!"} for name, found in IMPORTS.items()}


def rank(name: str) -> int:
    """Place of a module's package in the order; what is in none of them stands above all."""
    first = name.partition(".")[0]
    return ORDER.index(first) if first in ORDER else len(ORDER)


def test_a_package_imports_only_packages_below_it() -> None:
    assert len(MODULES) > 80
    wrong = [f"{a} imports {b}" for a in sorted(OWN) for b in sorted(OWN[a]) if rank(b) > rank(a)]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_by_way_of_others() -> None:
    try:
        TopologicalSorter(OWN).prepare()
    except CycleError as error:
        raise AssertionError("a circle: " + " <- ".join(error.args[1])) from None


def test_decode_needs_numpy_and_the_ground_only() -> None:
    allowed = {"decode", "errors", "config", "!numpy", *(f"!{name}" for name in sys.stdlib_module_names)}
    assert strangers("decode", lambda b: b.partition(".")[0] not in allowed) == [
        "decode.native.build_ffi imports !cffi"  # when the package is built
    ]


def test_policy_needs_decode_and_the_ground_only() -> None:
    allowed = {
        "policy",
        "decode",
        "errors",
        "config",
        "!numpy",
        *(f"!{name}" for name in sys.stdlib_module_names),
    }
    assert strangers("policy", lambda b: b.partition(".")[0] not in allowed) == []


def test_text_imports_no_device_code() -> None:
    assert strangers("text", lambda b: b.partition(".")[0] in ("ggml", "state")) == []


def test_what_does_without_a_model_loads_without_the_compiled_binding() -> None:
    """The pure packages, and those that call an engine but need one only when a model is opened."""
    packages = ("files", "decode", "text", "policy", "session", "llama", "server")
    light = [f"dflash_ggml.{name}" for name in MODULES if name.partition(".")[0] in packages]
    code = f"import sys, {', '.join(light)}; print('dflash_ggml.ggml.bindings' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_torch_stays_where_drafts_are_trained() -> None:
    """Only `train` imports it, nothing else imports `train`, and its command imports torch only when it is asked to train."""
    with_torch = {name.partition(".")[0] for name in MODULES if "!torch" in IMPORTS[name]}
    users = {a for a in OWN if any(b.partition(".")[0] == "train" for b in OWN[a])}
    assert with_torch == {"train"} and {a.partition(".")[0] for a in users} == {"train"}
    code = "import sys, dflash_ggml.train.cli as t; t.build_parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def strangers(package: str, strange: Callable[[str], bool]) -> list[str]:
    inside = [name for name in sorted(IMPORTS) if name.partition(".")[0] == package]
    assert len(inside) > 3
    return [f"{a} imports {b}" for a in inside for b in sorted(IMPORTS[a]) if strange(b)]


def test_only_models_names_architectures() -> None:
    architectures = {name for name in MODULES if name.startswith("models.")} - SHARED_MODELS
    outside = [name for name in sorted(MODULES) if name.partition(".")[0] != "models"]
    wrong = [f"{a} imports {b}" for a in outside for b in sorted(OWN[a] & architectures)]
    assert not wrong, "\n".join(wrong)
    names = {name.partition(".")[2] for name in architectures} - {
        "llama"
    }  # a package here, and llama.cpp's namesake
    for name in outside:
        # pre-tokenizers and checkpoints share names with models; draft training has a torch model of its own
        if name not in ("text.tokenizer", "train.recipe", "train.gguf_target"):
            words = {n.value for n in ast.walk(MODULES[name]) if isinstance(n, ast.Constant)}
            assert not words & names, name
