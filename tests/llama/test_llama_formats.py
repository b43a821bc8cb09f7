"""Tests of chat formats by name, and of formatters and handlers as llama-cpp-python's users write them. Toy engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_ggml.errors import ConfigError
from dflash_ggml.llama import chat_from_text
from dflash_ggml.llama.chat_handlers import (
    VISION,
    LlamaChatCompletionHandlerNotFoundException,
    LlamaChatCompletionHandlerRegistry,
    get_chat_completion_handler,
    guess_chat_format_from_gguf_metadata,
    register_chat_format,
)
from dflash_ggml.llama.formatter import (
    FUNCTION_NAMES,
    ChatFormatterResponse,
    Jinja2ChatFormatter,
    chat_formatter_to_chat_completion_handler,
    formatted,
    hf_tokenizer_config_to_chat_completion_handler,
    hf_tokenizer_config_to_chat_formatter,
)
from dflash_ggml.llama.lenient import usable_messages
from dflash_ggml.llama.requests import tool_choice_of
from dflash_ggml.text.chat_formats import FORMATS
from dflash_ggml.text.grammar import GrammarCompiler
from dflash_ggml.text.template import normalise_messages
from dflash_ggml.text.tools import NamedTool
from reference.fake_engine import TOOL_TEMPLATE, byte_vocabulary
from reference.toy_llama import ToyLlama

TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]
# what the models' makers published for TALK
PUBLISHED = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
    "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n",
    "llama-2": "[INST] <<SYS>>\nS\n<</SYS>>\n\none [/INST] two </s><s>[INST] three [/INST]",
    "llama-3": "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "one<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\ntwo<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nthree<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral-instruct": "[INST] S\n\none [/INST]two</s>[INST] three [/INST]",
    "gemma": "<start_of_turn>user\nS\n\none<end_of_turn>\n<start_of_turn>model\ntwo<end_of_turn>\n<start_of_turn>user\n"
    "three<end_of_turn>\n<start_of_turn>model\n",
    "zephyr": "<|system|>\nS</s>\n<|user|>\none</s>\n<|assistant|>\ntwo</s>\n<|user|>\nthree</s>\n<|assistant|>\n",
    "vicuna": "S USER: one ASSISTANT: two</s>USER: three ASSISTANT:",
    "alpaca": "S\n\n### Instruction:\none\n\n### Response:\ntwo\n\n### Instruction:\nthree\n\n### Response:\n",
    "phind": "### System Prompt\nS\n\n### User Message\none\n\n### Assistant\ntwo\n\n### User Message\nthree\n\n"
    "### Assistant\n",
    "openchat": "S<|end_of_turn|>GPT4 Correct User: one<|end_of_turn|>GPT4 Correct Assistant: two<|end_of_turn|>"
    "GPT4 Correct User: three<|end_of_turn|>GPT4 Correct Assistant:",
    "saiga": "<s>system\nS</s><s>user\none</s><s>bot\ntwo</s><s>user\nthree</s><s>bot\n",
}
# all that llama-cpp-python 0.3.36 registers
NAMES = """llama-2 llama-3 alpaca qwen vicuna oasst_llama baichuan-2 baichuan openbuddy redpajama-incite snoozy phind
    intel open-orca mistrallite zephyr pygmalion chatml mistral-instruct chatglm3 openchat saiga gemma
    functionary functionary-v1 functionary-v2 chatml-function-calling"""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("toy") / "toy.gguf"
    path.touch()
    return str(path)


def ask(llm: ToyLlama, reply: str, **options: Any) -> tuple[str, str]:
    """(prompt, content) of an answer to TALK."""
    llm.toy.replies = [reply]
    seen: list[Any] = []

    def watch(ids: Any, scores: Any) -> Any:
        seen.append(ids.tolist())
        return scores

    out: Any = llm.create_chat_completion(
        TALK, max_tokens=60, temperature=0, logits_processor=watch, **options
    )
    prompt = llm.detokenize(seen[0], special=True).decode()
    return prompt, out["choices"][0]["message"]["content"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_prompts(name: str) -> None:
    assert formatted(FORMATS[name], TALK).prompt == PUBLISHED[name]


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_shows_each_message_once_and_opens_the_answer(name: str) -> None:
    form = FORMATS[name]
    made = formatted(form, TALK)
    positions = [made.prompt.index(text) for text in ("S", "one", "two", "three")]
    assert positions == sorted(positions) and made.prompt.endswith(form.opening)
    named = FUNCTION_NAMES[{"vicuna": "format"}.get(name, "format_" + _snake(name))]
    assert named(messages=TALK) == made
    odd = [
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {"role": "narrator", "content": "x"},
    ]
    assert formatted(form, odd).prompt.count("one") == 1 and made.stop == list(form.stop)


def _snake(name: str) -> str:
    known = {"llama-2": "llama2", "llama-3": "llama3", "baichuan-2": "baichuan2"}
    return known.get(name, name.replace("-", "_"))


@pytest.mark.parametrize("name", NAMES.split())
@pytest.mark.filterwarnings("ignore:chat_format")
def test_every_name_answers(model_path: str, name: str) -> None:
    llm = ToyLlama(model_path, chat_format=name)
    prompt, content = ask(llm, "fine")
    assert content == "fine" and prompt.count("three") == 1
    if name in PUBLISHED:
        assert prompt == PUBLISHED[name]


def test_the_formats_stop_at_their_own_marks(model_path: str) -> None:
    _, content = ask(ToyLlama(model_path, chat_format="zephyr"), "good</s>\n<|user|>\nmore", stop="X")
    assert content == "good"
    _, content = ask(ToyLlama(model_path, chat_format="zephyr"), "gXood</s>", stop="X")
    assert content == "g"


def test_functionary_uses_the_models_own_tool_calls_with_a_warning(model_path: str) -> None:
    llm = ToyLlama(model_path, chat_format="functionary-v2")
    with pytest.warns(UserWarning, match="functionary-v2.*the model's own template") as caught:
        prompt, _ = ask(llm, "fine")
    assert len(caught) == 1 and prompt == ask(ToyLlama(model_path), "fine")[0]


def test_function_calling_without_a_template_for_tools(model_path: str) -> None:
    llm = ToyLlama(model_path, chat_format="chatml-function-calling", call_tags=False)
    llm.toy.replies = ['<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>']
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    out: Any = llm.create_chat_completion(TALK, tools=[tool], tool_choice="auto", temperature=0)
    assert out["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"


# --- formatters


def test_a_jinja_formatter_and_its_handler(model_path: str) -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}bot: {% endif %}"
    )
    formatter = Jinja2ChatFormatter(source, eos_token="<e>", bos_token="<b>")
    made = formatter(messages=TALK[1:2], tools=[])
    assert (made.prompt, made.stop, made.added_special) == ("<b>user: one<e>bot: ", ["<e>"], True)
    assert made.stopping_criteria is None
    llm = ToyLlama(model_path, chat_handler=formatter.to_chat_handler())
    prompt, content = ask(llm, "well<e>more")
    assert prompt == "<b>system: S<e>user: one<e>assistant: two<e>user: three<e>bot: " and content == "well"

    stops = Jinja2ChatFormatter(source, "<e>", "<b>", add_generation_prompt=False, stop_token_ids=[ord("a")])
    made = stops(messages=TALK[:1])
    assert made.prompt == "<b>system: S<e>"
    assert made.stopping_criteria is not None and made.stopping_criteria([1, ord("a")], None)  # type: ignore[arg-type]
    prompt, content = ask(ToyLlama(model_path, chat_handler=stops.to_chat_handler()), "wape")
    assert prompt.endswith("user: three<e>") and content == "wa"  # asked before the next token is taken

    # as llama-cpp-python's own code makes them: the template itself is used, with its tools and its way of calling them
    llm = ToyLlama(model_path)
    usual = Jinja2ChatFormatter(TOOL_TEMPLATE, "<|im_end|>", "", stop_token_ids=[llm.token_eos()])
    llm = ToyLlama(model_path, chat_handler=usual.to_chat_handler())
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    prompt, _ = ask(llm, "no</think>\n\nfine", tools=[tool])
    assert prompt.startswith('<|im_start|>system\n{"type": "function"') and prompt.endswith("<think>\n")

    with pytest.raises(ConfigError, match="does not compile"):
        Jinja2ChatFormatter("{% if %}", "", "")


def test_a_formatter_of_ones_own(model_path: str) -> None:
    @register_chat_format("shouting")
    def shout(messages: Any, **kwargs: Any) -> ChatFormatterResponse:
        return ChatFormatterResponse(" ".join(m["content"].upper() for m in messages) + "?", stop="!")

    try:
        with pytest.raises(ValueError, match="already registered"):
            register_chat_format("shouting")(shout)
        llm = ToyLlama(model_path, chat_format="shouting")
        assert ask(llm, "<think>\nso\n</think>\n\nYES! NO") == ("S ONE TWO THREE?", "YES")
        llm.toy.replies = ["YES! NO"]
        chunks: Any = llm.create_chat_completion(TALK, stream=True, temperature=0)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "YES"
    finally:
        LlamaChatCompletionHandlerRegistry().unregister_chat_handler("shouting")
    with pytest.raises(LlamaChatCompletionHandlerNotFoundException, match="Invalid chat handler: shouting"):
        get_chat_completion_handler("shouting")


def test_a_formatter_may_read_nonstandard_messages(model_path: str) -> None:
    def odd(messages: Any, **kwargs: Any) -> ChatFormatterResponse:
        return ChatFormatterResponse("|".join(m["parts"][0]["v"] for m in messages))

    llm = ToyLlama(model_path, chat_handler=chat_formatter_to_chat_completion_handler(odd))
    llm.toy.replies = ["ok"]
    out: Any = llm.create_chat_completion([{"who": "me", "parts": [{"v": "hi"}]}], temperature=0)
    assert out["choices"][0]["message"]["content"] == "ok" and out["usage"]["prompt_tokens"] == 2


def test_a_formatter_from_a_tokenizer_config(model_path: str) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    made = hf_tokenizer_config_to_chat_formatter(config)(messages=TALK[1:2])
    assert (made.prompt, made.stop) == ("<s>[user]one[assistant]", ["</s>", "<s>"])
    knows = {**config, "chat_template": template + "{% if add_generation_prompt %}[bot]{% endif %}"}
    assert hf_tokenizer_config_to_chat_formatter(knows)(messages=TALK[1:2]).prompt == "<s>[user]one[bot]"
    without = hf_tokenizer_config_to_chat_formatter(knows, add_generation_prompt=False)
    assert without(messages=TALK[1:2]).prompt == "<s>[user]one"
    llm = ToyLlama(model_path, chat_handler=hf_tokenizer_config_to_chat_completion_handler(knows))
    assert ask(llm, "a</s>b")[1] == "a"
    with pytest.raises(ConfigError, match="tokenizer_config: 'eos_token' is missing"):
        hf_tokenizer_config_to_chat_formatter({"chat_template": "x", "bos_token": ""})


def test_a_handler_of_ones_own_over_a_text_completion(model_path: str) -> None:
    """Written as those are that import llama-cpp-python's helpers."""
    convert = chat_from_text.NAMES["_convert_completion_to_chat"]

    def handler(*, llama: Any, messages: Any, stream: bool = False, **kwargs: Any) -> Any:
        rows = chat_from_text.mapped_roles(messages, {"user": "U", "assistant": "A"})
        prompt = chat_from_text.first_system_message(messages) + "".join(f"{r}:{t}" for r, t in rows)
        grammar = chat_from_text.grammar_for_response_format({"type": "text"})
        return convert(
            llama.create_completion(prompt, stream=stream, logprobs=1, grammar=grammar, max_tokens=9),
            stream=stream,
        )

    llm = ToyLlama(model_path, chat_handler=handler)
    llm.toy.replies = ["well", "well"]
    out: Any = llm.create_chat_completion(TALK)
    assert (out["object"], out["usage"]["prompt_tokens"]) == (
        "chat.completion",
        len(llm.tokenize(b"SU:oneA:twoU:three")),
    )
    (choice,) = out["choices"]
    assert "".join(e["token"] for e in choice["logprobs"]["content"]) == choice["message"]["content"] != ""
    chunks: Any = list(llm.create_chat_completion(TALK, stream=True))
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0] == {"role": "assistant"} and deltas[-1] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] and chunks[0]["object"] == "chat.completion.chunk"


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a": [1, -2.5e3, {}], "b": "x\\n\\u00e9"}', True),
        ('{\n  "a": true,\n  "b": null\n}', True),
        ("[]", True),
        ('{"a":   1}', False),
        ('{"a" 1}', False),
        ("01", False),
        ("123456789012345678", False),
    ],
)
def test_json_as_gbnf(text: str, fits: bool) -> None:
    pytest.importorskip("llguidance")
    tokenizer = byte_vocabulary()
    processor = GrammarCompiler(tokenizer, tokenizer.n_vocab).processor(
        chat_from_text.grammar_for_json().spec, 0
    )
    ids, row = tokenizer.encode(text), np.zeros(tokenizer.n_vocab, np.float32)
    rows = [processor(np.array(ids[:i], np.int32), row) for i in range(len(ids) + 1)] if fits else []
    assert all(np.isfinite(rows[i][ids[i]]) for i in range(len(rows) - 1))
    if fits:
        assert np.isfinite(rows[-1][list(tokenizer.eog_ids)]).any()
        return
    for i in range(len(ids)):
        if not np.isfinite(processor(np.array(ids[:i], np.int32), row)[ids[i]]):
            return
    raise AssertionError(f"{text} was let through")


def test_guessing_a_format() -> None:
    known = {"tokenizer.chat_template": FORMATS["zephyr"].template}
    assert guess_chat_format_from_gguf_metadata(known) == "zephyr"
    assert guess_chat_format_from_gguf_metadata({"tokenizer.chat_template": "{{ x }}"}) is None
    assert guess_chat_format_from_gguf_metadata({}) is None


def test_the_registry() -> None:
    registry, handler = LlamaChatCompletionHandlerRegistry(), lambda **kwargs: {}
    registry.register_chat_completion_handler("mine", handler)
    try:
        assert LlamaChatCompletionHandlerRegistry().get_chat_completion_handler_by_name("mine") is handler
        with pytest.raises(ValueError, match="overwrite=True"):
            registry.register_chat_completion_handler("mine", handler)
        registry.register_chat_completion_handler("mine", handler, overwrite=True)
    finally:
        registry.unregister_chat_handler("mine")
    with pytest.raises(ValueError, match="no chat handler named 'mine'"):
        registry.unregister_chat_handler("mine")


@pytest.mark.parametrize("name", VISION)
def test_handlers_for_images_name_what_is_unsupported(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no image encoder here"):
        VISION[name](clip_model_path="mmproj.gguf")
    with pytest.raises(ConfigError, match="there is no image encoder here"):
        VISION[name].from_pretrained(repo_id="x", filename="*mmproj*")  # type: ignore[attr-defined]


# --- conversations that others would refuse


@pytest.mark.filterwarnings("ignore:messages.* is read as")
def test_unknown_roles_are_answered(model_path: str) -> None:
    llm = ToyLlama(model_path, chat_format="llama-2")
    llm.toy.replies = ["a"]
    out: Any = llm.create_chat_completion([{"role": "narrator", "content": "x"}], temperature=0)
    assert out["choices"][0]["message"]["content"] == "a"


def test_odd_roles_and_empty_conversations(model_path: str) -> None:
    llm = ToyLlama(model_path)
    llm.toy.replies = ["a", "b"]
    with pytest.warns(UserWarning, match=r"messages\[0\].role '<b>' is read as 'user'") as caught:
        out: Any = llm.create_chat_completion([{"role": "<b>", "content": "x"}], temperature=0)
    assert (
        len(caught) == 1 and caught[0].filename == __file__ and out["choices"][0]["message"]["content"] == "a"
    )
    with pytest.warns(UserWarning, match="messages is empty"):
        out = llm.create_chat_completion([], temperature=0)
    assert out["choices"][0]["message"]["content"] == "b"
    with pytest.raises(ConfigError, match="expected a non-empty list"):
        llm.create_chat_completion("hello")  # type: ignore[arg-type]


def test_images_become_a_line_of_text(model_path: str) -> None:
    llm = ToyLlama(model_path)
    llm.toy.replies = ["a"]
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    talk: Any = [{"role": "user", "content": [{"type": "text", "text": "see "}, picture]}]
    with pytest.warns(UserWarning, match="left out: image") as caught:
        out: Any = llm.create_chat_completion(talk, temperature=0)
    assert len(caught) == 1 and talk[0]["content"][1] is picture
    text = "see [image left out: this model reads text only]"
    same: Any = llm.create_chat_completion([{"role": "user", "content": text}], max_tokens=1)
    assert out["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]


def test_the_fallback_without_a_template_is_chatml(model_path: str) -> None:
    """An empty template is none."""
    llm = ToyLlama(model_path, toy_template="")
    assert llm.chat_format == "chatml" and "chat_template.default" not in llm._chat_handlers
    assert ask(llm, "fine")[0] == PUBLISHED["chatml"]


CUT = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"path": "a.p'}}
CUSTOM = {"id": "1", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [CUT]},
        {"role": "assistant", "content": "x", "tool_calls": [CUSTOM, CUT]},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": "x", "thinking_blocks": [{"type": "thinking", "thinking": "hm"}]},
        {"role": "assistant", "content": "x", "reasoning": "hm"},
        {"role": "user", "content": {"type": "text", "text": "a"}},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, "b"]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        {"role": "narrator", "content": "a"},
    ],
)
@pytest.mark.filterwarnings("ignore:.*left out")
def test_messages_are_read_as_the_server_reads_them(message: dict[str, Any]) -> None:
    pytest.importorskip("sse_starlette")
    from dflash_ggml.server.notes import Notes
    from dflash_ggml.server.openai_chat import Message

    server = Message(**message).plain("messages[0]", Notes())
    assert normalise_messages(usable_messages([message])) == normalise_messages([server])


def test_a_part_that_cannot_be_read_is_named(model_path: str) -> None:
    with pytest.raises(ConfigError, match=r"messages\[0\].content\[1\].text: a string is needed"):
        usable_messages([{"role": "user", "content": ["a", {"type": "text", "text": None}]}])


def test_a_template_that_renders_nothing_is_reported(model_path: str) -> None:
    llm = ToyLlama(model_path, kv_overrides={"tokenizer.chat_template": "{# nothing #}"})
    with pytest.raises(ConfigError, match="messages: the chat template made no prompt of them"):
        llm.create_chat_completion([{"role": "user", "content": "x"}])


def test_options_as_clients_send_them(model_path: str) -> None:
    """A null is an option that was left out, a float without a fraction a whole number."""
    llm = ToyLlama(model_path)
    llm.toy.replies = ["a", "b"]
    talk: Any = [{"role": "user", "content": "x"}]
    whole: Any = {"top_k": 1.0, "seed": 3.0, "mirostat_mode": 0.0}
    nulls: Any = {"top_p": None, "min_p": None, "temperature": None, "repeat_penalty": None}
    answers: Any = [llm.create_chat_completion(talk, **options) for options in (whole, {**nulls, "top_k": 1})]
    assert [a["choices"][0]["message"]["content"] for a in answers] == ["a", "b"]
    with pytest.raises(ConfigError, match="top_k: 1.5 is not a whole number"):
        llm.create_chat_completion(talk, top_k=1.5)  # type: ignore[arg-type]


def test_a_tool_is_named_as_either_api_names_it() -> None:
    for choice in ({"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}):
        assert tool_choice_of(choice) == NamedTool("f")
    with pytest.raises(ConfigError, match="tool_choice"):
        tool_choice_of({"type": "function"})
