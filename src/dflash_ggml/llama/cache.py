"""Caches of saved states for `Llama.set_cache`, in memory or on disk. The prefix cache inside works without them."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from ..session.prefix_cache import common_prefix
from .state import LlamaState

Key = tuple[int, ...]


class BaseLlamaCache(ABC):
    """Maps token ids to saved states; a lookup finds the state that shares the longest prefix."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        self.capacity_bytes = capacity_bytes

    @property
    @abstractmethod
    def cache_size(self) -> int:
        """Bytes held."""

    @abstractmethod
    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """The best state; KeyError if none shares a first token."""

    @abstractmethod
    def __contains__(self, key: Sequence[int]) -> bool: ...

    @abstractmethod
    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None: ...


class LlamaRAMCache(BaseLlamaCache):
    """In memory, least recently used dropped first."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        super().__init__(capacity_bytes)
        self.cache_state: OrderedDict[Key, LlamaState] = OrderedDict()

    @property
    def cache_size(self) -> int:
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
    """One file per state in a folder of its own, oldest dropped first. Only load files that you trust (pickle)."""

    def __init__(self, cache_dir: str = ".cache/llama_cache", capacity_bytes: int = 2 << 30) -> None:
        super().__init__(capacity_bytes)
        self.folder = Path(cache_dir)
        self.folder.mkdir(parents=True, exist_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*.state"), key=lambda p: p.stat().st_mtime_ns)

    @property
    def cache_size(self) -> int:
        return sum(p.stat().st_size for p in self._files())

    def _find(self, key: Sequence[int]) -> Path | None:
        best, best_len = None, 0
        for path in self._files():
            with path.open("rb") as file:
                shared = common_prefix(pickle.load(file), key)
            if shared > best_len:
                best, best_len = path, shared
        return best

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        path = self._find(key)
        if path is None:
            raise KeyError("no cached state shares a prefix with these tokens")
        with path.open("rb") as file:
            pickle.load(file)  # the key stands first, so that a lookup need not read the state
            return pickle.load(file)

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
        for old in self._files():
            if self.cache_size <= self.capacity_bytes:
                break
            old.unlink()
