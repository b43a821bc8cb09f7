"""Tests of the stand-ins for llama.h: constants, handles, vocabulary functions, decoding token by token, and the inner
modules."""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from dflash_ggml import compat
from dflash_ggml.errors import ConfigError
from dflash_ggml.llama import types as llama_types
from dflash_ggml.llama.context import LlamaContext
from dflash_ggml.llama.functions import FUNCTIONS
from dflash_ggml.llama.llama import Llama
from dflash_ggml.llama.model import LlamaModel
from dflash_ggml.llama.speculative import LlamaPromptLookupDecoding
from reference.toy_llama import ToyLlama

# the public names of llama-cpp-python 0.3.36's llama_types
TYPES = """JsonType EmbeddingUsage Embedding CreateEmbeddingResponse EmbeddingData CompletionLogprobs CompletionChoice
    CompletionUsage CreateCompletionResponse Completion CompletionChunk CreateCompletionStreamResponse
    ChatCompletionResponseFunctionCall ChatCompletionResponseMessage ChatCompletionFunction
    ChatCompletionTopLogprobToken ChatCompletionLogprobToken ChatCompletionLogprobs ChatCompletionResponseChoice
    CreateChatCompletionResponse ChatCompletionMessageToolCallChunkFunction ChatCompletionMessageToolCallChunk
    ChatCompletionStreamResponseDeltaEmpty ChatCompletionStreamResponseDeltaFunctionCall
    ChatCompletionStreamResponseDelta ChatCompletionStreamResponseChoice CreateChatCompletionStreamResponse
    ChatCompletionFunctions ChatCompletionFunctionCallOption ChatCompletionRequestResponseFormat
    ChatCompletionRequestMessageContentPartText ChatCompletionRequestMessageContentPartImageImageUrl
    ChatCompletionRequestMessageContentPartImage ChatCompletionRequestMessageContentPart
    ChatCompletionRequestSystemMessage ChatCompletionRequestUserMessage ChatCompletionMessageToolCallFunction
    ChatCompletionMessageToolCall ChatCompletionMessageToolCalls
    ChatCompletionRequestAssistantMessageFunctionCall ChatCompletionRequestAssistantMessage
    ChatCompletionRequestToolMessage ChatCompletionRequestFunctionMessage ChatCompletionRequestMessage
    ChatCompletionRequestFunctionCallOption ChatCompletionRequestFunctionCall ChatCompletionFunctionParameters
    ChatCompletionToolFunction ChatCompletionTool ChatCompletionNamedToolChoiceFunction
    ChatCompletionNamedToolChoice ChatCompletionToolChoiceOption ChatCompletionMessage ChatCompletionChoice
    ChatCompletion ChatCompletionChunkDeltaEmpty ChatCompletionChunkChoice ChatCompletionChunkDelta
    ChatCompletionChunk ChatCompletionStreamResponse ChatCompletionResponseFunction ChatCompletionFunctionCall"""


@pytest.fixture
def facade() -> Iterator[Any]:
    yield compat.install()
    compat.uninstall()


@pytest.fixture
def llm(tmp_path: Path) -> ToyLlama:
    path = tmp_path / "toy.gguf"
    path.touch()
    return ToyLlama(str(path))


def c(name: str, *arguments: Any) -> Any:
    return FUNCTIONS[name](*arguments)


# --- names


def test_types_at_the_top_and_in_their_module(facade: Any) -> None:
    import llama_cpp.llama_types

    for name in TYPES.split():
        assert getattr(facade, name) is getattr(llama_cpp.llama_types, name) is getattr(llama_types, name)
        if isinstance(getattr(facade, name), type) and hasattr(getattr(facade, name), "__required_keys__"):
            assert get_type_hints(getattr(facade, name)) or name.endswith("Empty")
    message = facade.ChatCompletionRequestUserMessage(role="user", content="x")
    assert message == {"role": "user", "content": "x"}
    pydantic = pytest.importorskip("pydantic")
    adapter = pydantic.TypeAdapter(facade.ChatCompletionRequestMessage)
    assert adapter.validate_python(message) == message
    with pytest.raises(pydantic.ValidationError):
        adapter.validate_python({"role": "narrator"})


def test_constants(facade: Any) -> None:
    import llama_cpp

    expected = {
        "GGML_TYPE_F16": 1,
        "GGML_TYPE_Q8_0": 8,
        "GGML_TYPE_Q4_K": 12,
        "GGML_TYPE_IQ1_M": 29,
        "GGML_TYPE_BF16": 30,
        "GGML_TYPE_COUNT": 43,
        "LLAMA_FTYPE_MOSTLY_Q4_K_M": 15,
        "LLAMA_FTYPE_MOSTLY_Q2_0": 41,
        "LLAMA_FTYPE_GUESSED": 1024,
        "LLAMA_ROPE_SCALING_TYPE_YARN": 2,
        "LLAMA_ROPE_SCALING_TYPE_MAX_VALUE": 3,
        "LLAMA_ROPE_TYPE_IMROPE": 40,
        "LLAMA_POOLING_TYPE_MEAN": 1,
        "LLAMA_TOKEN_ATTR_CONTROL": 8,
        "LLAMA_SPLIT_MODE_ROW": 2,
        "LLAMA_VOCAB_PRE_TYPE_SEED_CODER": 35,
        "LLAMA_SESSION_MAGIC": 0x6767736E,
        "LLAMA_DEFAULT_SEED": 0xFFFFFFFF,
        "GGML_NUMA_STRATEGY_MIRROR": 4,
        "LLAMA_FLASH_ATTN_TYPE_AUTO": -1,
    }
    for module in (facade, llama_cpp.llama_cpp):
        assert {name: getattr(module, name) for name in expected} == expected


def test_version_metadata(facade: Any) -> None:
    for name in ("llama-cpp-python", "llama_cpp_python", "Llama.CPP-Python"):
        assert importlib.metadata.version(name) == facade.__version__
    assert importlib.metadata.distribution("llama-cpp-python").metadata["Name"] == "llama_cpp_python"
    assert importlib.metadata.version("numpy") == np.__version__
    compat.uninstall()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("llama-cpp-python")


def test_inner_modules(facade: Any) -> None:
    from llama_cpp._internals import CustomSampler, LlamaSamplingParams, normalize_embedding
    from llama_cpp._logger import logger, set_verbose
    from llama_cpp._utils import Singleton, suppress_stdout_stderr

    assert normalize_embedding([3.0, 4.0]) == [0.6, 0.8] and normalize_embedding([0.0]) == [0.0]
    assert LlamaSamplingParams().temp == 0.8
    with pytest.raises(ConfigError, match="CustomSampler: there is no libllama here"):
        CustomSampler(lambda candidates: None)
    before = logger.level
    set_verbose(False)
    assert logger.level == 40 and facade.set_verbose is set_verbose
    logger.setLevel(before)
    one = type("One", (Singleton,), {})
    assert one() is one()
    with suppress_stdout_stderr(disable=False):
        print("nobody reads this")


def test_what_is_silent(facade: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with facade.suppress_stdout_stderr(disable=False):
        print("nobody reads this")
    with facade.suppress_stdout_stderr():
        print("but this")
    assert capsys.readouterr().out == "but this\n"

    @facade.llama_log_callback
    def quiet(level: int, text: bytes, user_data: Any) -> None: ...

    facade.llama_log_set(quiet, ctypes.c_void_p(0))
    facade.llama_backend_init()
    assert not facade.llama_supports_mmap() and facade.llama_max_devices() == 16
    assert b"no libllama" in facade.llama_print_system_info() and facade.llama_time_us() > 0


def test_functions_of_libllama_are_not_there(facade: Any) -> None:
    import llama_cpp

    for name in ("llama_load_model_from_file", "llama_sampler_chain_init", "llama_state_get_data"):
        for module in (facade, llama_cpp.llama_cpp):
            with pytest.raises(AttributeError, match="libllama's functions are not there"):
                getattr(module, name)


# --- vocabulary


def test_kinds_of_vocabularies(llm: ToyLlama) -> None:
    from dflash_ggml.llama.model import LlamaModel

    for kind, expected in (("llama", 1), ("gpt2", 2), ("gemma4", 2)):
        model = LlamaModel.of("", llm.toy.tokenizer, None, {"tokenizer.ggml.model": kind})
        assert model.vocab_type() == expected


def test_the_vocabulary_behind_a_model(llm: ToyLlama) -> None:
    vocab, tokenizer = c("llama_model_get_vocab", llm.model), llm.toy.tokenizer
    assert c("llama_vocab_n_tokens", vocab) == llm.n_vocab() == tokenizer.n_vocab + 3
    assert c("llama_vocab_type", vocab) == 2
    end, think = llm.token_eos(), tokenizer.id_of("<think>")
    assert (c("llama_vocab_eos", vocab), c("llama_vocab_eot", vocab), c("llama_token_bos", vocab)) == (
        end,
        end,
        llm.token_bos(),
    )
    assert c("llama_vocab_pad", vocab) == tokenizer.special_ids["padding"]
    assert c("llama_vocab_sep", vocab) == c("llama_vocab_fim_pre", vocab) == -1
    assert c("llama_vocab_nl", vocab) == llm.token_nl() and not c("llama_vocab_get_add_bos", vocab)
    assert [c("llama_vocab_get_attr", vocab, t) for t in (65, end, think, llm.n_vocab() - 1)] == [4, 8, 16, 2]
    assert c("llama_vocab_is_eog", vocab, end) and not c("llama_vocab_is_eog", vocab, 65)
    assert c("llama_token_is_control", vocab, end) and not c("llama_token_is_control", vocab, think)
    assert c("llama_vocab_get_text", vocab, 32) == "Ġ".encode() and c("llama_vocab_get_score", vocab, 32) == 0


def test_pieces_and_ids_through_buffers(llm: ToyLlama) -> None:
    vocab = c("llama_model_get_vocab", llm.model)
    buffer = (ctypes.c_char * 32)()
    for token in range(llm.n_vocab()):
        n = c("llama_token_to_piece", vocab, token, buffer, 32, 0, True)
        assert buffer[:n] == llm.detokenize([token], special=True)
    end = llm.token_eos()
    assert c("llama_token_to_piece", vocab, end, buffer, 32, 0, False) == 0
    assert c("llama_token_to_piece", vocab, end, buffer, 3, 0, True) == -len("<|im_end|>")
    space_t = llm.toy.tokenizer.id_of("Ġt")
    assert c("llama_token_to_piece", vocab, space_t, buffer, 32, 1, True) == 1 and buffer[:1] == b"t"

    ids = (ctypes.c_int32 * 8)()
    text = b"hello <|im_end|>"
    n = c("llama_tokenize", vocab, text, len(text), ids, 8, True, True)
    assert ids[:n] == llm.tokenize(text, special=True) and ids[n - 1] == end
    assert c("llama_tokenize", vocab, text, len(text), ids, 2, True, True) == -n
    assert c("llama_detokenize", vocab, ids, n, buffer, 32, False, True) == len(text)
    assert buffer[: len(text)] == text
    assert c("llama_detokenize", vocab, ids, n, buffer, 3, False, True) == -len(text)


def test_the_c_pointer_for_tokenising(facade: Any, llm: ToyLlama) -> None:
    import llama_cpp.llama_cpp

    address = ctypes.cast(llama_cpp.llama_cpp._lib.llama_tokenize, ctypes.c_void_p).value
    kinds = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32]
    function = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds, ctypes.c_bool, ctypes.c_bool)(address)
    ids = (ctypes.c_int32 * 8)()
    n = function(llm.model, b"hello", 5, ids, 8, False, True)
    assert ids[:n] == llm.tokenize(b"hello")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (b"a\xe4\xb8b", "a\ufffd\ufffdb"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"\xf0\x9f\x98A", "\ufffd\ufffd\ufffdA"),
        ("né".encode(), "né"),
    ],
)
def test_bytes_that_are_no_utf_8(llm: ToyLlama, text: bytes, read: str) -> None:
    assert llm.tokenize(text) == llm.tokenize(read.encode())
    assert llm.detokenize(llm.tokenize(text)).decode() == read


def test_metadata_and_sizes(llm: ToyLlama) -> None:
    model, buffer = llm.model, ctypes.create_string_buffer(8)
    assert c("llama_model_meta_val_str", model, b"general.name", buffer, 8) == 3 and buffer.value == b"toy"
    assert c("llama_model_meta_val_str", model, b"general.architecture", buffer, 4) == 6
    assert buffer.value == b"qwe" and c("llama_model_meta_val_str", model, b"none", buffer, 8) == -1
    n = c("llama_model_meta_count", model)
    keys = []
    for i in range(n):
        c("llama_model_meta_key_by_index", model, i, long := ctypes.create_string_buffer(64), 64)
        keys.append(long.value.decode())
    assert keys == list(llm.metadata) and c("llama_model_meta_key_by_index", model, n, long, 64) == -1
    assert c("llama_model_meta_val_str_by_index", model, 0, long, 64) and long.value == b"qwen35"
    assert c("llama_model_chat_template", model) == llm.metadata["tokenizer.chat_template"].encode()
    assert c("llama_model_chat_template", model, b"x") is None
    assert (c("llama_model_n_embd", model), c("llama_model_n_ctx_train", model)) == (64, 1024)
    assert llm._model.desc() == "qwen35 toy" and c("llama_n_ctx", llm.ctx) == 1024
    assert c("llama_model_is_hybrid", model) and not c("llama_model_is_recurrent", model)


def test_a_model_by_its_header(demo_target: Path) -> None:
    model = LlamaModel(path_model=str(demo_target))
    assert model.n_vocab() == 8192 and model.n_layer() == c("llama_model_n_layer", model.model) == 16
    assert model.n_params() == 20281024 and model.size() == demo_target.stat().st_size
    assert model.detokenize(model.tokenize(b"hello world")) == b"hello world"
    assert (model.token_sep(), model.token_prefix(), model.add_eos_token()) == (-1, -1, False)
    model.close()
    assert model.model is None
    with pytest.raises(ValueError, match="Model path does not exist"):
        LlamaModel(path_model="/nowhere/x.gguf")


# --- handles


def test_handles_end_with_their_objects(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    path.touch()
    llm = ToyLlama(str(path))
    model, ctx = llm.model, llm.ctx
    for wrong in (0, None, 12345, ctx, "x"):
        with pytest.raises(ConfigError, match="is no LlamaModel of dflash-ggml"):
            c("llama_model_get_vocab", wrong)
    assert c("llama_get_model", ctypes.c_void_p(ctx)) == model
    llm.close()
    assert llm.model is None
    del llm
    gc.collect()
    with pytest.raises(ConfigError, match="still open"):
        c("llama_n_ctx", ctx)
    assert ToyLlama(str(path)).model not in (model, ctx)


# --- decoding


def decode(llm: Llama, ids: list[int], first: int, wanted: list[bool]) -> Any:
    """Rows float32 [n wanted, V] after a batch that is filled as guidance fills it."""
    batch = c("llama_batch_init", 64, 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.seq_id[i][0], batch.n_seq_id[i] = token, first + i, 0, 1
        batch.logits[i] = wanted[i]
    assert c("llama_decode", llm.ctx, batch) == 0
    rows = np.ctypeslib.as_array(c("llama_get_logits", llm.ctx), shape=(sum(wanted), llm.n_vocab())).copy()
    c("llama_batch_free", batch)
    return rows


def test_decoding_gives_the_rows_of_eval(llm: ToyLlama) -> None:
    ids = llm.tokenize(b"abcdefgh")
    rows = []
    for i in range(len(ids)):
        llm.reset()
        llm.eval(ids[: i + 1])
        rows.append(llm.session.slots.all[0].logits.copy())
    expected = np.stack(rows)
    llm.reset()
    for wanted in ([True] * 8, [False] * 7 + [True], [True, False] * 4, [True] + [False] * 7):
        c("llama_memory_clear", c("llama_get_memory", llm.ctx), True)
        assert np.array_equal(decode(llm, ids, 0, wanted), expected[np.flatnonzero(wanted)])
        assert llm.n_tokens == 8 and llm._input_ids.tolist() == ids
    # back to the third token, on with others, and to the same again
    memory = c("llama_get_memory", llm.ctx)
    assert c("llama_memory_seq_rm", memory, -1, 3, -1) and c("llama_memory_seq_pos_max", memory, 0) == 2
    other = decode(llm, [120], 3, [True])
    assert not np.array_equal(other[0], expected[3]) and llm._input_ids.tolist() == [*ids[:3], 120]
    assert c("llama_memory_seq_rm", memory, 0, 3, 99)
    assert np.array_equal(decode(llm, ids[3:], 3, [True] * 5), expected[3:])
    assert not c("llama_memory_seq_rm", memory, 0, 2, 4)  # a hole
    row = np.ctypeslib.as_array(c("llama_get_logits_ith", llm.ctx, 1), shape=(llm.n_vocab(),))
    assert np.array_equal(row, expected[4])
    last = np.ctypeslib.as_array(c("llama_get_logits_ith", llm.ctx, -1), shape=(llm.n_vocab(),))
    assert np.array_equal(last, expected[7])
    assert llm.sample(temp=0) == int(expected[7].argmax())


def test_rows_of_a_long_sequence(llm: ToyLlama) -> None:
    """More than are read in one pass."""
    ids = llm.tokenize(b"0123456789" * 9)
    positions = [2, 33, 34, 35, 66, 70]
    wanted = [i in positions for i in range(len(ids))]
    batch = c("llama_batch_init", len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.seq_id[i][0], batch.n_seq_id[i] = token, i, 0, 1
        batch.logits[i] = wanted[i]
    assert c("llama_decode", llm.ctx, batch) == 0 and llm._input_ids.tolist() == ids
    whole = ToyLlama(llm.model_path, logits_all=True)
    whole.eval(ids)
    for i in positions:
        assert np.array_equal(llm._ctx.row(i), whole.scores[i])
        llm.reset()
        llm.eval(ids[: i + 1])
        assert np.array_equal(llm.session.slots.all[0].logits, whole.scores[i])


def test_what_a_batch_may_not_be(llm: ToyLlama, facade: Any) -> None:
    from llama_cpp._internals import LlamaBatch

    batch = LlamaBatch(n_tokens=4, embd=0, n_seq_max=1)
    batch.set_batch([1, 2, 3], n_past=0, logits_all=False)
    llm._ctx.decode(batch)
    assert llm.n_tokens == 3 and batch.n_tokens() == 3
    with pytest.raises(ConfigError, match="no logits were requested at position 0"):
        llm._ctx.get_logits_ith(0)
    batch.set_batch([4], n_past=5, logits_all=False)
    with pytest.raises(ConfigError, match="follows a known token"):
        llm._ctx.decode(batch)
    batch.set_batch([4], n_past=-1, logits_all=False)
    with pytest.raises(ConfigError, match="follows a known token"):
        llm._ctx.decode(batch)
    batch.reset()
    batch.add_sequence([4], seq_id=1, logits_all=False)
    with pytest.raises(ConfigError, match="one sequence"):
        llm._ctx.decode(batch)
    with pytest.raises(ConfigError, match="5 tokens do not fit 4"):
        batch.set_batch([1] * 5, 0, False)
    batch.reset()
    with pytest.raises(ConfigError, match="one or more token ids"):
        llm._ctx.decode(batch)
    full = LlamaBatch(n_tokens=2000, embd=0, n_seq_max=1)
    full.set_batch([1] * 1025, n_past=0, logits_all=False)
    assert facade.llama_decode(llm.ctx, full.batch) == 1 and llm.n_tokens == 3
    with pytest.raises(RuntimeError, match="llama_decode returned 1: .* 1024 tokens"):
        llm._ctx.decode(full)
    ids = (ctypes.c_int32 * 2)(7, 8)
    assert facade.llama_decode(llm.ctx, facade.llama_batch_get_one(ids, 2)) == 0 and llm.n_tokens == 5
    with pytest.raises(ConfigError, match="a context comes with its Llama"):
        LlamaContext(model=llm._model)


# --- the inner classes, as scripts use them that go below Llama


def test_a_loop_over_the_inner_classes(facade: Any, demo_target: Path) -> None:
    internals = facade.internals
    params = facade.llama_model_default_params()
    params.load_mode = facade.LLAMA_LOAD_MODE_NONE
    model = internals.LlamaModel(path_model=str(demo_target), params=params)
    settings = facade.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_threads, settings.logits_all = 64, 16, 1, False
    context = internals.LlamaContext(model=model, params=settings)
    tokens = model.tokenize(b"def add(a, b):", add_bos=True, special=True)
    batch = internals.LlamaBatch(n_tokens=16, embd=0, n_seq_max=1)
    sampler = internals.LlamaSampler()
    sampler.add_top_k(50)
    sampler.add_top_p(0.9, 1)
    sampler.add_greedy()
    result, n_eval, step = list(tokens), 0, list(tokens)
    for _ in range(4):
        batch.set_batch(step, n_past=n_eval, logits_all=False)
        context.decode(batch)
        n_eval += len(step)
        step = [sampler.sample(context, -1)]
        result += step
    with Llama(str(demo_target), draft_model=False, n_ctx=64, n_threads=1, verbose=False) as other:
        text: Any = other("def add(a, b):", max_tokens=4, temperature=0)
    assert model.detokenize(result[len(tokens) :], special=True).decode() == text["choices"][0]["text"]
    assert context.n_ctx() == 64 and facade.llama_n_ctx(context.ctx) == 64
    model.close()
    assert context.ctx is None and model.model is None


def test_the_sampler_chain(llm: ToyLlama, facade: Any) -> None:
    from llama_cpp._internals import LlamaBatch, LlamaSampler

    batch = LlamaBatch(n_tokens=4)
    batch.set_batch([1, 2, 3], n_past=0, logits_all=True)
    llm._ctx.decode(batch)
    row = llm._ctx.row(-1)
    order = np.argsort(-row)

    def drawn(*steps: tuple[Any, ...], n: int = 6) -> list[int]:
        sampler = LlamaSampler()
        for name, *arguments in steps:
            getattr(sampler, name)(*arguments)
        return [sampler.sample(llm._ctx) for _ in range(n)]

    assert drawn(("add_greedy",)) == [order[0]] * 6
    assert drawn(("add_temp", 0.0)) == drawn(("add_top_k", 1), ("add_dist", 3)) == [order[0]] * 6
    assert set(drawn(("add_top_k", 3), ("add_temp", 5.0), ("add_dist", 3), n=60)) == set(order[:3])
    assert drawn(("add_temp", 2.0), ("add_dist", 7)) == drawn(("add_temp", 2.0), ("add_dist", 7))
    lowered = drawn(("add_penalties", llm.n_vocab(), 64, 1.0, 1e6, 0.0), ("add_greedy",))
    assert lowered == order[:6].tolist()  # what was drawn is out, what was decoded is not
    assert drawn(("add_logit_bias", llm.n_vocab(), {5: 1e6}), ("add_greedy",), n=1) == [5]
    assert (
        len(drawn(("add_mirostat_v2", 4, 5.0, 0.1)))
        == len(drawn(("add_typical", 0.5), ("add_min_p", 0.1)))
        == 6
    )

    sampler = LlamaSampler()
    sampler.add_dist(9)
    sampler.add_softmax()
    first = [sampler.sample(llm._ctx, 0) for _ in range(9)]
    assert sampler.get_seed() == 9 and sampler.clone().get_seed() == 9
    sampler.reset()
    assert [sampler.sample(llm._ctx, 0) for _ in range(9)] == first
    sampler.add_penalties(llm.n_vocab(), 64, 1.0, 1e6, 0.0)
    sampler.add_greedy()
    sampler.reset()
    sampler.accept(int(order[0]))
    assert sampler.sample(llm._ctx) == order[1]
    with pytest.raises(AttributeError, match="LlamaSampler.add_dry: there is no such step"):
        sampler.add_dry()


def test_a_grammar_in_the_sampler_chain(llm: ToyLlama, facade: Any) -> None:
    pytest.importorskip("llguidance")
    sampler = facade.internals.LlamaSampler()
    sampler.add_grammar(llm._model, facade.LlamaGrammar.from_string('root ::= "ab" [0-9]'))
    sampler.add_dist(1)
    batch = facade.internals.LlamaBatch(n_tokens=1)
    batch.set_batch([1], n_past=0, logits_all=False)
    llm._ctx.decode(batch)
    text = llm.detokenize([sampler.sample(llm._ctx) for _ in range(3)])
    assert text[:2] == b"ab" and text[2:].isdigit()
    with pytest.raises(ConfigError, match="cannot be cloned"):
        sampler.clone()
    sampler.close()


# --- drafters


def test_prompt_lookup() -> None:
    find = LlamaPromptLookupDecoding.find_candidate_pred_tokens
    ids = np.array([5, 6, 7, 8, 6, 7, 9, 5, 6, 7])
    assert find(ids, 3, 2).tolist() == [8, 6] and find(ids, 1, 9).tolist() == [8, 6, 7, 9, 5, 6, 7]
    assert find(np.arange(9), 3, 2).tolist() == [] and find(np.array([1]), 3, 2).tolist() == []
    assert LlamaPromptLookupDecoding(3, 1)(ids).tolist() == [8]
    assert LlamaPromptLookupDecoding().num_pred_tokens == 10
