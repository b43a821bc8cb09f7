"""The memory plan: which context fits, and what is said when none does."""

from __future__ import annotations

import pytest

from dflash_ggml.errors import DeviceError
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.models.qwen35_params import TargetParams
from dflash_ggml.state.memory import MARGIN, Sizes


@pytest.fixture(scope="module")
def sizes(demo_target) -> Sizes:
    with GGUFFile(demo_target) as f:
        return Sizes(TargetParams.from_gguf(f), 1 << 20, None, 0, 0, 512, "f16")


@pytest.mark.parametrize("longest", [100, 1000, 4096])
def test_the_trained_length_is_taken_when_it_fits(sizes, longest):
    assert sizes.fit(0, 1 << 40, longest).n_ctx == longest


def test_the_longest_context_that_fits(sizes):
    free = sizes.plan(5000, 0).total + MARGIN
    found = sizes.fit(0, free, 100_000)
    assert found.fits and not sizes.plan(found.n_ctx + 256, free).fits


@pytest.mark.parametrize("n_ctx, longest", [(4096, 4096), (0, 4096), (0, 100)])
def test_too_little_memory_is_an_error(sizes, n_ctx, longest):
    with pytest.raises(DeviceError, match="not enough device memory"):
        sizes.fit(n_ctx, MARGIN, longest)
