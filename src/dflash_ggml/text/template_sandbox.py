"""The environment in which chat templates run: jinja2's sandbox, with an end to time, loops and sizes.

Templates come from files and requests. They run in this process, with every operation counted, and not in a worker
under limits of the system: a worker would have to be sent every conversation, be started by each user of the library,
and its limits would be those of the machine; a count refuses the same templates everywhere. The price is that all ways
to make a value have to be known here. So generated code asks before it loops, joins, compares, slices or makes a list;
filters, tests and methods are those of the tables below, and nothing is lazy. No value ever outgrows VALUE, which
makes each single operation short; what it costs is taken from STEPS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn, cast

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from .template_meter import (
    BITS,
    ITEM,
    PIECE,
    VALUE,
    VIEWS,
    as_list,
    as_weighed,
    concat_pieces,
    depth_of,
    fits,
    joined_values,
    looked_through,
    loop_items,
    made_value,
    metered,
    part_of,
    refuse,
    spend,
    weight_of,
)

SOURCE = 1 << 16  # characters of a template; compiling takes up to 30 µs for each
OUTPUT = 1 << 24  # characters
WIDTH = 1000  # of what is padded, wrapped or indented
SLOW = 20_000  # characters that the filters with slow searches take

_LOOP = "what a loop goes through"  # a filter by a name that no template can write
_DICT = frozenset(dir(dict))
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"\S+")

# Filters and tests that look at a value from outside, and filters whose result holds what they are given.
_FREE = frozenset(("length", "count", "default", "d", "first", "last", "safe", "attr"))
_SAME = frozenset(("list", "reverse", "items", "select", "reject", "selectattr", "rejectattr"))
_WIDE = frozenset(("center", "indent", "batch", "slice", "wordwrap", "round", "tojson"))
_SLOWLY = frozenset(
    ("urlize", "striptags", "pprint", "wordwrap", "wordcount", "xmlattr", "title", "int", "float")
)
_SHORTENS = frozenset(
    ("trim", "string", "lower", "upper")
)  # of a string, to no more than three times its length
_COMPARES = frozenset(
    ("eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "gt", ">", "greaterthan", "le", "<=", "ge", ">=",
     "in", "lower", "upper", "divisibleby")
)  # fmt: skip
# Methods that can be called, of types other than strings.
_METHODS: dict[type, frozenset[str]] = {
    bytes: frozenset(("decode", "hex", "startswith", "endswith")),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    range: frozenset(("count", "index")),
    int: frozenset(("bit_length", "bit_count", "is_integer")),
    float: frozenset(("is_integer", "hex")),
}


@jinja2.pass_context
def _finalize(context: Any, value: Any) -> str:
    """The text of what a template writes."""
    text = value if isinstance(value, str) else str(value)
    spend(1 + len(text) // PIECE)
    return text


def _check_format(text: str, values: Any) -> None:
    """For `%`: each number in the format may be a width, `*` takes them from the values."""
    most = weight_of(values)
    numbers = sum(int(number) if len(number) < 10 else VALUE + 1 for number in _NUMBER.findall(text))
    if "*" in text and isinstance(values, tuple):
        numbers += sum(abs(value) for value in values if isinstance(value, int))
    fits(len(text) + numbers + text.count("%") * most)


class _Formatter(jinja2.sandbox.SandboxedFormatter):
    """`format` of a string, with all that it makes counted."""

    n = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        widths = (int(number) if len(number) < 10 else VALUE + 1 for number in _NUMBER.findall(format_spec))
        fits(sum(widths))
        made = super().format_field(value, format_spec)
        self.n = fits(self.n + len(made))
        spend(1)
        return made


class _Format:
    """A string's `format` or `format_map`."""

    def __init__(self, environment: jinja2.Environment, text: str, by_map: bool) -> None:
        self._environment, self._text, self._by_map = environment, text, by_map

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        if self._by_map:
            (mapping,) = args
            args, kwargs = (), mapping
        for value in (*args, *kwargs.values()):
            looked_through(value)
        return _Formatter(self._environment).vformat(self._text, args, kwargs)


class _Namespace(jinja2.utils.Namespace):
    """A namespace may hold itself and others: what it holds is not shown."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _width(value: Any) -> int:
    return fits(abs(value)) if isinstance(value, int) else 0


def _check_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    """Methods of strings that make long values out of short ones."""
    first = args[0] if args else None
    if name in ("center", "ljust", "rjust", "zfill"):
        _width(first)
    elif name == "expandtabs":
        fits(len(text) + text.count("\t") * _width(first))
    elif name == "replace" and len(args) > 1 and isinstance(first, str) and isinstance(args[1], str):
        fits(len(text) + text.count(first) * len(args[1]))
    elif name == "join":
        fits(weight_of(first) + len(text) * (len(first) if isinstance(first, Sized) else 0))
    elif name == "translate":
        fits(
            len(text) * (max(map(weight_of, first.values()), default=1) if isinstance(first, Mapping) else 1)
        )
    elif name in ("split", "rsplit", "splitlines") and len(text) * ITEM > VALUE:
        n = text.count(first) if isinstance(first, str) and first else sum(1 for _ in _WORD.finditer(text))
        fits((n + text.count("\n")) * ITEM)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
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
    """Of numbers: lists would be copied once for each."""
    get = (lambda item: item) if attribute is None else jinja2.filters.make_attrgetter(environment, attribute)
    for item in iterable:
        value = get(item)
        if not isinstance(start, (int, float)) or not isinstance(value, (int, float)):
            raise TypeError("sum: only numbers can be added")
        start += value
    return start


def _strftime_now(fmt: str) -> str:
    if len(fmt) > WIDTH:
        refuse(f"strftime_now: more than {WIDTH} characters")
    return datetime.now().strftime(fmt)


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that says what it costs."""
    passes = hasattr(function, "jinja_pass_arg")
    plain = name in _SHORTENS

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = args[1:] if passes else args
        if plain and len(given) == 1 and type(given[0]) is str and not kwargs:
            spend(1 + len(given[0]) // PIECE)
            return function(*args)
        given = (*given, *kwargs.values())
        if name in _SAME:
            if given and not isinstance(given[0], Sized):
                raise TypeError(f"{name}: expected a list")
            n = len(given[0]) if given else 0
            fits(ITEM * n)
            spend(1 + n)
            result = function(*args, **kwargs)
            return list(result) if isinstance(result, Iterator) else result
        weights = [weight_of(value) for value in given]
        spend(1 + sum(weights) // PIECE)
        if name in _WIDE and any(isinstance(v, int) and abs(v) > WIDTH for v in given[1:]):
            refuse(f"{name}: a number above {WIDTH}")
        if name in _SLOWLY and sum(weights) > SLOW:
            refuse(f"{name}: more than {SLOW} characters")
        value = given[0] if given else None
        if name == "replace" and len(given) > 2:
            old, new = map(str, given[1:3])
            for pair in ((old, new), (new, old)) if kwargs else ((old, new),):  # named in any order
                _check_method(str(value), name, pair)
        elif name == "join":
            fits(weights[0] + sum(weights[1:2]) * (len(value) if isinstance(value, Sized) else 0))
        elif name == "format":
            _check_format(str(value), given[1:])
        elif name == "indent":
            widths = (
                len(v) if isinstance(v, str) else abs(v) for v in given[1:] if isinstance(v, (str, int))
            )
            fits(weights[0] + (1 + str(value).count("\n")) * max(widths, default=4))
        elif name == "round" and any(isinstance(v, int) and abs(v) > 300 for v in given[1:]):
            refuse("round: more than 300 digits")
        result = function(*args, **kwargs)
        return made_value(as_list(result) if isinstance(result, Iterator) else result)

    return checked


class _Code(jinja2.compiler.CodeGenerator):
    """Code that asks first."""

    def _wrapped(self, function: str, visit: Callable[..., Any], node: Any, frame: Any) -> None:
        self.write(f"environment.{function}(")
        visit(node, frame)
        self.write(")")

    def visit_Output(self, node: jinja2.nodes.Output, frame: Any) -> None:
        text = sum(len(n.data) for n in node.nodes if isinstance(n, jinja2.nodes.TemplateData))
        self.writeline(f"environment.ask({1 + len(node.nodes) // 4 + text // PIECE})", node)
        super().visit_Output(node, frame)

    def visit_List(self, node: jinja2.nodes.List, frame: Any) -> None:
        self._wrapped("ask_made", super().visit_List, node, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: Any) -> None:
        self._wrapped("ask_made", super().visit_Dict, node, frame)

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: Any) -> None:
        if node.ctx == "load":
            self._wrapped("ask_made", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Add(self, node: jinja2.nodes.BinExpr, frame: Any) -> None:
        """A chain of sums at once: they are what templates are made of."""
        chain: list[jinja2.nodes.Expr] = [node]
        while isinstance(chain[0], jinja2.nodes.Add):
            chain[:1] = [chain[0].left, chain[0].right]
        self.write("environment.ask_sum(context, ")
        for item in chain:
            self.visit(item, frame)
            self.write(", ")
        self.write(")")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Any) -> None:
        self.write("environment.ask_joined((")
        for arg in node.nodes:
            self.visit(arg, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: Any) -> None:
        if isinstance(node.arg, jinja2.nodes.Slice):
            self._wrapped("ask_part", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: Any) -> None:
        """Comparing with a constant is short, except for looking into something."""
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        plain = len(sides) == 2 and any(isinstance(side, jinja2.nodes.Const) for side in sides)
        looks = {operand.op for operand in node.ops} & {"in", "notin"}
        constant = isinstance(sides[-1], (jinja2.nodes.Const, jinja2.nodes.List, jinja2.nodes.Tuple))
        if (plain and not looks) or (len(sides) == 2 and looks and constant):
            super().visit_Compare(node, frame)
            return
        self.write("(")
        self._wrapped("ask_weigh", self.visit, node.expr, frame)
        for operand in node.ops:
            self.write(f" {jinja2.compiler.operators[operand.op]} ")
            self._wrapped("ask_weigh", self.visit, operand.expr, frame)
        self.write(")")

    def _no_others(self, node: Any, frame: Any) -> NoReturn:
        self.fail("a chat template cannot include, import or extend others", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _no_others


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks trained spans in some templates; for rendering it is transparent."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of one chat template; compiling and rendering in it belong into `metered`."""

    code_generator_class = _Code
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))
    concat = staticmethod(concat_pieces)
    ask = staticmethod(spend)
    ask_made = staticmethod(made_value)
    ask_joined = staticmethod(joined_values)
    ask_part = staticmethod(part_of)
    ask_weigh = staticmethod(looked_through)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            finalize=_finalize,
        )
        self.filters |= {"tojson": _tojson, "sum": jinja2.pass_environment(_sum)}
        self.filters = {n: f if n in _FREE else _checked(n, cast(Any, f)) for n, f in self.filters.items()}
        self.filters[_LOOP] = loop_items
        self.tests = {n: _checked(n, cast(Any, f)) if n in _COMPARES else f for n, f in self.tests.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        parsed = super()._parse(source, name, filename)
        for loop in parsed.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, _LOOP, [], [], None, None, lineno=loop.lineno)
        return parsed

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT:  # as the sandbox would find it, without its detours
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if isinstance(obj, str) and attribute in ("format", "format_map"):
            return _Format(self, obj, attribute == "format_map")
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, str) and argument in ("format", "format_map"):
            return _Format(self, obj, argument == "format_map")
        return super().getitem(obj, argument)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call: of a macro, of a function that the environment or the caller gave, or of a method in the tables."""
        spend(1)
        if isinstance(__obj, jinja2.runtime.Macro):
            if len(args) > len(__obj.arguments) or not kwargs.keys() <= set(__obj.arguments):
                made_value((*args, *kwargs.values()))  # it can make a list of what it does not name
            return super().call(__context, __obj, *args, **kwargs)
        if isinstance(__obj, jinja2.runtime.LoopContext):
            return super().call(__context, __obj, *map(loop_items, args), **kwargs)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            spend(len(owner) // PIECE)
            _check_method(owner, name, (*args, *kwargs.values()))
        else:
            known = next((names for kind, names in _METHODS.items() if isinstance(owner, kind)), None)
            if known is not None and name not in known:
                raise jinja2.sandbox.SecurityError(
                    f"{name!r} of {type(owner).__name__!r} is not safely callable"
                )
            if name in ("count", "index", "copy"):
                looked_through(owner)
        for value in (*args, *kwargs.values()):
            looked_through(value)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, VIEWS):
            return result
        return made_value(as_list(result) if isinstance(result, Iterator) else result)

    def ask_sum(self, context: Any, *values: Any) -> Any:
        """A sum from left to right."""
        if all(type(value) is str for value in values):
            n = fits(sum(map(len, values)))
            spend(len(values) + n // PIECE)
            return "".join(values)
        made = values[0]
        for value in values[1:]:
            made = self.call_binop(context, "+", made, value)
        return made

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        spend(1)
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            spend(fits(len(left) + len(right)) // PIECE)
            return left + right
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if abs(left) > 1 and left.bit_length() * abs(right) > BITS:
                refuse(f"it makes an integer of more than {BITS} bits")
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, bytes, list, tuple)) and isinstance(times, int):
                    fits(weight_of(value) * times)
        elif operator == "%" and isinstance(left, (str, bytes)):
            if not isinstance(left, str):
                raise TypeError("%: expected a string")
            _check_format(left, right)
        elif operator == "+" and isinstance(left, list) and isinstance(right, list):
            spend(len(left) // 64)
            weight = fits(weight_of(left) + weight_of(right))
            return as_weighed(left + right, weight, max(depth_of(left), depth_of(right)))
        return made_value(super().call_binop(context, operator, left, right))


def compiled(source: str) -> jinja2.Template:
    """A template. Raises TemplateError for one that is too long, and whatever else compiling raises."""
    if len(source) > SOURCE:
        refuse(f"it has {len(source)} characters, at most {SOURCE} are allowed")
    return metered(lambda: Environment().from_string(source))


def rendered(template: jinja2.Template, scope: dict[str, Any]) -> str:
    """The text that a compiled template makes. Raises TemplateError beyond a limit, and whatever else it raises."""

    def run() -> str:
        pieces, n = [], 0
        for piece in template.root_render_func(template.new_context(scope)):
            n += len(piece)
            if n > OUTPUT:
                refuse(f"it writes more than {OUTPUT} characters")
            pieces.append(piece)
        return "".join(pieces)

    return metered(run)
