"""`DFlashSource`: an open DFlash, DFlash2 or DSpark file before its drafter exists.

It states the draft's memory needs, and loads the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ...config import DraftType
from ...ggml.device import BF16, F16, F32, Device
from ...ggml.retype import retyped
from ...ggml.weights import Source, Weights, bf16_as_f16
from ...models.target import Target
from ...state.context import context_bytes
from ...state.kv_type import KvType
from ...state.memory import Part
from ..dflash2 import AFTER as SELECTOR_AFTER
from ..dflash2 import BEFORE as SELECTOR_BEFORE
from ..dflash2 import ZERO
from ..drafter import DraftSource, Host
from ..dspark import AFTER, BEFORE, TO_TARGET
from .drafter import DFlashDrafter, cache_layers, kind_of
from .file import DraftFile
from .params import EMBEDDING, MASK, check_pair, window_note

# tables with row lookup
GATHERED = (EMBEDDING, MASK, SELECTOR_BEFORE, SELECTOR_AFTER, BEFORE, AFTER, TO_TARGET)


class DFlashSource(DraftSource):
    """An open DFlash file, in any dialect.

    Args:
        file: The file.
        window: Configured attention window, see `DraftFile.open`.
        type_: Type of converted float matrices (None: unchanged).
        candidates: Candidates per depth, instead of the selector's trained number.
    """

    def __init__(
        self,
        file: DraftFile,
        window: int | None = None,
        type_: DraftType | None = None,
        candidates: int | None = None,
    ) -> None:
        self.file, self.params, self.title = file, file.params, file.title
        if self.params.selector is not None and candidates is not None:
            self.params = replace(self.params, selector=replace(self.params.selector, candidates=candidates))
        self._window, self._type = window, type_
        self.head_dims = (file.params.head_dim,)
        self.name, self.depth, self.taps = kind_of(file.params), file.params.depth, file.params.taps
        self._weights: Weights | None = None

    @property
    def identity(self) -> list:
        kinds: list = [(name, *self.file.kind(name)) for name in sorted(self.file.names)]
        return kinds if self._type is None else [*kinds, self._type]

    def check(self, target: Target, target_name: str) -> list[str]:
        name = str(self.file.path)
        notes = check_pair(target, self.params, target_name, name)
        note = "" if self._window is not None else window_note(target_name, name, self.title, self.params)
        return [*notes, note] if note else notes

    def prepare(self, device: Device) -> list[str]:
        """Declare the weights on a device.

        Returns:
            Notes on conversions.

        Raises:
            ModelFileError: A tensor cannot be read or converted.
        """
        notes = []
        if self._weights is not None:
            self._weights.close()
        sources = {name: Source(*self.file.tensor(name)) for name in self.file.names}
        if self._type is not None:
            sources = {name: retyped(s, self._type, name in GATHERED) for name, s in sources.items()}
        if self.params.selector is not None:
            zeros = np.zeros(self.params.n_embd, np.float32)
            sources[ZERO] = Source(F32, (self.params.n_embd, 1), zeros.view(np.uint8))
        if device.lacks_bf16 and any(part.type == BF16 for part in sources.values()):
            notes.append(
                f"{device.info.name} has no BF16 tensor cores: the draft's BF16 weights become float16"
            )
            sources = {name: bf16_as_f16(name, part) for name, part in sources.items()}
        self._weights = Weights(device, sources, gathered=GATHERED)
        return notes

    def narrow(self) -> bool:
        wide = any(
            self.file.kind(name)[0] in (F32, F16, BF16) and _is_matrix(self.file.kind(name))
            for name in self.file.names
        )
        if self._type is not None or not wide:
            return False
        self._type = "q8_0"
        return True

    def parts(self, device: Device, kv_type: KvType, n_states: int = 1) -> list[Part]:
        assert self._weights is not None, "prepare comes first"
        p, wanted, spec = self.params, self._weights.wanted, cache_layers(self.params)
        return [
            Part("draft weights", lambda rows: wanted),
            Part("draft K/V", lambda rows: context_bytes(spec, kv_type, rows, p.block_size, n_states)),
        ]

    def start(
        self, host: Host, candidates: int, n_rows: int, progress: Callable[[str, int, int], None] | None
    ) -> DFlashDrafter:
        assert self._weights is not None, "prepare comes first"
        weights, self._weights = self._weights.fill(progress, "draft"), None
        return DFlashDrafter(host, self.params, weights, candidates, n_rows, self.file.to_target)


def _is_matrix(kind: tuple[int, tuple[int, ...]]) -> bool:
    return len(kind[1]) == 2 and kind[1][1] > 1
