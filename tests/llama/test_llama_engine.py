"""Tests of Llama on the real engine with the embedded pair, for what the toy engine cannot show. About 15 s."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.errors import ConfigError, DeviceError, DflashError, ModelFileError
from dflash_ggml.llama.cache import LlamaRAMCache
from dflash_ggml.llama.llama import Llama
from dflash_ggml.llama.speculative import LlamaPromptLookupDecoding
from dflash_ggml.llama.tokenizer import LlamaTokenizer
from dflash_ggml.session.events import Begin
from dflash_ggml.session.requests import ChatRequest
from dflash_ggml.session.session import run_chat

PROMPT = "def fibonacci(n):\n"
# float32 throughout, so that outputs can be compared; one thread, so that a busy machine does not slow the tests down
EXACT: dict[str, Any] = {"type_k": 0, "type_v": 0, "n_threads": 1, "budget": 12, "verbose": False}
CODE = "import numpy as np\n\n\ndef softmax(x, axis=-1):\n"


@pytest.fixture(scope="module")
def llm(f32_target: Path, f32_draft: Path) -> Iterator[Llama]:
    with Llama(
        str(f32_target), draft_model=str(f32_draft), n_ctx=1024, verbose=False, type_k=0, type_v=0
    ) as model:
        yield model


def text(llm: Llama, prompt: Any = PROMPT, **options: Any) -> str:
    return llm(prompt, **{"max_tokens": 24, "temperature": 0, **options})["choices"][0]["text"]


def test_it_speculates(llm: Llama) -> None:
    out = llm(PROMPT, max_tokens=60, temperature=0, mode="tree")
    timings = out["timings"]
    assert timings["mode"] == "tree" and timings["tokens_per_step"] > 1.5
    assert timings["steps"] < out["usage"]["completion_tokens"] == 60


def test_auto_reports_what_it_chose(llm: Llama) -> None:
    timings = llm(PROMPT, max_tokens=60, temperature=0)["timings"]
    uses = timings["widths"]
    assert timings["mode"] == "auto" and [use["nodes"] for use in uses] == sorted(u["nodes"] for u in uses)
    assert sum(use["steps"] for use in uses) == timings["steps"]
    assert sum(use["steps"] * use["nodes"] for use in uses) == timings["draft_n"]
    assert all(use["step_ms"] > 0 for use in uses) and uses[0]["predicted_ms"] is not None


def test_the_budget_is_what_a_step_could_offer(llm: Llama) -> None:
    for mode, budget in (("plain", 0), ("chain", 15), ("tree", 31)):
        timings = llm(PROMPT, max_tokens=8, temperature=0, mode=mode)["timings"]
        assert (timings["mode"], timings["budget"]) == (mode, budget)
        assert timings["draft_n"] == budget * timings["steps"]


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 0.9, "seed": 4}, {"temperature": 0, "stop": "array"}]
)
def test_speculation_changes_nothing(llm: Llama, options: dict[str, Any]) -> None:
    plain = text(llm, CODE, mode="plain", **options)
    assert plain and ("stop" not in options or plain + options["stop"] in text(llm, CODE, mode="plain"))
    assert text(llm, CODE, **options) == text(llm, CODE, mode="chain", **options) == plain
    chunks = llm(CODE, max_tokens=24, stream=True, **options)
    assert "".join(c["choices"][0]["text"] for c in chunks) == plain


def test_grammar_holds_under_speculation(llm: Llama) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"enum": ["fib", "sum"]},
            "args": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["name", "args"],
        "additionalProperties": False,
    }
    for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
        answers = [
            llm.create_chat_completion(
                [{"role": "user", "content": "hi"}],
                max_tokens=200,
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
                mode=mode,
                **options,
            )["choices"][0]
            for mode in ("plain", "tree")
        ]
        assert answers[0]["message"] == answers[1]["message"] and answers[0]["finish_reason"] == "stop"
        jsonschema.validate(json.loads(answers[0]["message"]["content"]), schema)


def test_a_forced_tool_without_a_template_for_tools(llm: Llama) -> None:
    parameters = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "fib", "parameters": parameters}}
    choice = llm.create_chat_completion(
        [{"role": "user", "content": "call it"}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "fib"}},
        max_tokens=150,
        seed=1,
    )["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    jsonschema.validate(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]), parameters)


def test_logprobs_do_not_depend_on_the_way_of_decoding(llm: Llama) -> None:
    tree, plain = (
        llm(PROMPT, max_tokens=20, temperature=0, logprobs=2, mode=mode)["choices"][0]["logprobs"]
        for mode in ("tree", "plain")
    )
    assert tree["tokens"] == plain["tokens"] and tree["text_offset"] == plain["text_offset"]
    np.testing.assert_allclose(tree["token_logprobs"], plain["token_logprobs"], atol=1e-3)
    whole = llm(PROMPT + "".join(tree["tokens"]), max_tokens=1, temperature=0, logprobs=0, echo=True)
    echoed = whole["choices"][0]["logprobs"]
    n = len(llm.tokenize(PROMPT.encode()))
    np.testing.assert_allclose(echoed["token_logprobs"][n : n + 20], tree["token_logprobs"], atol=1e-3)


def chat(llm: Llama, messages: list[dict[str, str]]) -> tuple[str, Begin]:
    # the pair ends most answers before their first word, which would leave nothing to compare
    ends = llm.session.tokenizer.eog_ids
    greedy = SamplingParams(temperature=0, logit_bias=dict.fromkeys(ends, float("-inf")))
    request = ChatRequest(messages=messages, sampling=greedy, max_tokens=24)
    events = list(run_chat(llm.session, request))
    words = "".join(getattr(e, "text", "") for e in events)
    return words, next(e for e in events if isinstance(e, Begin))


def test_cached_prefixes_change_nothing(llm: Llama, f32_target: Path, f32_draft: Path) -> None:
    options: dict[str, Any] = {"n_ctx": 1024, "prefix_cache_bytes": 0, **EXACT}
    logs: dict[str, list[dict[str, str]]] = {name: [] for name in "ab"}
    with Llama(str(f32_target), draft_model=str(f32_draft), **options) as bare:
        for turn, name in enumerate("aabab"):
            log = logs[name]
            log.append({"role": "user", "content": f"# task {name}{turn}\n" + CODE * (2 + turn % 2)})
            answer, begin = chat(llm, log)
            bare.session.scheduler.run_on_slot(lambda slot: slot.reset())
            assert chat(bare, log)[0] == answer != ""
            if len(log) > 1:
                new = len(llm.tokenize(log[-1]["content"].encode())) + len(
                    llm.tokenize(log[-2]["content"].encode())
                )
                assert begin.prompt_n - begin.cached_n <= new + 40
            log.append({"role": "assistant", "content": answer})


def test_states_survive_another_generation(llm: Llama) -> None:
    llm.reset()
    llm.eval(llm.tokenize(CODE.encode()))
    state = pickle.loads(pickle.dumps(llm.save_state()))
    expected = [t for t, _ in zip(llm.generate([], temp=0, reset=False), range(8))]
    text(llm)
    llm.load_state(state)
    assert [t for t, _ in zip(llm.generate([], temp=0, reset=False), range(8))] == expected
    assert expected == [t for t, _ in zip(llm.generate(llm.tokenize(CODE.encode()), temp=0), range(8))]
    llm.set_cache(LlamaRAMCache())
    assert text(llm, CODE) == text(llm, CODE)
    llm.set_cache(None)


def test_a_call_ends_an_open_stream_and_finds_the_state_whole(llm: Llama) -> None:
    llm.reset()
    llm.eval(llm.tokenize(CODE.encode()))
    state, expected = llm.save_state(), llm.sample(temp=0)
    for call in (lambda: llm.load_state(state), llm.save_state, lambda: llm.eval([])):
        stream = llm(PROMPT, max_tokens=40, temperature=0, stream=True)
        next(stream)
        call()
        assert llm.sample(temp=0) == expected
        with pytest.raises(DflashError, match="cut off"):
            next(stream)


def test_generate_takes_tokens_in(llm: Llama) -> None:
    ids = llm.tokenize(PROMPT.encode())
    stream = llm.generate(ids, temp=0)
    taken = [next(stream) for _ in range(4)]
    sent = llm.tokenize(b"\n\nclass Stack:\n")
    after = [stream.send(sent), next(stream), next(stream)]
    again = [t for t, _ in zip(llm.generate([*ids, *taken, *sent], temp=0), range(3))]
    assert after == again


def test_eval_and_sample(llm: Llama) -> None:
    llm.reset()
    llm.eval(llm.tokenize(PROMPT.encode()))
    tokens = []
    for _ in range(6):
        tokens.append(llm.sample(temp=0))
        llm.eval(tokens[-1:])
    assert llm.detokenize(tokens).decode() == text(llm, max_tokens=6)


def test_the_draft_beside_the_target(demo_target: Path, demo_draft: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    target.symlink_to(demo_target)
    with (
        pytest.warns(UserWarning, match="no DFlash draft beside") as caught,
        Llama(str(target), n_ctx=256, n_threads=1, verbose=False) as llm,
    ):
        assert caught[0].filename == __file__  # the caller's line, not ours
        assert not llm.engine.has_draft and text(llm, max_tokens=3)
    draft = tmp_path / "model-DFlash-q8_0.gguf"
    draft.symlink_to(demo_draft)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Llama(str(target), n_ctx=256, n_threads=1, verbose=False) as llm:
            assert llm.engine.has_draft
        with Llama(str(target), n_ctx=256, n_threads=1, verbose=False, draft_model=False) as llm:
            assert not llm.engine.has_draft
    draft.unlink()
    draft.write_bytes(b"GGUFnonsense")
    with (
        pytest.warns(UserWarning, match="decoding without a draft model") as caught,
        Llama(str(target), n_ctx=256, n_threads=1, verbose=False) as llm,
    ):
        assert caught[0].filename == __file__
        assert not llm.engine.has_draft
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ConfigError, match=f"mode tree needs a draft: .*{draft.name}.*draft_model=PATH"):
            Llama(str(target), mode="tree", verbose=False)
        with pytest.raises(ConfigError, match="^n_ctx: -5"):
            Llama(str(target), n_ctx=-5, verbose=False)
    with pytest.raises(ModelFileError):
        Llama(str(target), draft_model=str(draft), verbose=False)
    with pytest.raises(ConfigError, match="needs a draft"):
        Llama(str(target), draft_model=False, mode="tree", verbose=False)
    with pytest.raises(ConfigError, match="nowhere"):
        Llama(str(target), draft_model=tmp_path / "nowhere", verbose=False)
    draft.unlink()
    with pytest.warns(
        UserWarning, match="a function does not draft here.*decoding without a draft model"
    ) as caught:
        Llama(str(target), draft_model=lambda ids: ids, n_ctx=256, n_threads=1, verbose=False).close()
    assert len(caught) == 1 and caught[0].filename == __file__
    draft.symlink_to(demo_draft)
    with pytest.warns(
        UserWarning, match="a function does not draft here.*drafting with model-DFlash"
    ) as caught:
        Llama(str(target), draft_model=lambda ids: ids, n_ctx=256, n_threads=1, verbose=False).close()
    assert len(caught) == 1


def test_prompt_lookup_is_done_by_the_engine(demo_target: Path, demo_draft: Path, tmp_path: Path) -> None:
    """Prompt lookup replaces it, with as many tokens a step; the draft beside the target is ignored, without a warning."""
    target = tmp_path / "model.gguf"
    target.symlink_to(demo_target)
    (tmp_path / "model-DFlash-q8_0.gguf").symlink_to(demo_draft)
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=6)
    options: Any = {"n_ctx": 256, "n_threads": 1, "verbose": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Llama(str(target), draft_model=lookup, mode="tree", **options) as llm:
            assert llm.engine.sources == ("suffix",) and llm.engine.config.budget == 6
            prompt = "one two three four five six\n" * 6
            llm(prompt, max_tokens=24, temperature=0)
            assert llm.session.slots.all[0].slot.sequence.statistics.accepted > 6
        with Llama(str(target), spec=("suffix",), **options) as llm:
            assert llm.engine.sources == ("suffix",)
        with Llama(str(target), draft_model=False, **options) as llm:
            assert llm.engine.sources == ()
        with Llama(str(target), **options) as llm:
            assert llm.engine.sources == ("dflash", "suffix")


def test_a_found_draft_that_fails_on_the_device(
    demo_target: Path, demo_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning, and plain decoding; a target's own error is reported once, without mention of a draft."""

    def start(*args: object, **options: object) -> None:
        raise DeviceError("no memory for the draft")

    monkeypatch.setattr("dflash_ggml.drafts.dflash.source.DFlashSource.start", start)
    target = tmp_path / "model.gguf"
    target.symlink_to(demo_target)
    (tmp_path / "dflash.gguf").symlink_to(demo_draft)
    with (
        pytest.warns(UserWarning, match="decoding without a draft model: no memory for the draft"),
        Llama(str(target), n_ctx=256, n_threads=1, verbose=False) as llm,
    ):
        assert not llm.engine.has_draft
    with pytest.raises(DeviceError):
        Llama(str(target), draft_model=str(demo_draft), n_ctx=256, n_threads=1, verbose=False)


def test_vocabulary_only(demo_target: Path) -> None:
    tokenizer = LlamaTokenizer.from_ggml_file(str(demo_target))
    assert tokenizer.decode(tokenizer.encode("Hello, wörld!")) == "Hello, wörld!"
    llm = Llama(str(demo_target), vocab_only=True, verbose=False)
    assert llm.n_vocab() == 8192 and llm.token_eos() == 8188
    with pytest.raises(ConfigError, match="vocab_only"):
        llm("x")


def test_pickle_opens_the_model_again(demo_target: Path, demo_draft: Path) -> None:
    with Llama(
        str(demo_target), draft_model=str(demo_draft), n_ctx=256, n_threads=1, verbose=False, seed=5
    ) as llm:
        expected = text(llm)
        data = pickle.dumps(llm)
    with pickle.loads(data) as again:
        assert again.n_ctx() == 256 and again.engine.has_draft and text(again) == expected
