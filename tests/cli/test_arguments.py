"""The options that name and load the models, on the command line and of the class."""

from __future__ import annotations

import argparse
import importlib
import re

import pytest

import dflash_ggml
from dflash_ggml.cli.arguments import add_model_options, engine_config, memory_size
from dflash_ggml.config import ALL_LAYERS, EngineConfig
from dflash_ggml.errors import ConfigError
from dflash_ggml.files.pairs import EMBEDDED_DRAFT
from dflash_ggml.llama.options import LlamaOptions


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
    assert both.spec == ("dflash", "suffix") and both.draft is not None and both.copies
    for words, spec in (("suffix", ("suffix",)), ("none", ())):
        config = configured("--spec", words)
        assert config.spec == spec and config.draft is None and config.copies == (spec != ())
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
    with pytest.raises(argparse.ArgumentTypeError, match="is (no|outside)"):
        memory_size(text)


def test_the_context_and_the_limit_reach_the_engine():
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    assert engine_config(parser.parse_args([])).n_ctx == 0
    config = engine_config(parser.parse_args(["-c", "8192", "--gpu-memory", "50%"]))
    assert config.n_ctx == 8192 and config.gpu_memory == 0.5


def test_flash_attention_leaves_other_words_alone(capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("command", ["cli.run", "cli.chat", "server.cli", "bench.cli"])
def test_command_lines_of_llama_cpps_programs_run(command: str, caplog: pytest.LogCaptureFixture) -> None:
    build = importlib.import_module(f"dflash_ggml.{command}").build_parser
    line = "--jinja -fa on -ub 512 --no-mmap -tb 4 -ngl all -cb --no-warmup -fa -ngld 99 --draft-min 1 -c 512"
    args = build().parse_args([*line.split(), "--mode", "plain"])
    assert (args.gpu_layers, args.ctx_size) == (-1, 512)
    engine_config(args)
    assert caplog.messages == [
        "without effect here: --jinja, -fa, -ub, --no-mmap, -tb, -cb, --no-warmup, -fa, -ngld, --draft-min"
    ]
    caplog.clear()
    engine_config(build().parse_args(["--mode", "plain"]))
    assert caplog.messages == []
    with pytest.raises(SystemExit):  # what would change the text is no option
        build().parse_args(["--lora", "x"])


@pytest.mark.parametrize("command", ["cli.run", "cli.chat", "cli.doctor", "server.cli", "bench.cli"])
def test_abbreviations_mean_the_options_that_help_lists(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """--threads-batch and the like are known by their full names only."""
    parse = importlib.import_module(f"dflash_ggml.{command}").build_parser().parse_args
    line = "--ctx 512 --thread 2 --gpu-l 0 --draft-m=5 --sp suffix --no-cal --threads-batch 4 --poll=50"
    args = parse(line.split())
    assert (args.ctx_size, args.threads, args.gpu_layers, args.draft_max) == (512, 2, 0, 5)
    assert args.spec == ("suffix",) and args.no_calibrate
    assert args.no_effect == ["--threads-batch", "--poll"]
    for words in (["--mma"], ["--threads-b=4"], ["--flash=on"]):
        with pytest.raises(SystemExit):
            parse(words)
        assert f"unrecognized arguments: {words[0]}" in capsys.readouterr().err
