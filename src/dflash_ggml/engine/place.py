"""A place on the device for one text, which is read, written and left there."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial

from ..config import Mode
from ..decode.controller import controller
from ..decode.sampling import Sampler
from ..drafts.suffix import NAME
from ..errors import ConfigError, ContextOverflowError, NoNumbersError
from .committed import Committed
from .step import Run, Step


class Place(Committed):
    """A committed text, and how it is written on: alone by `generate`, or beside others by the engine's `step`."""

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model; see `sources` for all that drafts."""
        return self.engine.drafter is not None

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of what drafts: the model's kind, suffix for copies; none where decoding is plain."""
        model = () if self.engine.drafter is None else (self.engine.drafter.name,)
        return (*model, *(() if self.copies is None else (NAME,)))

    def forget(self) -> None:
        """Forget the texts that copies are made from: what is measured may not copy from the same answer written before."""
        with self.engine.passing:  # a step of any place may be looking in them
            if self.copies:
                self.copies.forget()

    def generate(
        self,
        sampler: Sampler,
        *,
        max_tokens: int | None = None,
        mode: Mode | None = None,
        budget: int | None = None,
        stop: Callable[[int], bool] | None = None,
        should_stop: Callable[[], bool] | None = None,
        keep_rows: bool = False,
    ) -> Generator[Step, None, None]:
        """Decode from `logits` until `stop(token)` (None: an end-of-generation token), `max_tokens` or the context's end.

        `should_stop` is asked between steps. However it ends, also by closing the generator, `tokens` then holds the prompt
        and all emitted tokens but the last, which is `pending`. Raises ConfigError for options that do not fit. Until it has
        ended or been closed, other calls that would change the state are refused.
        """
        with self._claim.by("a generation"):
            run = self._run(sampler, max_tokens, mode, budget, stop, keep_rows)
            self._guarded(self._overwrite)
            step = self._guarded(partial(self.engine.stepper.first, run))
            while True:
                if run.finish is None and should_stop and should_stop():
                    run.finish = "cancelled"
                step.finish = run.finish
                yield step
                if step.finish:
                    return
                step = self._guarded(partial(self._one_step, run))

    def _one_step(self, run: Run) -> Step:
        self.ready()
        self._overwrite()
        try:
            (step,) = self.engine.stepper.step_each([run], self.engine.others([run]))
        finally:
            self.clear_spoilt()
        step = self.stepped(run, step)
        if isinstance(step, Exception):
            raise step
        return step

    def stepped(self, run: Run, step: Step | Exception, beside: bool = False) -> Step | Exception:
        """What came of a run's step; beside: others were in its pass. Where it came to no numbers it is made once more, alone and
        without a tree: whatever a mask hides, a column that overflows may spoil all that a kernel computes together with it."""
        if not isinstance(step, NoNumbersError) or (self.sequence.torn and not beside):
            return step
        try:
            if self.sequence.torn and (error := self._read_again()):
                return error
            (step,) = self.engine.stepper.step_each([run], self.engine.others([run]), plain=True)
        except NoNumbersError as error:
            return error
        finally:
            self.clear_spoilt()
        return step

    def _read_again(self) -> Exception | None:
        """Have the state before the last token anew; what kept it from that, after which the text is of no use."""
        sequence = self.sequence
        *tokens, pending = sequence.tokens
        kept = sequence.text, sequence.sampler, sequence.undraftable, sequence.statistics
        sequence.text = []  # its list goes on
        try:
            self._reset()
            self._prefill(tokens)
        except Exception as error:  # noqa: BLE001 - it is that run's alone
            sequence.torn = True
            return error
        finally:
            sequence.text, sequence.sampler, sequence.undraftable, sequence.statistics = kept
        sequence.pending, sequence.logits = pending, None
        return None

    def ready(self) -> None:
        """Have rows for a step, for which others may move. Raises NoRoomError, or DeviceError after one that broke."""
        self._usable()
        self._have_rows(self.n_tokens + 1)

    def begin(
        self,
        sampler: Sampler,
        *,
        max_tokens: int | None = None,
        mode: Mode | None = None,
        budget: int | None = None,
        stop: Callable[[int], bool] | None = None,
        keep_rows: bool = False,
    ) -> Run:
        """A generation as `generate` has it, for `first` and `Engine.step`."""
        with self._claim.by("begin"):
            run = self._run(sampler, max_tokens, mode, budget, stop, keep_rows)
            self._guarded(self._overwrite)
            return run

    def first(self, run: Run) -> Step:
        """The first token of a generation that was begun, which the prompt's own pass gave."""
        with self._claim.by("first"):
            step = self._guarded(partial(self.engine.stepper.first, run))
            step.finish = run.finish
            return step

    def resume(self, run: Run) -> None:
        """Go on here with a run whose place was closed, once a snapshot of its text is restored. Raises ConfigError where the
        texts differ."""
        with self._claim.by("resume"):
            self._usable()
            left, here = run.sequence, self.sequence
            if left.tokens != here.tokens:
                raise ConfigError("resume: the place holds another text than the run")
            here.pending, here.text, here.sampler, here.logits = left.pending, left.text, left.sampler, None
            here.undraftable, here.statistics = left.undraftable, left.statistics
            self._guarded(self._overwrite)
            run.sequence, self.copies = here, run.copies

    def _run(self, sampler, max_tokens, mode, budget, stop, keep_rows) -> Run:
        """The options of a generation, checked."""
        self._usable()
        _ = self.logits
        if max_tokens is not None and max_tokens < 1:
            raise ConfigError(f"max_tokens: {max_tokens} is below 1")
        if budget is not None and not 1 <= budget <= self.config.budget:
            raise ConfigError(
                f"budget: {budget} is outside 1..{self.config.budget}, what the engine was loaded with"
            )
        room = self.n_ctx - self.n_tokens
        if room < 1:
            raise ContextOverflowError(f"the context window of {self.n_ctx} tokens is full")
        depth = self.engine.drafter.depth if self.engine.drafter else 0
        chosen = controller(
            self._mode(mode),
            budget or self.config.budget,
            depth,
            self.config.chain_seed,
            self.engine.experience,
            self.copies,
        )
        self.sequence.sampler, self.sequence.text = sampler, self.tokens
        limit = room if max_tokens is None else min(max_tokens, room)
        ends = stop or self.tokenizer.eog_ids.__contains__
        return Run(self.sequence, chosen, limit, ends, self.copies, keep_rows)

    def _mode(self, mode: Mode | None) -> Mode:
        """The mode of a generation."""
        mode = mode or self.config.mode
        if mode != "auto" or not self.config.reproducible:
            return mode
        return "tree" if self.engine.device.info.is_gpu and self.engine.drafter else "plain"

    def expected_ms(self, nodes: int) -> float | None:
        """What a step that verifies `nodes` drafted nodes (0: a plain one) is expected to take now; None if nothing is known."""
        context = self.n_tokens
        if nodes == 0 or not self.sources:
            return self.engine.costs.of("plain", 1, context)
        columns = self.engine.drafter.depth + 1 if self.engine.drafter else 0
        return self.engine.costs.drafted([nodes], columns, context)[nodes] or None
