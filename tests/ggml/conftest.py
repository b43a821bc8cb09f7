"""Fixtures shared by the tests of operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from dflash_ggml.ggml.bindings import ffi, lib
from reference.graph import OpGraph, device_names

MakeGraph = Callable[..., OpGraph]


@pytest.fixture(params=device_names())
def graph(request: pytest.FixtureRequest) -> Iterator[MakeGraph]:
    """Makes graphs on one device."""
    if request.param == "CPU":
        yield OpGraph
        return
    backend = lib.ggml_backend_init_by_name(request.param.encode(), ffi.NULL)
    yield lambda threads=1: OpGraph(backend=backend)
    lib.ggml_backend_free(backend)
