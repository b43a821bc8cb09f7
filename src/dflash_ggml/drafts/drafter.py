"""The contract of a draft: `DraftSource` before it runs, and `Drafter` in every step.

A kind of draft is two classes: a source, an open and checked file that states its memory needs, and the drafter that it starts on
a device. Memory is planned, and a draft that does not fit refused, before any weight is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..decode.candidates import CandidateBlock, Candidates, NonFiniteDraft
from ..decode.sequence import Sequence
from ..ggml.bindings import Tensor
from ..ggml.device import Device
from ..ggml.graph_cache import GraphCache
from ..models.target import Append, Target
from ..state.kv_type import KvType
from ..state.memory import Part


@dataclass(frozen=True, slots=True)
class Host:
    """The parts of the target that a drafter uses.

    Attributes:
        device: The draft's device.
        graphs: The graphs of both.
        target, weights: The target and its tensors, for embedding and head.
        features: The target's tensor of features, [taps * D, columns]; None without taps.
        kv_type: Types of the draft's caches.
        n_states: State indices, one per sequence.
    """

    device: Device
    graphs: GraphCache
    target: Target
    weights: Mapping[str, Tensor]
    features: Tensor
    kv_type: KvType
    n_states: int = 1


class DraftSource(ABC):
    """An open draft that fits its target."""

    name: str  # name of its kind, one of `config.SOURCES`
    depth: int  # length of the longest path it proposes
    taps: tuple[int, ...]  # tapped layers of the target, from 0, ascending; none for a draft without a model
    head_dims: tuple[int, ...] = ()  # of the layers with keys and values
    title: str = ""  # its name in the file, or empty

    @property
    @abstractmethod
    def identity(self) -> list:
        """Key of its measured costs, as plain data: types and shapes of its tensors."""

    @abstractmethod
    def check(self, target: Target, target_name: str) -> list[str]:
        """Check that the draft fits a target.

        Returns:
            Warnings for a pair that may work badly.

        Raises:
            ModelFileError: The pair cannot work; it names both files.
        """

    @abstractmethod
    def prepare(self, device: Device) -> list[str]:
        """Prepare the weights for a device without allocating its memory.

        Returns:
            Notes on conversions.

        Raises:
            ModelFileError: A tensor cannot be read or converted.
        """

    def narrow(self) -> bool:
        """Use about half the memory, at some loss, from the next `prepare` on; False if that is not possible."""
        return False

    @abstractmethod
    def parts(self, device: Device, kv_type: KvType, n_states: int = 1) -> list[Part]:
        """Its device memory for `n_states` sequences, for the memory plan; after `prepare`."""

    @abstractmethod
    def start(
        self, host: Host, candidates: int, n_rows: int, progress: Callable[[str, int, int], None] | None
    ) -> Drafter:
        """Upload the weights and create the drafter.

        Args:
            host: The target's parts.
            candidates: Best tokens per depth.
            n_rows: Cache rows, numbered like the target's.
            progress: Called with a stage, bytes done and bytes in all.

        Raises:
            ModelFileError: A tensor cannot be read.
            DeviceError: The device has too little memory.
        """


class Drafter(ABC):
    """Proposes continuations of sequences; owns its own state. A draft changes the speed, never the output distribution."""

    name: str = "draft"  # as its source's
    depth: int
    taps: tuple[int, ...]

    @abstractmethod
    def propose(
        self, sequences: Items[Sequence], budget: int, depth: int | None = None
    ) -> list[Candidates | NonFiniteDraft]:
        """Propose continuations of the pending tokens, in one pass where the draft can, and take in unseen features.

        Args:
            budget: Nodes of the largest tree grown from them.
            depth: Tokens that will be used at most, so that a shorter, cheaper proposal suffices; None for all.

        Returns:
            Candidates by sequence, or NonFiniteDraft for a sequence with NaN, which is then decoded without the draft.
        """

    @abstractmethod
    def take_in(self, sequences: Items[Sequence]) -> None:
        """Take in the features of `unseen` tokens now, before more are committed or their columns are reused."""

    @property
    @abstractmethod
    def append(self) -> Append | None:
        """Function that adds the draft's part to a prefill graph, which takes in the features directly; None if there is none."""

    @abstractmethod
    def prefilled(self, sequence: Sequence, n: int, appended: bool) -> None:
        """Note that the n tokens after the committed ones are being committed.

        Args:
            appended: Whether `append` was part of their pass.
        """

    @abstractmethod
    def reset(self, sequence: Sequence) -> None:
        """Reset the sequence."""

    def leave(self, sequence: Sequence) -> None:
        """Note that the sequence gives its rows back."""
        self.reset(sequence)

    @property
    @abstractmethod
    def rows(self) -> Items[object]:
        """Cache tensors [row, n_rows] with a row per cache row, which a snapshot copies."""

    @property
    def rings(self) -> Items[tuple[Tensor, int, int]]:
        """Ring caches: tensors [row, n], rows per state index, and the number of last tokens still visible.

        Those rows are soon overwritten, so every snapshot copies them.
        """
        return ()

    @abstractmethod
    def seen(self, sequence: Sequence) -> NDArray[np.bool_]:
        """Which of the committed positions it has taken in, bool [n_tokens]; the argument of `restore_seen`."""

    @abstractmethod
    def restore_seen(self, sequence: Sequence, seen: NDArray[np.bool_]) -> None:
        """Restore a result of `seen`: the draft holds those positions and no later ones."""

    @property
    @abstractmethod
    def nbytes(self) -> dict[str, int]:
        """Device bytes by part, named as in the memory plan."""

    @abstractmethod
    def close(self) -> None:
        """Free its memory."""


class CachedDrafter(Drafter):
    """A drafter with a cache row for each token of the context.

    Attributes:
        held: Bool, which cache rows hold what was computed for a token.
    """

    def __init__(self, n_rows: int) -> None:
        self._held_bytes = bytearray(n_rows)
        self.held = np.frombuffer(self._held_bytes, bool)

    def reset(self, sequence: Sequence) -> None:
        self.restore_seen(sequence, np.zeros(0, bool))

    def seen(self, sequence: Sequence) -> NDArray[np.bool_]:
        return self.held[sequence.cache_rows][: sequence.n_tokens].copy()

    def restore_seen(self, sequence: Sequence, seen: NDArray[np.bool_]) -> None:
        held = self.held[sequence.cache_rows]
        held[: len(seen)] = seen
        held[len(seen) :] = False

    def known_from(self, sequence: Sequence) -> int:
        """The position from which on it has seen all tokens."""
        first = sequence.first_row
        # numpy would copy: a step's time must not grow with its context
        return max(self._held_bytes.rfind(0, first, first + sequence.n_tokens) + 1 - first, 0)


def batch_bucket(n: int) -> int:
    """The batch size that n sequences are padded to: a few sizes only, so that graphs stay few."""
    return next(size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if size >= n)


def checked(make: Callable[[], CandidateBlock]) -> CandidateBlock | NonFiniteDraft:
    """The result of `make`, or the NonFiniteDraft that it raised."""
    try:
        return make()
    except NonFiniteDraft as error:
        return error
