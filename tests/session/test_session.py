"""Tests of sessions: the order of events, cancelling, failures, boundaries, invalid prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dflash_ggml.session as package
from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.errors import ConfigError, ContextOverflowError
from dflash_ggml.session import events
from dflash_ggml.session.events import (
    Begin,
    Finish,
    Progress,
    ReasoningDelta,
    TextDelta,
    ToolCallArgs,
    ToolCallBegin,
    ToolCallEnd,
    Usage,
    merged,
)
from dflash_ggml.session.hooks import Hooks
from dflash_ggml.session.requests import ChatRequest, CompletionRequest
from dflash_ggml.session.session import Session, run_chat, run_completion
from dflash_ggml.session.templates import N_KEPT, Templates
from reference.fake_engine import TOOL_TEMPLATE, FakeEngine, byte_vocabulary

GREEDY = SamplingParams(temperature=0)
USER = {"role": "user", "content": "hello " * 30}


@pytest.fixture
def session() -> Session:
    return Session(FakeEngine(tokenizer=byte_vocabulary(template=TOOL_TEMPLATE)))


def chat(**options: Any) -> ChatRequest:
    return ChatRequest(**{"messages": [USER], "sampling": GREEDY, "max_tokens": 30, **options})


def test_order_of_events(session: Session) -> None:
    session.engine.replies = [
        "why</think>text<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>"
    ]
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}},
    }
    events = list(run_chat(session, chat(tools=(tool,), max_tokens=200)))
    kinds = [type(e) for e in events]
    order = [
        Begin,
        Progress,
        ReasoningDelta,
        TextDelta,
        ToolCallBegin,
        ToolCallArgs,
        ToolCallEnd,
        Usage,
        Finish,
    ]
    assert list(dict.fromkeys(kinds)) == order
    assert sorted(kinds, key=order.index) == kinds and kinds.count(Usage) == kinds.count(Finish) == 1
    begin, usage = events[0], events[-2]
    progress = [e for e in events if isinstance(e, Progress)]
    assert progress[-1].done == progress[-1].total == begin.prompt_n - begin.cached_n
    assert [p.done for p in progress] == sorted({p.done for p in progress})
    assert usage.prompt_n == begin.prompt_n and usage.mode == "auto" and usage.budget == 31
    assert usage.tokens_per_step == pytest.approx(
        usage.predicted_n / usage.steps
    )  # the end counts, the first does not
    assert events[-1] == Finish("tool_calls")


@pytest.mark.parametrize(("cut", "arguments"), [(True, '{"a": "b"'), (False, '{"a": "b"}')])
def test_only_what_the_model_ended_is_completed(session: Session, cut: bool, arguments: str) -> None:
    """The limit behind a value leaves the arguments open; a model that stops there has forgotten the closing tags."""
    reply = "</think><tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>"
    session.engine.replies = [reply + "\n</function>" if cut else reply]
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}},
    }
    limit = len(session.tokenizer.encode(reply)) if cut else 200
    events = list(run_chat(session, chat(tools=(tool,), max_tokens=limit)))
    assert "".join(e.json for e in events if isinstance(e, ToolCallArgs)) == arguments
    assert events[-1] == Finish("length" if cut else "tool_calls")


def test_an_answer_bound_by_a_schema_is_no_call(session: Session) -> None:
    """Even one that looks like a call without its tags; without a schema it is one."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}
    schema = {"type": "object", "properties": {"name": {"const": "f"}, "arguments": {"const": {}}}}
    bound = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for option, kinds in (({}, {ToolCallBegin}), ({"response_format": bound}, {TextDelta})):
        session.engine.replies = ['</think>{"name": "f", "arguments": {}}']
        events = list(run_chat(session, chat(tools=(tool,), max_tokens=60, **option)))
        assert {type(e) for e in events} & {ToolCallBegin, TextDelta} == kinds


def test_thinking_of_chats_that_leave_it_open() -> None:
    """The session's word counts for them, and for no others."""
    engine = FakeEngine(tokenizer=byte_vocabulary(template=TOOL_TEMPLATE))
    for default, option, opens in (
        (None, {}, True),
        (False, {}, False),
        (False, {"enable_thinking": True}, True),
        (False, {"chat_template_kwargs": {"enable_thinking": True}}, True),
        (True, {"enable_thinking": False}, False),
    ):
        session = Session(engine, thinking=default)
        assert session.can_switch_thinking
        assert (session.prepare(chat(**option)).reasoning == "open") is opens
    no_switch = TOOL_TEMPLATE.replace("enable_thinking", "nothing")
    assert not Session(FakeEngine(tokenizer=byte_vocabulary(template=no_switch))).can_switch_thinking
    assert not Session(FakeEngine(tokenizer=byte_vocabulary(template=""))).can_switch_thinking


def test_what_chats_leave_open_is_as_the_session_has_it() -> None:
    """Variables of the template one by one, and whether thoughts are set apart."""
    template = "{{ a }}{{ b }}{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    engine = FakeEngine(tokenizer=byte_vocabulary(template=template), replies=["Hm.</think>Yes"] * 3)
    session = Session(engine, variables={"a": 1, "b": 2}, split_reasoning=False)  # type: ignore[arg-type]
    ask: Any = {"messages": [{"role": "user", "content": "x"}]}
    assert session.prepare(chat(**ask)).text.startswith("12x")
    assert session.prepare(chat(**ask, chat_template_kwargs={"b": 3})).text.startswith("13x")
    for split, kinds in ((None, {TextDelta}), (False, {TextDelta}), (True, {TextDelta, ReasoningDelta})):
        found = {type(event) for event in run_chat(session, chat(**ask, split_reasoning=split))}
        assert found & {TextDelta, ReasoningDelta} == kinds
    with pytest.raises(ConfigError, match=r"chat_template_kwargs.messages"):
        Session(engine, variables={"messages": 1})  # type: ignore[arg-type]


def test_variables_of_a_template_are_not_the_requests_own(session: Session) -> None:
    for given, words in (
        ({"messages": []}, r"^chat_template_kwargs\.messages: "),
        ({"tools": []}, r"^chat_template_kwargs\.tools: "),
        ({"self": 1}, r"^chat_template_kwargs\.self: "),
        ({"a b": 1}, r"^chat_template_kwargs: 'a b' is not a name"),
        (
            {"continue_final_message": 1},
            r"^chat_template_kwargs\.continue_final_message: must be true or false",
        ),
        ({"add_generation_prompt": None}, r"^chat_template_kwargs\.add_generation_prompt: must be"),
        ({"bos_token": {}, "raise_exception": 1, "range": 2, "__x": 3}, None),
    ):
        if words is None:
            session.prepare(chat(chat_template_kwargs=given))
        else:
            with pytest.raises(ConfigError, match=words):
                session.prepare(chat(chat_template_kwargs=given))
    open_turn = session.prepare(chat()).text
    closed = session.prepare(chat(chat_template_kwargs={"add_generation_prompt": False})).text
    assert open_turn.startswith(closed) and open_turn != closed


def test_stop_string_is_named(session: Session) -> None:
    session.engine.replies = ["</think>a STOP b"]
    *_, finish = run_chat(session, chat(stop=("zzz", "STOP")))
    assert finish == Finish("stop", "STOP")


def test_cancelling_between_steps(session: Session) -> None:
    answers = iter([False] * 9)
    events = list(run_chat(session, chat(), should_stop=lambda: next(answers, True)))
    assert isinstance(events[-2], Usage) and events[-1] == Finish("cancelled")
    assert 0 < events[-2].predicted_n < 30


def test_cancelling_during_prefill(session: Session) -> None:
    answers = iter([False])
    events = list(run_chat(session, chat(), should_stop=lambda: next(answers, True)))
    assert events[-1] == Finish("cancelled") and events[-2].predicted_n == 0
    assert 0 < len(session.engine.tokens) < events[0].prompt_n
    # what was prefilled is still good
    second = list(run_chat(session, chat()))
    assert second[0].cached_n == len(session.engine.tokens[: second[0].cached_n]) > 0


def test_closing_the_iterator(session: Session) -> None:
    events = run_chat(session, chat())
    for event in events:
        if isinstance(event, ReasoningDelta):
            break
    events.close()
    assert list(run_chat(session, chat()))[-1].reason == "length"


def test_a_failing_callback_leaves_the_session_usable(session: Session) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("mine")

    expected = list(run_chat(session, chat(max_tokens=5)))[2:-2]
    for options in ({"logits_processor": (fail,)}, {"on_step": fail}, {"stopping_criteria": (fail,)}):
        with pytest.raises(RuntimeError, match="mine"):
            list(run_chat(session, chat(), hooks=Hooks(**options)))
        again = list(run_chat(session, chat(max_tokens=5)))
        assert [e for e in again if isinstance(e, (ReasoningDelta, TextDelta))] == [
            e for e in expected if isinstance(e, (ReasoningDelta, TextDelta))
        ]


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (
            chat(messages=[{"role": "user", "content": "x" * 2000}]),
            ContextOverflowError,
            "exceed context window of 1024",
        ),
        (chat(messages=[]), ConfigError, "messages"),
        (chat(sampling=SamplingParams(top_p=3)), ConfigError, "top_p"),
        (chat(stop=("",)), ConfigError, "stop string"),
        (CompletionRequest(prompt=""), ConfigError, "prompt"),
        (CompletionRequest(prompt=[1, 2], suffix="x"), ConfigError, "suffix"),
        (CompletionRequest(prompt=[10_000]), ConfigError, "token id 10000"),
    ],
)
def test_bad_requests_fail_before_the_first_event_or_are_refused(
    session: Session, request_: Any, error: type[Exception], words: str
) -> None:
    run: Any = run_chat if isinstance(request_, ChatRequest) else run_completion
    with pytest.raises(error, match=words):
        list(run(session, request_))
    assert list(run_chat(session, chat()))[-1].reason == "length"


def test_without_a_template(session: Session) -> None:
    bare = Session(FakeEngine(tokenizer=byte_vocabulary(template="")))
    with pytest.raises(ConfigError, match="no chat template"):
        list(run_chat(bare, chat()))
    given = chat(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert list(run_chat(bare, given))[-1].reason == "length"


def test_a_prompt_beyond_the_trained_length_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = Session(FakeEngine(config=EngineConfig(Path("toy.gguf"), n_ctx=4096)))  # type: ignore[arg-type]
    trained = session.engine.params.n_ctx_train
    for n in (trained, trained + 1, trained + 2):
        session.prepare(CompletionRequest(prompt=[1] * n))
    message = f"a prompt of {trained + 1} tokens: toy.gguf was trained for {trained}, "
    assert [m.startswith(message) for m in caplog.messages] == [True]


def test_templates_of_requests_are_kept_until_others_push_them_out() -> None:
    templates = Templates(byte_vocabulary())
    sources = [f"{{{{ messages }}}}{i}" for i in range(N_KEPT)]
    first, second, *_ = [templates.of(source)[0] for source in sources]
    assert templates.of(sources[0])[0] is first
    templates.of("one more")
    assert templates.of(sources[0])[0] is first  # used last but one
    assert templates.of(sources[1])[0] is not second


def test_boundaries_are_where_messages_start(session: Session) -> None:
    request = chat(messages=[{"role": "system", "content": "s"}, USER])
    prepared = session.prepare(request)
    ids, marks = prepared.ids, prepared.boundaries
    assert list(ids) == session.tokenizer.encode(prepared.text)
    assert [session.tokenizer.decode([ids[i]], special=True) for i in marks] == ["<|im_start|>"] * 3
    assert session.prepare(chat(template="{{ messages[0].content }}")).boundaries == ()
    assert session.count_tokens(request) == len(ids)


def test_continuing_an_answer(session: Session) -> None:
    messages = [USER, {"role": "assistant", "content": "The answer"}]
    prompt = session.prepare(chat(messages=messages, continue_final_message=True)).text
    assert prompt.endswith("<|im_start|>assistant\nThe answer")


def test_plain_decoding_without_a_draft() -> None:
    session = Session(
        FakeEngine(config=EngineConfig(model="toy.gguf", n_ctx=256, n_batch=8), has_draft=False)
    )
    usage = list(run_completion(session, CompletionRequest(prompt="abc", sampling=GREEDY, max_tokens=9)))[-2]
    assert (usage.mode, usage.budget, usage.draft_n, usage.steps, usage.tokens_per_step) == (
        "plain",
        0,
        0,
        8,
        1.0,
    )


@pytest.mark.parametrize(
    ("options", "shown"),
    [({}, ("auto", 31)), ({"budget": 7}, ("auto", 7)), ({"mode": "plain"}, ("plain", 0))],
)
def test_an_answer_that_no_step_followed_names_the_planned_mode(
    session: Session, options: dict[str, Any], shown: tuple[str, int]
) -> None:
    *_, usage, _ = run_chat(session, chat(max_tokens=1, **options))
    assert usage.steps == 0 and (usage.mode, usage.budget) == shown


def test_fill_in_the_middle(session: Session) -> None:
    marks = {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3}
    session.tokenizer.id_of = lambda text: marks.get(text)  # type: ignore[method-assign]
    ids = session.prepare(CompletionRequest(prompt="a", suffix="b")).ids
    assert ids == (1, 97, 2, 98, 3)
    ids = session.prepare(CompletionRequest(prompt="a", suffix="b", suffix_first=True)).ids
    assert ids == (2, 98, 1, 97, 3)


def test_merged_deltas() -> None:
    events = [TextDelta("a"), TextDelta("b"), ReasoningDelta("c"), ToolCallArgs(0, "{"), ToolCallArgs(0, "}")]
    assert merged(events) == [TextDelta("ab"), ReasoningDelta("c"), ToolCallArgs(0, "{}")]
    assert merged([ToolCallArgs(0, "{"), ToolCallArgs(1, "}")]) == [
        ToolCallArgs(0, "{"),
        ToolCallArgs(1, "}"),
    ]


def test_what_the_package_offers() -> None:
    offered = (package.ChatRequest, package.CompletionRequest, package.Session, package.run_chat)
    assert all(callable(name) for name in (*offered, package.run_completion))
    assert {"ReasoningDelta", "TextDelta", "ToolCallBegin", "StepReport", "Finish"} <= set(events.__all__)
