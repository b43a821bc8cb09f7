"""Llama on the toy engine, with the requests that both share in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_ggml.llama.llama import Llama
from reference.fake_engine import TEMPLATE, FakeEngine, byte_vocabulary


class ToyLlama(Llama):
    """Opens a FakeEngine instead of a model file. toy_template, call_tags: of its vocabulary."""

    def __init__(
        self, model_path: str, *, toy_template: str = TEMPLATE, call_tags: bool = True, **kwargs: Any
    ) -> None:
        self._toy = {"template": toy_template, "call_tags": call_tags}
        super().__init__(model_path, **{"verbose": False, "n_ctx": 1024, **kwargs})

    def _open_engine(self) -> Any:
        config = self._options.engine_config(Path("draft.gguf"))
        tokenizer = byte_vocabulary(**self._toy)
        return FakeEngine(config=config, tokenizer=tokenizer, parallel=config.parallel)

    @property
    def toy(self) -> FakeEngine:
        """The engine, typed as what it is."""
        engine: Any = self.engine
        return engine
