"""The environment in which chat templates run: jinja2's sandbox, with an end to time, loops and sizes.

Templates come from files and requests. They run in this process, with every operation counted, and not in a worker
under limits of the system: a worker would have to be sent every conversation, be started by each user of the library,
and its limits would be those of the machine; a count refuses the same templates everywhere. The price is that all ways
to make a value have to be known here. So generated code asks before it loops, joins, compares, slices or makes a list;
filters, tests and methods are those that `template_filters` knows, and nothing is lazy. No value ever outgrows VALUE, which
makes each single operation short; what it costs is taken from STEPS.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from .template_code import GenerationTag, GuardedCode
from .template_filters import (
    COMPARES,
    FREE,
    METHODS,
    WIDTH,
    StringFormat,
    add_up,
    check_format,
    check_method,
    guarded,
    tojson,
)
from .template_meter import (
    BITS,
    PIECE,
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

_LOOP = "what a loop goes through"  # a filter by a name that no template can write
_DICT = frozenset(dir(dict))


@jinja2.pass_context
def _finalize(context: Any, value: Any) -> str:
    """The text of what a template writes."""
    text = value if isinstance(value, str) else str(value)
    spend(1 + len(text) // PIECE)
    return text


class _Namespace(jinja2.utils.Namespace):
    """A namespace may hold itself and others: what it holds is not shown."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _strftime_now(fmt: str) -> str:
    if len(fmt) > WIDTH:
        refuse(f"strftime_now: more than {WIDTH} characters")
    return datetime.now().strftime(fmt)


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message))


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of one chat template; compiling and rendering in it belong into `metered`."""

    code_generator_class = GuardedCode
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
            extensions=[GenerationTag, jinja2.ext.loopcontrols],
            finalize=_finalize,
        )
        self.filters |= {"tojson": tojson, "sum": jinja2.pass_environment(add_up)}
        self.filters = {n: f if n in FREE else guarded(n, cast(Any, f)) for n, f in self.filters.items()}
        self.filters[_LOOP] = loop_items
        self.tests = {n: guarded(n, cast(Any, f)) if n in COMPARES else f for n, f in self.tests.items()}
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
            return StringFormat(self, obj, attribute == "format_map")
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, str) and argument in ("format", "format_map"):
            return StringFormat(self, obj, argument == "format_map")
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
            check_method(owner, name, (*args, *kwargs.values()))
        else:
            known = next((names for kind, names in METHODS.items() if isinstance(owner, kind)), None)
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
            check_format(left, right)
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
