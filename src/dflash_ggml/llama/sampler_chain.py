"""llama-cpp-python's inner LlamaSampler: a chain of steps, drawn from by this package's sampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..decode.sampling import Sampler
from ..decode.sampling_params import SamplingParams
from ..errors import ConfigError
from ..text.grammar import GrammarCompiler
from .constants import LLAMA_DEFAULT_SEED
from .context import LlamaContext
from .model import LlamaModel
from .requests import grammar_spec

# every step off
_OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


class LlamaSampler:
    """Steps by name, each once. They act in the order of `decode.sampling`, whatever order they were added in.

    Penalties and a grammar see the tokens that were sampled or accepted here, as there.
    """

    def __init__(self) -> None:
        self._options: dict[str, Any] = dict(_OFF)
        self._grammar: Any = None
        self._accepted: list[int] = []
        self._sampler: Sampler | None = None
        self.custom_samplers: list[Any] = []

    def _set(self, **options: Any) -> None:
        self._options |= options
        self._sampler = None

    def add_greedy(self) -> None:
        self._set(temperature=0.0)

    def add_dist(self, seed: int) -> None:
        self._set(seed=None if seed & 0xFFFFFFFF == LLAMA_DEFAULT_SEED else seed & 0xFFFFFFFF)

    def add_softmax(self) -> None:
        """Nothing: a draw takes logits."""

    def add_top_k(self, k: int) -> None:
        self._set(top_k=k)

    def add_top_p(self, p: float, min_keep: int = 1) -> None:
        self._set(top_p=p)

    def add_min_p(self, p: float, min_keep: int = 1) -> None:
        self._set(min_p=p)

    def add_typical(self, p: float, min_keep: int = 1) -> None:
        self._set(typical_p=p)

    def add_temp(self, temp: float) -> None:
        self._set(temperature=max(temp, 0.0))

    def add_mirostat(self, n_vocab: int, seed: int, tau: float, eta: float, m: int) -> None:
        self._set(mirostat_mode=1, mirostat_tau=tau, mirostat_eta=eta)
        self.add_dist(seed)

    def add_mirostat_v2(self, seed: int, tau: float, eta: float) -> None:
        self._set(mirostat_mode=2, mirostat_tau=tau, mirostat_eta=eta)
        self.add_dist(seed)

    def add_penalties(
        self,
        n_vocab: int,
        penalty_last_n: int,
        penalty_repeat: float,
        penalty_freq: float,
        penalty_present: float,
    ) -> None:
        self._set(
            penalty_last_n=max(penalty_last_n, 0),
            repeat_penalty=penalty_repeat,
            frequency_penalty=penalty_freq,
            presence_penalty=penalty_present,
        )

    def add_logit_bias(self, n_vocab: int, logit_bias: Mapping[int, float]) -> None:
        self._set(logit_bias=dict(logit_bias))

    def add_grammar(self, model: LlamaModel, grammar: Any) -> None:
        """Needs llguidance; grammar: a LlamaGrammar, an empty one binds nothing."""
        spec = grammar_spec(grammar)
        if spec is not None:
            self._grammar = GrammarCompiler(model.tokenizer, model.n_vocab()).processor(spec, 0)
            self._sampler = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("add_"):
            raise AttributeError(f"LlamaSampler.{name}: there is no such step in this package's sampler")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get_seed(self) -> int:
        """The seed of the draws; 2^32-1 for fresh entropy."""
        seed = self._options.get("seed")
        return LLAMA_DEFAULT_SEED if seed is None else seed

    def sample(self, ctx: LlamaContext, idx: int = -1) -> int:
        """A token from a row of the context's last batch, which is accepted. idx as in get_logits_ith."""
        row = ctx.row(idx)
        if self._sampler is None:
            processors = [] if self._grammar is None else [self._grammar]
            self._sampler = Sampler(SamplingParams(**self._options), len(row), processors)
        token = self._sampler.sample(row, self._accepted)
        self._accepted.append(token)
        return token

    def accept(self, token: int) -> None:
        """Take in a token that was chosen otherwise."""
        self._accepted.append(int(token))

    def reset(self) -> None:
        """Forget what was accepted, and begin the draws again."""
        self._accepted, self._sampler = [], None

    def clone(self) -> LlamaSampler:
        """Another one with the same steps and tokens. Raises ConfigError with a grammar."""
        if self._grammar is not None:
            raise ConfigError("LlamaSampler.clone: a chain with a grammar cannot be cloned; build it anew")
        other = LlamaSampler()
        other._options, other._accepted = dict(self._options), list(self._accepted)
        return other

    def close(self) -> None:
        """Nothing to free."""
