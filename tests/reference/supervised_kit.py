"""A toy model for an engine process: it dies where its prompts ask for it, and while loading as often as a file says."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dflash_ggml.config import EngineConfig
from dflash_ggml.errors import ConfigError
from dflash_ggml.server.runner import Runner
from dflash_ggml.session.events import Event
from dflash_ggml.session.prompts import Prepared
from dflash_ggml.session.session import Session
from reference.fake_engine import TOOL_TEMPLATE, FakeEngine, byte_vocabulary

SLOWLY = "slowly"  # so many answers of this model would take hours
IN_PREPARE = "die in prepare"
IN_GGML = "die in ggml"


def build_bad_graph() -> None:
    """A shape that ggml ends the process for."""
    from dflash_ggml.ggml.bindings import ffi, lib

    context = lib.ggml_init({"mem_size": 1 << 16, "mem_buffer": ffi.NULL, "no_alloc": True})
    lib.ggml_reshape_2d(context, lib.ggml_new_tensor_1d(context, lib.GGML_TYPE_F32, 6), 4, 2)


class ToyRunner(Runner):
    """An endless model: 16 million tokens of context."""

    def __init__(self) -> None:
        config = EngineConfig(model=Path("toy.gguf"), n_ctx=1 << 24, n_batch=32)
        engine: Any = FakeEngine(config=config, tokenizer=byte_vocabulary(template=TOOL_TEMPLATE))
        super().__init__(Session(engine, cache_bytes=0))

    def prepare(self, request: Any) -> Prepared:
        prepared = super().prepare(request)
        if IN_PREPARE in prepared.text:
            os.abort()
        return prepared

    def events(self, prepared: Prepared, cancelled: Callable[[], bool]) -> Generator[Event, None, None]:
        for event in super().events(prepared, cancelled):
            if IN_GGML in prepared.text:
                build_bad_graph()
            if SLOWLY in prepared.text:
                time.sleep(0.01)
            yield event


@dataclass(frozen=True)
class ToyOpener:
    """Opens a ToyRunner. fates: a file with a letter per start, taken from its front: a aborts, e is an error, else well."""

    fates: Path | None = None

    def __call__(self, progress: Callable[[str, int, int], None]) -> ToyRunner:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        progress("weights", 1, 2)
        fate = "."
        if self.fates is not None:
            left = self.fates.read_text()
            self.fates.write_text(left[1:])
            fate = left[:1]
        if fate == "a":
            os.abort()
        if fate == "e":
            raise ConfigError("toy: this cannot be opened")
        return ToyRunner()


def main(fd: int) -> None:
    """An engine process that sends what SAID holds, and then nothing."""
    pipe = Connection(fd)
    pipe.send_bytes(os.environ["SAID"].encode())
    while True:
        pipe.recv_bytes()
