"""Command-line options of the sampler, shared by the commands that generate text."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..decode.recommended import described, recommended
from ..decode.sampling_params import OPTIONS, SamplingParams
from ..errors import ConfigError
from .option_table import entries

log = logging.getLogger(__name__)

# llama.cpp's flags, the value's name in the help, the field, and what it does
_TABLE = """
--temp --temperature X temperature | temperature, 0: greedy, below 0: plain softmax, no filters
--top-k N top_k | keep the N most likely tokens, 0: all
--top-p X top_p | nucleus sampling: keep the most likely tokens with this total probability, 1: off
--min-p X min_p | keep tokens with at least this share of the best one's probability, 0: off
--typical --typical-p X typical_p | locally typical sampling, 1: off
--repeat-penalty X repeat_penalty | penalty for tokens that occurred: divides their positive logits, multiplies negative
    ones, 1: off
--presence-penalty X presence_penalty | subtracted once from the logit of every token that occurred, 0: off
--frequency-penalty X frequency_penalty | subtracted from a logit for each occurrence of its token, 0: off
--repeat-last-n N penalty_last_n | last tokens that these penalties count, 0: off, -1: all
-l --logit-bias ID+BIAS logit_bias | add to a token's logit, -inf: ban it; may be repeated
-s --seed N seed | random seed, -1: a new one each time
--mirostat N mirostat_mode | 1 or 2: mirostat instead of filters and temperature, 0: off
--mirostat-ent X mirostat_tau | mirostat's target surprise in bits
--mirostat-lr X mirostat_eta | mirostat's learning rate
"""
ABOUT = {name: text for _, (_, name), text in entries(_TABLE)}


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add all of the sampler's options, for `sampling_params`."""
    group = parser.add_argument_group(
        "sampling", "defaults are those that the model file recommends, if it has any"
    )
    for flags, (metavar, name), text in entries(_TABLE):
        value = getattr(SamplingParams(), name)
        many = isinstance(value, Mapping)
        shown = "random" if value is None else "none" if many else value
        group.add_argument(
            *flags,
            dest=name,
            type=partial(_read, name),
            action="append" if many else "store",
            metavar=metavar,
            help=f"{text} (default {shown})",
        )


def _read(name: str, text: str) -> Any:
    """argparse's parser of an option; its errors name the flag instead of the field."""
    try:
        value = parse_option(name, text)
    except ValueError:
        kinds = {dict: "ID+BIAS or ID-BIAS", float: "a number"}
        kind = kinds.get(type(getattr(SamplingParams(), name)), "a whole number")
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind}") from None
    try:
        replace(SamplingParams(), **{name: value}).validate()
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).partition(" ")[2]) from None
    return value


def parse_option(name: str, text: str) -> Any:
    """An option's value from its text; a seed of -1 asks for fresh entropy, as in llama.cpp.

    Raises:
        ValueError: The text is not a value of the option's kind.
    """
    if name == "logit_bias":
        return token_bias(text)
    if name == "seed":
        return None if int(text) == -1 else int(text)
    return type(getattr(SamplingParams(), name))(text)


def token_bias(text: str) -> dict[int, float]:
    """`ID+BIAS` or `ID-BIAS`, several with commas between, or `none`.

    Raises:
        ValueError: For anything else.
    """
    pairs = [re.fullmatch(r"(\d+)([+-][^+-].*)", part.strip()) for part in text.split(",") if text != "none"]
    if not all(pairs):
        raise ValueError(f"{text!r} is not ID+BIAS or ID-BIAS")
    return {int(pair[1]): float(pair[2]) for pair in pairs if pair}


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
