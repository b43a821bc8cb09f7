"""Command-line options of the sampler, shared by the commands that generate text."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..decode.recommended import described, recommended
from ..decode.sampling_params import OPTIONS, Option, SamplingParams
from ..errors import ConfigError

log = logging.getLogger(__name__)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add all of the sampler's options, for `sampling_params`."""
    default = SamplingParams()
    group = parser.add_argument_group(
        "sampling", "defaults are those that the model file recommends, if it has any"
    )
    for name, option in OPTIONS.items():
        value = getattr(default, name)
        many = isinstance(value, Mapping)
        shown = "random" if value is None else "none" if many else value
        group.add_argument(
            *option.flags,
            dest=name,
            type=_reader(name, option),
            action="append" if many else "store",
            default=None,
            metavar="ID+BIAS" if many else "N" if isinstance(value, int) or value is None else "X",
            help=f"{option.help} (default {shown})",
        )


def _reader(name: str, option: Option) -> Callable[[str], Any]:
    """argparse's parser of an option; its errors name the flag instead of the field."""
    default = getattr(SamplingParams(), name)
    kind = "ID+BIAS or ID-BIAS" if isinstance(default, Mapping) else "a number"
    kind = "a whole number" if default is None or isinstance(default, int) else kind

    def read(text: str) -> Any:
        try:
            value = option.parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}") from None
        try:
            replace(SamplingParams(), **{name: value}).validate()
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).partition(" ")[2]) from None
        return value

    return read


def sampling_params(args: argparse.Namespace, metadata: Mapping[str, Any] | None = None) -> SamplingParams:
    """The sampling options: flags, else the recommendations in the model file's `metadata`, else our defaults.

    Logs which came from the file.

    Raises:
        ConfigError: A field is wrong; the error names it.
    """
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = {t: bias for pairs in args.logit_bias for t, bias in pairs.items()}
    taken = {name: value for name, value in recommended(metadata or {}).items() if name not in given}
    params = SamplingParams(**taken | given)
    params.validate()
    if taken and params.temperature != 0:
        log.warning("from the model file: %s; flags win", described(taken))
    return params


def check_biases(params: SamplingParams, n_vocab: int) -> None:
    """Refuse a bias for a token outside the vocabulary, which is known once the model is open.

    Raises:
        ConfigError: A token is unknown; the error names it.
    """
    for token in params.logit_bias:
        if token >= n_vocab:
            raise ConfigError(f"-l/--logit-bias: {token} is not a token of this model, it has {n_vocab}")
