"""llama-cpp-python's internal LlamaSampler: a chain of steps, executed by this package's sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..decode.sampling import Sampler
from ..decode.sampling_params import SamplingParams
from ..errors import ConfigError
from ..text.grammar import GrammarCompiler
from .constants import LLAMA_DEFAULT_SEED
from .context import LlamaContext
from .model import LlamaModel
from .requests import grammar_spec

# all steps disabled
_OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def _seeded(seed: int, **options: Any) -> dict[str, Any]:
    seed &= 0xFFFFFFFF
    return {**options, "seed": None if seed == LLAMA_DEFAULT_SEED else seed}


# a step's arguments, and our sampler's options that it sets
_STEPS: dict[str, Callable[..., dict[str, Any]]] = {
    "greedy": lambda: {"temperature": 0.0},
    "dist": _seeded,
    "softmax": dict,  # the final step
    "top_k": lambda k: {"top_k": k},
    "top_p": lambda p, min_keep=1: {"top_p": p},
    "min_p": lambda p, min_keep=1: {"min_p": p},
    "typical": lambda p, min_keep=1: {"typical_p": p},
    "temp": lambda temp: {"temperature": max(temp, 0.0)},
    "mirostat": lambda n_vocab, seed, tau, eta, m: _mirostat(1, seed, tau, eta),
    "mirostat_v2": lambda seed, tau, eta: _mirostat(2, seed, tau, eta),
    "penalties": lambda n_vocab, penalty_last_n, penalty_repeat, penalty_freq, penalty_present: {
        "penalty_last_n": max(penalty_last_n, 0),
        "repeat_penalty": penalty_repeat,
        "frequency_penalty": penalty_freq,
        "presence_penalty": penalty_present,
    },
    "logit_bias": lambda n_vocab, logit_bias: {"logit_bias": dict(logit_bias)},
}


def _mirostat(mode: int, seed: int, tau: float, eta: float) -> dict[str, Any]:
    return _seeded(seed, mirostat_mode=mode, mirostat_tau=tau, mirostat_eta=eta)


class LlamaSampler:
    """Steps by name, each once, applied in the order of `decode.sampling`.

    Penalties and a grammar see the tokens that were sampled or accepted here, as in llama-cpp-python.
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

    def add_grammar(self, model: LlamaModel, grammar: Any) -> None:
        """Add a step that masks what a grammar forbids; needs llguidance.

        Args:
            model: Whose vocabulary it is.
            grammar: A LlamaGrammar; an empty one binds nothing.
        """
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
        """A copy with the same steps and tokens.

        Raises:
            ConfigError: A step is a grammar.
        """
        if self._grammar is not None:
            raise ConfigError("LlamaSampler.clone: a chain with a grammar cannot be cloned; build it anew")
        other = LlamaSampler()
        other._options, other._accepted = dict(self._options), list(self._accepted)
        return other

    def close(self) -> None:
        """Nothing to free."""


def _adds(step: Callable[..., dict[str, Any]]) -> Callable[..., None]:
    return lambda self, *args, **kwargs: self._set(**step(*args, **kwargs))


for _name, _step in _STEPS.items():
    setattr(LlamaSampler, f"add_{_name}", _adds(_step))
