"""Prompt scorer on a device: a second small model beside the target, which scores the tokens of a prompt.

A prompt is one sequence, prefilled in chunks, in cache rows of the scorer's own, which hold one prompt at a time. Scratch memory
is shared with the target's graphs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..decode.sequence import Sequence
from ..errors import ConfigError
from ..files.gguf import GGUFFile
from ..files.hub import draft_rank
from ..files.pairs import ModelName
from ..ggml.bindings import Tensor, lib
from ..ggml.device import F16, F32, Device
from ..ggml.graph import Graph
from ..ggml.store import Store, Workspace
from ..ggml.weights import Progress, Weights
from ..models.scorer import Memory, ScorerModel
from ..state.kv_type import KvType
from ..state.memory import Part, padded
from ..state.state import state_parts
from ..text.prompt_selection import QUESTION
from ..text.tokenizer import Tokenizer
from .batches import BatchSizes
from .kernel_tuning import copies_by_heads
from .passes import TargetPasses

LONGEST = 131_072  # tokens of a scored prompt
USUAL = ModelName("Qwen3.5", "0.8B")  # file names looked for in the target's folder
_ADVICE = "score prompts by words (--prompt-scorer lexical), or lower the context (-c)"
_NAMES = {"target K/V": "scorer K/V", "recurrent state": "scorer state"}


def scorer_beside(model: Path) -> Path | None:
    """The file of the usual scorer in the target's folder, the best one of several; None if there is none."""
    found = [
        path
        for path in model.parent.glob("*.gguf")
        if ModelName.of(path.name) == USUAL and path != model and "mmproj" not in path.name.lower()
    ]
    return min(found, key=lambda path: draft_rank(path.name), default=None)


class ScorerSource:
    """An open scorer file and its memory needs.

    Args:
        keep: Smallest share of a prompt to prefill; a prompt may be 1 / keep times as long as the context.

    Attributes:
        tokenizer: None where its ids are the target's.

    Raises:
        ModelFileError: The file is damaged, or is no such model.
    """

    def __init__(self, path: Path, keep: float, target_tokens: Items[str]) -> None:
        self.path, self._keep = path, keep
        self.file = GGUFFile(path)
        self.model = ScorerModel.from_gguf(self.file)
        tokens = self.file.metadata.get("tokenizer.ggml.tokens", ())
        is_same = len(tokens) == len(target_tokens) and all(a == b for a, b in zip(tokens, target_tokens))
        self.tokenizer = None if is_same else Tokenizer.from_gguf(self.file)
        self._weights: Weights | None = None

    def __str__(self) -> str:
        what = f"block {self.model.block} of {self.path}"
        return what if self.tokenizer is None else f"{what}, with a vocabulary of its own"

    def weights(self, device: Device) -> Weights:
        """The weights, declared on a device; the same object until closed."""
        if self._weights is None:
            self._weights = Weights(device, self.model.sources(self.file))
        return self._weights

    def rows(self, target_rows: int) -> int:
        """Tokens of the longest prompt, by the target's cache rows."""
        return padded(min(math.ceil(target_rows / self._keep), LONGEST) + QUESTION, 256)

    def parts(self, device: Device, n_batch: int, kv_type: KvType) -> list[Part]:
        """Memory parts of a `Scorer`, by the target's cache rows, for the memory plan."""
        spec, unit, weights = self.model.trunk.state_spec(), device.alignment, self.weights(device).wanted

        def by_own_rows(part: Part) -> Part:
            return Part(_NAMES[part.name], lambda rows: part.nbytes(self.rows(rows)), _ADVICE)

        found = [Part("scorer weights", lambda rows: weights, _ADVICE)]
        state = state_parts(spec, unit, kv_type, 0, 0, 1, n_batch)
        found += [by_own_rows(part) for part in state if part.name in _NAMES]
        a_row = lib.ggml_type_size(key_type(device)) * self.model.key_row
        window = padded(4 * self.model.trunk.n_embd * (QUESTION + 1), unit)

        def keys(rows: int) -> int:
            return padded(a_row * self.rows(rows), unit) + window

        return [*found, Part("scorer keys", keys, _ADVICE)]

    def scratch_bytes(self, device: Device, n_batch: int, target_rows: int, kv_type: KvType) -> int:
        """Estimated scratch memory of its passes."""
        rows = self.rows(target_rows)
        spec = self.model.trunk.state_spec()
        copied = 0
        if device.is_gpu:
            by_heads = copies_by_heads(device, (layer.head_dim for layer in spec.kv))
            copied = spec.f16_copy(rows, kv_type, by_heads)
        return self.model.scratch_bytes(n_batch, rows) + copied

    def start(
        self,
        device: Device,
        workspace: Workspace,
        target_rows: int,
        kv_type: KvType,
        batches: BatchSizes,
        progress: Progress | None,
    ) -> Scorer:
        """Upload the weights.

        Args:
            device: The first of the devices.
            workspace: The target's scratch memory, which is shared.
            target_rows: Cache rows of the target.
            kv_type: Types of its own caches.
            batches: Sizes of passes.
            progress: Called with a stage, bytes done and bytes in all.

        Raises:
            DeviceError: They do not fit.
        """
        weights = self.weights(device).fill(progress, "scorer")
        return Scorer(self, device, weights, workspace, self.rows(target_rows), kv_type, batches)

    def close(self) -> None:
        """Drop the declared weights."""
        if self._weights is not None:
            self._weights.close()
            self._weights = None


def key_type(device: Device) -> int:
    """ggml type of the scored block's keys: the device's fastest."""
    return F16 if device.is_gpu else F32


class Scorer:
    """Scores one prompt at a time: `begin`, `advance` until nothing remains, `masses`. For the engine's thread only.

    Attributes:
        name: Key under which its selections are remembered.
        limit: Tokens of the longest prompt, the window included.
        tokenizer: Its own, None where its ids are the target's.
    """

    def __init__(
        self,
        source: ScorerSource,
        device: Device,
        weights: Weights,
        workspace: Workspace,
        n_rows: int,
        kv_type: KvType,
        batches: BatchSizes,
    ) -> None:
        self.name, self.limit, self.tokenizer = source.path.stem, n_rows, source.tokenizer
        self._model, self._device, self._weights, self._batches = source.model, device, weights, batches
        trunk, n_batch = self._model.trunk, batches.most
        self.passes = TargetPasses(
            *(device, trunk, weights, kv_type, n_rows, 0, 0, self._model.taps),
            n_batch=n_batch,
            workspace=workspace,
        )
        self._stores = Store(device, 1), Store(device, 1)
        keys = self._stores[0].tensor(key_type(device), self._model.key_row, n_rows, name="scorer keys")
        window = self._stores[1].tensor(F32, trunk.n_embd, QUESTION + 1, name="scorer window")
        self._stores[0].reserve()
        self._stores[1].allocate()
        self._memory = Memory(keys, window)
        self._sequence, self._ids, self._window, self._is_sound = Sequence(), list[int](), 0, True
        self.passes.reserve(n_batch, self._append)
        with_most = self._model.masses(device, weights, self._memory, n_rows, QUESTION)
        with_most.place(workspace).close()

    def _append(self, g: Graph, x: Tensor, ids: Tensor, positions: Tensor, rows: Tensor) -> None:
        self._model.append(g, self._weights, self._memory, x, positions)

    def begin(self, ids: Items[int], window: int) -> int:
        """Begin to score these tokens, by the queries of the last `window`.

        Returns:
            How many of them are known from the previous prompt.

        Raises:
            ConfigError: There are more tokens than `limit`, or no window.
        """
        if not 0 < window <= min(QUESTION, len(ids) - 1) or len(ids) > self.limit:
            raise ConfigError(
                f"prompt scorer: {len(ids)} tokens with a window of {window}, at most {self.limit}"
            )
        held = self._sequence.tokens
        if not self._is_sound or len(held) > len(ids) - window or held != list(ids[: len(held)]):
            self.passes.state.reset()
            self._sequence.clear()
        self._ids, self._window, self._is_sound = list(ids), window, True
        self._memory.first = len(ids) - window
        return len(held)

    def advance(self, most: int | None = None) -> int:
        """Run the next chunk of at most `most` tokens; returns how many remain."""
        at = self._sequence.n_tokens
        left = len(self._ids) - at
        n = self._batches.next(left)
        n = n if most is None else min(n, most)
        began, self._is_sound = time.perf_counter(), False
        self.passes.linear(self._sequence, self._ids[at : at + n], self._append, outputs="hidden")
        self._device.synchronize()
        self._sequence.tokens.extend(self._ids[at : at + n])
        self._is_sound = True
        self._batches.took(n, time.perf_counter() - began)
        return left - n

    def masses(self) -> NDArray[np.float32]:
        """How much of the window's attention each token before it gets, float32 [tokens - window]; sums to 1.

        Not finite if the model overflows; its state of the prompt is reset then.
        """
        window = self._window
        graph = self._model.masses(self._device, self._weights, self._memory, self._memory.first, window)
        try:
            graph.place(self.passes.workspace).run()
            found = self._device.read(graph.outputs["mass"])
        finally:
            graph.close()
        found /= window * self._model.trunk.n_heads
        if not np.isfinite(found).all():  # later passes would multiply it by 0
            self._is_sound = False
            for t in (*self.passes.state.kv.wholes, self._memory.keys, self._memory.window):
                lib.ggml_backend_tensor_memset(t, 0, 0, lib.ggml_nbytes(t))
        return found

    @property
    def nbytes(self) -> Mapping[str, int]:
        """Bytes by part, named as in the memory plan."""
        own = self.passes.nbytes_on(self._device)
        found = {name: own[of] for of, name in (("target weights", "scorer weights"), *_NAMES.items())}
        return found | {"scorer keys": sum(store.nbytes for store in self._stores)}

    def close(self) -> None:
        """Free its own memory; the shared scratch memory stays."""
        self.passes.close()
        for store in self._stores:
            store.close()
