"""Tests of the grammar sandbox: grammars are compiled in a process with limits before the server compiles them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time

import pytest

from dflash_ggml.errors import ConfigError
from dflash_ggml.server import grammar_sandbox
from dflash_ggml.server.grammar_sandbox import Vetter
from dflash_ggml.session.session import Session
from dflash_ggml.text.grammar import GrammarCompiler
from dflash_ggml.text.grammar_spec import GrammarSpec
from reference.fake_engine import FakeEngine

pytest.importorskip("llguidance")

WORD = GrammarSpec("regex", "[a-z]+")
NAMES = [f"name{i}" for i in range(400)]
LARGE = GrammarSpec(
    "json_schema",
    json.dumps({"type": "object", "properties": {n: {"type": "string"} for n in NAMES}, "required": NAMES}),
)


@pytest.fixture
def vetter():
    made = Vetter(["<|im_start|>", "<|im_end|>"])
    yield made
    made.close()


def process(vetter: Vetter) -> subprocess.Popen[bytes]:
    assert vetter._process is not None
    return vetter._process


def test_good_and_bad_grammars_come_to_an_end(vetter: Vetter) -> None:
    for spec in (
        WORD,
        LARGE,
        GrammarSpec("json_object"),
        GrammarSpec("regex", "(unclosed"),
        GrammarSpec("gbnf", "no rules"),
        GrammarSpec("lark", 'start: <|im_end|> "x"'),
    ):
        vetter(spec)
    first = process(vetter).pid
    vetter(WORD)
    assert process(vetter).pid == first


def test_numbers_of_tokens_do_not_end_the_trial_early() -> None:
    assert (
        grammar_sandbox._TOKEN_IDS.sub("<[0]>", "start: <[5000]> /a+/ <[12-13,99]> <[^7]>")
        == "start: <[0]> /a+/ <[0]> <[0]>"
    )


def test_one_that_takes_too_long_is_refused_and_remembered(vetter: Vetter) -> None:
    vetter(WORD)
    stopped = process(vetter)
    os.kill(stopped.pid, signal.SIGSTOP)  # whatever it is at, it does not come to an end
    vetter.seconds = 0.05
    with pytest.raises(ConfigError, match=r"grammar \(json_schema\): compiling it takes more than 0.05 s"):
        vetter(LARGE)
    assert stopped.poll() is not None
    with pytest.raises(ConfigError, match="0.05 s"):
        vetter(LARGE)
    vetter.seconds = grammar_sandbox.SECONDS
    vetter(WORD)  # in another process
    assert process(vetter).pid != stopped.pid


def test_one_that_takes_too_much_memory_is_refused() -> None:
    vetter = Vetter([], memory=1 << 16)
    try:
        with pytest.raises(ConfigError, match="more than 0 MiB of memory"):
            vetter(LARGE)
        vetter.memory = grammar_sandbox.MEMORY
        vetter(GrammarSpec("regex", "x"))
    finally:
        vetter.close()


def test_a_process_that_was_killed_between_two_grammars_is_started_again(vetter: Vetter) -> None:
    vetter(WORD)
    process(vetter).send_signal(signal.SIGKILL)
    process(vetter).wait()
    vetter(LARGE)


def test_where_none_can_be_started_grammars_are_compiled_anyway(
    vetter: Vetter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(grammar_sandbox, "spawn", refuse)
    vetter(WORD)
    vetter(LARGE)
    assert caplog.text.count("compiled without the sandbox: no more processes") == 1


def test_closing_does_not_wait_for_a_grammar(vetter: Vetter) -> None:
    vetter(WORD)
    os.kill(process(vetter).pid, signal.SIGSTOP)
    vetter.seconds = 600
    asking = threading.Thread(target=vetter, args=(LARGE,))
    asking.start()
    while asking.is_alive() and not vetter._lock.locked():
        time.sleep(0.001)
    vetter.close()
    asking.join(30)
    assert not asking.is_alive()


def test_the_process_ends_with_its_server(vetter: Vetter) -> None:
    vetter(WORD)
    assert vetter._pipe is not None
    vetter._pipe.close()
    process(vetter).wait(30)


def test_a_compiler_asks_once_for_each_grammar() -> None:
    calls = []

    def vet(spec: GrammarSpec) -> None:
        calls.append(spec)
        if spec == LARGE:
            raise ConfigError("grammar: refused")

    engine = FakeEngine()
    compiler = Session(engine, vet=vet).grammars  # type: ignore[arg-type]
    compiler.matcher(WORD)
    compiler.matcher(WORD)
    for _ in range(2):
        with pytest.raises(ConfigError, match="refused"):
            compiler.matcher(LARGE)
    assert calls == [WORD, LARGE, LARGE]
    GrammarCompiler(engine.tokenizer, engine.n_vocab).matcher(LARGE)


def test_special_tokens_come_from_the_vocabulary() -> None:
    engine = FakeEngine()
    made = Vetter.of(engine.tokenizer)
    known = [t for i, t in enumerate(engine.tokenizer.tokens) if engine.tokenizer.is_control(i)]
    assert known and made._special == known
