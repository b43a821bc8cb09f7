"""Tests of roles that templates do not render: folded, turned into user messages, and left alone where they are supported."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_ggml.errors import ConfigError
from dflash_ggml.text.roles import Renders, fit
from dflash_ggml.text.template import ChatTemplate, normalise_messages

# as the published Qwen3.5 template: system only first, a user message somewhere, and none but four roles
STRICT = (
    "{%- if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('No user query') }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System must be first') }}{% endif %}"
    "{%- if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('Odd role') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
# as those of Gemma: no system message at all, and turns that alternate
ALTERNATING = (
    "{%- for m in messages %}"
    "{%- if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('not in turn') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
# drops in silence what it does not know
FORGETFUL = (
    "{%- for m in messages %}{% if m.role in ['user', 'assistant'] or loop.first %}"
    "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)

CHATML = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{%- endif %}"
)


def rendered(source: str, *rows: tuple[str, str]) -> str:
    template = ChatTemplate(source)
    messages = normalise_messages([{"role": role, "content": content} for role, content in rows])
    return template.render(fit(messages, template.renders))


def test_one_system_message_is_left_as_it_is() -> None:
    assert rendered(STRICT, ("system", " s "), ("user", "u")) == "[system] s [user]u"
    assert rendered(STRICT, ("user", "u"), ("assistant", "a")) == "[user]u[assistant]a"


def test_leading_ones_become_one() -> None:
    rows = [("system", "a"), ("developer", "b"), ("system", ""), ("user", "u")]
    for source in (STRICT, FORGETFUL):
        assert rendered(source, *rows) == "[system]a\n\nb[user]u"
    assert rendered(ALTERNATING, *rows) == "[user]a\n\nb\n\nu"


def test_later_ones_join_the_message_before_them() -> None:
    messages = [("system", "s"), ("user", "u"), ("system", "r1"), ("assistant", "a"), ("tool", "t")]
    text = rendered(STRICT, *messages, ("developer", "r2"))
    assert text == (
        "[system]s[user]u\n\n<system>\nr1\n</system>[assistant]a[tool]t\n\n<system>\nr2\n</system>"
    )


def test_later_ones_behind_an_answer_are_a_message_of_the_user() -> None:
    rows = [("user", "u"), ("assistant", "a"), ("system", "r"), ("user", "v")]
    assert rendered(STRICT, *rows) == "[user]u[assistant]a[user]<system>\nr\n</system>[user]v"
    assert rendered(ALTERNATING, *rows) == "[user]u[assistant]a[user]<system>\nr\n</system>\n\nv"
    assert rendered(FORGETFUL, *rows) == "[user]u[assistant]a[user]<system>\nr\n</system>[user]v"


def test_templates_that_show_them_get_them() -> None:
    rows = [("user", "u"), ("system", "r"), ("owner", "o")]
    text = rendered(CHATML, *rows)
    assert "<|im_start|>system\nr<|im_end|>" in text and "<|im_start|>owner\no<|im_end|>" in text


@pytest.mark.parametrize("source", [STRICT, FORGETFUL])
def test_unknown_roles_become_user_messages(source: str) -> None:
    rows = [("user", "u"), ("assistant", "a"), ("critic", "c"), ("assistant", "b")]
    assert rendered(source, *rows) == "[user]u[assistant]a[user]<critic>\nc\n</critic>[assistant]b"


def test_a_conversation_without_the_user_opens_with_the_instructions() -> None:
    assert rendered(STRICT, ("system", "Say hi")) == "[user]Say hi"
    assert rendered(FORGETFUL, ("system", "Say hi")) == "[system]Say hi"
    with pytest.raises(ConfigError, match="No user query"):
        rendered(STRICT, ("assistant", "a"))


def test_messages_are_not_changed_in_place() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "u"},
        {"role": "system", "content": "r"},
        {"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]},
    ]
    out = fit(messages, Renders(True, False, True, True, lambda name: False))
    assert messages[0] == {"role": "user", "content": "u"} and messages[1]["content"] == "r"
    assert out[1] == messages[2]


def test_a_role_with_marks_in_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"messages\[0\].role"):
        normalise_messages([{"role": "<|im_end|>", "content": "x"}])
