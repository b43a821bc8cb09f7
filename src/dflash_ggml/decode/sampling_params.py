"""Sampling parameters: their only list. The command line's and the requests' names of them stand with those."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options of the sampler; `dflash-run --help-all` explains them, with the values that switch a step off."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    mirostat_mode: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1

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


OPTIONS = tuple(option.name for option in fields(SamplingParams))


def require(condition: bool, name: str, value: object, wanted: str) -> None:
    """Refuse an option's value unless the condition holds.

    Raises:
        ConfigError: It names the option.
    """
    if not condition:
        raise ConfigError(f"{name} must be {wanted}, got {value}")
