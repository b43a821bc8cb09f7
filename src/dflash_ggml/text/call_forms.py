"""Formats of tool calls in models' output: one table of tags, for the parser of calls and the grammar of forced calls.

    <function=name>           {"name": "name", "arguments": {...}}           <tool_call>name
    <parameter=key>                                                          <arg_key>key</arg_key>
    value                                                                    <arg_value>value</arg_value>
    </parameter>                                                             </tool_call>
    </function>

Qwen's parameters ("xml"), a JSON object ("json"), and keys with values ("keys"), as Laguna and GLM have them; and Gemma's
object in a notation of its own ("gemma", see `TaggedStream`), with tags of its own around calls and thoughts:

    <|tool_call>call:name{key:<|"|>value<|"|>,other:[1,true]}<tool_call|>
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

ToolFormat = Literal["xml", "json", "keys", "harmony", "gemma"]

CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
ARG_KEY, END_ARG_VALUE = "<arg_key>", "</arg_value>"

HEAD = re.compile(r"call:([^\s{}<>]{1,200})\s*(?=\{)")  # of Gemma's calls; group 1 is the tool's name
OPEN_HEAD = re.compile(r"c(a(l(l(:([^\s{}<>]{1,200}\s*)?)?)?)?)?|")

_BLANK = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags around reasoning and calls.

    Attributes:
        text: Quote of strings in a call's object, "" for formats without one.
    """

    think: str
    end_think: str
    call: str
    end_call: str
    text: str = ""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Tags that may be control tokens; a tag that continues after a `>` begins with one."""
        every = (self.think, self.end_think, self.call, self.end_call, self.text)
        return tuple(tag[: tag.index(">") + 1] for tag in every if tag)


TAGS = Tags("<think>", "</think>", CALL, END_CALL)
GEMMA = Tags("<|channel>thought", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')


@dataclass(frozen=True, slots=True)
class CallForm:
    """A format of calls with arguments between tags.

    Attributes:
        name: Opening of a call, group 1 is the tool's name.
        bare: Whether it needs no `<tool_call>` before it.
        key: Opening of an argument, group 1 is its name, or without a group the end of the call.
        open_key: Incomplete openings of an argument.
        end: Ends a value if followed by one of `follow`; all but the first of these end the call.
        forgotten: The call's end (group 1) after a value without an `end`.
        key_line: An argument's opening within such a value.
        lines: Whether line ends around a value are stripped.
        quotes: Whether complete calls inside a value belong to it. Grammar rules: `rule_name` and `rule_key` ({}: the
            name), `rule_end` after a value and `behind` after that, `close`.
        forbidden: Text in a value that the parser would take for its end.
    """

    name: re.Pattern[str]
    bare: bool
    key: re.Pattern[str]
    open_key: re.Pattern[str]
    end: str
    follow: tuple[str, ...]
    forgotten: re.Pattern[str]
    key_line: re.Pattern[str]
    lines: bool
    quotes: bool
    rule_name: str
    rule_key: str
    rule_end: str
    behind: str
    close: str
    forbidden: str

    @property
    def closing(self) -> tuple[str, ...]:
        """Closing tags that may follow a value, in order or alone."""
        return ("\n" + self.end, self.end) if self.lines else (self.end,)


FORMS = {
    "xml": CallForm(
        name=re.compile(r"<function=([^<>\n]{1,200})>"),
        bare=True,
        key=re.compile(r"<parameter=([^<>\n]{1,200})>|</function>|</tool_call>"),
        open_key=re.compile(r"<[^<]*\Z"),
        end=END_PARAMETER,
        follow=(PARAMETER, END_FUNCTION, END_CALL),
        forgotten=re.compile(
            r"\n?(</function>\s*</tool_call>|</tool_call>|</function>)(?=\s*(<tool_call>|\Z))"
        ),
        key_line=re.compile(r"\n<parameter=([^<>\n]{1,200})>\n?"),
        lines=True,
        quotes=True,
        rule_name='"<function=" {} ">\\n"',
        rule_key='"<parameter=" {} ">\\n"',
        rule_end="\n</parameter>\n",
        behind="",
        close='"</function>"',
        forbidden=r"<\/parameter>|\n<parameter=|\n<\/function>|<\/tool_call>",
    ),
    "keys": CallForm(
        name=re.compile(r"([\w.:/-]{1,200})\s*(?=<arg_key>|</tool_call>)"),
        bare=False,
        key=re.compile(r"<arg_key>([^<>]{1,200})</arg_key>\s*<arg_value>|</tool_call>"),
        open_key=re.compile(r"<arg_key>[^<>]{0,200}(<[^<>]{0,12}(>\s*(<[^<>]{0,12})?)?)?\Z|<[^<>]{0,12}\Z"),
        end=END_ARG_VALUE,
        follow=(ARG_KEY, END_CALL),
        forgotten=re.compile(r"(</tool_call>)(?=\s*\Z)"),
        key_line=re.compile(r"(?!)"),
        lines=False,
        quotes=False,
        rule_name="{} line",
        rule_key='"<arg_key>" {} "</arg_key>" line "<arg_value>"',
        rule_end=END_ARG_VALUE,
        behind="line",
        close="",
        forbidden=r"<\/arg_value>|<\/tool_call>",
    ),
}


def after_blanks(text: str, at: int) -> int:
    """Index of the first character from `at` on that is not white space; the length if there is none."""
    match = _BLANK.match(text, at)
    return match.end() if match else at


def partial_suffix(text: str, markers: Iterable[str]) -> int:
    """Length of the longest suffix of `text` that is the beginning of a marker (0 if none)."""
    return len(text) - min((_begun(text, marker) for marker in markers), default=len(text))


def _begun(text: str, marker: str) -> int:
    """Where the longest suffix of `text` that is the beginning of `marker` starts; len(text) if there is none."""
    start = max(len(text) - len(marker) + 1, 0)
    while (start := text.find(marker[:1], start)) >= 0:
        if marker.startswith(text[start:]):
            return start
        start += 1
    return len(text)
