"""Runner of a suite's jobs: alternating settings, warm-up, progress, Ctrl-C."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TextIO

from ..config import Mode
from ..engine.engine import Engine
from ..engine.slot import Slot
from ..files.pairs import EMBEDDED_TARGET
from ..session.requests import ChatRequest
from ..session.session import Session
from .measure import Interrupted, Job, Run, Setting, decode
from .prompts import Prompt
from .servers import Server, ServerError

WARM_UP = 24  # tokens of the warm-up run, which builds graphs


class Lines:
    """Progress of suites, for pipes: a line when one begins. The base of other forms."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin(self, name: str, total: int) -> None:
        """A suite of `total` runs begins."""
        print(f"dflash-bench: {name}, {total} runs", file=self._stream, flush=True)

    def at(self, done: int, what: str) -> None:
        """`done` runs are done, `what` comes next."""

    def end(self) -> None:
        """The suite has ended."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a suite: prompts, tokens per run, repetitions, values of the sweeps, prompts for acceptance (None: all)."""

    prompts: int
    n: int
    rounds: int
    budgets: tuple[int, ...]
    temperatures: tuple[float, ...]
    lengths: tuple[int, ...]
    acceptance: int | None = None


QUICK = Size(6, 48, 1, (3, 7, 15, 31, 63), (0.0, 0.8, 1.2), (64, 256, 1024), 12)
_LENGTHS = tuple(128 << i for i in range(0, 14, 2))
FULL = Size(18, 200, 2, (1, 3, 7, 15, 23, 31, 47, 63), (0.0, 0.4, 0.8, 1.2), _LENGTHS)


@dataclass(slots=True)
class Bench:
    """An engine with the suites' common parts.

    mode, budget: The setting for suites that do not compare several. chat: apply the model's template to all prompts (True),
    none (False), or requests (None).
    """

    engine: Engine
    prompts: Sequence[Prompt]
    size: Size
    progress: Lines
    should_stop: Callable[[], bool] = lambda: False
    servers: Sequence[Server] = ()
    mode: Mode = "auto"
    budget: int = 31
    temperature: float = 0.0
    seed: int = 1
    chat: bool | None = None
    stopped: bool = False
    error: ServerError | None = None
    _session: Session = field(init=False)
    slot: Slot = field(init=False)  # decodes everything

    def __post_init__(self) -> None:
        self._session, self.slot = Session(self.engine, cache_bytes=0), self.engine.open()
        if self.chat is None and self.engine.config.model == EMBEDDED_TARGET:
            self.chat = False  # it has a template, but was trained on code only
        if not self.engine.tokenizer.chat_template:
            self.chat = False

    # ---- settings

    def setting(
        self, label: str, mode: Mode, budget: int | None = None, temperature: float | None = None
    ) -> Setting:
        """A setting of ours, by default at the run's temperature."""
        return Setting(label, mode, budget, self.temperature if temperature is None else temperature)

    def modes(
        self,
        budgets: Sequence[int] = (7, 15, 31),
        temperature: float | None = None,
        drafts: bool | None = None,
    ) -> list[Setting]:
        """Plain, chain, trees and auto; plain alone without a draft (or as `drafts` says)."""
        found = [self.setting("plain", "plain", None, temperature)]
        if self.engine.has_draft if drafts is None else drafts:
            found.append(self.setting("chain", "chain", None, temperature))
            found += [self.setting(f"tree {b}", "tree", b, temperature) for b in budgets]
            found.append(self.setting("auto", "auto", self.budget, temperature))
        return found

    def swept(self) -> list[Setting]:
        """Plain, and the given mode or auto."""
        found = [self.setting("plain", "plain")]
        if self.engine.has_draft and self.mode != "plain":
            label = f"tree {self.budget}" if self.mode == "tree" else self.mode
            budget = None if self.mode == "chain" else self.budget
            found.append(self.setting(label, self.mode, budget))
        return found

    def others(self) -> list[Setting]:
        """The servers to compare with."""
        at = self.temperature
        return [Setting(f"{s.url} ({s.model})", temperature=at, server=s.url) for s in self.servers]

    # ---- jobs

    def ids(self, prompt: Prompt) -> tuple[Prompt, list[int]]:
        """A prompt, with or without template, and its token ids."""
        tokenizer = self.engine.tokenizer
        chat = prompt.chat if self.chat is None else self.chat
        if chat:
            request = ChatRequest(messages=[{"role": "user", "content": prompt.text}])
            return replace(prompt, chat=True), list(self._session.prompts.make(request).ids)
        ids = [*tokenizer.bos_ids, *tokenizer.encode(prompt.text, special=False)]
        return replace(prompt, chat=False), ids

    def jobs(
        self,
        settings: Sequence[Setting],
        prompts: Sequence[Prompt],
        rounds: int | None = None,
        endless: bool = False,
    ) -> list[Job]:
        """Every prompt that fits with every setting, `rounds` times, rotating the first setting."""
        found = []
        for round_ in range(self.size.rounds if rounds is None else rounds):
            for i, (prompt, ids) in enumerate(map(self.ids, prompts)):
                if len(ids) >= self.engine.n_ctx:
                    continue
                for j in range(len(settings)):
                    setting = settings[(i + round_ + j) % len(settings)]
                    seed = self.seed + round_
                    found.append(Job(prompt, ids, prompt.text, setting, self.size.n, seed, endless))
        return found

    def filled(self, length: int, turn: int, setting: Setting, n: int) -> Job:
        """A job with a prompt of `length` tokens: the run's prompts concatenated, beginning with another one each time."""
        tokenizer, ids = self.engine.tokenizer, list[int]()
        for i in range(length):
            prompt = self.prompts[(7 * turn + i) % len(self.prompts)]
            ids += tokenizer.encode(prompt.text + "\n\n", special=False)
            if len(ids) >= length:
                break
        ids = [*tokenizer.bos_ids, *ids][:length]
        prompt = Prompt(f"{length} tokens, {turn + 1}", "filled", "")
        return Job(prompt, ids, _unseen(tokenizer.decode(ids)), setting, n, self.seed + turn)

    # ---- the run

    def run(self, name: str, jobs: Sequence[Job]) -> list[Run]:
        """The runs of the jobs, in order; after Ctrl-C those so far, with `stopped` set; a server's error sets `error`."""
        runs: list[Run] = []
        warm: set[tuple[Setting, int]] = set()
        self.progress.begin(name, len(jobs))
        try:
            for job in jobs:
                self.progress.at(len(runs), f"{job.setting.label}, {job.prompt.id}")
                # one per length: caches and graphs differ between them
                key = (job.setting, len(job.ids).bit_length() if job.prompt.style == "filled" else 0)
                if key not in warm:
                    self._decode(replace(job, n=min(job.n, WARM_UP), text=_unseen(job.text)))
                    warm.add(key)
                runs.append(self._decode(job))
            self.progress.at(len(runs), "")
        except Interrupted:
            self.stopped = True
        except ServerError as error:  # keep earlier measurements
            self.error = error
        finally:
            self.progress.end()
        return runs

    def _decode(self, job: Job) -> Run:
        if self.should_stop():
            raise Interrupted
        for server in self.servers:
            if server.url == job.setting.server:
                return server.complete(job, self.should_stop)
        return decode(self.slot, job, self.should_stop)


def _unseen(text: str) -> str:
    """The text after a unique line, so that no server has it in its cache."""
    return f"# {secrets.token_hex(4)}\n{text}"
