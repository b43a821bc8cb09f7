"""The contract of a draft: what it needs before it runs, and what it does every step.

A kind of draft is two classes: a source, an open and checked file that states the memory it will take, and the drafter that is
started from it on a device. The memory plan is made, and a draft that does not fit refused, before any weight is moved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..decode.candidates import Candidates, NonFiniteDraft, Rows
from ..decode.sequence import Sequence
from ..ggml.bindings import Tensor
from ..ggml.device import Device
from ..ggml.graph_cache import GraphCache
from ..models.target import Append, Target
from ..state.kv_type import KvType
from ..state.memory import Part
from ..state.state import TargetState


@dataclass(frozen=True, slots=True)
class Host:
    """What a drafter shares with its target.

    Attributes:
        device: Where the draft lies.
        graphs: Those of both.
        target, weights: The target and its tensors, for embedding and head.
        state: The target's, for features.
        kv_type: Types of the draft's caches.
        n_states: State indices, one per sequence.
    """

    device: Device
    graphs: GraphCache
    target: Target
    weights: Mapping[str, Tensor]
    state: TargetState
    kv_type: KvType
    n_states: int = 1


class DraftSource(ABC):
    """An open draft that fits its target."""

    name: str  # of its kind, one of `config.SOURCES`
    depth: int  # the longest path that it proposes
    taps: tuple[int, ...]  # tapped layers of the target, from 0, ascending; none for a draft without a model
    head_dims: tuple[int, ...] = ()  # of the layers that keep keys and values
    title: str = ""  # its name in the file, if any

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
        """Make ready for a device without taking its memory.

        Returns:
            Notes on what had to be changed for it.

        Raises:
            ModelFileError: A tensor cannot be read or converted.
        """

    def narrow(self) -> bool:
        """Take about half the memory, at some loss, from the next `prepare` on; False where it cannot."""
        return False

    @abstractmethod
    def parts(self, device: Device, kv_type: KvType, n_states: int = 1) -> list[Part]:
        """The device memory that it will take for `n_states` sequences, for the memory plan; after `prepare`."""

    @abstractmethod
    def start(
        self, host: Host, candidates: int, n_rows: int, progress: Callable[[str, int, int], None] | None
    ) -> Drafter:
        """Bring the weights to the device.

        Args:
            host: The target that it drafts for.
            candidates: Best tokens per depth.
            n_rows: Cache rows, row for row the target's.
            progress: Called with a stage, bytes done and bytes in all.

        Raises:
            ModelFileError: A tensor cannot be read.
            DeviceError: The device has no room.
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
            budget: nodes of the largest tree that is grown from them.
            depth: tokens beyond which nothing is used, so that a shorter and cheaper proposal will do; None for all.

        Returns:
            Candidates by sequence, or NonFiniteDraft where they are NaN: that one is decoded without the draft.
        """

    @abstractmethod
    def take_in(self, sequences: Items[Sequence]) -> None:
        """Take in the features of `unseen` tokens now, before more are committed or their columns are reused."""

    @property
    @abstractmethod
    def append(self) -> Append | None:
        """Builds the draft's part of a prefill graph, which takes in the features at once; None if there is none."""

    @abstractmethod
    def prefilled(self, sequence: Sequence, n: int, appended: bool) -> None:
        """The n tokens after the committed ones are being committed.

        Args:
            appended: `append` was part of their pass.
        """

    @abstractmethod
    def reset(self, sequence: Sequence) -> None:
        """Forget the sequence."""

    def leave(self, sequence: Sequence) -> None:
        """The sequence gives its rows back: forget them."""
        self.reset(sequence)

    @property
    @abstractmethod
    def rows(self) -> Items[object]:
        """Cache tensors [row, n_rows] with a row per cache row, which a snapshot copies."""

    @property
    def rings(self) -> Items[tuple[Tensor, int, int]]:
        """Ring caches: tensors [row, n], rows per state index, and how many of the last tokens may still be seen.

        Those rows are soon overwritten, so every snapshot copies them.
        """
        return ()

    @abstractmethod
    def seen(self, sequence: Sequence) -> NDArray[np.bool_]:
        """Which of the committed positions it has seen, bool [n_tokens]; `restore_seen` takes it back."""

    @abstractmethod
    def restore_seen(self, sequence: Sequence, seen: NDArray[np.bool_]) -> None:
        """Restore what `seen` returned: the draft holds those positions and no later ones."""

    @property
    @abstractmethod
    def nbytes(self) -> dict[str, int]:
        """Device bytes by part, named as in the memory plan."""

    @abstractmethod
    def close(self) -> None:
        """Free its memory."""


def batch_bucket(n: int) -> int:
    """The batch size that n sequences are padded to: a few sizes only, so that graphs stay few."""
    return next(size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if size >= n)


def checked(make: Callable[[], Rows]) -> Rows | NonFiniteDraft:
    """The result of `make`, or the NonFiniteDraft that it raised."""
    try:
        return make()
    except NonFiniteDraft as error:
        return error
