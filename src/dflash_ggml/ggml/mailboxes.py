"""Mailboxes of ranks: memory through which two devices exchange partial sums of layers (`ggml_all_reduce`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import DeviceError
from .bindings import lib
from .device import I64, Device, key
from .store import Store, Stored

CELLS = 1 << 20  # values per transfer, 8 bytes each: a prefill batch takes several transfers


def mailbox_words() -> int:
    """Size of a mailbox in 8-byte words: a header, and cells for alternate transfers."""
    return lib.GGML_ALL_REDUCE_HEADER + 2 * CELLS


class Mailboxes(Stored):
    """A mailbox on each of two devices, each with the other's address.

    Raises:
        DeviceError: There is too little memory.
    """

    def __init__(self, ranks: Sequence[Device]) -> None:
        self._stores = [Store(device, 1) for device in ranks]
        self.tensors = [store.tensor(I64, mailbox_words(), name="mailbox") for store in self._stores]
        for store in self._stores:
            store.allocate()
        self._each = list(zip(ranks, self.tensors))
        for (device, own), (_, other) in zip(self._each, reversed(self._each)):
            device.write(own, np.array([key(other.data)], np.int64))

    def check(self) -> None:
        """Check for timeouts.

        Raises:
            DeviceError: One device has waited for the other in vain; its results are NaN from then on.
        """
        for (device, own), other in zip(self._each, reversed(self._each)):
            if device.read_bytes(own, np.empty(8, np.uint8), 8).any():
                raise DeviceError(
                    f"{device.label}: {other[0].label} did not answer within 10 seconds; load the model again, or with "
                    "whole layers (-sm layer)"
                )
