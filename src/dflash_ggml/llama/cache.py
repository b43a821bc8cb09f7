"""Caches for `Llama.set_cache`: results of `Llama.save_state` by their tokens, in memory or on disk.

The session's own prefix cache does not need them.
"""

from __future__ import annotations

import pickle
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..session.prefix_cache import common_prefix
from .state import LlamaState

Key = tuple[int, ...]


class BaseLlamaCache(ABC):
    """Maps token ids to saved states; a lookup finds the state that shares the longest prefix.

    Args:
        capacity_bytes: Limit, above which old states are dropped.
    """

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        self.capacity_bytes = capacity_bytes

    @property
    @abstractmethod
    def cache_size(self) -> int:
        """Bytes held."""

    @abstractmethod
    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """The state that shares the longest prefix.

        Raises:
            KeyError: None shares the first token.
        """

    @abstractmethod
    def __contains__(self, key: Sequence[int]) -> bool: ...

    @abstractmethod
    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None: ...


class LlamaRAMCache(BaseLlamaCache):
    """States in memory; the least recently used is dropped first."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        super().__init__(capacity_bytes)
        self.cache_state: OrderedDict[Key, LlamaState] = OrderedDict()

    @property
    def cache_size(self) -> int:
        """Bytes held."""
        return sum(state.llama_state_size for state in self.cache_state.values())

    def _find(self, key: Sequence[int]) -> Key | None:
        best = max(self.cache_state, key=lambda k: common_prefix(k, key), default=None)
        return best if best is not None and common_prefix(best, key) > 0 else None

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        found = self._find(key)
        if found is None:
            raise KeyError("no cached state shares a prefix with these tokens")
        self.cache_state.move_to_end(found)
        return self.cache_state[found]

    def __contains__(self, key: Sequence[int]) -> bool:
        return self._find(key) is not None

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        key = tuple(key)
        self.cache_state.pop(key, None)
        self.cache_state[key] = value
        while self.cache_size > self.capacity_bytes and self.cache_state:
            self.cache_state.popitem(last=False)


LlamaCache = LlamaRAMCache


class LlamaDiskCache(BaseLlamaCache):
    """States on disk, one file each in a folder of its own; the oldest is dropped first.

    The files are pickles: only load files that you trust. One that cannot be read, such as an older version's, counts as
    missing, with one warning.
    """

    def __init__(self, cache_dir: str = ".cache/llama_cache", capacity_bytes: int = 2 << 30) -> None:
        super().__init__(capacity_bytes)
        self.folder = Path(cache_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._unreadable: set[Path] = set()
        self._warned = False

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*.state"), key=lambda p: p.stat().st_mtime_ns)

    @property
    def cache_size(self) -> int:
        """Bytes of all files."""
        return sum(p.stat().st_size for p in self._files())

    def _find(self, key: Sequence[int]) -> Path | None:
        best, best_len = None, 0
        for path in self._files():
            shared = common_prefix(self._load(path, 1) or (), key)
            if shared > best_len:
                best, best_len = path, shared
        return best

    def _load(self, path: Path, n: int) -> Any:
        """The n-th object of a file: 1 the key, so that a lookup need not read the state, 2 the state. None: unreadable."""
        if path in self._unreadable:
            return None
        try:
            with path.open("rb") as file:
                return [pickle.load(file) for _ in range(n)][-1]
        except Exception as error:  # noqa: BLE001 - unpickling may fail in any way
            if not self._warned:
                message = f"{path}: a saved state that cannot be read ({error}) counts as missing; delete it"
                warnings.warn(message, stacklevel=3)
            self._warned = True
            self._unreadable.add(path)
            return None

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        while (path := self._find(key)) is not None:
            state = self._load(path, 2)
            if state is not None:
                return state
        raise KeyError("no cached state shares a prefix with these tokens")

    def __contains__(self, key: Sequence[int]) -> bool:
        return self._find(key) is not None

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        key = tuple(int(i) for i in key)
        path = self.folder / f"{sha256(repr(key).encode()).hexdigest()[:32]}.state"
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            pickle.dump(key, file)
            pickle.dump(value, file)
        part.replace(path)
        self._unreadable.discard(path)
        for old in self._files():
            if self.cache_size <= self.capacity_bytes:
                break
            old.unlink()
