"""Opener of the model: called in the inference thread, or sent to the engine process and called there."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..cli.chat_options import THINKING, thinking_choice
from ..cli.sampling_options import check_biases
from ..config import EngineConfig
from ..decode.sampling_params import SamplingParams
from ..errors import ConfigError
from .grammar_sandbox import Vetter
from .runner import Progress, Runner


@dataclass(frozen=True, slots=True)
class Opener:
    """Loads the model, and refuses defaults that it does not support. Plain data, so that it can be sent."""

    config: EngineConfig
    cache_bytes: int
    sampling: SamplingParams
    think: str = "auto"
    disk: Path | None = None  # folder of the persistent prefix cache
    disk_bytes: int = 0
    parallel: int = 0  # sequences per batch; 0: as memory allows
    chats: Mapping[str, Any] = field(default_factory=dict)  # defaults of chats, as keywords of Session

    def __call__(self, progress: Progress) -> Runner:
        from ..engine.engine import Engine
        from ..session.disk_cache import DiskCache, state_identity
        from ..session.session import Session

        config = replace(self.config, parallel=self.parallel)
        engine = Engine.load(config, progress)
        vetter = Vetter.of(engine.tokenizer)
        try:
            check_biases(self.sampling, engine.n_vocab)
            disk = (
                None if self.disk is None else DiskCache(self.disk, self.disk_bytes, state_identity(engine))
            )
            session = Session(
                engine,
                cache_bytes=self.cache_bytes,
                thinking=THINKING[self.think],
                vet=vetter,
                disk=disk,
                **self.chats,
            )
            thinking_choice(self.think, session)  # warns if there is no switch
            with suppress(ConfigError):  # requests with grammars are refused
                session.grammars.warm()
                vetter.warm()
            return Runner(session, vetter.close)
        except BaseException:
            vetter.close()
            engine.close()
            raise
