"""Sampling parameters, each with its names on the command line and in requests: their only list."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class Option:
    """How people name an option: llama.cpp's flags, and its name in requests where that is not the field's own.

    parse makes a value of a flag's text or raises ValueError.
    """

    flags: tuple[str, ...]
    request: str | None
    parse: Callable[[str], Any]
    help: str


def seed_number(text: str) -> int | None:
    """A seed; -1 asks for fresh entropy, as in llama.cpp."""
    return None if int(text) == -1 else int(text)


def token_bias(text: str) -> dict[int, float]:
    """`ID+BIAS` or `ID-BIAS`, several with commas between, or `none`.

    Raises:
        ValueError: For anything else.
    """
    pairs = [re.fullmatch(r"(\d+)([+-][^+-].*)", part.strip()) for part in text.split(",") if text != "none"]
    if not all(pairs):
        raise ValueError(f"{text!r} is not ID+BIAS or ID-BIAS")
    return {int(pair[1]): float(pair[2]) for pair in pairs if pair}


def _option(default: Any, *flags: str, help: str, request: str | None = None, parse: Any = None) -> Any:
    option = Option(flags, request, parse or type(default), help)
    given: dict[str, Any] = {"default_factory": default} if callable(default) else {"default": default}
    return field(**given, metadata={"option": option})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options of the sampler; the help texts give the values that switch a step off."""

    temperature: float = _option(
        0.8, "--temp", "--temperature", help="temperature, 0: greedy, below 0: plain softmax, no filters"
    )
    top_k: int = _option(40, "--top-k", help="keep the N most likely tokens, 0: all")
    top_p: float = _option(
        0.95,
        "--top-p",
        help="nucleus sampling: keep the most likely tokens with this total probability, 1: off",
    )
    min_p: float = _option(
        0.05, "--min-p", help="keep tokens with at least this share of the best one's probability, 0: off"
    )
    typical_p: float = _option(1.0, "--typical", "--typical-p", help="locally typical sampling, 1: off")
    repeat_penalty: float = _option(
        1.0,
        "--repeat-penalty",
        help="penalty for tokens that occurred: divides their positive logits, multiplies negative ones, 1: off",
    )
    presence_penalty: float = _option(
        0.0, "--presence-penalty", help="subtracted once from the logit of every token that occurred, 0: off"
    )
    frequency_penalty: float = _option(
        0.0, "--frequency-penalty", help="subtracted from a logit for each occurrence of its token, 0: off"
    )
    penalty_last_n: int = _option(
        64,
        "--repeat-last-n",
        help="last tokens that these penalties count, 0: off, -1: all",
        request="repeat_last_n",
    )
    logit_bias: Mapping[int, float] = _option(
        dict,
        "-l",
        "--logit-bias",
        help="add to a token's logit, -inf: ban it; may be repeated",
        parse=token_bias,
    )
    seed: int | None = _option(
        None, "-s", "--seed", help="random seed, -1: a new one each time", parse=seed_number
    )
    mirostat_mode: int = _option(
        0,
        "--mirostat",
        help="1 or 2: mirostat instead of filters and temperature, 0: off",
        request="mirostat",
    )
    mirostat_tau: float = _option(5.0, "--mirostat-ent", help="mirostat's target surprise in bits")
    mirostat_eta: float = _option(0.1, "--mirostat-lr", help="mirostat's learning rate")

    def validate(self) -> None:
        """Refuse values that cannot be honoured.

        Raises:
            ConfigError: A field is wrong; it names it.
        """
        for name in ("temperature", "presence_penalty", "frequency_penalty", "mirostat_tau", "mirostat_eta"):
            require(math.isfinite(getattr(self, name)), name, getattr(self, name), "a finite number")
        for name in ("top_p", "min_p", "typical_p"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "between 0 and 1")
        require(0 < self.repeat_penalty < math.inf, "repeat_penalty", self.repeat_penalty, "above 0")
        require(self.penalty_last_n >= -1, "penalty_last_n", self.penalty_last_n, "a count, or -1 for all")
        require(self.seed is None or self.seed >= 0, "seed", self.seed, "a whole number from 0")
        require(self.mirostat_mode in (0, 1, 2), "mirostat_mode", self.mirostat_mode, "0, 1 or 2")
        for token, bias in self.logit_bias.items():
            require(bias < math.inf, f"logit_bias[{token}]", bias, "finite, or -inf to ban the token")


OPTIONS: Mapping[str, Option] = {f.name: f.metadata["option"] for f in fields(SamplingParams)}


def require(condition: bool, name: str, value: object, wanted: str) -> None:
    """Refuse an option's value unless the condition holds.

    Raises:
        ConfigError: It names the option.
    """
    if not condition:
        raise ConfigError(f"{name} must be {wanted}, got {value}")
