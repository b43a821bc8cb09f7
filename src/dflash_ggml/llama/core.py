"""The token-level half of `Llama`: evaluation, sampling, generation of tokens, saved states."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from ..decode.sampling import Sampler, log_softmax
from ..errors import ConfigError
from ..session.prefix_cache import common_prefix
from ..session.prompt_state import ROWS_AT_ONCE
from ..session.row_keeper import RowKeeper
from ..text.grammar import LlamaGrammar
from .base import LlamaBase
from .cache import BaseLlamaCache
from .left_out import MIN_P, REPEAT_PENALTY, TEMPERATURE, TOP_K, TOP_P, settled
from .requests import as_tuple, grammar_spec, sampling_params
from .state import LlamaState, LogitsProcessorList, StoppingCriteriaList


class LlamaCore(LlamaBase):
    """What can be done with tokens on one model with one context."""

    # --- evaluation, one call at a time

    def set_seed(self, seed: int) -> None:
        """Seed of the next sampled text."""
        self._seed = seed

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """A cache of whole saved states, asked before and filled after each completion."""
        with self._turn():
            self.cache = cache

    def reset(self) -> None:
        """Empty the context. Raises ConfigError after close()."""
        if not self._options.vocab_only:
            _ = self.session
        with self._turn():
            self.n_tokens = 0
            self._requires_eval = True

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the first n_tokens of input_ids. Raises ContextOverflowError, ConfigError."""
        with self.session.turns.taken():
            self._evaluate(self._input_ids.tolist() + [int(t) for t in tokens])

    def _evaluate(self, ids: list[int]) -> None:
        """Bring the engine to exactly ids, with the logits of the last one."""
        state = self.session.state
        # with logits_all, rows exist for the tokens evaluated before
        known = common_prefix(self._input_ids, ids) if self._logits_all else len(ids)
        with self._whole():
            list(state.advance(ids[:known], state.seek(ids[:known]), (), None))
            for i, row in self._read(ids, known, len(ids)):
                self.scores[i] = row
        self.input_ids[: len(ids)] = ids
        self.n_tokens = len(ids)
        self._requires_eval = False

    def _read(self, ids: list[int], start: int, stop: int) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Append ids[start:stop] to a context of ids[:start]; yields each place with the logits after it."""
        for at in range(start, stop, ROWS_AT_ONCE):
            rows: list[npt.NDArray[np.float32]] = []
            self.engine.prefill(ids[at : min(at + ROWS_AT_ONCE, stop)], take_row=rows.append)
            self.session.state.evaluated()
            yield from enumerate(rows, at)

    def _logits_at(self, ids: list[int], places: Sequence[int]) -> npt.NDArray[np.single]:
        """Evaluate exactly ids; the logits after these places in it, rising, float32 [n places, n_vocab].

        From the first of them to the last a pass takes 32 tokens.
        """
        rows = np.empty((len(places), self._n_vocab), np.single)
        with self.session.turns.taken(), self._whole():
            state, engine = self.session.state, self.engine
            at = places[0] + 1 if places else len(ids)
            list(state.advance(ids[:at], state.seek(ids[:at]), (), None))
            rows[:1] = engine.logits
            row_of = {place: row for row, place in enumerate(places)}
            stop = places[-1] + 1 if places else at
            for place, row in self._read(ids, at, stop):
                if place in row_of:
                    rows[row_of[place]] = row
            if stop < len(ids):
                engine.prefill(ids[stop:])
                state.evaluated()
        self.input_ids[: len(ids)] = ids
        self.n_tokens = len(ids)
        self._requires_eval = False
        return rows

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Leave the engine empty when its work is broken off: an interrupt may have torn the state."""
        try:
            yield
        except (Exception, KeyboardInterrupt):
            self.session.state.reset()
            raise

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
        with self.session.turns.taken():
            if not self.session.state.holds(self._input_ids):
                self._evaluate(self._input_ids.tolist())
            return sampler.sample(self.engine.logits, self._input_ids.tolist())

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
            stream = self.session.turns.run(self._decode(ids, sampler, keeper, criteria))
            for token in stream:
                sent = yield token
                ids.append(token)
                if sent is not None:
                    stream.close()
                    ids += [int(t) for t in sent]
                    break

    def _decode(
        self, ids: list[int], sampler: Sampler, keeper: RowKeeper | None, criteria: tuple[Any, ...]
    ) -> Generator[int, None, None]:
        """Evaluate ids, then yield what follows; n_tokens counts the tokens before the one that is being yielded."""
        self._evaluate(list(ids))
        if len(ids) >= self._n_ctx:
            return
        text = np.empty(self._n_ctx + 1, np.intc)
        text[: len(ids)] = ids
        n, ended = len(ids), False

        def stop(token: int) -> bool:
            nonlocal ended, n
            if keeper is not None and keeper.row is not None:
                if self._logits_all:
                    self.scores[n - 1] = keeper.row
                ended = any(c(text[:n], keeper.row) for c in criteria)
            text[n] = token
            n += 1
            return ended

        self.session.state.spent()
        steps: Any = self.engine.generate(sampler, stop=stop)
        try:
            while True:
                with self._whole():
                    step = next(steps, None)
                if step is None:
                    return
                for token in step.tokens[:-1] if ended else step.tokens:
                    yield token
                    self.input_ids[self.n_tokens] = token
                    self.n_tokens += 1
        finally:
            steps.close()
            self._requires_eval = True

    # --- saved states

    def save_state(self) -> LlamaState:
        """The evaluated context, to be given to load_state of this or an equal model."""
        with self.session.turns.taken():
            return self._saved_state()

    def _saved_state(self) -> LlamaState:
        if self.engine.tokens != self._input_ids.tolist():
            self._evaluate(self._input_ids.tolist())
        snapshot = self.engine.snapshot() if self.n_tokens else None
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
        with self.session.turns.taken():
            if state.llama_state is None:
                self.session.state.reset()
            else:
                self.session.state.restore(state.llama_state)
            if self._logits_all and len(state.scores):
                self.scores[: len(state.scores)] = state.scores
            self.input_ids = state.input_ids.copy()
            self.n_tokens = state.n_tokens
            self._seed = state.seed
            self._requires_eval = True

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

    def _follow_engine(self) -> None:
        """After a generation: the context is what the engine holds."""
        ids = self.engine.tokens
        self.input_ids[: len(ids)] = ids
        self.n_tokens = len(ids)

    @staticmethod
    def logits_to_logprobs(logits: npt.ArrayLike, axis: int = -1) -> npt.NDArray[np.single]:
        """Log-softmax along an axis, in single precision."""
        return np.apply_along_axis(log_softmax, axis, np.asarray(logits, np.single))

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
        """How many leading tokens are equal."""
        return common_prefix(a, b)
