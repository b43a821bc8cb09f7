"""Grammar sandbox: a process with limits of time and memory in which a grammar is compiled before the server compiles it.

The static bounds (`text.grammar_limits`, `text.bounded_schema`) refuse every form that is known to explode; the sandbox stops
forms that are not known yet. A compiled grammar cannot be sent between processes, so the process only reports that compiling
has ended, well or with an error, and the server then compiles it again. The vocabulary there is bytes and the special tokens:
what grows without bounds is the grammar itself.
"""

from __future__ import annotations

import logging
import math
import os
import re
import resource
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from msgspec import Struct

from ..errors import ConfigError
from ..text.grammar import GrammarCompiler
from ..text.grammar_spec import GrammarSpec
from ..text.tokenizer import Tokenizer
from .pipe import Pipe, spawn

log = logging.getLogger(__name__)

SECONDS = 3.0  # to compile one grammar; the slowest that the static bounds let through take a tenth
STARTING = 20.0  # seconds until a process is ready: it imports numpy and llguidance
MEMORY = 1 << 30  # bytes beyond what the process has when it is ready
REFUSED = 64  # refused grammars that are remembered, so that asking again costs nothing

_TOKEN_IDS = re.compile(r"<\[[\d\s,^-]*\]>")  # of the real vocabulary; one id is as good as another here


class Vetter:
    """Asked before a grammar is compiled; any thread may, one at a time gets its turn.

    Starts its process at the first use or by `warm`, and again when that has died.

    Args:
        special: The vocabulary's special tokens, which grammars may name.
    """

    def __init__(self, special: Iterable[str], seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self.seconds, self.memory = seconds, memory
        self._special = list(special)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Pipe | None = None
        self._refused: OrderedDict[GrammarSpec, str] = OrderedDict()
        self._closed = self._warned = False

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vetter:
        """One for this vocabulary."""
        ids = (i for i in range(tokenizer.n_vocab) if tokenizer.is_control(i))
        return cls(tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids)

    def __call__(self, spec: GrammarSpec) -> None:
        """Raise ConfigError for a grammar whose compilation passes the limits."""
        with self._lock:
            if spec in self._refused:
                raise ConfigError(self._refused[spec])
            pipe = self._ready()
            if pipe is None:
                return
            refusal = None
            try:
                pipe.send(Trial(spec, self.seconds))
                if pipe.wait(self.seconds):
                    pipe.receive(bool)
                    return
                refusal = f"compiling it takes more than {self.seconds:g} s"
            except (EOFError, OSError, ValueError):
                if self._closed:
                    return
                refusal = f"compiling it takes more than {self.memory >> 20} MiB of memory, or its stack"
            self._end()
            message = f"grammar ({spec.kind}): {refusal}; make it smaller"
            self._refused[spec] = message
            while len(self._refused) > REFUSED:
                self._refused.popitem(last=False)
            raise ConfigError(message)

    def warm(self) -> None:
        """Start the process now: it takes a third of a second."""
        with self._lock:
            self._ready()

    def close(self) -> None:
        """End the process; callers that wait for it continue."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _ready(self) -> Pipe | None:
        """The way to a process that waits for a grammar; None where none can be started, which is logged once."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._pipe is None and not self._closed:
            try:
                self._spawn()
            except (EOFError, OSError, ValueError) as error:
                self._end()
                if not self._warned:
                    log.warning("grammars are compiled without being tried out first: %s", error)
                    self._warned = True
        return self._pipe

    def _spawn(self) -> None:
        # a compiler that runs out of memory says so on stderr, and the client gets an error anyway
        self._process, self._pipe = spawn(__name__, stderr=subprocess.DEVNULL)
        self._pipe.send(Setup(self._special, self.memory))
        if not self._pipe.wait(STARTING):
            raise OSError(f"the process that tries them out was not ready after {STARTING:g} s")
        self._pipe.receive(bool)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._pipe is not None:
            with suppress(OSError):
                self._pipe.close()
        self._process = self._pipe = None


class _Bytes:
    """A vocabulary of single bytes and special tokens, as far as a compiler asks."""

    def __init__(self, special: Sequence[str]) -> None:
        self._pieces = [bytes([i]) for i in range(256)] + [text.encode() for text in special]
        self.n_vocab = len(self._pieces) + 1
        self._pieces.append(b"<end of the vocabulary>")
        self.bos_id, self.eos_id = None, self.n_vocab - 1
        self.eog_ids = frozenset({self.eos_id})

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token]

    def is_control(self, token: int) -> bool:
        return token >= 256

    def encode(self, text: str, special: bool = True, most: int | None = None) -> list[int]:
        return list(text.encode())


class Setup(Struct):
    """The first message to the process: what its vocabulary and its limit are."""

    special: list[str]
    memory: int


class Trial(Struct):
    """A grammar to compile. The answer is true, and so is that to a `Setup`."""

    spec: GrammarSpec
    seconds: float


def main(fd: int) -> None:
    """Compile what comes, and say when it is done; ends with the pipe."""
    pipe = Pipe(fd)
    try:
        setup: Setup = pipe.receive(Setup)
        vocabulary = _Bytes(setup.special)
        compiler = GrammarCompiler(vocabulary, vocabulary.n_vocab)  # type: ignore[arg-type]
        compiler.matcher(GrammarSpec("json_object", ""))
        _limit(setup.memory)
        while True:
            pipe.send(True)
            trial: Trial = pipe.receive(Trial)
            _limit_time(trial.seconds)
            text = _TOKEN_IDS.sub("<[0]>", trial.spec.text)
            with suppress(Exception):  # the server meets the same error, and its words are better there
                compiler.matcher(GrammarSpec(trial.spec.kind, text))
    except (EOFError, OSError):
        os._exit(0)


def _limit(memory: int) -> None:
    """Let this process have `memory` bytes more than now, where the system can say so (macOS does not keep to it)."""
    used = 0
    with suppress(OSError), open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))


def _limit_time(seconds: float) -> None:
    """Let this process end by itself should its server be killed while it compiles."""
    with suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds) + 1, hard))
