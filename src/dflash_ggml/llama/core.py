"""The token-level half of `Llama`: evaluation, sampling, generation of tokens, saved states."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..decode.sampling import Sampler, log_softmax
from ..errors import ConfigError
from ..session.generation import Generation
from ..session.prefix_cache import common_prefix
from ..session.row_keeper import RowKeeper
from ..session.slots import CachedSlot
from ..text.grammar import LlamaGrammar
from .base import LlamaBase
from .cache import BaseLlamaCache
from .left_out import MIN_P, REPEAT_PENALTY, TEMPERATURE, TOP_K, TOP_P, settled
from .requests import as_tuple, grammar_spec, sampling_params
from .state import LlamaState, LogitsProcessorList, StoppingCriteriaList

if TYPE_CHECKING:
    from ..engine.step import Step

T = TypeVar("T")


class TokenGeneration(Generation):
    """The tokens after a prompt as events, until `ends` says that the next one is too many."""

    def __init__(self, ids: Sequence[int], sampler: Sampler, ends: Callable[[int], bool]) -> None:
        super().__init__(ids, {"sampler": sampler, "max_tokens": None, "stop": ends})

    def take(self, step: Step) -> None:
        self.events.extend(step.tokens[:-1] if step.finish == "stop" else step.tokens)


class LlamaCore(LlamaBase):
    """What can be done with tokens on one model with one context."""

    # --- evaluation, one call at a time

    def set_seed(self, seed: int) -> None:
        """Seed of the next sampled text."""
        self._seed = seed

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """A cache of whole saved states, asked before and filled after each completion."""
        self._between_steps(lambda: setattr(self, "cache", cache))

    def reset(self) -> None:
        """Empty the context. Raises ConfigError after close()."""
        if not self._options.vocab_only:
            _ = self.session
        self._between_steps(lambda: self._follow([]))
        self._requires_eval = True

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the first n_tokens of input_ids. Raises ContextOverflowError, ConfigError."""
        more = [int(t) for t in tokens]
        self._on_slot(lambda slot: self._evaluate(slot, self._input_ids.tolist() + more), len(more))

    def _on_slot(self, work: Callable[[CachedSlot], T], more: int = 0) -> T:
        """Do something between two steps with the slot that has most of the context, and cache rows for `more` tokens."""
        ids = self._input_ids.tolist()
        return self.session.scheduler.borrow(work, ids, len(ids) + more + 1)

    def _evaluate(self, slot: CachedSlot, ids: list[int]) -> None:
        """Bring a slot to exactly ids, with the logits of the last one."""
        # with logits_all, rows exist for the tokens evaluated before
        known = common_prefix(self._input_ids, ids) if self._logits_all else len(ids)
        slot.load(ids[:known])
        for i, row in enumerate(slot.extend(ids[known:]), known):
            self.scores[i] = row
        self._follow(ids)

    def _follow(self, ids: Sequence[int]) -> None:
        """The context is these tokens, evaluated, from now on."""
        self.n_tokens, self._requires_eval = 0, False
        self._append(ids)

    def _append(self, ids: Sequence[int]) -> None:
        self.input_ids[self.n_tokens : self.n_tokens + len(ids)] = ids
        self.n_tokens += len(ids)

    def _logits_at(self, ids: list[int], places: Sequence[int]) -> npt.NDArray[np.single]:
        """Evaluate exactly ids; the logits after these places in it, rising, float32 [n places, n_vocab].

        From the first of them to the last a pass takes 32 tokens.
        """
        rows = np.empty((len(places), self._n_vocab), np.single)

        def work(slot: CachedSlot) -> None:
            at = places[0] + 1 if places else len(ids)
            row_of = {place: row for row, place in enumerate(places)}
            stop = places[-1] + 1 if places else at
            slot.load(ids[:at])
            rows[:1] = slot.logits
            for place, row in enumerate(slot.extend(ids[at:stop]), at):
                if place in row_of:
                    rows[row_of[place]] = row
            slot.load(ids)
            self._follow(ids)

        self._on_slot(work, max(len(ids) - self.n_tokens, 0))
        return rows

    def sample(
        self,
        top_k: int = TOP_K,
        top_p: float = TOP_P,
        min_p: float = MIN_P,
        typical_p: float = 1.0,
        temp: float = TEMPERATURE,
        repeat_penalty: float = REPEAT_PENALTY,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_eta: float = 0.1,
        mirostat_tau: float = 5.0,
        penalize_nl: bool = True,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        idx: int | None = None,
    ) -> int:
        """A token from the logits after the last evaluated token, or after position idx (needs logits_all).

        Penalties count the text so far: nobody knows which part of it is a prompt. tfs_z and penalize_nl have no effect, as in
        llama-cpp-python. Raises ConfigError when nothing was evaluated.
        """
        _ = self.session  # closed, or without weights: said first
        if self.n_tokens == 0:
            raise ConfigError("sample: nothing has been evaluated yet; call eval first")
        sampler = self._sampler(
            n_prompt=self.n_tokens,
            logits_processor=logits_processor,
            grammar=grammar,
            temperature=temp,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            mirostat_mode=mirostat_mode,
            mirostat_eta=mirostat_eta,
            mirostat_tau=mirostat_tau,
        )
        n = self.n_tokens
        if idx is not None and (at := idx % n) != n - 1:
            if not self._logits_all:
                raise ConfigError("sample: idx needs a model opened with logits_all=True")
            return sampler.sample(self.scores[at], self._input_ids[: at + 1].tolist())

        def draw(slot: CachedSlot) -> int:
            if not slot.holds(self._input_ids):
                self._evaluate(slot, self._input_ids.tolist())
            return sampler.sample(slot.logits, self._input_ids.tolist())

        return self._on_slot(draw)

    def _sampler(
        self,
        *,
        n_prompt: int,
        logits_processor: Any,
        grammar: Any,
        keeper: RowKeeper | None = None,
        n_exempt: int = 0,
        **sampling: Any,
    ) -> Sampler:
        """A sampler of this vocabulary; n_prompt: length of the text that the grammar does not bind."""
        spec = grammar_spec(grammar)
        rules = [] if spec is None else [self.session.grammars.processor(spec, n_prompt)]
        first = [] if keeper is None else [keeper]
        sampling = settled(sampling, self._recommended)
        params = sampling_params(
            seed=self._seed, last_n_tokens_size=self.last_n_tokens_size, n_vocab=self._n_vocab, **sampling
        )
        processors = [*first, *as_tuple(logits_processor), *rules]
        return Sampler(params, self._n_vocab, processors, n_exempt=n_exempt)

    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = TOP_K,
        top_p: float = TOP_P,
        min_p: float = MIN_P,
        typical_p: float = 1.0,
        temp: float = TEMPERATURE,
        repeat_penalty: float = REPEAT_PENALTY,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        grammar: LlamaGrammar | None = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Tokens after a prompt, without end: end-of-generation tokens are yielded like others, the caller breaks.

        Tokens that are sent in are put behind the last one. reset=False goes on from the current context. Ends when
        the context is full or stopping_criteria(ids so far, logits after them) says so.
        """
        ids = ([] if reset else self._input_ids.tolist()) + [int(t) for t in tokens]
        criteria = as_tuple(stopping_criteria)
        keeper = RowKeeper() if criteria or self._logits_all else None
        sampler = self._sampler(
            n_prompt=len(ids),
            keeper=keeper,
            n_exempt=0 if self._options.penalize_prompt else len(ids),
            logits_processor=logits_processor,
            grammar=grammar,
            temperature=temp,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            mirostat_mode=mirostat_mode,
            mirostat_eta=mirostat_eta,
            mirostat_tau=mirostat_tau,
        )
        sent: Sequence[int] | None = []
        while sent is not None:
            sent = None
            with closing(self._decode(ids, sampler, keeper, criteria)) as stream:
                for token in stream:
                    sent = yield token
                    ids.append(token)
                    if sent is not None:
                        ids += [int(t) for t in sent]
                        break

    def _decode(
        self, ids: list[int], sampler: Sampler, keeper: RowKeeper | None, criteria: tuple[Any, ...]
    ) -> Generator[int, None, None]:
        """Evaluate ids, then yield what follows; n_tokens counts the tokens before the one that is being yielded."""
        ids = list(ids)
        self._on_slot(lambda slot: self._evaluate(slot, ids), max(len(ids) - self.n_tokens, 0))
        if len(ids) >= self._n_ctx:
            return
        text = np.empty(self._n_ctx + 1, np.intc)
        text[: len(ids)] = ids
        n = len(ids)

        def ends(token: int) -> bool:
            nonlocal n
            ended = False
            if keeper is not None and keeper.row is not None:
                if self._logits_all:
                    self.scores[n - 1] = keeper.row
                ended = any(c(text[:n], keeper.row) for c in criteria)
            text[n] = token
            n += 1
            return ended

        try:
            with closing(self.session.scheduler.run(TokenGeneration(ids, sampler, ends))) as tokens:
                last: list[int] = []
                for token in tokens:
                    self._append(last)
                    yield token
                    last = [token]  # counts once the next one is asked for, and comes
                self._append(last)
        finally:
            self._requires_eval = True

    # --- saved states

    def save_state(self) -> LlamaState:
        """The evaluated context, to be given to load_state of this or an equal model."""
        return self._on_slot(self._saved_state)

    def _saved_state(self, slot: CachedSlot) -> LlamaState:
        if slot.tokens != self._input_ids.tolist():
            self._evaluate(slot, self._input_ids.tolist())
        snapshot = slot.slot.snapshot() if self.n_tokens else None
        return LlamaState(
            input_ids=self.input_ids.copy(),
            scores=self._scores.copy() if self._logits_all else np.empty((0, self._n_vocab), np.single),
            n_tokens=self.n_tokens,
            llama_state=snapshot,
            llama_state_size=0 if snapshot is None else snapshot.nbytes,
            seed=self._seed,
        )

    def load_state(self, state: LlamaState) -> None:
        """Go back to a saved context and its seed. Raises ConfigError if it comes from a model of another shape."""

        def work(slot: CachedSlot) -> None:
            if state.llama_state is None:
                slot.reset()
            else:
                slot.restore(state.llama_state)
            if self._logits_all and len(state.scores):
                self.scores[: len(state.scores)] = state.scores
            self.input_ids = state.input_ids.copy()
            self.n_tokens = state.n_tokens
            self._seed = state.seed
            self._requires_eval = True

        self._on_slot(work, max(state.n_tokens - self.n_tokens, 0))

    def _consult_cache(self, prompt: Sequence[int]) -> None:
        """Load the state of `self.cache` that shares a longer prefix with the prompt than the context does."""
        if not self.cache:
            return
        try:
            item = self.cache[prompt]
        except KeyError:
            return
        if common_prefix(item.input_ids[: item.n_tokens], prompt) > common_prefix(self._input_ids, prompt):
            seed = self._seed
            self.load_state(item)
            self._seed = seed

    @staticmethod
    def logits_to_logprobs(logits: npt.ArrayLike, axis: int = -1) -> npt.NDArray[np.single]:
        """Log-softmax along an axis, in single precision."""
        return np.apply_along_axis(log_softmax, axis, np.asarray(logits, np.single))

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
        """How many leading tokens are equal."""
        return common_prefix(a, b)
