"""Tests of Llama against the surface of llama_cpp.Llama: constructor, text completions, tokens, states. Toy engine, 5 s."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_ggml.errors import ConfigError, ContextOverflowError, DflashError
from dflash_ggml.llama.cache import LlamaDiskCache, LlamaRAMCache
from dflash_ggml.llama.state import LogitsProcessorList, MinTokensLogitsProcessor, StoppingCriteriaList
from reference.toy_llama import ToyLlama


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("toy") / "toy.gguf"
    path.touch()
    return str(path)


@pytest.fixture
def llm(model_path: str) -> ToyLlama:
    return ToyLlama(model_path)


def text_of(chunks: Any) -> str:
    return "".join(c["choices"][0]["text"] for c in chunks)


# --- constructor


def test_missing_file() -> None:
    with pytest.raises(ValueError, match="^Model path does not exist: /nowhere/x.gguf$"):
        ToyLlama("/nowhere/x.gguf")


def test_options_without_meaning_warn_once_and_unknown_ones_are_swallowed(model_path: str) -> None:
    with pytest.warns(UserWarning, match="no meaning.*: use_mlock, offload_kqv, numa$") as caught:
        ToyLlama(model_path, numa=True, use_mlock=True, offload_kqv=False, n_parts=-1, f16_kv=True)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ToyLlama(model_path, rope_freq_base=10000.0, rope_freq_scale=1.0, n_parts=-1, flash_attn=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pooling_type": 4}, "pooling_type"),
        ({"n_seq_max": 0}, "n_seq_max: 0 is outside 1..64"),
        ({"n_seq_max": 65}, "n_seq_max: 65 is outside"),
        ({"lora_path": "x"}, "lora_path"),
        ({"rope_freq_base": 1e6}, "rope_freq_base"),
        ({"yarn_orig_ctx": 4096}, "yarn_orig_ctx"),
        ({"type_k": 99}, "99 is not a type of a K/V cache"),
        ({"kv_overrides": {"qwen35.block_count": 3}}, "qwen35.block_count"),
        ({"mode": "fast"}, "mode"),
        ({"chat_format": "llama-99"}, "Invalid chat handler: llama-99"),
    ],
)
def test_what_would_change_the_results_is_refused(model_path: str, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ToyLlama(model_path, **options).create_chat_completion([{"role": "user", "content": "x"}])


def test_attributes_that_others_read(llm: ToyLlama) -> None:
    assert llm.n_ctx() == llm.context_params.n_ctx == llm._n_ctx == 1024
    assert llm.n_vocab() == llm._n_vocab == llm.toy.n_vocab and llm.n_embd() == 64
    assert (llm.token_bos(), llm.token_eos()) == (llm.toy.tokenizer.id_of("<|endoftext|>"), llm._token_eos)
    assert llm.tokenize(b"a") == [97]  # and no text begins with it
    assert llm.detokenize([llm.token_nl()]) == b"\n" and llm.pooling_type() == -1
    assert llm.metadata["tokenizer.ggml.add_bos_token"] == "false"
    assert llm.metadata["qwen35.rope.freq_base"] == "10000000.000000"
    assert llm.metadata["qwen35.block_count"] == "4" and "tokenizer.ggml.tokens" not in llm.metadata
    assert llm.chat_format == "chat_template.default" in llm._chat_handlers
    assert llm.input_ids.dtype == np.intc and len(llm.input_ids) == 1024 and llm._scores_buffer is None
    assert llm._is_hybrid and llm.cache is None and llm.last_n_tokens_size == 64
    assert (llm.lora_path, llm.lora_base, llm.lora_scale, llm.numa) == (None, None, 1.0, False)
    assert (llm.tensor_split, llm.kv_overrides, llm.spm_infill) == (None, None, False)
    assert isinstance(llm.model, int) and isinstance(llm.ctx, int) and llm.model != llm.ctx
    with pytest.raises(AttributeError, match="no libllama"):
        llm._candidates  # noqa: B018


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({}, ("auto", "auto")),
        ({"type_k": 8, "type_v": 2}, ("q8_0", "q4_0")),
        ({"type_k": 30}, ("bf16", "auto")),
        ({"type_k": 0, "type_v": 1}, ("f32", "f16")),
        ({"type_k": 7, "type_v": 6}, ("q5_1", "q5_0")),
        ({"type_v": 3}, ("auto", "q4_1")),
    ],
)
def test_types_of_the_cache_by_ggml_number(
    model_path: str, given: dict[str, int], taken: tuple[str, str]
) -> None:
    config = ToyLlama(model_path, **given).toy.config
    assert (config.type_k, config.type_v) == taken


def test_types_of_a_cache_that_there_are_not(model_path: str) -> None:
    with pytest.warns(UserWarning, match="type_k=20, type_v=None: iq4_nl is not supported, q4_0 is as small"):
        assert ToyLlama(model_path, type_k=20).toy.config.type_k == "q4_0"
    with pytest.raises(
        ConfigError, match=r"type_v: 9 is not a type of a K/V cache; take one of 0 \(f32\), 1"
    ):
        ToyLlama(model_path, type_v=9)


@pytest.mark.parametrize(("given", "runs"), [(None, 2), (0, 2), (-1, 2), (3, 3)])
def test_threads_are_those_that_run(model_path: str, given: int | None, runs: int) -> None:
    llm = ToyLlama(model_path, n_threads=given)
    assert (llm.n_threads, llm.n_threads_batch, llm.context_params.n_threads) == (runs, runs, runs)


# --- text completions


def test_shape_of_a_completion(llm: ToyLlama) -> None:
    out = llm("abc", max_tokens=4, seed=1)
    assert (
        out["id"].startswith("cmpl-")
        and out["object"] == "text_completion"
        and isinstance(out["created"], int)
    )
    assert out["model"] == llm.model_path and llm("abc", max_tokens=1, model="m")["model"] == "m"
    assert set(out) == {"id", "object", "created", "model", "choices", "usage", "timings"}
    (choice,) = out["choices"]
    assert set(choice) == {"text", "index", "logprobs", "finish_reason"}
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "length")
    usage = out["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 4, 7)
    assert (
        out["timings"]["mode"] == "auto"
        and out["timings"]["draft_n"] >= out["timings"]["draft_n_accepted"] > 0
    )


def test_shape_of_a_stream(llm: ToyLlama) -> None:
    chunks = list(llm("abc", max_tokens=9, seed=1, stream=True))
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1]["choices"][0]["text"] == "" and chunks[-1]["usage"]["completion_tokens"] == 9
    assert all("usage" not in c for c in chunks[:-1])
    assert text_of(chunks) == llm("abc", max_tokens=9, seed=1)["choices"][0]["text"]


def test_stream_equals_body_with_everything_on(llm: ToyLlama) -> None:
    for seed in range(8):
        options: dict[str, Any] = {
            "max_tokens": 40,
            "seed": seed,
            "stop": ["x", "yz"],
            "logprobs": 2,
            "temperature": 1.2,
        }
        body = llm("hello ", **options)
        chunks = list(llm("hello ", stream=True, **options))
        assert text_of(chunks) == body["choices"][0]["text"]
        assert chunks[-1]["choices"][0]["finish_reason"] == body["choices"][0]["finish_reason"]
        parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
        for key, value in (body["choices"][0]["logprobs"] or {}).items():
            assert [item for p in parts for item in p[key]] == value


def test_stop_strings_across_tokens(llm: ToyLlama) -> None:
    llm.toy.replies = ["one STO two STOP three"] * 3
    out = llm("p", max_tokens=60, temperature=0, stop="STOP")
    assert out["choices"][0]["text"] == "one STO two " and out["choices"][0]["finish_reason"] == "stop"
    # the earliest occurrence wins, whatever the order in the list
    assert llm("p", max_tokens=60, temperature=0, stop=["three", "two"])["choices"][0]["text"] == "one STO "
    chunks = list(llm("p", max_tokens=60, temperature=0, stop=["STOP"], stream=True))
    assert text_of(chunks) == "one STO two " and all("STOP" not in c["choices"][0]["text"] for c in chunks)
    # the context holds nothing beyond the token that completed the stop string
    assert llm.detokenize(llm._input_ids.tolist()).decode() in (
        "pone STO two STO",
        "pone STO two ",
        "pone STO two ST",
    )


def test_characters_are_never_split(llm: ToyLlama) -> None:
    llm.toy.replies = ["né 世界 🎉 ok"]
    chunks = list(llm("p", max_tokens=60, temperature=0, stream=True))
    assert text_of(chunks) == "né 世界 🎉 ok" and not any("\ufffd" in c["choices"][0]["text"] for c in chunks)


def test_end_of_generation_token(llm: ToyLlama) -> None:
    llm.toy.replies = ["done"]
    out = llm("p", max_tokens=60, temperature=0)
    assert (out["choices"][0]["text"], out["choices"][0]["finish_reason"]) == ("done", "stop")
    assert out["usage"]["completion_tokens"] == len(llm.tokenize(b"done"))


def test_max_tokens(llm: ToyLlama) -> None:
    for n in (1, 2, 3, 7):
        assert llm("p", max_tokens=n, seed=n)["usage"]["completion_tokens"] == n
    for n in (None, 0, -1):
        out = llm("p" * 1000, max_tokens=n, logit_bias=dict.fromkeys(llm.toy.tokenizer.eog_ids, -100))
        assert out["usage"]["completion_tokens"] == 24 and out["choices"][0]["finish_reason"] == "length"


def test_overflow_has_the_message_that_servers_match(llm: ToyLlama) -> None:
    words = r"^Requested tokens \(1024\) exceed context window of 1024$"
    with pytest.raises(ValueError, match=words) as caught:
        llm("p" * 1024)
    assert isinstance(caught.value, ContextOverflowError)
    stream = llm("p" * 1024, stream=True)
    with pytest.raises(ValueError, match=words):
        next(stream)
    assert llm("p", max_tokens=1)["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_p": float("nan")}, "top_p"),
        ({"temperature": float("inf")}, "temperature"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias"),
        ({"suffix": "x"}, "fill-in-the-middle"),
        ({"logprobs": -1}, "logprobs"),
        ({"grammar": 3}, "grammar"),
        ({"prompt": ""}, "prompt"),
    ],
)
def test_bad_values_are_named(llm: ToyLlama, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        llm(**{"prompt": "p", **options})


@pytest.mark.parametrize(
    ("given", "taken", "words"),
    [
        ({"top_p": 1.5}, {"top_p": 1.0}, "top_p 1.5 is taken as 1"),
        ({"min_p": -1}, {"min_p": 0.0}, "min_p -1 is taken as 0"),
        ({"typical_p": 2.0, "top_p": -0.1}, {"typical_p": 1.0, "top_p": 0.0}, "top_p -0.1.*; typical_p 2.0"),
        ({"repeat_penalty": 0}, {"repeat_penalty": 1.0}, "repeat_penalty 0 is not a penalty"),
        ({"mirostat_mode": 3}, {"mirostat_mode": 0}, "mirostat_mode 3"),
        (
            {"logit_bias": {99999: 1, 65: 2, -3: 1}},
            {"logit_bias": {65: 2}},
            "logit_bias -3 is not a token id below",
        ),
    ],
)
def test_values_out_of_range_are_clamped_with_one_warning(
    llm: ToyLlama, given: dict, taken: dict, words: str
) -> None:
    with pytest.warns(UserWarning, match=words) as caught:
        text = llm("abc", max_tokens=8, seed=3, **given)["choices"][0]["text"]
    assert len(caught) == 1 and caught[0].filename == __file__
    assert text == llm("abc", max_tokens=8, seed=3, **taken)["choices"][0]["text"]


@pytest.mark.parametrize(
    ("prompt", "got"), [(b"abc", "bytes"), (None, "None"), (5, "5"), ([1, 1.5], r"\[1, 1.5\]")]
)
def test_an_invalid_prompt_is_refused_by_name(llm: ToyLlama, prompt: Any, got: str) -> None:
    with pytest.raises(TypeError, match=f"prompt: expected text or token ids, got {got}"):
        llm(prompt)


def test_prompt_as_tokens_and_echo(llm: ToyLlama) -> None:
    ids = llm.tokenize(b"hello")
    a, b = llm(ids, seed=3, max_tokens=5), llm("hello", seed=3, max_tokens=5)
    assert a["choices"][0]["text"] == b["choices"][0]["text"]
    echoed = llm("hello", seed=3, max_tokens=5, echo=True)
    assert echoed["choices"][0]["text"] == "hello" + b["choices"][0]["text"]


@pytest.mark.parametrize("prompt", ["hello", [104, 101]])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_stream_echoes_the_prompt_first(llm: ToyLlama, prompt: Any, logprobs: int | None) -> None:
    options: dict[str, Any] = {"max_tokens": 9, "seed": 3, "echo": True, "logprobs": logprobs}
    body = llm(prompt, **options)["choices"][0]
    chunks = [c["choices"][0] for c in llm(prompt, stream=True, **options)]
    assert chunks[0]["text"] == ("hello" if prompt == "hello" else "he")
    assert "".join(c["text"] for c in chunks) == body["text"] and len(chunks) > 2
    if logprobs is not None:
        for key, value in body["logprobs"].items():
            assert [x for c in chunks if c["logprobs"] for x in c["logprobs"][key]] == value


def test_a_stream_without_text_echoes_too(llm: ToyLlama) -> None:
    end = {llm.token_eos(): 100}
    chunks = llm("hello", max_tokens=9, temperature=0, logit_bias=end, echo=True, stream=True)
    assert [c["choices"][0]["text"] for c in chunks] == ["hello", ""]


def test_logprobs(llm: ToyLlama) -> None:
    out = llm("abc", max_tokens=6, seed=5, logprobs=3)["choices"][0]
    logprobs = out["logprobs"]
    assert "".join(logprobs["tokens"]) == out["text"]
    assert logprobs["text_offset"] == [3 + len("".join(logprobs["tokens"][:i])) for i in range(6)]
    for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]):
        assert top[token] == logprob <= max(top.values()) <= 0 and 3 <= len(top) <= 4
    # they are those of the model, whatever was done to the logits for sampling
    biased = llm("abc", max_tokens=1, temperature=0, logprobs=1, logit_bias={65: 100})["choices"][0][
        "logprobs"
    ]
    assert biased["tokens"] == ["A"] and biased["token_logprobs"][0] < -1


def test_logprobs_with_echo_equal_those_of_generating_the_same_text(llm: ToyLlama) -> None:
    out = llm("ab", max_tokens=6, temperature=0, logprobs=1)["choices"][0]
    whole = llm("ab" + out["text"], max_tokens=1, temperature=0, logprobs=1, echo=True)["choices"][0][
        "logprobs"
    ]
    assert whole["token_logprobs"][0] is None and whole["tokens"][:2] == ["a", "b"]
    assert whole["text_offset"] == list(range(9))
    np.testing.assert_allclose(whole["token_logprobs"][2:8], out["logprobs"]["token_logprobs"], rtol=1e-5)


# --- sampling


def test_seeds(llm: ToyLlama, model_path: str) -> None:
    def say(model: ToyLlama, **options: Any) -> str:
        return model("abc", max_tokens=12, temperature=1.5, **options)["choices"][0]["text"]

    assert say(llm, seed=7) == say(llm, seed=7) != say(llm, seed=8)
    assert say(llm, seed=7, mode="plain") == say(llm, seed=7)  # speculation changes nothing
    first, second = ToyLlama(model_path, seed=11), ToyLlama(model_path, seed=11)
    outputs = [say(first) for _ in range(3)]
    assert outputs == [say(second) for _ in range(3)] and len(set(outputs)) == 3


def test_logit_bias_and_processors_combine(llm: ToyLlama) -> None:
    seen: list[int] = []

    def forbid_b(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        seen.append(len(ids))
        assert scores.dtype == np.single and len(scores) == llm.n_vocab()
        scores[66] = -np.inf
        return scores

    out = llm(
        "p",
        max_tokens=4,
        temperature=0,
        logits_processor=LogitsProcessorList([forbid_b]),
        logit_bias={"66": 99, 67: 50},
    )
    assert out["choices"][0]["text"] == "CCCC" and seen == [1, 2, 3, 4]


def test_callables_without_a_list(llm: ToyLlama) -> None:
    def only_b(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        scores[:] = -np.inf
        scores[66] = 0
        return scores

    def after_four(ids: np.ndarray, row: np.ndarray) -> bool:
        return len(ids) >= 4

    out = llm("p", max_tokens=9, logits_processor=only_b, stopping_criteria=after_four)  # type: ignore[arg-type]
    assert out["choices"][0]["text"] == "BBB"
    chat = llm.create_chat_completion(
        [{"role": "user", "content": "x"}], max_tokens=3, logits_processor=only_b
    )  # type: ignore[arg-type]
    assert chat["choices"][0]["message"]["content"] == "BBB"  # type: ignore[index]
    tokens = llm.generate(llm.tokenize(b"p"), logits_processor=only_b, stopping_criteria=after_four)  # type: ignore[arg-type]
    assert list(tokens) == [66] * 3


def test_penalties_count_what_is_generated(llm: ToyLlama, model_path: str) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "frequency_penalty": 60.0}
    favoured = {"logit_bias": {65: 100, 66: 50}}
    # 100, then 100 - 60 against 50, then 40 against -10
    assert llm("AAAA", **favoured, **options)["choices"][0]["text"].startswith("ABA")
    assert ToyLlama(model_path, penalize_prompt=True)("AAAA", **favoured, **options)["choices"][0][
        "text"
    ].startswith("B")
    for mode in ("plain", "tree"):
        outputs = [llm("AB" * 9, mode=mode, **favoured, **options)["choices"][0]["text"] for _ in "12"]
        assert outputs[0] == outputs[1] and outputs[0].startswith("ABA")
    greedy = list(zip(range(6), llm.generate(llm.tokenize(b"AAAA"), temp=0, repeat_penalty=1e6)))
    assert len({token for _, token in greedy}) == 6  # none of its own again


def test_processors_see_the_true_history_in_order(llm: ToyLlama) -> None:
    histories: list[list[int]] = []

    def spy(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        histories.append(ids.tolist())
        return scores

    out = llm("abc", max_tokens=30, seed=2, logits_processor=LogitsProcessorList([spy]))
    ids = llm.tokenize(b"abc" + out["choices"][0]["text"].encode())
    assert [len(h) for h in histories] == list(range(3, 33)) or out["choices"][0]["finish_reason"] == "stop"
    assert all(h == histories[-1][: len(h)] for h in histories) and histories[-1] == ids[: len(histories[-1])]


def test_min_tokens_processor(llm: ToyLlama) -> None:
    llm.toy.replies = ["ab"]
    processor = LogitsProcessorList([MinTokensLogitsProcessor(5, llm.token_eos())])
    assert (
        llm("p", max_tokens=9, temperature=0, logits_processor=processor)["usage"]["completion_tokens"] >= 5
    )


def test_stopping_criteria(llm: ToyLlama) -> None:
    calls: list[tuple[list[int], float]] = []

    def after_three(ids: np.ndarray, row: np.ndarray) -> bool:
        calls.append((ids.tolist(), float(row.max())))
        return len(ids) >= 4

    out = llm("p", max_tokens=20, temperature=0, stopping_criteria=StoppingCriteriaList([after_three]))
    assert out["usage"]["completion_tokens"] == 3 and out["choices"][0]["finish_reason"] == "stop"
    assert [len(ids) for ids, _ in calls] == [1, 2, 3, 4]
    llm.reset()
    llm.eval(calls[-1][0])
    assert calls[-1][1] == pytest.approx(float(llm.session.slots.all[0].logits.max()))


def test_grammar(llm: ToyLlama) -> None:
    pytest.importorskip("llguidance")
    from dflash_ggml.text.grammar import LlamaGrammar

    for seed in range(4):
        out = llm(
            "p", max_tokens=40, seed=seed, grammar=LlamaGrammar.from_string('root ::= "<" [a-c]{3,9} ">"')
        )
        text = out["choices"][0]["text"]
        assert text[0] == "<" and text[-1] == ">" and set(text[1:-1]) <= set("abc") and 5 <= len(text) <= 11
        assert (
            text
            == llm("p", max_tokens=40, seed=seed, mode="plain", grammar='root ::= "<" [a-c]{3,9} ">"')[
                "choices"
            ][0]["text"]
        )


def test_an_empty_grammar_is_none(llm: ToyLlama) -> None:
    from dflash_ggml.text.grammar import LlamaGrammar

    free = llm("p", max_tokens=8, seed=1)["choices"][0]["text"]
    empties = [
        make("")
        for make in (LlamaGrammar.from_string, LlamaGrammar.from_json_schema, LlamaGrammar.from_regex)
    ]
    for grammar in ["", " \n", *empties]:
        assert llm("p", max_tokens=8, seed=1, grammar=grammar)["choices"][0]["text"] == free


# --- tokens


def test_tokenize_and_detokenize(llm: ToyLlama) -> None:
    assert llm.detokenize(llm.tokenize("héllo 世".encode())).decode() == "héllo 世"
    end = llm.tokenize(b"<|im_end|>", special=True)
    assert end == [llm.token_eos()] != llm.tokenize(b"<|im_end|>")
    assert (llm.detokenize(end), llm.detokenize(end, special=True)) == (b"", b"<|im_end|>")
    assert llm.detokenize([llm.n_vocab() - 1]) == b""
    tokenizer = llm.tokenizer()
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"


def test_a_tokenizer_of_the_callers_own(model_path: str) -> None:
    from dflash_ggml.llama.tokenizer import BaseLlamaTokenizer

    class Shout(BaseLlamaTokenizer):
        def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
            return list(text.upper())

        def detokenize(self, tokens, prev_tokens=None, special=False) -> bytes:
            return bytes(tokens)

    llm = ToyLlama(model_path, tokenizer=Shout())
    llm("abc", max_tokens=1)
    assert llm._input_ids.tolist()[:3] == [65, 66, 67]


def test_generate_yields_without_end_and_matches_completions(llm: ToyLlama) -> None:
    text = llm("abc", max_tokens=10, temperature=0)["choices"][0]["text"]
    tokens = []
    for token in llm.generate(llm.tokenize(b"abc"), temp=0):
        tokens.append(token)
        assert llm.n_tokens == 3 + len(tokens) - 1  # the newest is not in the context yet
        if len(tokens) == 10:
            break
    assert llm.detokenize(tokens).decode() == text
    llm.toy.replies = ["a"]
    stream = llm.generate(llm.tokenize(b"q"), temp=0)
    taken = [next(stream) for _ in range(5)]
    assert taken[1] == llm.token_eos()  # continues after it


def test_generate_send(llm: ToyLlama) -> None:
    stream = llm.generate(llm.tokenize(b"abc"), temp=0)
    taken = [next(stream) for _ in range(6)]
    after = stream.send([65, 66])
    assert llm._input_ids.tolist() == [97, 98, 99, *taken, 65, 66]
    expected = next(llm.generate([97, 98, 99, *taken, 65, 66], temp=0))
    assert after == expected


def test_generate_stops_at_the_end_of_the_context_and_by_criteria(llm: ToyLlama) -> None:
    assert len(list(llm.generate([65] * 1020, temp=0))) == 4
    criteria = StoppingCriteriaList([lambda ids, row: len(ids) >= 7])
    assert len(list(llm.generate([65, 66], temp=0, stopping_criteria=criteria))) == 5


def test_eval_sample_reset(llm: ToyLlama) -> None:
    with pytest.raises(ConfigError, match="call eval first"):
        llm.sample()
    llm.eval(llm.tokenize(b"abc"))
    token = llm.sample(temp=0)
    assert token == int(llm.session.slots.all[0].logits.argmax()) and llm.sample(temp=0) == token
    llm.eval([token])
    assert llm.n_tokens == 4 and list(llm.eval_tokens) == [97, 98, 99, token]
    llm.n_tokens = 2  # as some code rewinds it
    llm.eval([99])
    assert llm.sample(temp=0) == token
    llm.reset()
    assert llm.n_tokens == 0 and llm._requires_eval
    out = llm("abc", max_tokens=1, temperature=0)
    assert llm.detokenize([token]).decode() == out["choices"][0]["text"]


def test_logits_all_fills_scores(model_path: str) -> None:
    llm = ToyLlama(model_path, logits_all=True, n_ctx=64)
    llm.eval([97, 98])
    llm.eval([99])
    assert llm.scores.shape == (64, llm.n_vocab()) and len(llm.eval_logits) == 3
    for i in range(3):
        other = ToyLlama(model_path)
        other.eval([97, 98, 99][: i + 1])
        np.testing.assert_array_equal(llm.scores[i], other.session.slots.all[0].logits)
        assert llm.sample(temp=0, idx=i) == other.sample(temp=0)
    tokens = [t for t, _ in zip(llm.generate([97, 98, 99], temp=0), range(4))]
    assert [int(llm.scores[2 + i].argmax()) for i in range(4)] == tokens
    np.testing.assert_allclose(np.exp(llm.logits_to_logprobs(llm.scores[:2])).sum(axis=-1), 1, rtol=1e-5)
    assert ToyLlama.longest_token_prefix([1, 2, 3], [1, 2, 4]) == 2


# --- states


def test_sampling_at_a_position(model_path: str) -> None:
    """Positions below 0 count from the end of the sequence, not of the buffer."""
    llm = ToyLlama(model_path, logits_all=True)
    llm.eval([5, 6, 7, 8])
    assert [llm.sample(temp=0, idx=i - 4) for i in range(4)] == [llm.sample(temp=0, idx=i) for i in range(4)]
    assert llm.sample(temp=0, idx=-2) == int(llm.scores[2].argmax())


def test_save_and_load_state(llm: ToyLlama) -> None:
    llm.eval(llm.tokenize(b"hello there"))
    state = llm.save_state()
    assert state.n_tokens == llm.n_tokens and state.llama_state_size > 0
    expected = [t for t, _ in zip(llm.generate([65], temp=0, reset=False), range(5))]
    llm("something else", max_tokens=5)
    llm.load_state(pickle.loads(pickle.dumps(state)))
    assert llm.n_tokens == state.n_tokens
    assert [t for t, _ in zip(llm.generate([65], temp=0, reset=False), range(5))] == expected


@pytest.mark.parametrize("disk", [False, True])
def test_set_cache(llm: ToyLlama, tmp_path: Path, disk: bool) -> None:
    cache = LlamaDiskCache(str(tmp_path)) if disk else LlamaRAMCache()
    llm.set_cache(cache)
    outputs = [
        llm(p, max_tokens=5, temperature=0)["choices"][0]["text"] for p in ("a" * 80, "b" * 80, "a" * 80)
    ]
    assert outputs[0] == outputs[2] and cache.cache_size > 0 and llm.tokenize(b"a" * 90) in cache
    llm.set_cache(None)
    assert llm("a" * 80, max_tokens=5, temperature=0)["choices"][0]["text"] == outputs[0]
    with pytest.raises(KeyError):
        cache[[1]]


def test_states_that_cannot_be_read_count_as_missing(llm: ToyLlama, tmp_path: Path) -> None:
    """Files of a version whose modules had other names: one warning, then as if they were not there."""
    llm.set_cache(LlamaDiskCache(str(tmp_path)))
    text = llm("a" * 80, max_tokens=5, temperature=0)["choices"][0]["text"]
    llm("b" * 80, max_tokens=5, temperature=0)
    files = sorted(tmp_path.glob("*.state"))
    for path in files:
        data = path.read_bytes()
        assert data.count(b"dflash_ggml.llama.state") == 1
        path.write_bytes(data.replace(b"dflash_ggml.llama.state", b"dflash_ggml.older.state"))
    cache = LlamaDiskCache(str(tmp_path))
    llm.set_cache(cache)
    with pytest.warns(UserWarning, match=r"\.state: a saved state that cannot be read .*older") as caught:
        assert llm("a" * 80, max_tokens=5, temperature=0)["choices"][0]["text"] == text
        llm("b" * 80, max_tokens=5, temperature=0)
    assert len(files) == 2 and len(caught) == 1
    # what was written since is found again
    assert cache[llm.tokenize(b"a" * 80)].n_tokens > 80


def test_caches_keep_their_capacity(llm: ToyLlama, tmp_path: Path) -> None:
    llm.eval([1, 2])
    state = llm.save_state()
    ram = LlamaRAMCache(capacity_bytes=2 * state.llama_state_size)
    disk = LlamaDiskCache(str(tmp_path), capacity_bytes=25_000)
    for i in range(4):
        ram[[i]] = state
        disk[[i]] = state
    assert len(ram.cache_state) == 2 and [0] not in ram and [3] in ram
    assert disk.cache_size <= 25_000 and [3] in disk


# --- life


def test_pickle_is_the_constructor(llm: ToyLlama) -> None:
    state = llm.__getstate__()
    assert state["model_path"] == llm.model_path and state["n_ctx"] == 1024
    other = ToyLlama.__new__(ToyLlama)
    other._toy = llm._toy
    other.__setstate__(state)
    assert (
        other("abc", max_tokens=5, temperature=0)["choices"]
        == llm("abc", max_tokens=5, temperature=0)["choices"]
    )


def test_context_manager_and_close(model_path: str) -> None:
    with ToyLlama(model_path) as llm:
        engine = llm.toy
    assert engine.closed
    llm.close()
    calls = (
        lambda: llm("x"),
        lambda: llm.eval([1]),
        lambda: next(iter(llm.generate([1]))),
        lambda: llm.create_chat_completion([{"role": "user", "content": "x"}]),
        llm.reset,
        llm.sample,
        llm.save_state,
        lambda: llm.engine,
    )
    for call in calls:
        with pytest.raises(ConfigError, match="this Llama is closed; open the model again"):
            call()


def test_an_unread_stream_gives_way(llm: ToyLlama) -> None:
    stream = llm("abc", max_tokens=50, stream=True, temperature=0)
    first = next(stream)
    out = llm("xyz", max_tokens=5, temperature=0)
    assert out["usage"]["completion_tokens"] == 5 and first["choices"][0]["text"]
    with pytest.raises(DflashError, match="cut off"):
        list(stream)
    closed = llm("abc", max_tokens=50, stream=True)
    next(closed)
    closed.close()
    assert llm("abc", max_tokens=5)["usage"]["completion_tokens"] == 5


def test_threads_wait_for_each_other(llm: ToyLlama) -> None:
    from concurrent.futures import ThreadPoolExecutor

    prompts = ["abc", "hello", "xyz", "q"] * 3
    alone = [llm(p, max_tokens=8, temperature=0)["choices"][0]["text"] for p in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(
            pool.map(lambda p: llm(p, max_tokens=8, temperature=0)["choices"][0]["text"], prompts)
        )
    assert together == alone


def test_on_step_sees_every_step(llm: ToyLlama) -> None:
    steps: list[Any] = []
    out = llm("abc", max_tokens=20, seed=1, on_step=steps.append)
    assert sum(len(s.tokens) for s in steps) >= out["usage"]["completion_tokens"]
    assert sum(s.mode != "prefill" for s in steps) == out["timings"]["steps"]


def test_statistics_line(model_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    ToyLlama(model_path, verbose=True)("abc", max_tokens=5)
    captured = capsys.readouterr()
    assert "tokens per step" in captured.err and captured.out == ""
