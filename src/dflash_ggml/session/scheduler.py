"""Thread-safe queue and scheduling loop of all generations of an engine: admit, prefill, step.

The driver is a thread of its own (`start`) or the callers that wait for events, one at a time. With driving callers a sequence
advances only while its caller waits for it, and a thread that makes a new call ends the stream that it left unfinished.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ConfigError, ContextOverflowError, DflashError, NoRoomError, as_exception
from .generation import RESERVE, Generation
from .prefill_budget import PrefillBudget
from .prefix_cache import common_prefix
from .scoring import Scoring
from .slots import CachedSlot, Slots

if TYPE_CHECKING:
    from ..engine.step import Step, Verify

log = logging.getLogger("dflash_ggml")
T = TypeVar("T")
Events = Generator[Any, None, None]

SHARED = 64  # shared prompt tokens worth waiting for while another prompt prefills them
POLL_S = 0.5  # seconds between checks, since the end of a thread is not signalled


@dataclass(slots=True)
class Tally:
    """Totals over all steps.

    Attributes:
        passes: Steps.
        columns: Columns of their passes: drafted tokens, and one per sequence.
        sequences: Sequences in them.
        emitted: Tokens emitted.
        preemptions: Sequences preempted for lack of cache rows.
        seconds: Time in steps.
    """

    passes: int = 0
    columns: int = 0
    sequences: int = 0
    emitted: int = 0
    preemptions: int = 0
    seconds: float = 0.0

    def add(self, steps: list[Step]) -> None:
        """Add one step."""
        self.passes += 1
        self.sequences += len(steps)
        self.columns += sum([step.n_draft + 1 for step in steps])
        self.emitted += sum([len(step.tokens) for step in steps])


class SlotTask(Generation):
    """A caller's function to run on a slot between two steps.

    Args:
        work: Called with the slot.
        ids: The slot with the longest prefix of these is preferred.
        room: Tokens that need cache rows.
    """

    def __init__(self, work: Callable[[CachedSlot], Any], ids: Sequence[int], room: int) -> None:
        super().__init__(ids, {})
        self.work, self.result = work, None
        self.remaining = room  # the budget treats it as a prompt

    def reservations(self) -> tuple[int, ...]:
        """Its rows, as of a prompt."""
        return (self.remaining,)


class Scheduler:
    """Runs generations on the slots of an engine, from any thread."""

    def __init__(self, slots: Slots) -> None:
        self.slots, self.engine = slots, slots.engine
        self.budget, self.tally = PrefillBudget(self.engine.device.is_gpu), Tally()
        self.joins = self.engine.joins
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []  # in order of their start, preempted ones included
        self._open: list[Generation] = []  # generations whose events are being read
        # C locks: an interrupt cannot leave them locked, as it could locks implemented in Python
        self._driver = threading.RLock()  # held by the driver, the only thread that touches the engine
        self._lock = threading.RLock()  # guards the queues
        self._changed = threading.Condition(self._lock)  # notified of events and ends
        self._version = 0  # number of notifications
        self._thread: threading.Thread | None = None
        self._closed = self._is_unnotified = False

    # ---- callers

    def run(self, generation: Generation) -> Events:
        """The events of a generation, which begins with the first. Closing the iterator ends it within one step."""
        self.submit(generation)
        yield from self.events(generation)

    def submit(self, *generations: Generation) -> None:
        """Queue generations.

        Raises:
            ConfigError: The session is closed.
        """
        self._refuse_inside()
        if self._thread is None:
            me = threading.current_thread()
            with self._driver:
                self._cut_off(lambda reader: reader is me)
        with self._lock:
            if self._closed:
                raise ConfigError("the session is closed")
            self.waiting.extend(generations)
            self._notify()

    def events(self, generation: Generation) -> Events:
        """The events of a submitted generation. Raises its error."""
        generation.reader = threading.current_thread()
        self._open.append(generation)
        try:
            while True:
                generation.reader = threading.current_thread()
                ended = generation.ended  # read first: events appended before it is set are not missed
                if generation.events:
                    yield generation.events.popleft()
                elif not ended:
                    self._wait(generation)
                elif generation.error is not None:
                    raise generation.error
                else:
                    return
        finally:
            self._open.remove(generation)
            self.abandon(generation)

    def abandon(self, generation: Generation) -> None:
        """Note that its events are no longer read."""
        generation.abandoned = True
        if not generation.ended and self._thread is None and not self.is_driven_here():
            with self._driver:
                self._drop()
            self._notify()

    def run_on_slot(self, work: Callable[[CachedSlot], T], ids: Sequence[int] = (), room: int = 1) -> T:
        """Run a function on a free slot between two steps: that with the longest prefix of `ids`, with `room` rows."""
        task = SlotTask(work, ids, max(min(room, self.engine.n_ctx), 1))
        self.submit(task)
        try:
            self._wait(task)
        finally:
            task.abandoned = True
        if task.error is not None:
            raise task.error
        return task.result  # type: ignore[return-value]

    def is_driven_here(self) -> bool:
        """Whether the caller is inside an iteration."""
        return self._driver._is_owned()  # type: ignore[attr-defined]

    def _refuse_inside(self) -> None:
        """Raise ConfigError for a call from inside an iteration, which would deadlock."""
        if self.is_driven_here():
            raise ConfigError("this call came from inside a step on the same model; make it after the step")

    def _cut_off(self, is_gone: Callable[[threading.Thread], bool]) -> None:
        """End the open streams whose reader satisfies `is_gone`."""
        for generation in list(self._open):
            if is_gone(generation.reader):
                self._end(generation)
                generation.events.clear()
                generation.error = DflashError(
                    "this stream was cut off: a later call on the same model began before it ended"
                )

    def _wait(self, generation: Generation) -> None:
        """Wait for events or the end."""
        self._refuse_inside()
        if self._thread is not None:
            with self._lock:
                self._changed.wait_for(lambda: generation.events or generation.ended)
            return
        me = threading.current_thread()
        generation.is_awaited = True
        generation.lap()  # the caller's own time does not count
        try:
            while not (generation.events or generation.ended):
                with self._driver:
                    progressed = bool(generation.events or generation.ended) or self.iterate()
                    seen = self._version
                    if not progressed:  # it may be waiting for the stream of a thread that has ended
                        self._cut_off(lambda reader: reader is not me and not reader.is_alive())
                with self._lock:
                    if not progressed and seen == self._version:
                        self._changed.wait(POLL_S)
        finally:
            generation.is_awaited = False

    # ---- drivers

    def start(self) -> None:
        """Drive the loop by a thread of its own from now on."""
        self._thread = threading.Thread(target=self._loop, name="dflash-scheduler", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while True:
            with self._lock:
                while not self._closed and not self.is_busy:
                    if self._is_unnotified:
                        self._notify()
                    self._changed.wait()
                if self._closed:
                    return
            with self._driver:
                try:
                    self.iterate()
                except BaseException as error:  # a bug of ours; later requests are still answered
                    log.exception("an iteration failed")
                    self._end_all(as_exception(error))

    def close(self) -> None:
        """End all generations; later ones are refused."""
        self._refuse_inside()
        with self._lock:
            self._closed = True
            self._notify()
        if self._thread is not None:
            self._thread.join()
        with self._driver:
            self._end_all(DflashError("the session was closed before this answer had ended"))

    def _notify(self) -> None:
        """Notify waiting threads."""
        with self._lock:
            self._is_unnotified, self._version = False, self._version + 1
            self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    # ---- an iteration

    def iterate(self) -> bool:
        """Admit, prefill, and step all decoding sequences; False if there was nothing to do. For the driver only."""
        did = True  # unless it is known that nothing was
        try:
            dropped, admitted, decoding = self._drop(), self._admit(), self._decoding()
            prefilled, stepped = self._prefill(decoding)
            if not stepped:
                stepped = self._step([generation for generation in decoding if generation.is_decoding])
            did = dropped or admitted or prefilled or stepped
            return did
        finally:
            still_decoding = any(generation.is_decoding for generation in self.running)
            if self._thread is not None and self.engine.device.is_gpu and still_decoding:
                # deliver events while the next step waits for the GPU: waking threads now would delay that step
                self._is_unnotified = True
                self.engine.device.before_waiting(self._notify)
            elif did:
                self._notify()

    def _may_advance(self, generation: Generation) -> bool:
        return self._thread is not None or generation.is_awaited or generation.runs_ahead

    def _active(self) -> list[Generation]:
        """Running generations that may advance now."""
        return [generation for generation in self.running if self._may_advance(generation)]

    def _decoding(self) -> list[Generation]:
        return [generation for generation in self._active() if generation.is_decoding]

    @contextmanager
    def _work_on(self, *generations: Generation) -> Iterator[None]:
        """Context whose error or interrupt ends exactly these generations; interrupts are raised here too."""
        try:
            yield
        except BaseException as error:
            is_interrupt = isinstance(error, (KeyboardInterrupt, SystemExit))
            failure = DflashError("the generation was interrupted") if is_interrupt else as_exception(error)
            for generation in generations:
                self._fail(generation, failure)
            if is_interrupt:
                raise

    def _timed(self, work: Callable[[], Any]) -> tuple[float, bool]:
        """Run a function; returns its seconds, and whether no graph was built."""
        built, began = self.engine.graph_counts()["graphs"], time.perf_counter()
        work()
        return time.perf_counter() - began, self.engine.graph_counts()["graphs"] == built

    def _drop(self) -> bool:
        """End abandoned and cancelled generations; returns whether there were any."""
        with self._lock:
            known = [g for g in (*self.waiting, *self.running) if g.abandoned or g.should_stop is not None]
        for generation in known:
            with self._work_on(generation):
                if generation.abandoned:
                    self._end(generation)
                elif (
                    self._may_advance(generation)
                    and generation.should_stop is not None
                    and generation.should_stop()
                ):
                    if generation.slot is None and generation.preempted is None:
                        generation.begin(0)
                    generation.finish(cancelled=True)
                    self._end(generation)
        return any(generation.ended for generation in known)

    # ---- admission

    def _admit(self) -> bool:
        """Admit preempted generations, then waiting ones, while there are slots; returns whether there were any.

        While sequences decode, at most one admission per step copies K/V rows. None is admitted while a running sequence lacks
        rows, which have priority.
        """
        did = ran_task = False
        copies, is_decoding = self.slots.copies, bool(self._decoding())
        if any(generation.lacks_rows for generation in self.running):
            return did
        for generation in self._active():
            if generation.preempted is not None:
                if not self._resume(generation):
                    return did
                did = True
                if is_decoding:  # its own rows were copied
                    return did
        with self._lock:
            waiting = [generation for generation in self.waiting if self._may_advance(generation)]
        for generation in waiting:
            if isinstance(generation, Scoring):
                did |= self._start_scoring(generation)
                continue
            if self._is_prefilled_elsewhere(generation):
                continue
            if isinstance(generation, SlotTask) and (ran_task or not self._may_run_task(generation)):
                continue  # decode a step between two copies
            with self._work_on(generation):
                generation.slot = self._slot_for(generation)
                if generation.slot is None:
                    return did
                with self._lock:
                    self.waiting.remove(generation)
                    self.running.append(generation)
                if isinstance(generation, SlotTask):
                    ran_task = True
                    self._run_task(generation, generation.slot)
                else:
                    self._start(generation, generation.slot)
            did = True
            if is_decoding and self.slots.copies > copies:
                break
        return did

    def _start(self, generation: Generation, slot: CachedSlot) -> None:
        """Restore the longest cached prefix of a prompt in a slot."""
        generation.lap()
        cached = slot.start(
            generation.ids, generation.boundaries, generation.first_answer, generation.wants_prompt_logits
        )
        generation.remaining = len(generation.ids) - cached
        generation.begin(cached)

    def _start_scoring(self, generation: Scoring) -> bool:
        """Start scoring a prompt, unless another one is being scored."""
        if any(other.is_scoring for other in self.running):
            return False
        with self._work_on(generation):
            with self._lock:
                self.waiting.remove(generation)
                self.running.append(generation)
            generation.start()
        return True

    def _slot_for(self, generation: Generation) -> CachedSlot | None:
        """A slot for a waiting generation. Raises NoRoomError if it is alone and there are too few rows."""
        for room in generation.reservations():
            slot = self.slots.take(generation.ids, min(room, self.engine.n_ctx))
            if slot is not None:
                return slot
        if any(other.slot is not None for other in self.running):
            return None
        raise NoRoomError(f"no cache rows for {room} tokens are free; lower --parallel")

    def _may_run_task(self, task: SlotTask) -> bool:
        """Whether decoding sequences can wait for a caller's work; it counts like a prompt of so many tokens."""
        return self.budget.choose([task], len(self._decoding()), time.perf_counter()) is not None

    def _run_task(self, task: SlotTask, slot: CachedSlot) -> None:
        """Run a caller's work on a slot."""

        def work() -> None:
            task.result = task.work(slot)

        took, is_warm = self._timed(work)
        if is_warm and self._decoding():
            self.budget.debit(took)
        self._end(task)

    def _is_prefilled_elsewhere(self, generation: Generation) -> bool:
        """Whether another prompt being prefilled shares a long prefix with this one, which is then prefilled once."""
        for other in self._active():
            if not other.is_prefilling or other.slot is None or generation.wants_prompt_logits:
                continue
            shared = common_prefix(other.ids, generation.ids)
            shared = min(shared, len(generation.ids) - 1, len(other.ids) - 1)
            done = len(other.ids) - other.remaining
            if done < shared and shared >= self.slots.known(generation.ids) + SHARED:
                other.slot.mark(shared)
                return True
        return False

    # ---- prefill

    def _prefill(self, decoding: list[Generation]) -> tuple[bool, bool]:
        """Prefill chunks of prompts.

        One chunk if no sequence decodes, else as many as the budget allows, or one in the pass of the decode step.

        Returns:
            Whether there was any, and whether the sequences were stepped.
        """
        did, n_decoding = False, sum(not generation.lacks_rows for generation in decoding)
        while prompts := [generation for generation in self._active() if generation.is_prefilling]:
            most: int | None = None
            generation = next((prompt for prompt in prompts if not prompt.remaining), None)
            if generation is None:
                is_one_enough = did and not n_decoding  # deliver its events to the caller first
                choice = (
                    None if is_one_enough else self.budget.choose(prompts, n_decoding, time.perf_counter())
                )
                if choice is None:
                    break
                generation, most = prompts[choice[0]], choice[1] if n_decoding else None
            did = True
            if n_decoding and self._can_join(generation):
                self._prefill_joined(generation, most, decoding)
                return True, True
            with self._work_on(generation):
                if isinstance(generation, Scoring):
                    self._score_chunk(generation, most, n_decoding > 0)
                else:
                    self._prefill_chunk(generation, most, n_decoding > 0)
        return did, False

    def _can_join(self, generation: Generation) -> bool:
        """Whether the next chunk of a prompt can share the pass of a step; the first step runs alone, to measure it."""
        is_plain = not (isinstance(generation, Scoring) or generation.wants_prompt_logits)
        return self.joins and is_plain and generation.remaining > 0 and self.tally.passes > 0

    def _prefill_joined(self, generation: Generation, most: int | None, decoding: list[Generation]) -> None:
        """Prefill at most so many tokens in the pass of a step of all decoding sequences."""
        steps: list[Step | Exception] = []

        def step(run: Verify) -> None:
            with self._work_on(*decoding):
                steps.extend(self.engine.step([g.sequence for g in decoding if g.sequence is not None], run))

        try:
            with self._work_on(generation):
                self._prefill_chunk(generation, most, True, step, len(decoding))
        finally:
            with self._work_on(*decoding):
                self._deliver(decoding, steps)

    def _prefill_chunk(
        self,
        generation: Generation,
        most: int | None,
        others_wait: bool,
        join: Callable[[Verify], None] | None = None,
        others: int = 0,
    ) -> None:
        """Prefill at most so many tokens; after the last chunk the first token is drawn. join, others: see
        `CachedSlot.prefill`."""
        slot, before = generation.slot, generation.remaining
        assert slot is not None
        if before:
            logits: list[Any] | None = [] if generation.wants_prompt_logits else None
            took, is_warm = self._timed(lambda: slot.prefill(generation.ids, most, logits, join, others))
            generation.remaining = len(generation.ids) - slot.slot.n_tokens
            n = before - generation.remaining
            if join is None:
                self.budget.prefilled(n, took, others_wait, is_warm)
            else:
                self.tally.seconds += self.budget.joined(n, took, is_warm)
            generation.prefilled(logits)
        if generation.remaining:
            return
        if generation.options["max_tokens"] == 0:
            generation.finish()
            self._end(generation)
        else:
            generation.sequence = slot.begin(**generation.options)
            self._take(generation, slot.slot.first())

    def _score_chunk(self, generation: Scoring, most: int | None, others_wait: bool) -> None:
        """Score at most so many tokens of a prompt; after the last chunk the selection is known."""
        if before := generation.remaining:
            took, is_warm = self._timed(lambda: generation.advance(most))
            tokens = before - generation.remaining
            self.budget.prefilled(tokens, took, others_wait, is_warm, is_scoring=True)
        if not generation.remaining:
            self._end(generation)

    # ---- decoding

    def _step(self, generations: list[Generation]) -> bool:
        """Run one step of all these sequences."""
        with self._work_on(*generations):
            began = time.perf_counter()
            steps = (
                self.engine.step([g.sequence for g in generations if g.sequence is not None])
                if generations
                else []
            )
            took = time.perf_counter() - began
            n_done = self._deliver(generations, steps)
            if n_done:
                self.budget.decoded(took, n_done)
                self.tally.seconds += took
        return bool(generations)

    def _deliver(self, generations: list[Generation], steps: list[Step | Exception]) -> int:
        """Deliver each generation's step; returns their number."""
        done = [step for step in steps if not isinstance(step, Exception)]
        if done:
            self.tally.add(done)
        for generation, step in zip(generations, steps):
            generation.lacks_rows = isinstance(step, NoRoomError)
            if not generation.lacks_rows:
                with self._work_on(generation):
                    self._take(generation, step)
        for generation, step in zip(generations, steps):  # preempted ones have none
            if isinstance(step, NoRoomError):
                with self._work_on(generation):
                    self._make_room(generation, step)
        return len(done)

    def _take(self, generation: Generation, step: Step | Exception) -> None:
        """Deliver a step to its generation. Raises the error if the step failed."""
        if isinstance(step, Exception):
            raise step
        generation.take(step)
        if step.finish is not None:
            generation.finish()
            self._end(generation)

    # ---- lack of cache rows

    def _make_room(self, generation: Generation, error: NoRoomError) -> None:
        """Free rows for a sequence: close idle slots, then preempt the newest sequences until the rows suffice. The sequence
        takes them at once, before preempted ones can resume."""
        while generation.is_decoding and not self._grow(generation):
            if self.slots.close_idle_slot():
                continue
            decoding = [other for other in self.running if other.is_decoding]
            if len(decoding) > 1:
                with self._work_on(decoding[-1]):
                    self._preempt(decoding[-1])
            elif any(other.is_prefilling and not other.is_scoring for other in self.running):
                return
            else:
                raise ContextOverflowError(str(error))

    def _grow(self, generation: Generation) -> bool:
        """Try to extend a sequence's rows; returns whether it can advance."""
        assert generation.slot is not None
        slot = generation.slot.slot
        if not slot.grow(min(slot.n_tokens + RESERVE, self.engine.n_ctx)) and not slot.grow(
            slot.n_tokens + 1
        ):
            return False
        generation.lacks_rows = False
        return True

    def _preempt(self, generation: Generation) -> None:
        """Preempt a sequence: move its state to the host, to be resumed later."""
        slot = generation.slot
        assert slot is not None
        generation.preempted = slot.slot.snapshot()
        generation.slot, generation.lacks_rows = None, False
        self.tally.preemptions += 1
        self.slots.close_slot(slot)

    def _resume(self, generation: Generation) -> bool:
        """Resume a preempted sequence, or end it with its error; False if there are too few rows."""
        snapshot, sequence = generation.preempted, generation.sequence
        assert snapshot is not None and sequence is not None
        with self._work_on(generation):
            generation.slot = self._slot_for(generation)
            if generation.slot is None:
                return False
            generation.slot.resume(sequence, snapshot)
            generation.preempted = None
        return True

    # ---- ends

    def _end_all(self, error: Exception) -> None:
        """End all generations with this error."""
        with self._lock:
            known = [*self.waiting, *self.running]
        for generation in known:
            self._end(generation, error)
        self._notify()

    def _fail(self, generation: Generation, error: Exception) -> None:
        """End a generation with an error; its slot may be inconsistent, and is reset."""
        slot = generation.slot
        self._end(generation, error)
        if slot is not None:
            try:
                slot.reset()
            except Exception:  # its caller gets the first error
                log.exception("a slot could not be emptied")

    def _end(self, generation: Generation, error: Exception | None = None) -> None:
        """End a generation; its slot keeps the tokens until it is needed."""
        if generation.ended:
            return
        slot, generation.slot = generation.slot, None
        with self._lock:
            generation.sequence = generation.preempted = None
            generation.lacks_rows = False
            for queue in (self.waiting, self.running):
                if generation in queue:
                    queue.remove(generation)
            generation.error, generation.ended = error, True
        if slot is not None:
            slot.release()
