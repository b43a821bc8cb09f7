"""Tests of the call surface of llama_cpp.Llama 0.3.36, method by method: names, order and defaults of all parameters."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from dflash_ggml.llama.keywords import SIGNATURES, arguments, for_handler
from dflash_ggml.llama.llama import Llama
from dflash_ggml.llama.options import LlamaOptions

SAMPLING = "tfs_z=1.0 mirostat_mode=0 mirostat_tau=5.0 mirostat_eta=0.1"
SURFACE = {
    "create_completion": f"""prompt suffix=None max_tokens=16 temperature=0.8 top_p=0.95 min_p=0.05 typical_p=1.0
        logprobs=None echo=False stop=None frequency_penalty=0.0 presence_penalty=0.0 repeat_penalty=1.0 top_k=40
        stream=False seed=None {SAMPLING} model=None stopping_criteria=None logits_processor=None grammar=None
        logit_bias=None""",
    "create_chat_completion": f"""messages functions=None function_call=None tools=None tool_choice=None temperature=0.2
        top_p=0.95 top_k=40 min_p=0.05 typical_p=1.0 stream=False stop=None seed=None response_format=None
        max_tokens=None presence_penalty=0.0 frequency_penalty=0.0 repeat_penalty=1.0 {SAMPLING} model=None
        logits_processor=None grammar=None logit_bias=None logprobs=None top_logprobs=None""",
    "generate": f"""tokens top_k=40 top_p=0.95 min_p=0.05 typical_p=1.0 temp=0.8 repeat_penalty=1.0 reset=True
        frequency_penalty=0.0 presence_penalty=0.0 {SAMPLING} penalize_nl=True logits_processor=None
        stopping_criteria=None grammar=None""",
    "sample": """top_k=40 top_p=0.95 min_p=0.05 typical_p=1.0 temp=0.8 repeat_penalty=1.0 frequency_penalty=0.0
        presence_penalty=0.0 tfs_z=1.0 mirostat_mode=0 mirostat_eta=0.1 mirostat_tau=5.0 penalize_nl=True
        logits_processor=None grammar=None idx=None""",
    "tokenize": "text add_bos=True special=False",
    "detokenize": "tokens prev_tokens=None special=False",
    "eval": "tokens",
    "reset": "",
    "set_cache": "cache",
    "set_seed": "seed",
    "save_state": "",
    "load_state": "state",
    "create_embedding": "input model=None",
    "embed": "input normalize=False truncate=True return_count=False",
    "from_pretrained": "repo_id filename additional_files=None local_dir=None local_dir_use_symlinks='auto' cache_dir=None",
    **dict.fromkeys(
        (
            "n_ctx",
            "n_embd",
            "n_vocab",
            "tokenizer",
            "token_eos",
            "token_bos",
            "token_nl",
            "pooling_type",
            "close",
        ),
        "",
    ),
    "logits_to_logprobs": "logits axis=-1",
    "longest_token_prefix": "a b",
}
CONSTRUCTOR = """n_gpu_layers=0 split_mode=1 main_gpu=0 tensor_split=None vocab_only=False use_mmap=True use_mlock=False
    kv_overrides=None seed=4294967295 n_ctx=512 n_batch=512 n_ubatch=512 n_threads=None n_threads_batch=None
    rope_scaling_type=-1 pooling_type=-1 attention_type=-1 rope_freq_base=0.0 rope_freq_scale=0.0 yarn_ext_factor=-1.0
    yarn_attn_factor=1.0 yarn_beta_fast=32.0 yarn_beta_slow=1.0 yarn_orig_ctx=0 logits_all=False embedding=False
    offload_kqv=True flash_attn=False op_offload=None swa_full=None no_perf=False last_n_tokens_size=64 lora_base=None
    lora_scale=1.0 lora_path=None numa=False chat_format=None chat_handler=None draft_model=None tokenizer=None
    type_k=None type_v=None spm_infill=False verbose=True"""


def parameters(function: object) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.name != "self"]  # type: ignore[arg-type]


def written(parameter: inspect.Parameter) -> str:
    return (
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
    )


@pytest.mark.parametrize("name", SURFACE)
def test_methods(name: str) -> None:
    positional = [p for p in parameters(getattr(Llama, name)) if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [written(p) for p in positional] == SURFACE[name].split()
    extra = [p for p in parameters(getattr(Llama, name)) if p.kind is p.KEYWORD_ONLY]
    assert all(p.default is None for p in extra)


def test_call_is_create_completion() -> None:
    assert Llama.__call__ is Llama.create_completion


def test_constructor() -> None:
    first, *rest = parameters(Llama)
    assert written(first) == "model_path" and rest[-1].kind is rest[-1].VAR_KEYWORD
    keywords = [written(p) for p in rest[:-1]]
    golden = CONSTRUCTOR.split()
    assert keywords[: len(golden)] == golden
    assert all(p.kind is p.KEYWORD_ONLY for p in rest[:-1])
    # what is not stock is ours, and LlamaOptions knows the same keywords with the same defaults
    assert [k.split("=")[0] for k in keywords[len(golden) :]] == [
        "mode",
        "budget",
        "candidates",
        "chain_seed",
        "calibrate",
        "reproducible",
        "draft_window",
        "draft_type",
        "spec",
        "draft_max",
        "n_seq_max",
        "device",
        "draft_device",
        "cpu_moe",
        "n_cpu_moe",
        "prefix_cache_bytes",
        "penalize_prompt",
        "prefill_fp8",
    ]
    options = [written(p) for p in parameters(LlamaOptions)]
    assert options == ["model_path", *keywords]


@pytest.mark.parametrize("name", ["create_completion", "create_chat_completion", "generate"])
def test_wrong_calls_raise_pythons_errors(name: str) -> None:
    method, opened = getattr(Llama, name), object.__new__(Llama)
    with pytest.raises(TypeError, match=rf"^{name}\(\) missing a required argument"):
        method(opened)
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'templature'"):
        method(opened, [], templature=1)


def test_handlers_get_what_llama_cpp_has_and_what_was_given() -> None:
    given = arguments("create_chat_completion", None, [], enable_thinking=False)
    taken = for_handler(given)
    assert taken["enable_thinking"] is False and taken["max_tokens"] is None
    assert "budget" not in taken and "mode" not in taken


@pytest.mark.parametrize(
    ("method", "args", "kwargs"),
    [
        ("create_completion", (None, "x", "suffix", 3), {}),
        ("create_completion", (None, "x"), {"n": 2}),
        ("create_completion", (None,), {"prompt": np.array([1, 2])}),
        ("generate", (None, np.array([1, 2])), {"temp": 0}),
        ("sample", (None, 5, 0.4), {"idx": 3}),
    ],
)
def test_arguments_are_those_that_python_would_bind(method: str, args: Any, kwargs: Any) -> None:
    bound = SIGNATURES[method].bind(*args, **kwargs)
    bound.apply_defaults()
    found = arguments(method, *args, **kwargs)
    assert list(found) == list(bound.arguments)
    assert all(found[name] is value for name, value in bound.arguments.items())
