"""Tests of the compiled binding: exported symbols, and declarations equal to ggml's."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Set
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflash_ggml.ggml.bindings import _bindings, callbacks, ffi, lib
from dflash_ggml.ggml.device import list_devices

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "dflash_ggml" / "ggml" / "bindings"
INCLUDE = ROOT / "vendor" / "llama.cpp" / "ggml" / "include"

# What PyPI's ggml-python (an older ggml) does not have under the same name.
NEWER_THAN_GGML_PYTHON = {"ggml_prec_set_acc", "ggml_prec_set_src"}
# Declarations that an unpatched CPU build of ggml does not have either.
NOT_STOCK = {"35_tree_ops.h", "80_shims.h", "90_cuda.h"}
PYTHON_CALLBACKS = {"dflash_log_message", "dflash_abort_trace"}

# Multiplies two matrices with our ggml and compares with numpy: wrong if another ggml answered a call.
PRODUCT = """
import numpy as np
from dflash_ggml.ggml.bindings import ffi, lib
context = lib.ggml_init({"mem_size": 1 << 16, "mem_buffer": ffi.NULL, "no_alloc": True})
a = lib.ggml_new_tensor_2d(context, lib.GGML_TYPE_F32, 32, 5)
b = lib.ggml_new_tensor_2d(context, lib.GGML_TYPE_F32, 32, 3)
product = lib.ggml_mul_mat(context, a, b)
graph = lib.ggml_new_graph_custom(context, 8, False)
lib.ggml_build_forward_expand(graph, product)
backend = lib.ggml_backend_cpu_init()
lib.ggml_backend_alloc_ctx_tensors(context, backend)
rng = np.random.default_rng(1)
x, y = rng.standard_normal((5, 32), np.float32), rng.standard_normal((3, 32), np.float32)
lib.ggml_backend_tensor_set(a, ffi.from_buffer(x), 0, x.nbytes)
lib.ggml_backend_tensor_set(b, ffi.from_buffer(y), 0, y.nbytes)
assert lib.ggml_backend_graph_compute(backend, graph) == lib.GGML_STATUS_SUCCESS
out = np.empty((3, 5), np.float32)
lib.ggml_backend_tensor_get(product, ffi.from_buffer(out), 0, out.nbytes)
assert np.allclose(out, y @ x.T, atol=1e-5)
print(ffi.string(lib.ggml_version()).decode())
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter, away from the checkout."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd="/")


def declared(without: Set[str] = frozenset()) -> dict[str, int]:
    """Functions that the binding declares, CUDA included, except in some files -> number of parameters."""
    spec = importlib.util.spec_from_file_location("build_ffi", PACKAGE / "build_ffi.py")
    assert spec is not None and spec.loader is not None
    build_ffi = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build_ffi)
    functions = {}
    for path in build_ffi.cdef_files(cuda=True):
        if path.name not in without:
            functions.update(prototypes(re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))))
    return functions


def prototypes(text: str) -> dict[str, int]:
    """Function prototypes in C text without comments: name -> number of parameters."""
    found = {}
    for name, parameters in re.findall(
        r"\b((?:ggml|dflash)_\w+)\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)\s*[;,]", text
    ):
        parameters = re.sub(r"\([^()]*\)", "", parameters).strip()
        found[name] = 0 if parameters in ("", "void") else parameters.count(",") + 1
    return found


def test_every_declaration_is_in_the_vendored_headers_with_the_same_number_of_parameters() -> None:
    headers = {}
    for name in ("ggml.h", "ggml-alloc.h", "ggml-backend.h", "ggml-cpu.h", "ggml-cuda.h"):
        text = (INCLUDE / name).read_text(encoding="utf-8")
        headers.update(prototypes(re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)))
    headers.update(prototypes(re.sub(r"/\*.*?\*/", "", (PACKAGE / "shims.h").read_text(), flags=re.DOTALL)))
    ours = {name: arity for name, arity in declared().items() if name not in PYTHON_CALLBACKS}
    assert len(ours) > 90
    assert {name: headers.get(name) for name in ours} == ours


def test_every_bound_function_is_called_somewhere() -> None:
    files = [path for folder in ("src", "tests", "bench") for path in (ROOT / folder).rglob("*.py")]
    called = {
        name for path in files for name in re.findall(r"\blib\.(\w+)", path.read_text(encoding="utf-8"))
    }
    assert declared().keys() - called == PYTHON_CALLBACKS


def test_names_and_arities_agree_with_ggml_python() -> None:
    code = (
        "import json, ggml.ggml as g\n"
        "print(json.dumps({n: len(f.argtypes) for n, f in vars(g).items()"
        " if n.startswith('ggml_') and isinstance(getattr(f, 'argtypes', None), (list, tuple))}))"
    )
    done = run_python(code)
    if "No module named 'ggml'" in done.stderr:
        pytest.skip("ggml-python is not installed (extra: test)")
    theirs = json.loads(done.stdout)
    ours = declared(without=NOT_STOCK)
    assert {name for name in ours if name not in theirs} == NEWER_THAN_GGML_PYTHON
    assert {n: a for n, a in ours.items() if n in theirs} == {n: theirs[n] for n in ours if n in theirs}


def test_the_module_exports_nothing_but_its_init_function() -> None:
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", _bindings.__file__], capture_output=True, text=True
    )
    assert [line.split()[-1] for line in symbols.stdout.splitlines()] == ["PyInit__bindings"]


@pytest.mark.parametrize("other", ["ggml.ggml", "llama_cpp"])
@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_another_ggml_in_the_process_does_not_clash(other: str, first: str) -> None:
    """ggml-python loads its libraries with RTLD_GLOBAL, which takes over calls by name wherever it can."""
    if importlib.util.find_spec(other.partition(".")[0]) is None:
        pytest.skip(f"{other} is not installed")
    load = f"import {other}\n"
    use = {
        "ggml.ggml": "assert ggml.ggml.ggml_type_size(0) == 4\n",
        "llama_cpp": "llama_cpp.llama_backend_init()\n",
    }[other]
    done = run_python(load + PRODUCT + use if first == "theirs" else PRODUCT + load + use)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ffi.string(lib.ggml_version()).decode()


def test_an_abort_inside_ggml_names_cause_and_location() -> None:
    code = """
from dflash_ggml.ggml.bindings import ffi, lib
def build_bad_graph():
    context = lib.ggml_init({"mem_size": 1 << 16, "mem_buffer": ffi.NULL, "no_alloc": True})
    a = lib.ggml_new_tensor_1d(context, lib.GGML_TYPE_F32, 6)
    lib.ggml_reshape_2d(context, a, 4, 2)
print("before", flush=True)
build_bad_graph()
"""
    done = run_python(code)
    assert done.returncode == -6  # SIGABRT: the process cannot continue
    assert done.stdout == "before\n"
    assert "dflash-ggml: ggml stopped the process: " in done.stderr
    assert "GGML_ASSERT(ggml_nelements(a) == ne0*ne1) failed" in done.stderr
    assert "in build_bad_graph" in done.stderr


def test_log_lines_reach_logging(caplog: pytest.LogCaptureFixture) -> None:
    callbacks.set_log_level(lib.GGML_LOG_LEVEL_DEBUG)
    try:
        with caplog.at_level("DEBUG", logger="dflash_ggml.ggml"):
            lib.ggml_backend_free(lib.ggml_backend_cpu_init())
            callbacks.dflash_log_message(lib.GGML_LOG_LEVEL_ERROR, ffi.new("char[]", b"caf\xe9\n"))
    finally:
        callbacks.set_log_level(lib.GGML_LOG_LEVEL_WARN)
    assert caplog.records[-1].levelname == "ERROR"
    assert caplog.records[-1].getMessage() == "caf\N{REPLACEMENT CHARACTER}"


def test_quantised_rows_are_those_of_the_format() -> None:
    """Read back by the `gguf` package, which knows the formats from elsewhere."""
    row = np.linspace(-1, 1, 256, dtype=np.float32)
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_K"):
        kind = getattr(lib, f"GGML_TYPE_{name}")
        packed = np.empty(lib.ggml_row_size(kind, row.size), np.uint8)
        size = lib.ggml_quantize_chunk(
            kind, ffi.from_buffer("float[]", row), ffi.from_buffer(packed), 0, 1, row.size, ffi.NULL
        )
        assert size == packed.nbytes
        back = gguf.dequantize(packed, gguf.GGMLQuantizationType[name])
        assert back.shape == row.shape
        assert np.abs(back - row).max() < 0.05


def test_a_buffer_takes_what_its_tensors_ask_for_in_whole_steps() -> None:
    """The sizes that memory plans count with, before anything is allocated."""
    device = next(d for d in list_devices() if not d.is_gpu).handle
    buffer_type = lib.ggml_backend_dev_buffer_type(device)
    step = lib.ggml_backend_buft_get_alignment(buffer_type)
    context = ffi.gc(
        lib.ggml_init({"mem_size": 1 << 16, "mem_buffer": ffi.NULL, "no_alloc": True}), lib.ggml_free
    )
    expected = 0
    for kind, columns, rows in ((lib.GGML_TYPE_F32, 3, 5), (lib.GGML_TYPE_Q4_K, 256, 7)):
        t = lib.ggml_new_tensor_2d(context, kind, columns, rows)
        n_bytes = lib.ggml_backend_buft_get_alloc_size(buffer_type, t)
        assert n_bytes == lib.ggml_row_size(kind, columns) * rows
        expected += -(-n_bytes // step) * step
    assert lib.ggml_backend_alloc_ctx_tensors_from_buft_size(context, buffer_type) == expected


def test_this_cpu_has_what_ggml_was_compiled_for() -> None:
    assert lib.dflash_missing_cpu_feature() == ffi.NULL
