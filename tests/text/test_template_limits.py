"""Tests of the limits on chat templates from files and requests: steps, lengths and source size."""

from __future__ import annotations

import pytest

from dflash_ggml.errors import ConfigError
from dflash_ggml.text import template_meter
from dflash_ggml.text.template import ChatTemplate

ROWS = [{"role": "user", "content": "x"}]
LONG = "more than 16777216 characters"
MANY = "more than 1000000 steps"
DEEP = "recursion"
GROWS = (
    "{% set ns = namespace(a=START) %}{% for i in range(200) %}{% set ns.a = MORE %}{% endfor %}{{ ns.a }}"
)


@pytest.fixture(autouse=True)
def steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit of time: on a slow machine it would come first."""
    monkeypatch.setattr(template_meter, "SECONDS", 1000.0)


def grows(start: str, more: str) -> str:
    return GROWS.replace("START", start).replace("MORE", more)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 'a' * 10**9 }}", LONG),
        ("{{ [1] * 10**9 }}", LONG),
        ("{{ '{:1000000000}'.format(1) }}", LONG),
        ("{{ '{:{}}'.format(1, 10**9) }}", LONG),
        ("{{ '{:1000000000}'['format'](1) }}", LONG),
        ("{{ '{:1000000000}' | attr('format')(1) }}", LONG),
        ("{{ ('{0}' * 1000).format('a' * 10**6) }}", LONG),
        ("{{ '%1000000000d' % 1 }}", LONG),
        ("{{ '%*d' % (10**9, 1) }}", LONG),
        ("{{ '%1000000000d' | format(1) }}", LONG),
        ("{{ ('%(a)s' * 1000) % {'a': 'a' * 10**6} }}", LONG),
        ("{{ 'a'.center(10**9) }}", LONG),
        ("{{ 'a'.ljust(10**9) }}", LONG),
        ("{{ 'a'.zfill(10**9) }}", LONG),
        ("{{ '\t'.expandtabs(10**9) }}", LONG),
        ("{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}", LONG),
        ("{{ ('a' * 10**6) | replace(new='b' * 10**6, old='a') }}", LONG),
        ("{{ ('a' * 10**6).join(['b'] * 1000) }}", LONG),
        ("{{ (['a' * 10**6] * 1000) | join }}", LONG),
        ("{{ ('a,' * 10**6).split(',') }}", LONG),
        ("{{ ('a' * 10**6) | list }}", LONG),
        ("{{ {}.fromkeys(range(100), 'a' * 10**6) }}", LONG),
        ("{{ [1] | tojson(separators=['a' * 10**7, 'a' * 10**7]) }}", LONG),
        ("{{ 'a' | center(10**9) }}", "center: a number above 1000"),
        ("{{ 'a' | indent(10**9) }}", "indent: a number above 1000"),
        ("{{ [[1]] | tojson(indent=10**9) }}", "tojson: a number above 1000"),
        ("{{ [1] | batch(10**9, 'x') }}", "batch: a number above 1000"),
        ("{{ 1.5 | round(10**9) }}", "round: a number above 1000"),
        ("{{ ('<' * 10**6) | striptags }}", "striptags: more than 20000 characters"),
        ("{{ [[1], [2]] | sum(start=[]) }}", "only numbers"),
        ("{{ (5).to_bytes(10**9, 'big') }}", "not safely callable"),
        ("{{ 2 ** (10**8) }}", "more than 16384 bits"),
        ("{{ 2**16000 * 2**16000 }}", "more than 16384 bits"),
        ("{{ 10.0 ** 1000 }}", "out of range"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ range(10**9) }}", "Range too big"),
        ("{{ lipsum(10**9) }}", "undefined"),
        ("{{ strftime_now('%Y' * 10**6) }}", "strftime_now: more than 1000"),
        (grows("'a'", "ns.a ~ ns.a"), LONG),
        (grows("'a'", "ns.a + ns.a"), LONG),
        (grows("[1]", "ns.a + ns.a"), LONG),
        (grows("[1]", "[ns.a, ns.a]"), LONG),
        (grows("{}", "dict(a=ns.a, b=ns.a)"), LONG),
        (grows("(1,)", "(ns.a,)"), "nested deeper than 100"),
        ("{% macro f() %}{% set ns.a = varargs %}{% endmacro %}" + grows("1", "f(ns.a, ns.a) or ns.a"), LONG),
        ("{% for i in range(100000) %}" + "x" * 1000 + "{% endfor %}", "writes more than"),
        ("{% set x %}{% for i in range(100000) %}" + "x" * 1000 + "{% endfor %}{% endset %}{{ x }}", LONG),
        ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", MANY),
        ("{% for a in [1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}", MANY),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            MANY,
        ),
        ("{% set a = 'a' * 10**7 %}{% for i in range(100000) %}{% set b = a[::-1] %}{% endfor %}", MANY),
        ("{% set a = 'a' * 10**7 %}{% for i in range(100000) %}{{ 'b' in a }}{% endfor %}", MANY),
        ("{% set a = 'a' * 10**7 %}{% for i in range(100000) %}{{ a == a ~ '' }}{% endfor %}", MANY),
        ("{% set a = 'a' * 10**7 %}{% for i in range(100000) %}{{ a.find('b') }}{% endfor %}", MANY),
        ("".join(f"{{% set a{i} = 'a' * 10**7 + '{i}' %}}" for i in range(9)), MANY),
        (grows("[]", "ns.a + ['a' * 10**7 + i | string]"), MANY),
        (grows("[1]", "[ns.a] + ns.a"), LONG),
        (grows("(1,)", "{1: ns.a}.items() | first"), "nested deeper than 100"),
        ("{% for c in 'a' * 10**7 %}{{ loop.length }}{% endfor %}", MANY),
        ("{{ ([{'a': 'x'}] * 100000) | join(attribute='a', d='y' * 10000) }}", LONG),
        ("{{ '{a:{w}}'.format_map({'a': 1, 'w': 10**9}) }}", LONG),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", DEEP),
        ("{% block a %}{{ self.a() }}{% endblock %}", DEEP),
        ("{{ raise_exception('no\nmore ' * 1000) }}", r"no more no .* \.\.\.$"),
    ],
)
def test_what_a_template_does_has_an_end(source: str, words: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(ConfigError, match=words) as caught:
        template.render(ROWS)
    assert str(caught.value).startswith("messages: the chat template refused them: ")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x" * 10_000_000, "it has 10000000 characters, at most 65536"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", DEEP),
        ("{{ " + "[" * 5000 + "]" * 5000 + " }}", DEEP),
        ("{{ 1" + "+1" * 20_000 + " }}", "compile"),
        ("{{ a" + "|trim" * 10_000 + " }}", DEEP),
        ("{% if a %}" + "{% elif a %}" * 5000 + "{% endif %}", "compile"),
        ("{% if a %}" * 5000, "compile"),
        ("{{ " + "9" * 10_000 + " }}", "compile"),
        ("{% break %}", "outside loop"),
        ("{% include 'a' %}", "cannot include"),
        ("{% extends 'a' %}", "cannot include"),
        ("{% import 'a' as b %}", "cannot include"),
        ("{% from 'a' import b %}", "cannot include"),
    ],
)
def test_what_does_not_compile_is_one_clear_error(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        ChatTemplate(source)
    assert str(caught.value).startswith("chat template does not compile: ") and "\n" not in str(caught.value)


def test_steps_are_counted_anew_for_each_rendering() -> None:
    template = ChatTemplate("{% for i in rows %}{% endfor %}")

    def left(n: int) -> int:
        code = template._template
        list(code.root_render_func(code.new_context({"rows": [0] * n})))
        return template_meter.METER.left

    assert template_meter.metered(lambda: left(10)) - template_meter.metered(lambda: left(1010)) == 1000
    for _ in range(3):
        assert template.render(ROWS, rows=[0] * 600_000) == ""
    with pytest.raises(ConfigError, match=MANY):
        template.render(ROWS, rows=[0] * 1_000_000)


def test_steps_that_are_slow_end_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_meter, "SECONDS", 0.0)
    with pytest.raises(ConfigError, match="more than 0 s"):
        ChatTemplate("{% for i in rows %}{% endfor %}").render(ROWS, rows=[0] * 100_000)


def test_a_conversation_of_a_million_tokens_is_rendered() -> None:
    rows = [{"role": "user", "content": "word " * 1000}] * 1000
    template = ChatTemplate(
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content | trim + '\n' }}{% endfor %}"
    )
    assert len(template.render(rows)) > 5_000_000


def test_what_templates_do_with_lists_and_texts_is_jinjas() -> None:
    source = (
        "{% set ns = namespace(a=[]) %}{% for m in messages * 3 %}{% set ns.a = ns.a + [m.content ~ loop.index] %}"
        "{% endfor %}{{ ns.a }}{{ ns.a | join('-') }}{{ ns.a[1:] | tojson }}{{ 'a' + 'b' + 'c' }}{{ 1 + 2 + 3.5 }}"
        "{{ [1, 2] + [3] == [1, 2, 3] }}{{ '{:>3}|{a!r}'.format(1, a='b') }}{{ '%3d|%s' % (1, 'b') }}"
        "{{ ns.a | map('upper') | list | length }}{{ [3, 1] | sort | sum }}{{ {'a': [1]} | tojson(indent=1) }}"
    )
    assert ChatTemplate(source).render(ROWS) == (
        "['x1', 'x2', 'x3']x1-x2-x3[\"x2\", \"x3\"]abc6.5True  1|'b'  1|b34{\n \"a\": [\n  1\n ]\n}"
    )
