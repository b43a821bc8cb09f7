"""Reader of the cases in ggml's test-backend-ops.cpp: the constructor calls of chosen test structs, loops expanded.

It understands what our patches use: nested range-based loops over lists, integers, booleans, enumerators (as
strings), and the conditional operator. Anything else around a case that is asked for is an error, not a gap.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_LOOP = re.compile(r"for \((?:const )?\w+ (\w+) : \{([^{}]*)\}\) \{")
_STRUCT = re.compile(r"^struct (test_\w+) : public (test_\w+) \{$(.*?)^\};$", re.MULTILINE | re.DOTALL)

Case = dict[str, object]


@dataclass(slots=True)
class Struct:
    """A test struct: its base, its text, and its constructor's parameters with the defaults as C++ text."""

    name: str
    base: str
    text: str
    parameters: dict[str, str | None] = field(default_factory=dict)


class _Names(dict):
    """Enumerators stand for themselves."""

    def __missing__(self, name: str) -> object:
        if not name.isupper():
            raise KeyError(name)
        return name


def structs_calling(source: str, functions: Iterable[str]) -> dict[str, Struct]:
    """The test structs whose graph calls one of `functions`, themselves or in their base."""
    calls = re.compile(r"\b(?:" + "|".join(functions) + r")\(ctx\b")
    found: dict[str, Struct] = {}
    for name, base, text in _STRUCT.findall(source):
        if calls.search(text) or base in found:
            struct = found[name] = Struct(name, base, text)
            constructor = re.search(rf"^    {name}\((.*?)\)\s*:", text, re.MULTILINE | re.DOTALL)
            if constructor:
                for parameter in _split(constructor[1]):
                    declared, _, default = (part.strip() for part in parameter.partition("="))
                    struct.parameters[declared.split()[-1]] = default or None
            else:
                struct.parameters = found[base].parameters
    return found


def cases(source: str, function: str, structs: dict[str, Struct]) -> Iterator[tuple[str, Case]]:
    """(struct, parameters) of every case that `function` makes of `structs`, in its order.

    Raises ValueError for a case in a block that is not a loop over a list.
    """
    start = re.search(rf"^static .*\b{function}\(\) \{{$", source, re.MULTILINE)
    assert start, f"{function} not found"
    body = source[start.end() : source.index("\n}\n", start.end())]
    body = re.sub(r"//[^\n]*|/\*.*?\*/", "", body, flags=re.DOTALL)
    blocks: list[tuple[str, list[str]] | None] = []
    token = re.compile(rf"{_LOOP.pattern}|new (test_\w+)\(|[{{}}]|\"(?:\\.|[^\"\\])*\"|'.'")
    at = 0
    while match := token.search(body, at):
        at = match.end()
        if match[1]:
            blocks.append((match[1], _split(match[2])))
        elif match[0] == "{":
            blocks.append(None)
        elif match[0] == "}":
            blocks.pop()
        elif match[3] in structs:
            at = _closing(body, at)
            yield from _expand(structs[match[3]], _split(body[match.end() : at - 1]), blocks)


def _expand(
    struct: Struct, arguments: list[str], blocks: list[tuple[str, list[str]] | None]
) -> Iterator[tuple[str, Case]]:
    loops = []
    for block in blocks:
        if block is None:
            raise ValueError(f"{struct.name}({', '.join(arguments)}) is in a block that is not understood")
        loops.append([(block[0], value) for value in block[1]])
    for choice in itertools.product(*loops):
        names = _Names(true=True, false=False)
        for variable, value in choice:
            names[variable] = _value(value, names)
        texts = dict(zip(struct.parameters, arguments, strict=False))
        assert len(arguments) <= len(struct.parameters), struct.name
        for name, default in struct.parameters.items():
            if name not in texts:
                assert default is not None, f"{struct.name}: no value for {name}"
                texts[name] = default
        yield struct.name, {name: _value(text, names) for name, text in texts.items()}


def _value(text: str, names: _Names) -> object:
    choice = re.fullmatch(r"(.+?) \? (.+) : (.+)", text)
    if choice:
        return _value(choice[2] if _value(choice[1], names) else choice[3], names)
    if not re.fullmatch(r"[\w =<>!+*-]+", text):
        raise ValueError(f"{text!r} is not understood")
    return eval(text, {"__builtins__": {}}, names)


def _split(text: str) -> list[str]:
    """Arguments at the top level of a list."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _closing(text: str, at: int) -> int:
    """The index behind the parenthesis that closes the one before `at`."""
    depth = 1
    while depth:
        depth += (text[at] == "(") - (text[at] == ")")
        at += 1
    return at
