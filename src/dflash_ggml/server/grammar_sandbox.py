"""Grammar sandbox: a process with limits of time and memory in which a grammar is compiled before the server compiles it.

The static limits (`text.grammar_limits`, `text.bounded_schema`) refuse every known explosive form; the sandbox stops unknown
ones. A compiled grammar cannot be sent between processes, so the process only reports that compiling has ended, with or without
an error, and the server then compiles it again. The sandbox's vocabulary is bytes and the special tokens: the grammar itself is
what can grow without bounds.
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
from ..text.tokenizer import BYTE, CONTROL, Tokenizer
from ..text.tokenizer_sentencepiece import SentencePiece
from .pipe import Pipe, spawn

log = logging.getLogger(__name__)

SECONDS = 3.0  # seconds to compile one grammar; the slowest within the static limits take a tenth
STARTING = 20.0  # seconds to start the process, which imports numpy and llguidance
MEMORY = 1 << 30  # bytes beyond the process's memory when ready
REFUSED = 64  # cached refusals, so that repeated requests cost nothing

_TOKEN_IDS = re.compile(r"<\[[\d\s,^-]*\]>")  # end-of-sequence id; any id will do


class Vetter:
    """Tries grammars in the sandbox, one at a time; thread-safe.

    Starts the process at the first use or by `warm`, and again after it has died.

    Args:
        special: The vocabulary's special tokens, which grammars may reference.
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
        """The sandbox for this vocabulary."""
        ids = (i for i in range(tokenizer.n_vocab) if tokenizer.is_control(i))
        return cls(tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids)

    def __call__(self, spec: GrammarSpec) -> None:
        """Raise ConfigError for a grammar whose compilation exceeds the limits."""
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
        """Start the process now, which takes a third of a second."""
        with self._lock:
            self._ready()

    def close(self) -> None:
        """End the process; waiting callers continue."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _ready(self) -> Pipe | None:
        """The pipe to a ready process; None if it cannot be started, which is logged once."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._pipe is None and not self._closed:
            try:
                self._spawn()
            except (EOFError, OSError, ValueError) as error:
                self._end()
                if not self._warned:
                    log.warning("grammars are compiled without the sandbox: %s", error)
                    self._warned = True
        return self._pipe

    def _spawn(self) -> None:
        # drop the compiler's out-of-memory message; the client gets an error
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


def _vocabulary(special: Sequence[str]) -> Tokenizer:
    """A vocabulary of single bytes and special tokens."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *special, "<end of the vocabulary>"]
    types = [BYTE] * 256 + [CONTROL] * (len(special) + 1)
    ends = {"eos": len(tokens) - 1}
    return Tokenizer(tokens, types, (), "", special_ids=ends, sentencepiece=SentencePiece((), False, ()))


class Setup(Struct):
    """The first message to the process: vocabulary and limit."""

    special: list[str]
    memory: int


class Trial(Struct):
    """A grammar to compile. The answer is true, as for a `Setup`."""

    spec: GrammarSpec
    seconds: float


def main(fd: int) -> None:
    """Compile grammars from the pipe, and report when done; ends with the pipe."""
    pipe = Pipe(fd)
    try:
        setup: Setup = pipe.receive(Setup)
        vocabulary = _vocabulary(setup.special)
        compiler = GrammarCompiler(vocabulary, vocabulary.n_vocab)
        compiler.matcher(GrammarSpec("json_object", ""))
        _limit(setup.memory)
        while True:
            pipe.send(True)
            trial: Trial = pipe.receive(Trial)
            _limit_time(trial.seconds)
            text = _TOKEN_IDS.sub("<[0]>", trial.spec.text)
            with suppress(Exception):  # the server gets the same error, with a better message
                compiler.matcher(GrammarSpec(trial.spec.kind, text))
    except (EOFError, OSError):
        os._exit(0)


def _limit(memory: int) -> None:
    """Limit this process to `memory` bytes more than now, if the system supports it (macOS does not enforce it)."""
    used = 0
    with suppress(OSError), open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))


def _limit_time(seconds: float) -> None:
    """Limit this process's time, in case its server is killed while it compiles."""
    with suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds) + 1, hard))
