"""Tests of thinking in chats: budgets that end it, what effort means, and continuing within one."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.errors import ConfigError
from dflash_ggml.session.answer import Answer
from dflash_ggml.session.events import Finish, ReasoningDelta, ToolCallBegin
from dflash_ggml.session.hooks import Hooks
from dflash_ggml.session.requests import ChatRequest, GrammarSpec
from dflash_ggml.session.session import Session, run_chat
from dflash_ggml.session.thinking import EFFORTS, effort_budget
from reference.fake_engine import TEMPLATE, TOOL_TEMPLATE, FakeEngine, FakeSlot, byte_vocabulary
from reference.scheduled import batched, config

GREEDY = SamplingParams(temperature=0)
USER = {"role": "user", "content": "hello"}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    },
}
END = "\n</think>"


def on(template: str = TOOL_TEMPLATE, **options: Any) -> Session:
    return Session(FakeEngine(tokenizer=byte_vocabulary(template=template)), **options)  # type: ignore[arg-type]


def chat(**options: Any) -> ChatRequest:
    return ChatRequest(**{"messages": [USER], "sampling": GREEDY, "max_tokens": 60, **options})


def answer(session: Session, reply: str, hooks: Hooks | None = None, **options: Any) -> Answer:
    session.engine.replies = [reply]  # type: ignore[attr-defined]
    return Answer.of(run_chat(session, chat(**options), hooks=hooks or Hooks()))


@pytest.mark.parametrize("mode", ["plain", "chain", "tree"])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 5, 12])
def test_a_used_up_budget_ends_the_thought(budget: int, split: bool, mode: Any) -> None:
    """The usage counts the end, and the answer is as if the model had written it. A token is a letter here."""
    session = on(TOOL_TEMPLATE.replace("enable_thinking", "nothing"))
    options: dict[str, Any] = {"split_reasoning": split, "mode": mode, "ignore_eos": True}
    found = answer(session, "abcdfg" * 9, reasoning_budget=budget, **options)
    thought = ("abcdfg" * 2)[:budget]
    by_itself = answer(session, thought + END, **options)
    assert found.reasoning == (thought if split else "")
    assert (found.reasoning, found.text) == (by_itself.reasoning, by_itself.text) and found.text
    usage, finish = found.done()
    assert usage.reasoning_n == budget + len(session.tokenizer.encode(END))
    assert (usage.predicted_n, finish) == (by_itself.done()[0].predicted_n, by_itself.done()[1])


@pytest.mark.parametrize("budget", [None, -1, 40])
def test_what_ends_in_time_is_left_alone(budget: int | None) -> None:
    found = answer(on(), "short</think>fine<|im_end|>", reasoning_budget=budget)
    assert (found.reasoning, found.text) == ("short", "fine")


def test_thoughts_that_the_model_begins_have_budgets_too() -> None:
    session = on(TEMPLATE)
    found = answer(session, "<think>abcdfgabcdfg", reasoning_budget=4)
    assert found.reasoning == "abcd"
    assert found.done()[0].reasoning_n == 4 + len(session.tokenizer.encode(END))


def test_no_character_is_cut() -> None:
    """The first bytes of one wait for the rest, three tokens at most."""
    found = answer(on(), "a丮丮丮丮", reasoning_budget=2)
    assert found.reasoning == "a丮"


def test_the_limit_of_the_answer_comes_first() -> None:
    found = answer(on(), "abcdfgabcdfg", reasoning_budget=4, max_tokens=5)
    assert found.done()[1] == Finish("length") and found.text == ""


def test_the_end_is_forced_past_bans_processors_and_criteria() -> None:
    """None of them chose it; logits of the tokens before and behind it reach them as ever."""
    session = on()
    ban = {session.tokenizer.id_of("</think>"): float("-inf")}
    seen: list[int] = []
    rows: list[Any] = []

    def process(ids: Any, scores: Any) -> Any:
        seen.append(len(ids))
        rows.append(scores)
        return scores

    def criterion(ids: Any, row: Any) -> bool:
        assert (row == rows[-1]).all() and len(ids) == seen[-1]
        return False

    hooks = Hooks(logits_processor=(process,), stopping_criteria=(criterion,))
    sampling = SamplingParams(temperature=0, logit_bias=ban)
    found = answer(session, "abcdfg", hooks, reasoning_budget=3, sampling=sampling, logprobs=1)
    assert found.reasoning == "abc"
    first = seen[0]
    n_end = len(session.tokenizer.encode(END))
    assert seen == [first + i for i in range(60) if not 3 <= i < 3 + n_end]


def test_forced_tokens_are_certain() -> None:
    found = answer(on(), "abcdfg", reasoning_budget=2, split_reasoning=False, logprobs=1, max_tokens=30)
    text = b"".join(entry.data for entry in found.logprobs).decode()
    assert text.startswith("ab\n</think>")
    n_end = len(on().tokenizer.encode(END))
    assert [e.logprob == 0.0 and not e.top for e in found.logprobs[:9]] == [
        2 <= i < 2 + n_end for i in range(9)
    ]


def test_what_binds_the_answer_binds_it_behind_a_forced_end() -> None:
    pytest.importorskip("llguidance")
    for grammar in (GrammarSpec("regex", "x{3}"), GrammarSpec("gbnf", 'root ::= "xxx"')):
        found = answer(on(), "abcdfg" * 5, reasoning_budget=4, grammar=grammar)
        assert (found.reasoning, found.text) == ("abcd", "xxx")
    found = answer(on(), "abcdfg" * 5, reasoning_budget=4, tools=(TOOL,), tool_choice="required")
    assert found.reasoning == "abcd" and found.tools and found.tools[0].name == "f"


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, TOOL_TEMPLATE.replace("'<think>\\\\n'", "''")])
@pytest.mark.parametrize(
    "begun",
    ["<tool_call>", "<tool_call>\n<function=f>\n<para", "<tool_call>\n<function=f>\n<parameter=a>\nvalue"],
)
def test_a_strict_call_within_a_thought_is_no_call(begun: str, template: str) -> None:
    """The end is forced in the middle of it, and calls behind are bound again."""
    pytest.importorskip("llguidance")
    session = on(template)
    opens = session.prepare(chat()).reasoning == "open"
    reply = begun if opens else f"<think>{begun}"
    budget = len(session.tokenizer.encode(begun))
    found = answer(session, reply + "abcdfg" * 3, reasoning_budget=budget, tools=(TOOL,), max_tokens=100)
    assert found.reasoning == begun.strip()
    assert found.done()[0].reasoning_n == budget + len(session.tokenizer.encode(END))


def test_calls_that_a_thought_quotes_are_not_bound() -> None:
    """A strict tool binds the calls of the answer."""
    pytest.importorskip("llguidance")
    call = "<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>"
    session = on()
    session.engine.replies = [f"I write <tool_call> {{}}</think>{call}"]  # type: ignore[attr-defined]
    events = list(run_chat(session, chat(tools=(TOOL,), max_tokens=200)))
    thought = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
    assert thought == "I write <tool_call> {}"
    assert [e.name for e in events if isinstance(e, ToolCallBegin)] == ["f"]


@pytest.mark.parametrize("n_ctx", [1024, 150])
def test_batched_chats_have_budgets_of_their_own(n_ctx: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where cache rows are short, so that some are preempted."""
    engine = FakeEngine(config(n_ctx), byte_vocabulary(template=TOOL_TEMPLATE), parallel=3)
    session = Session(engine)  # type: ignore[arg-type]
    engine.replies = ["abcdfg" * 9] * 3
    resumed: list[Any] = []
    resume = FakeSlot.resume
    monkeypatch.setattr(FakeSlot, "resume", lambda *them: resumed.append(them) or resume(*them))
    budgets = (3, None, 30)
    found = batched(session, [chat(reasoning_budget=n, ignore_eos=True) for n in budgets])
    assert bool(resumed) == (n_ctx == 150)
    for budget, one in zip(budgets, found):
        alone = answer(on(), "abcdfg" * 9, reasoning_budget=budget, ignore_eos=True)
        assert (one.reasoning, one.text) == (alone.reasoning, alone.text)
        n_end = len(session.tokenizer.encode(END))
        assert one.done()[0].reasoning_n == (60 if budget is None else budget + n_end)


def test_no_budget_at_all_is_a_chat_without_thinking() -> None:
    """Where the template can leave the thought out; the session's setting is the default of chats."""
    assert on().prepare(chat(reasoning_budget=0)).reasoning == "closed"
    assert on().prepare(chat(reasoning_budget=0, enable_thinking=True)).reasoning == "closed"
    quiet = on(reasoning_budget=0)
    assert quiet.prepare(chat()).reasoning == "closed"
    for option in ({"enable_thinking": True}, {"reasoning_budget": 9}, {"reasoning_effort": "low"}):
        assert quiet.prepare(chat(**option)).reasoning == "open"
    assert answer(quiet, "abcdfg</think>x<|im_end|>", enable_thinking=True).reasoning == "abcdfg"


def test_the_sessions_budget_is_the_default_of_chats() -> None:
    session = on(reasoning_budget=3)
    for option, thought in (
        ({}, "abc"),
        ({"reasoning_budget": 5}, "abcdf"),
        ({"reasoning_budget": -1}, "abcdfgabcdfg"),
        ({"reasoning_effort": "max"}, "abcdfgabcdfg"),
        ({"enable_thinking": True}, "abc"),
    ):
        assert answer(session, "abcdfgabcdfg</think>x<|im_end|>", **option).reasoning == thought


def test_efforts_are_shares_of_an_answer() -> None:
    """Of the family's longest, or of the one that was asked for."""
    pytest.importorskip("dflash_ggml.ggml.bindings")
    from dflash_ggml.models.registry import TARGETS

    shares = {level: effort_budget(level, TARGETS["qwen3"].longest_answer) for level in EFFORTS}
    assert shares == {"minimal": 512, "low": 2048, "medium": 8192, "high": 24576, "xhigh": None, "max": None}
    for family in ("qwen35", "qwen35moe", "qwen3next"):
        assert effort_budget("medium", TARGETS[family].longest_answer) == 20_480
    session = on()
    for most, budget in ((None, 128), (1000, 128), (100, 25)):
        limit = session.thought_limit(session.prepare(chat(reasoning_effort="medium", max_tokens=most)))
        assert limit is not None and limit.budget == budget
    found = answer(on(), "abcdfg" * 9, reasoning_effort="low", max_tokens=48)
    assert found.reasoning == "abc"
    found = answer(on(), "abcdfg" * 9, reasoning_effort="low", reasoning_budget=5)
    assert found.reasoning == "abcdf", "a budget says it better"


def test_what_is_no_budget_and_no_effort() -> None:
    for options, words in (
        ({"reasoning_budget": -2}, r"^reasoning_budget: expected -1"),
        ({"reasoning_effort": "hard"}, r"^reasoning_effort: 'hard' is none of minimal, low"),
    ):
        with pytest.raises(ConfigError, match=words):
            chat(**options)
    with pytest.raises(ConfigError, match=r"^reasoning_budget: "):
        on(reasoning_budget=-5)


def test_a_template_gets_the_effort() -> None:
    session = on("{{ reasoning_effort }}" + TOOL_TEMPLATE)
    assert session.prepare(chat(reasoning_effort="low")).text.startswith("low")
    other = chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "its own"})
    assert session.prepare(other).text.startswith("its own")


# ---- going on within a thought

QWEN = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' %}{{ '\\n<think>\\n' + (m.reasoning_content or '') | trim + '\\n</think>\\n\\n' }}"
    "{%- else %}{{ '\\n' }}{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{%- else %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)


@pytest.mark.parametrize("template", [QWEN, TOOL_TEMPLATE, TEMPLATE])
@pytest.mark.parametrize(
    "last",
    [
        {"content": "", "reasoning_content": "I was about"},
        {"content": None, "reasoning": "I was about"},
        {"content": "\n", "reasoning_content": "I was about"},
        {"content": "<think>\nI was about"},
        {"content": "<think>I was about"},
    ],
)
@pytest.mark.parametrize("thinking", [None, False])
def test_a_thought_goes_on(template: str, last: dict[str, Any], thinking: bool | None) -> None:
    """Whether the template shows thoughts or not; the blank between the words is the model's."""
    session = on(template)
    request = chat(
        messages=[USER, {"role": "assistant", **last}],
        continue_final_message=True,
        enable_thinking=thinking,
        max_tokens=200,
    )
    prepared = session.prepare(request)
    assert prepared.reasoning == "begun"
    assert prepared.text.endswith("<think>\nI was about") and prepared.text.count("<think>") == 1
    session.engine.replies = [" to say</think>yes<|im_end|>"]  # type: ignore[attr-defined]
    found = Answer.of(run_chat(session, prepared))
    assert (found.reasoning, found.text) == (" to say", "yes")


def test_a_thought_that_goes_on_has_a_budget_of_its_own() -> None:
    messages = [USER, {"role": "assistant", "content": "", "reasoning_content": "abc"}]
    found = answer(on(QWEN), "dfgabc", messages=messages, continue_final_message=True, reasoning_budget=2)
    assert found.reasoning == "df"


@pytest.mark.parametrize(
    "last",
    [
        {"content": "So", "reasoning_content": "It is"},
        {"content": "So"},
        {"content": ""},
        {"content": "<think>It is</think>So"},
        {"content": "So <think> is a tag"},
    ],
)
def test_messages_that_end_outside_a_thought_go_on_there(last: dict[str, Any]) -> None:
    session = on(QWEN)
    request = chat(messages=[USER, {"role": "assistant", **last}], continue_final_message=True)
    assert session.prepare(request).reasoning == "closed"


def test_a_bound_answer_behind_a_thought_that_goes_on() -> None:
    pytest.importorskip("llguidance")
    messages = [USER, {"role": "assistant", "content": "", "reasoning_content": "abc"}]
    found = answer(
        on(QWEN),
        "def</think>zzz",
        messages=messages,
        continue_final_message=True,
        grammar=GrammarSpec("regex", "x{3}"),
    )
    assert (found.reasoning, found.text) == ("def", "xxx")
