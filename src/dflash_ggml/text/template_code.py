"""Code that jinja2 generates from chat templates, made to ask before it loops, joins, compares, slices or makes a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from .template_meter import PIECE


class GuardedCode(jinja2.compiler.CodeGenerator):
    """Code that asks the environment first: its methods `ask`, `ask_made`, `ask_sum`, `ask_joined`, `ask_part`, `ask_weigh`."""

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


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks trained spans in some templates; for rendering it is transparent."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
