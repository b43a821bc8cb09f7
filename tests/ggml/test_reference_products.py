"""Matrix products of the CPU's reference mode: a column's bits do not depend on the columns beside it.

Greedy decoding is compared token for token with a tree of any width on the strength of this.
"""

from __future__ import annotations

import numpy as np
import pytest

from dflash_ggml.ggml.bindings import lib
from reference.graph import OpGraph

WIDTHS = range(1, 34)
TYPES = {"f32": lib.GGML_TYPE_F32, "f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0}


@pytest.fixture
def reference_backend():
    backend = lib.ggml_backend_cpu_init()
    lib.ggml_backend_cpu_set_n_threads(backend, 2)
    lib.ggml_backend_cpu_set_use_ref(backend, True)
    yield backend
    lib.ggml_backend_free(backend)


@pytest.mark.parametrize("shape", [(96, 40), (1024, 64), (1024, 67)], ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_a_column_does_not_depend_on_the_width(reference_backend, name: str, shape: tuple[int, int]) -> None:
    k, rows = shape
    rng = np.random.default_rng(k)
    weights = rng.standard_normal((rows, k)).astype(np.float32)
    x = rng.standard_normal((len(WIDTHS), k)).astype(np.float32)
    with OpGraph(backend=reference_backend) as g:
        w = g.tensor(weights)
        if name != "f32":
            w = lib.ggml_cast(g.ctx, w, TYPES[name])
        found = g.run(*(lib.ggml_mul_mat(g.ctx, w, g.tensor(x[:width])) for width in WIDTHS))
    for width, product in zip(WIDTHS, found, strict=True):
        np.testing.assert_array_equal(product[0, 0], found[-1][0, 0, :width])
    tolerance = {"f32": 1e-5, "f16": 1e-2, "q8_0": 0.1}[name]
    np.testing.assert_allclose(found[-1][0, 0], x @ weights.T, atol=tolerance * np.sqrt(k))
