"""Sandbox for chat templates: jinja2's sandbox with limits of time, steps and sizes.

Generated code calls the meter before loops, joins, comparisons, slices and list displays; filters, tests and methods have
declared costs, and nothing is lazy. No value exceeds VALUE, which bounds each operation; its cost is subtracted from STEPS.
Why it runs in this process: docs/decisions/0005-chat-templates-are-metered.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.sandbox
from jinja2 import compiler, nodes, parser, runtime, utils

from . import template_meter as meter
from .template_meter import PIECE, fits, made, refuse, spend, weight_of

SOURCE = 1 << 16  # characters of a template; compiling takes up to 30 µs per character
OUTPUT = 1 << 24  # characters
SLOW = 20_000  # characters for filters with slow searches

_LOOP = "what a loop goes through"  # internal filter, with a name that is not an identifier
_DICT = frozenset(dir(dict))
_FREE = frozenset(("length", "count", "default", "d", "first", "last", "safe", "attr"))  # external lookups
# tests that scan a value, with Python's operators
_COMPARE = frozenset(("in", "lower", "upper", "divisibleby"))
# string methods with results up to three times as long
_SHORT = frozenset(("trim", "string", "lower", "upper"))
_WIDE = frozenset(("center", "indent", "batch", "slice", "wordwrap", "round", "tojson"))
_SLOWLY = frozenset(
    ("urlize", "striptags", "pprint", "wordwrap", "wordcount", "xmlattr", "title", "int", "float")
)
# Callable methods of Python's built-in types other than str.
_OWNERS = (bytes, dict, list, tuple, range, int, float)
_METHODS = frozenset(
    ("decode", "hex", "startswith", "endswith", "copy", "get", "items", "keys", "values", "count", "index",
     "bit_length", "bit_count", "is_integer")
)  # fmt: skip


def _asking(function: str, when: Callable[[Any], bool] = lambda node: True) -> Callable[..., Any]:
    """Make a visitor wrap its output in a call of the environment's `function`."""

    def wrapped(visit: Callable[..., Any]) -> Callable[..., Any]:
        def visitor(self: compiler.CodeGenerator, node: Any, frame: Any) -> None:
            asks = when(node)
            self.write(f"environment.{function}(" if asks else "")
            visit(self, node, frame)
            self.write(")" if asks else "")

        return visitor

    return wrapped


class _Code(compiler.CodeGenerator):
    """Code generator that adds calls of the environment."""

    visit_List = _asking("ask_made")(compiler.CodeGenerator.visit_List)
    visit_Dict = _asking("ask_made")(compiler.CodeGenerator.visit_Dict)
    visit_Tuple = _asking("ask_made", lambda node: node.ctx == "load")(compiler.CodeGenerator.visit_Tuple)
    visit_Getitem = _asking("ask_part", lambda node: isinstance(node.arg, nodes.Slice))(
        compiler.CodeGenerator.visit_Getitem
    )

    def visit_Output(self, node: nodes.Output, frame: Any) -> None:
        text = sum(len(n.data) for n in node.nodes if isinstance(n, nodes.TemplateData))
        self.writeline(f"environment.ask({1 + len(node.nodes) // 4 + text // PIECE})", node)
        super().visit_Output(node, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Any) -> None:
        """Handle a chain of sums at once, which templates use most."""
        chain: list[nodes.Expr] = [node]
        while isinstance(chain[0], nodes.Add):
            chain[:1] = [chain[0].left, chain[0].right]
        self._all("ask_sum", chain, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self._all("ask_joined", node.nodes, frame)

    def _all(self, function: str, items: list[nodes.Expr], frame: Any) -> None:
        self.write(f"environment.{function}((")
        for item in items:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Any) -> None:
        """Comparisons with constants are cheap, except for `in`."""
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        looks = any(operand.op in ("in", "notin") for operand in node.ops)
        short = (nodes.Const, nodes.List, nodes.Tuple) if looks else nodes.Const
        if len(sides) == 2 and any(isinstance(side, short) for side in (sides[1:] if looks else sides)):
            super().visit_Compare(node, frame)
            return
        ask = _asking("ask_weigh")(lambda self, node, frame: self.visit(node, frame))
        self.write("(")
        ask(self, node.expr, frame)
        for operand in node.ops:
            self.write(f" {compiler.operators[operand.op]} ")
            ask(self, operand.expr, frame)
        self.write(")")

    def _no_others(self, node: Any, frame: Any) -> NoReturn:
        self.fail("a chat template cannot include, import or extend others", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _no_others


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks trained spans in some templates; for rendering it is transparent."""

    tags = {"generation"}

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Formatter(jinja2.sandbox.SandboxedFormatter):
    """`format` of a string, with counted output."""

    n = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        fits(meter.widths(format_spec))
        text = super().format_field(value, format_spec)
        self.n = fits(self.n + len(text))
        spend(1)
        return text


class _Namespace(utils.Namespace):
    """A namespace without a repr of its members, since it may contain itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON like transformers' `tojson`: no HTML escapes, non-ASCII unchanged; refused if too long."""
    written = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None and separators is None:
        return written.encode(value)
    pieces, n = [], 0
    for piece in written.iterencode(value):
        n = fits(n + len(piece))
        pieces.append(piece)
    return "".join(pieces)


def _sum(environment: Any, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """Sum of numbers; lists, which would be copied repeatedly, are refused."""
    get = (lambda item: item) if attribute is None else jinja2.filters.make_attrgetter(environment, attribute)
    for item in iterable:
        value = get(item)
        if not isinstance(start, (int, float)) or not isinstance(value, (int, float)):
            raise TypeError("sum: only numbers can be added")
        start += value
    return start


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    """`str.replace` with keyword arguments."""
    meter.check_growth("replace", value, (old, new))
    return str(value).replace(str(old), str(new), -1 if count is None else count)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test with counted cost, and checked arguments."""
    passes = hasattr(function, "jinja_pass_arg")

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if name in _SHORT and len(args) == 1 and type(args[0]) is str:
            spend(1 + len(args[0]) // PIECE)
            return function(*args)
        given = (*args[passes:], *kwargs.values())
        weight = sum(map(weight_of, given))
        spend(1 + weight // PIECE)
        if name in _WIDE and any(isinstance(v, int) and abs(v) > meter.WIDTH for v in given[1:]):
            refuse(f"{name}: a number above {meter.WIDTH}")
        if name in _SLOWLY and weight > SLOW:
            refuse(f"{name}: more than {SLOW} characters")
        if given and name in ("join", "indent", "format", "list"):
            meter.check_growth(name, given[0], given[1:])
        return made(function(*args, **kwargs))

    return checked


@jinja2.pass_context
def _finalize(context: Any, value: Any) -> str:
    """The text of an output expression."""
    text = value if isinstance(value, str) else str(meter.count_scanned(value))
    spend(1 + len(text) // PIECE)
    return text


def _strftime_now(fmt: str) -> str:
    if len(fmt) > meter.WIDTH:
        refuse(f"strftime_now: more than {meter.WIDTH} characters")
    return datetime.now().strftime(fmt)


def _raise_exception(message: Any) -> NoReturn:
    refuse(str(message))


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of one chat template; compile and render in it only inside `metered`."""

    code_generator_class = _Code
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))
    concat = staticmethod(meter.concat)
    ask = staticmethod(spend)
    ask_made = staticmethod(made)
    ask_joined = staticmethod(meter.joined)
    ask_part = staticmethod(meter.part_of)
    ask_weigh = staticmethod(meter.count_scanned)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            finalize=_finalize,
        )
        self.filters |= {"tojson": _tojson, "sum": jinja2.pass_environment(_sum), "replace": _replace}
        self.filters |= {n: _guarded(n, cast(Any, f)) for n, f in self.filters.items() if n not in _FREE}
        compares = [n for n, f in self.tests.items() if n in _COMPARE or f.__module__ == "_operator"]
        self.tests |= {n: _guarded(n, cast(Any, self.tests[n])) for n in compares}
        self.filters[_LOOP] = meter.loop_items
        del self.globals["lipsum"]
        self.globals |= {
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        for loop in parsed.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _LOOP, [], [], None, None, lineno=loop.lineno)
        return parsed

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute of a value, or a member of a dictionary, like the sandbox's lookup."""
        if type(obj) is dict and attribute not in _DICT:  # same result as the sandbox's lookup, faster
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """A counted `format` or `format_map` of a string; None for anything else."""
        if super().wrap_str_format(value) is None:
            return None
        text, by_map = value.__self__, value.__name__ == "format_map"
        return lambda *args, **kwargs: _Formatter(self).vformat(
            text, () if by_map else args, args[0] if by_map else kwargs
        )

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of a macro, of a function of the environment or the caller, or of an allowed method."""
        spend(1)
        if isinstance(__obj, runtime.Macro):
            if len(args) > len(__obj.arguments) or not kwargs.keys() <= set(__obj.arguments):
                made((*args, *kwargs.values()))  # it can create a list of unnamed members
            return super().call(__context, __obj, *args, **kwargs)
        if isinstance(__obj, runtime.LoopContext):
            return super().call(__context, __obj, *map(meter.loop_items, args), **kwargs)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            spend(len(owner) // PIECE)
            meter.check_growth(name, owner, (*args, *kwargs.values()))
        elif isinstance(owner, _OWNERS) and name not in _METHODS:
            raise jinja2.sandbox.SecurityError(f"{name!r} of {type(owner).__name__!r} is not safely callable")
        for value in (*args, *kwargs.values(), *([owner] if name in ("count", "index", "copy") else [])):
            meter.count_scanned(value)
        result = super().call(__context, __obj, *args, **kwargs)
        return result if isinstance(result, meter.VIEWS) else made(result)

    def ask_sum(self, values: tuple[Any, ...]) -> Any:
        """A sum from left to right."""
        if all(type(value) is str for value in values):
            return meter.concat(values)
        total = values[0]
        for value in values[1:]:
            total = self.call_binop(cast(Any, None), "+", total, value)
        return total

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """A binary operator, refused if its result would be too large."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if abs(left) > 1 and left.bit_length() * abs(right) > meter.BITS:
                refuse(f"it makes an integer of more than {meter.BITS} bits")
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, bytes, list, tuple)) and isinstance(times, int):
                    fits(weight_of(value) * times)
        elif operator == "%" and isinstance(left, (str, bytes)):
            if isinstance(left, bytes):
                raise TypeError("%: expected a string")
            meter.check_format(left, right)
        elif operator == "+" and isinstance(left, list) and isinstance(right, list):
            fits(meter.ITEM * (len(left) + len(right)))
            return meter.part_of(left + right)  # no new value
        return made(super().call_binop(context, operator, left, right))


def compiled(source: str) -> jinja2.Template:
    """Compile a template.

    Raises:
        TemplateError: It is too long, or does not compile.
    """
    if len(source) > SOURCE:
        refuse(f"it has {len(source)} characters, at most {SOURCE} are allowed")
    return meter.metered(lambda: Environment().from_string(source))


def rendered(template: jinja2.Template, scope: dict[str, Any]) -> str:
    """The output of a compiled template.

    Raises:
        TemplateError: A limit is exceeded, or rendering fails.
    """

    def run() -> str:
        pieces, n = [], 0
        for piece in template.root_render_func(template.new_context(scope)):
            n += len(piece)
            if n > OUTPUT:
                refuse(f"it writes more than {OUTPUT} characters")
            pieces.append(piece)
        return "".join(pieces)

    return meter.metered(run)
