"""Version metadata of the facade: what importlib.metadata reports for llama-cpp-python while it is installed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import metadata
from typing import Any

NAME = "llama_cpp_python"


class FacadeDistribution(metadata.Distribution):
    """A distribution without files."""

    def __init__(self, version: str) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\nSummary: the facade of dflash-ggml\n",
            "top_level.txt": "llama_cpp\n",
        }

    def read_text(self, filename: str) -> str | None:
        """A metadata file."""
        return self._texts.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        """Where a file would lie: beside this module."""
        return os.path.join(os.path.dirname(__file__), path)


class DistributionFinder:
    """An entry of sys.meta_path that finds the facade's distribution, and no module."""

    def __init__(self, version: str) -> None:
        self._found = FacadeDistribution(version)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """No module: they stand in sys.modules already."""
        return None

    def invalidate_caches(self) -> None:
        """Nothing is cached."""

    def find_distributions(self, context: Any = None) -> Iterator[metadata.Distribution]:
        """The facade, if its name or every distribution is requested."""
        name = getattr(context, "name", None)
        if name is None or re.sub(r"[-_.]+", "_", name).lower() == NAME:
            yield self._found
