"""Tests of the options that name and load models, on the command line and in the class."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import dflash_ggml
from dflash_ggml.cli.arguments import add_model_options, engine_config, memory_size
from dflash_ggml.cli.chat_options import session_options, text_options
from dflash_ggml.config import ALL_LAYERS, EngineConfig
from dflash_ggml.errors import ConfigError
from dflash_ggml.files.pairs import EMBEDDED_DRAFT
from dflash_ggml.llama.options import LlamaOptions
from dflash_ggml.text.chat_formats import FORMATS
from dflash_ggml.text.grammar_spec import GrammarSpec


def configured(*flags: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    return engine_config(parser.parse_args(flags))


@pytest.mark.parametrize(
    "flags, layers",
    [("", None), ("--cpu-moe", ALL_LAYERS), ("-cmoe", ALL_LAYERS), ("-ncmoe 12", 12), ("--n-cpu-moe 0", 0)],
)
def test_experts_of_the_host(flags: str, layers: int | None) -> None:
    assert configured(*flags.split()).n_cpu_moe == layers
    keywords = {"cpu_moe": True} if layers == ALL_LAYERS else {"n_cpu_moe": layers}
    assert LlamaOptions("model.gguf", **keywords).engine_config(None).n_cpu_moe == layers


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("", (None, None, None, None)),
        ("-sm layer", ("layer", None, None, None)),
        ("--split-mode none -mg 1", ("none", None, None, None)),
        ("-ts 3,1", (None, (3.0, 1.0), None, None)),
        ("--tensor-split 0.5/0.5", (None, (0.5, 0.5), None, None)),
        ("-dev CUDA0,CUDA1 -devd CUDA2", (None, None, ("CUDA0", "CUDA1"), "CUDA2")),
        ("--device none --spec-draft-device none", (None, None, ("none",), None)),
    ],
)
def test_devices(flags: str, expected: tuple[Any, ...]) -> None:
    config = configured(*flags.split(), "--mode", "plain")
    assert (config.split_mode, config.tensor_split, config.device, config.draft_device) == expected


def test_rows_are_split_by_layers(caplog: pytest.LogCaptureFixture) -> None:
    assert configured("-sm", "row", "--mode", "plain").split_mode == "layer"
    assert caplog.messages == ["-sm row: it is not built, layers are shared out instead (-sm layer)"]


@pytest.mark.parametrize(
    "keywords, expected",
    [
        ({}, (None, None)),
        ({"split_mode": 0}, ("none", None)),
        ({"tensor_split": [1, 2]}, (None, (1.0, 2.0))),
        ({"split_mode": 2}, ("layer", None)),
        ({"split_mode": 3}, ("tensor", None)),
    ],
)
def test_splits_of_llama(keywords: dict[str, Any], expected: tuple[Any, ...]) -> None:
    config = LlamaOptions("model.gguf", **keywords).engine_config(None)
    assert (config.split_mode, config.tensor_split) == expected
    named = LlamaOptions("model.gguf", device=["CUDA1", "CUDA0"], draft_device="CUDA2").engine_config(None)
    assert (named.device, named.draft_device, named.splits_layers) == (("CUDA1", "CUDA0"), "CUDA2", True)


def test_experts_of_no_such_layers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="n_cpu_moe: -1 is outside"):
        configured("-ncmoe", "-1")
    with pytest.raises(SystemExit):
        configured("-cmoe", "-ncmoe", "3")
    assert "not allowed with" in capsys.readouterr().err
    for layers in (0, 3):
        with pytest.raises(ConfigError, match=f"cpu_moe, n_cpu_moe={layers}: .*take one of them"):
            LlamaOptions("model.gguf", cpu_moe=True, n_cpu_moe=layers).check()
    LlamaOptions("model.gguf", cpu_moe=True).check()


def test_sources_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("dflash_ggml.ggml.bindings")
    assert configured().spec is None and configured().draft is not None
    both = configured("--spec", "dflash, suffix")
    assert both.spec == ("dflash", "suffix") and both.draft is not None and both.prompt_lookup
    for words, spec in (("suffix", ("suffix",)), ("none", ())):
        config = configured("--spec", words)
        assert config.spec == spec and config.draft is None and config.prompt_lookup == (spec != ())
        with pytest.raises(ConfigError, match="--spec: it leaves out the draft that -md or -hfd names"):
            configured("--spec", words, "-md", str(EMBEDDED_DRAFT))
    with pytest.raises(SystemExit):
        configured("--spec", "dflash,eagle")
    assert (
        "argument --spec: 'eagle' is none of dflash, dflash2, dspark, mtp, suffix, none"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("module", ["cli.run", "cli.chat", "cli.doctor", "bench.cli", "server.cli"])
def test_version(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("dflash_ggml.ggml.bindings")
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"dflash_ggml.{module}").main(["--version"])
    out = capsys.readouterr().out
    assert end.value.code in (0, None)
    assert re.fullmatch(rf"dflash-\w+ {re.escape(dflash_ggml.__version__)} \(ggml \d[\d.]*, patched\)\n", out)


@pytest.mark.parametrize(
    ("flags", "types"),
    [
        ("", "auto auto auto auto"),
        ("-ctk q8_0 -ctv q4_0", "q8_0 q4_0 auto auto"),
        ("--cache-type-k bf16", "bf16 auto auto auto"),
        ("--cache-type f32", "f32 f32 auto auto"),
        ("--cache-type f16 -ctv q5_1 -ctkd q5_0 --cache-type-v-draft q4_1", "f16 q5_1 q5_0 q4_1"),
    ],
)
def test_types_of_the_caches(flags: str, types: str) -> None:
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    config = engine_config(parser.parse_args([*flags.split(), "--mode", "plain"]))
    found = (config.type_k, config.type_v, config.draft_type_k, config.draft_type_v)
    assert " ".join(found) == types


@pytest.mark.parametrize(
    "text, size",
    [
        ("23GiB", 23 << 30),
        ("23gib", 23 << 30),
        ("1.5G", 3 << 29),
        ("24 GB", 24 * 10**9),
        ("500MB", 500 * 10**6),
        ("7k", 7 << 10),
        ("1000", 1000),
        ("90%", 0.9),
        ("100%", 1.0),
    ],
)
def test_memory_sizes(text, size):
    found = memory_size(text)
    assert found == size and type(found) is type(size)


@pytest.mark.parametrize("text", ["", "G", "-1G", "0", "0%", "101%", "1.5.2G", "8 bananas", "1e9", "12 %%"])
def test_what_is_no_memory_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is (no|an invalid|outside)"):
        memory_size(text)


def test_the_context_and_the_limit_reach_the_engine():
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    assert engine_config(parser.parse_args([])).n_ctx == 0
    config = engine_config(parser.parse_args(["-c", "8192", "--gpu-memory", "50%"]))
    assert config.n_ctx == 8192 and config.gpu_memory == 0.5


def test_flash_attention_leaves_other_arguments_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run = importlib.import_module("dflash_ggml.cli.run").build_parser()
    bench = importlib.import_module("dflash_ggml.bench.cli").build_parser()
    assert run.parse_args(["-fa", "-"]).stdin == "-"
    assert run.parse_args(["-fa", "Hello"]).stdin == "Hello"
    assert run.parse_args(["--flash-attn", "-p", "on"]).prompt == "on"
    assert bench.parse_args(["-fa", "calibrate"]).command == "calibrate"
    for words in (["-fa", "ON", "-"], ["--flash-attn", "Disabled", "-"], ["-fa=0", "-"], ["-fa", "--", "-"]):
        args = run.parse_args(words)
        assert args.stdin == "-" and args.no_effect == [words[0].partition("=")[0]]
    with pytest.raises(SystemExit):
        run.parse_args(["--flash-attn=fast"])
    assert "'fast' is none of on, off, auto" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["--draft-max", "--draft", "--draft-n"])
def test_every_name_of_the_tokens_ahead(name: str) -> None:
    assert configured(name, "5", "--mode", "plain").draft_max == 5


COMMANDS = ["cli.run", "cli.chat", "server.cli", "bench.cli", "cli.doctor"]
# what the usage texts of llama-server, llama-cli and llama-completion list, with as many values as each takes
OF_SERVERS = ("--host", "--port", "--api-key", "--api-key-file", "-a", "--alias", "--cors-origins")
LLAMA_CPP = Path(__file__).with_name("llama_cpp_options.txt").read_text().splitlines()


def parser_of(command: str) -> argparse.ArgumentParser:
    build: Any = importlib.import_module(f"dflash_ggml.{command}").build_parser
    return build()


@pytest.mark.parametrize("command", ["cli.run", "cli.chat", "server.cli", "bench.cli"])
def test_command_lines_of_llama_cpps_programs_run(command: str, caplog: pytest.LogCaptureFixture) -> None:
    line = "--jinja -fa on -ub 512 --no-mmap -tb 4 -ngl all -cb --no-warmup -fa -ngld 99 --draft-min 1 -c 512"
    args = parser_of(command).parse_args([*line.split(), "--mode", "plain"])
    assert (args.gpu_layers, args.ctx_size) == (-1, 512)
    engine_config(args)
    assert caplog.messages == [
        "without effect here: --jinja, -fa, -ub, --no-mmap, -tb, -cb, --no-warmup, -fa, -ngld, --draft-min"
    ]
    caplog.clear()
    engine_config(parser_of(command).parse_args(["--mode", "plain"]))
    assert caplog.messages == []


@pytest.mark.parametrize("command", ["cli.run", "cli.chat", "server.cli"])
def test_every_option_of_llama_cpps_programs_is_known(command: str) -> None:
    """As many values are taken, or the option is refused by name; none is read as another one."""
    known = parser_of(command)._option_string_actions
    for line in LLAMA_CPP:
        name, n = line.split()
        if command != "server.cli" and name in OF_SERVERS:
            continue
        assert name in known, name
        nargs = known[name].nargs
        assert ({None: "1", 0: "0", "?": "?"}.get(nargs) or str(nargs)) == n, name


@pytest.mark.parametrize(
    ("mb", "free", "expected"),
    [
        (None, 2 << 30, 1024),
        (None, 24 << 30, 3072),
        (None, 1 << 40, 8192),
        (0, 1 << 40, 0),
        (512, 1 << 30, 512),
        (-1, 0, 1 << 42),
    ],
)
def test_memory_for_prefixes(mb: int | None, free: int, expected: int) -> None:
    from dflash_ggml.server.cli import cache_bytes

    assert cache_bytes(mb, free) == expected << 20


def test_names_of_llama_cpp_for_our_options() -> None:
    line = (
        "--spec-draft-hf a/b --spec-draft-n-max 48 --spec-type draft-dflash,ngram-mod -rea off -np -1 -cram -1 -n -2 "
        "--api-key one,two -a x,y --cors-origins http://a,http://b --threads -1 --spec-draft-type-k q8_0 --log-verbose"
    )
    args = parser_of("server.cli").parse_args(line.split())
    assert (args.hf_repo_draft, args.think, args.parallel, args.cache_mb) == ("a/b", "off", -1, -1)
    assert (args.api_key, args.alias) == (["one", "two"], ["x", "y"])
    assert args.cors_origin == ["http://a", "http://b"]
    assert (args.max_tokens, args.spec, args.cache_type_k_draft) == (
        None,
        ("dflash", "dflash2", "suffix"),
        "q8_0",
    )
    config = configured("--spec-draft-n-max", "48", "-t", "-1", "--spec-type", "none")
    assert (config.draft_max, config.n_threads, config.spec) == (16, None, ())
    with pytest.raises(SystemExit):
        parser_of("server.cli").parse_args(["--api-key", "one,"])
    args = parser_of("cli.run").parse_args(
        ["-cnv", "--system-prompt", "S", "--spec-type", "draft-mtp", "-p", "x"]
    )
    assert (args.chat, args.system, args.spec) == (True, "S", ("mtp",))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--lora a.gguf", "--lora: adapters are not supported"),
        ("--lora-scaled=a.gguf:1", "--lora-scaled: adapters"),
        ("--rope-scaling yarn", "--rope-scaling: positions are taken as the model file has them"),
        ("--rope-scale 4", "--rope-scale: positions"),
        ("--rope-freq-base 1e6", "--rope-freq-base: positions"),
        ("--yarn-ext-factor 0.5", "--yarn-ext-factor: positions"),
        ("--control-vector-layer-range 1 2", "--control-vector-layer-range: control vectors"),
        ("--override-kv a=int:1", "--override-kv: the model file's keys"),
        ("--dry-multiplier 0.8", "--dry-multiplier: there is no such sampler here"),
        ("--top-nsigma 1", "--top-nsigma: there is no such sampler"),
        ("--samplers top_k;temperature", "--samplers: samplers run in one order"),
        ("--spec-type draft-eagle3", "argument --spec: 'draft-eagle3' is none of dflash, "),
        ("--spec-type draft-simple,ngram-mod", "'draft-simple' is none of"),
        ("--ssl-key-file k.pem", "--ssl-key-file: there is no TLS here"),
        ("--models-dir m", "--models-dir: one model is served"),
        ("-mu http://x/y.gguf", "-mu: name the model with -hf"),
        ("--fim-qwen-7b-default", "--fim-qwen-7b-default: name the model with -hf"),
        ("--skip-chat-parsing", "--skip-chat-parsing: answers are parsed"),
    ],
)
@pytest.mark.parametrize("command", ["cli.run", "server.cli"])
def test_what_would_change_the_answer_is_refused_by_name(
    command: str, words: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parser_of(command).parse_args(words.split())
    printed = capsys.readouterr().err
    assert end.value.code == 2 and printed.count("\n") == 1 and why in printed


@pytest.mark.parametrize(
    "words",
    [
        "--rope-scale 1.0",
        "--rope-freq-base 0",
        "--yarn-ext-factor -1.00",
        "--dry-multiplier 0.0",
        "--xtc-probability=0",
        "--top-n-sigma -1",
        "--sampling-seq edskypmxt",
        "--pooling mean",
        "--api-prefix=",
        "--grp-attn-n 1",
    ],
)
def test_a_value_that_asks_for_nothing_is_refused_nowhere(words: str) -> None:
    args = parser_of("server.cli").parse_args(words.split())
    assert args.no_effect == [words.partition(" ")[0].partition("=")[0]]


@pytest.mark.parametrize("command", COMMANDS)
def test_options_have_their_full_names_only(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is a value read out of a name: what begins like an option of one letter is not that one."""
    for words, near in (
        ("--ctx 512", "--ctx (did you mean --ctx-size?)"),
        ("--mma", "--mma (did you mean --mmap?)"),
        ("-cfoo 8192", "-cfoo"),
        ("-c512", "-c512"),
        ("--nothing=4", "--nothing=4"),
    ):
        with pytest.raises(SystemExit):
            parser_of(command).parse_args(words.split())
        assert f"unrecognized arguments: {near};" in capsys.readouterr().err
    if command == "server.cli":
        args = parser_of(command).parse_args(["-cram", "8192"])
        assert (args.cache_mb, args.ctx_size) == (8192, 0)


def test_templates_and_variables_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    for words, template in (
        (["--chat-template", "{{ x }}"], "{{ x }}"),
        (["--chat-template", "chatml"], FORMATS["chatml"].template),
        (["--chat-template", "llama3"], FORMATS["llama-3"].template),
        (["--chat-template-file", str(file)], "{{ messages }}"),
    ):
        assert session_options(parser_of("server.cli").parse_args(words))["template"] == template
    line = (
        '--chat-template-kwargs {"a":[1]} --reasoning-effort low --reasoning-format none --reasoning-budget 0'
    )
    assert session_options(parser_of("cli.chat").parse_args(line.split())) == {
        "variables": {"a": [1], "reasoning_effort": "low"},
        "split_reasoning": False,
        "reasoning_budget": 0,
    }
    assert session_options(parser_of("cli.run").parse_args([])) == {"variables": {}, "split_reasoning": True}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ["--chat-template", "nothing"],
            "'nothing' is not a known chat format: give the template itself, or one of",
        ),
        (["--chat-template-file", "nothing"], "can't read nothing: "),
        (["--chat-template-kwargs", "[1]"], "'[1]' is not a JSON object"),
        (["--chat-template-kwargs", "{"], "not valid JSON"),
        (["--reasoning-budget", "-2"], "-2 is neither -1 nor a count"),
        (["--reasoning-format", "x"], "invalid choice: 'x'"),
        (["-n", "0"], "0 is neither -1 nor a count"),
    ],
)
@pytest.mark.parametrize("command", ["cli.run", "cli.chat", "server.cli"])
def test_bad_options_of_chats(
    command: str, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser_of(command).parse_args(words)
    assert why in capsys.readouterr().err


def test_prefill_in_8_bit_floats_is_asked_for() -> None:
    assert configured("--prefill-fp8").prefill_fp8 and not configured().prefill_fp8
    assert LlamaOptions("x", prefill_fp8=True).engine_config(None).prefill_fp8
    assert not LlamaOptions("x").engine_config(None).prefill_fp8


@pytest.mark.parametrize("command", ["cli.run", "cli.chat"])
def test_options_of_texts(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    words = ["--ignore-eos", "-r", "User:", "--reverse-prompt", "###", "-jf", str(file)]
    assert text_options(parser_of(command).parse_args(words)) == {
        "ignore_eos": True,
        "stop": ("User:", "###"),
        "prompt_keep": None,
        "grammar": GrammarSpec("json_schema", '{"type": "integer"}'),
    }
    for empty in (["--grammar", ""], ["-j", " "], []):
        assert text_options(parser_of(command).parse_args(empty))["grammar"] is None
    assert text_options(parser_of(command).parse_args(["--grammar", 'root ::= "a"']))[
        "grammar"
    ] == GrammarSpec("gbnf", 'root ::= "a"')
    with pytest.raises(SystemExit):
        parser_of(command).parse_args(["-j", "{"])
    assert "-j/--json-schema: json schema: not valid JSON" in capsys.readouterr().err
