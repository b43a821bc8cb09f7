"""Command-line options of conversations (template, thinking) and of generated text (stop strings, constraints)."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..text.chat_formats import named_template
from ..text.grammar_spec import GrammarSpec, json_schema_spec, spec_of
from .option_table import add_table

if TYPE_CHECKING:
    from ..session.session import Session

THINKING = {"on": True, "off": False, "auto": None}
FORMATS = (
    "auto",
    "deepseek",
    "none",
    "deepseek-legacy",
)  # formats of reasoning in answers, by llama.cpp's names

log = logging.getLogger(__name__)

_CHAT = """
--think _ think auto | turn the model's thinking on or off, through its chat template (default auto: the template's own default)
--reasoning-budget N budget | most tokens of thinking, after which it is ended; 0: none, -1: no limit (default)
--reasoning-format FORMAT format auto | none: leave thoughts in the text, with tags; auto, deepseek: separate them (default auto)
--reasoning-effort LEVEL | thinking effort: low, medium or high, as reasoning_effort in the chat template, if it has such levels
--chat-template JINJA template | chat template: its Jinja source, or a name such as chatml
--chat-template-file FILE file | the same from a file
--chat-template-kwargs JSON variables | variables for the chat template: {"enable_thinking": false}
"""
_TEXT = """
--ignore-eos | continue after end-of-generation tokens
-r --reverse-prompt TEXT stops | stop at this string; may be repeated
--grammar GBNF gbnf | constrain the output by this grammar
--grammar-file FILE gbnf_file | the same from a file
-j --json-schema JSON schema | constrain the output by this JSON schema
-jf --json-schema-file FILE schema_file | the same from a file
"""


def add_chat_options(add: Callable[..., Any]) -> None:
    """Add what `session_options` reads, and --think, to a group of options; `add` is the group's add_argument."""
    kinds: dict[str, Any] = {
        "think": {"choices": tuple(THINKING)},
        "format": {"choices": FORMATS},
        "budget": _budget,
    }
    kinds["variables"] = {"type": _variables, "default": {}}
    kinds["template"] = {"dest": "chat_template", "type": _template}
    kinds["file"] = {"dest": "chat_template", "type": file_text}
    add_table(add, _CHAT, **kinds)


def add_text_options(add: Callable[..., Any]) -> None:
    """Add what `text_options` reads to a group of options."""
    kinds: dict[str, Any] = {"stops": {"dest": "stop", "action": "append", "default": []}}
    for name, kind in (("gbnf", partial(spec_of, "gbnf")), ("schema", _schema)):
        kinds[name] = {"dest": "grammar", "type": kind}
        kinds[f"{name}_file"] = {"dest": "grammar", "type": partial(_in_file, kind)}
    add_table(add, _TEXT, **kinds)


def session_options(args: argparse.Namespace) -> dict[str, Any]:
    """Defaults of requests, as keywords of `Session`, without thinking."""
    level = args.reasoning_effort
    effort = {} if level in (None, "default") else {"reasoning_effort": level}
    found = {
        "template": args.chat_template,
        "variables": {**effort, **args.chat_template_kwargs},
        "split_reasoning": args.reasoning_format != "none",
        "reasoning_budget": args.reasoning_budget,
        "prompt_keep": args.prompt_keep,
    }
    return {name: value for name, value in found.items() if value is not None}


def text_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of a request for stop strings and constraints."""
    names = ("ignore_eos", "grammar", "prompt_keep")
    return {"stop": tuple(args.stop), **{name: getattr(args, name) for name in names}}


def thinking_choice(word: str, session: Session) -> bool | None:
    """The value of --think; warns if the model's chat template has no switch."""
    choice = THINKING[word]
    if choice is not None and not session.can_switch_thinking:
        log.warning("--think %s: this model's chat template knows no such switch, the model decides", word)
    return choice


def file_text(name: str) -> str:
    """The text of a file."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"can't read {name}: {error}") from None


def _in_file(read: Callable[[str], Any], name: str) -> Any:
    return read(file_text(name))


def _template(text: str) -> str:
    """A template, given as text or by name."""
    try:
        return text if "{" in text else named_template(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _variables(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def _schema(text: str) -> GrammarSpec | None:
    try:
        return json_schema_spec(text) if text.strip() else None
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _budget(text: str) -> int:
    found = int(text)
    if found < -1:
        raise argparse.ArgumentTypeError(f"{found} is neither -1 nor a count")
    return found
