"""Hostile requests against a server in a separate process, each followed by a normal one that must be answered.

    python -m fuzz.hostile    serves the toy engine and prints its port

A request is its seed. It is "loads" where it is answered, "refused" with an error that its client can parse.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import brotli

from fuzz.campaign import TESTS, TOO_MUCH, Outcome
from reference.requests import REQUESTS

HANGS_AFTER = 30.0  # seconds for one answer, the normal ones included; a generous limit for a busy machine
NORMAL = {"model": "toy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
PATHS = (*REQUESTS, "/tokenize", "/detokenize", "/apply-template", "/infill", "/props", "/slots", "/metrics",
         "/v1/models", "/api/show", "/api/tags", "/v1/messages/count_tokens", "/v1/responses/x", "/", "/no/such")  # fmt: skip
Body = dict[str, Any]


class Server:
    """One server process."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "fuzz.hostile"],
            stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment, cwd=TESTS,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline() or 0)
        while self.ask("GET", "/health", b"", {})[0] != 200:
            time.sleep(0.02)
        self.ask("POST", "/v1/chat/completions", json.dumps(NORMAL).encode(), {})
        self.before = self.most()

    def ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        """Status and whole answer. Raises OSError or HTTPException where none comes."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=HANGS_AFTER)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"content-type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def ended(self) -> str:
        """Its last output; empty while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(0.5)
            self._errors.seek(0)
            printed = self._errors.read().decode(errors="replace").strip().splitlines()
            return f"exit code {code}: {' | '.join(printed[-3:])}"
        return ""

    def most(self) -> int:
        """Its peak memory in bytes, 0 where the system does not report it."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return 1024 * int(line.split()[1])
        return 0

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()


def run(first: int, n: int) -> Outcome:
    """Requests `first` to `first + n - 1`; after one that ends the server or fills its memory, with a new one."""
    outcome, server = Outcome(), Server()
    try:
        for seed in range(first, first + n):
            what, words = _one(server, *request(seed))
            outcome.note(what, seed, words)
            if what in ("abort", "hang", "over 300 MB"):
                server.close()
                server = Server()
    finally:
        server.close()
    return outcome


def _one(server: Server, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[str, str]:
    try:
        status, answer = server.ask(method, path, body, headers)
        reply = answer.decode(errors="replace")
        good, _ = server.ask("POST", "/v1/chat/completions", json.dumps(NORMAL).encode(), {})
    except TimeoutError:
        return "abort" if server.ended() else "hang", f"{method} {path}: {server.ended() or 'no answer'}"
    except (OSError, http.client.HTTPException) as error:
        ended = server.ended()
        return ("abort" if ended else "wrong exception"), f"{method} {path}: {error!r} {ended}"
    if good != 200:
        return "wrong exception", f"{method} {path}: the normal request was answered {good}"
    if status >= 500 and status not in (501, 503):
        return "wrong exception", f"{method} {path}: {status} {reply[:200]}"
    if "internal error" in reply or "engine_error" in reply:
        return "wrong exception", f"{method} {path}: in its answer: {reply[-200:]}"
    if server.most() > server.before + TOO_MUCH:
        return "over 300 MB", f"{method} {path}: {server.most() >> 20} MB"
    if status < 400:
        return "loads", ""
    return (
        ("refused", "")
        if reply.strip() or method == "HEAD"
        else ("wrong exception", f"{path}: {status}, no words")
    )


def request(seed: int) -> tuple[str, str, bytes, dict[str, str]]:
    """Method, path, body and headers."""
    rng = random.Random(seed)
    make = rng.choice([_changed] * 4 + [_damaged, _packed, _odd_route, _template, _lies] + [_constraint] * 5)
    path, body, headers = make(rng)
    method = (
        "POST"
        if make is not _odd_route
        else rng.choice(["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "POST", "X"])
    )
    return method, path, body, headers


def _changed(rng: random.Random) -> tuple[str, bytes, dict[str, str]]:
    """A good request with one to four things in it replaced."""
    path = rng.choice(sorted(REQUESTS))
    body = copy.deepcopy(REQUESTS[path])
    for _ in range(rng.randint(1, 4)):
        holder: Any = body
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            key = rng.choice(keys) if keys else ""
            if not keys or not isinstance(holder[key], (dict, list)) or rng.random() < 0.3:
                break
            holder = holder[key]
        if isinstance(holder, list) and not keys:
            holder.append(_junk(rng))
        elif isinstance(holder, dict) and rng.random() < 0.2:
            holder[_text(rng)] = _junk(rng)
        else:
            holder[key] = _junk(rng)
    return path, _dumped(body), {}


def _damaged(rng: random.Random) -> tuple[str, bytes, dict[str, str]]:
    """The bytes of a good request, some of them others."""
    path = rng.choice(sorted(REQUESTS))
    body = bytearray(json.dumps(REQUESTS[path]).encode())
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(body) + 1)
        action = rng.random()
        if action < 0.4 and at < len(body):
            body[at] = rng.randrange(256)
        elif action < 0.7:
            body[at:at] = rng.choice(
                [b"\x00", b"\xff\xfe", b"[" * 5000, b'"', b"}", b"1e99999", b"\\ud800", b"NaN"]
            )
        else:
            del body[at : at + rng.choice([1, 10, 1000])]
        body = body or bytearray(b" ")
    return path, bytes(body), {}


def _packed(rng: random.Random) -> tuple[str, bytes, dict[str, str]]:
    """A compressed body: a good request or a great many zeros, whole or damaged."""
    path = rng.choice(sorted(REQUESTS))
    name, compress = rng.choice(
        [("gzip", gzip.compress), ("deflate", zlib.compress), ("br", brotli.compress)]
    )
    plain = json.dumps(REQUESTS[path]).encode()
    body = bytearray(compress(rng.choice([plain, plain, plain * 99, bytes(1 << 25)])))
    for _ in range(rng.choice([0, 1, 3])):
        body[rng.randrange(len(body))] = rng.randrange(256)
    end = len(body) if rng.random() < 0.7 else rng.randrange(len(body))
    return (
        path,
        bytes(body[:end]),
        {"content-encoding": rng.choice([name, name, name, "zstd", f"{name}, br"])},
    )


def _odd_route(rng: random.Random) -> tuple[str, bytes, dict[str, str]]:
    path = rng.choice(PATHS) + rng.choice(
        ["", "/", "?x=" + "%00" * 9, "/../..", "//", "%2e%2e", "?" + "a" * 5000]
    )
    return (
        path,
        _dumped(_junk(rng)),
        {rng.choice(["accept", "x-api-key", "authorization"]): "a" * rng.choice([0, 99])},
    )


def _lies(rng: random.Random) -> tuple[str, bytes, dict[str, str]]:
    """Headers that do not fit the body."""
    path = rng.choice(sorted(REQUESTS))
    headers = rng.choice([
        {"content-type": "text/plain"}, {"content-type": "multipart/form-data; boundary=x"}, {"expect": "100-continue"},
        {"content-encoding": "gzip"}, {"content-type": "application/json; charset=utf-16"}, {"connection": "upgrade"},
        {"host": "a" * 1000}, {"content-type": ""},
    ])  # fmt: skip
    return path, _dumped(REQUESTS[path]), headers


def _template(rng: random.Random) -> tuple[str, bytes, dict[str, str]]:
    """A chat with variables for its template, some of which are the server's own."""
    names = [
        "messages",
        "tools",
        "self",
        "continue_final_message",
        "add_generation_prompt",
        "enable_thinking",
        "a b",
    ]
    names += [
        "bos_token",
        "loop",
        "range",
        "namespace",
        "raise_exception",
        "context",
        "environment",
        "",
        "\x00",
        "é",
        "if",
    ]
    given = {name: _junk(rng) for name in rng.sample(names, rng.randint(1, 4))}
    body = {
        **NORMAL,
        "chat_template_kwargs": given,
        "chat_template": rng.choice(TEMPLATES),
        "template": "{{ 'a'*10**9 }}",
    }
    return rng.choice(["/v1/chat/completions", "/apply-template", "/api/chat"]), _dumped(body), {}


def _constraint(rng: random.Random) -> tuple[str, bytes, dict[str, str]]:
    """An oversized schema or grammar, in one of the fields that take one."""
    body = copy.deepcopy(NORMAL)
    if rng.random() < 0.35:
        kind, text = rng.choice(GRAMMARS)(rng)
        if kind == "gbnf":
            body["grammar"] = text
            return (
                rng.choice(["/v1/chat/completions", "/completion", "/v1/completions"]),
                _dumped(body | {"prompt": "a"}),
                {},
            )
        field = rng.choice([{"guided_regex": text}, {"structured_outputs": {"regex": text}}, {"regex": text}])
        if kind == "lark":
            field = rng.choice(
                [{"guided_grammar": text}, {"grammar": text}, {"structured_outputs": {"grammar": text}}]
            )
        return "/v1/chat/completions", _dumped(body | field), {}
    schema = rng.choice(SCHEMAS)(rng)
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        schema = rng.choice(
            [{"properties": {"a": schema}}, {"items": schema}, {"anyOf": [schema, {}]}, {"allOf": [schema]}]
        )
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    path, more = rng.choice([
        ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}),
        ("/v1/chat/completions", {"tools": [tool], "tool_choice": "required"}),
        ("/v1/chat/completions", {"guided_json": schema}),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}),
        ("/v1/messages", {"max_tokens": 3, "tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"}}),
        ("/api/chat", {"format": schema}),
        ("/completion", {"prompt": "a", "n_predict": 3, "json_schema": schema}),
    ])  # fmt: skip
    return path, _dumped(body | more), {}


def _chain(link: Callable[[str], Any], n: int) -> Body:
    return {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(n)} | {f"d{n}": {}},
    }


def _pattern(rng: random.Random) -> str:
    pattern = rng.choice(["a", "(a|b)", "[a-z]*", ".*a", r"\p{L}", "(a*)*", "(?:x?)"])
    for _ in range(rng.randint(1, 5)):
        count = rng.choice(
            ["{10}", "{1000}", "{0,300}", "*", "{4000000000}", "{2,}", "|" + pattern, "?", "+b"]
        )
        pattern = f"({pattern}{count})"
    return pattern


SCHEMAS: list[Callable[[random.Random], Any]] = [
    lambda rng: _chain(lambda ref: {"$ref": ref}, rng.choice([100, 2500, 9000])),
    lambda rng: _chain(lambda ref: {"properties": {"a": {"$ref": ref}}}, rng.choice([100, 150, 199, 1000])),
    lambda rng: _chain(lambda ref: {"items": {"$ref": ref}}, rng.choice([150, 2000])),
    lambda rng: _chain(lambda ref: {"anyOf": [{"$ref": ref}, {"type": "null"}]}, rng.choice([60, 150, 2000])),
    lambda rng: _chain(lambda ref: {"allOf": [{"$ref": ref}, {"type": "string"}]}, rng.choice([20, 60, 2000])),
    lambda rng: _chain(lambda ref: {"oneOf": [{"$ref": ref}, {"$ref": ref}]}, rng.choice([10, 20, 60])),
    lambda rng: {"allOf": [{"multipleOf": rng.choice([9973, 7919, 0.0007, 1e-9])} for _ in range(2)], "type": "integer"},
    lambda rng: {"type": "number", "multipleOf": rng.choice([0, -1, 1e-300, 1e300, 9973, 99991, 0.1])},
    lambda rng: {"required": [f"p{i}" for i in range(rng.choice([900, 4000, 8000]))]},
    lambda rng: {"properties": {f"p{i}": {"type": "string"} for i in range(rng.choice([900, 1200, 4000]))}},
    lambda rng: {"enum": [f"v{i}" * 9 for i in range(rng.choice([900, 8000]))]},
    lambda rng: {"enum": ["x" * 100_000, "y" * 100_000, {"a": [1] * 5000}]},
    lambda rng: {"const": _junk(rng)},
    lambda rng: {"type": "string", "pattern": _pattern(rng), "maxLength": rng.choice([9, 5000])},
    lambda rng: {"type": "string", "pattern": f"^{_pattern(rng)}$"},
    lambda rng: {"patternProperties": {_pattern(rng): {"type": "string"}, "^a": {}}},
    lambda rng: {"properties": {f"p{i}": {"type": "string", "pattern": f".*[a-m].{{{i}}}z"} for i in range(200)}},
    lambda rng: {"allOf": [{"type": "string", "pattern": _pattern(rng)} for _ in range(rng.randint(2, 6))]},
    lambda rng: {"anyOf": [{"properties": {f"a{i}": {"type": "string"}}} for i in range(rng.choice([50, 900, 4000]))]},
    lambda rng: {"allOf": [{"anyOf": [{"required": [f"a{i}{j}"]} for j in range(4)]} for i in range(rng.choice([3, 12]))]},
    lambda rng: {"type": "array", "minItems": rng.choice([0, 4096, 10**9, -1]), "items": {"type": "array", "minItems": 4096}},
    lambda rng: {"prefixItems": [{"type": "integer"}] * rng.choice([900, 4000])},
    lambda rng: {"type": "string", "minLength": rng.choice([10**6, 10**9, 10**30, -1]), "maxLength": 10**6},
    lambda rng: {rng.choice(["type", "items", "allOf", "enum", "$ref", "required", "properties"]): _junk(rng)},
    lambda rng: {"type": "number", "minimum": rng.choice([-1e308, 0.1234567890123, 10**30]), "maximum": rng.choice([1e308, 1])},
]  # fmt: skip
GRAMMARS: list[Callable[[random.Random], tuple[str, str]]] = [
    lambda rng: ("gbnf", "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(rng.choice([150, 9000])))),
    lambda rng: ("gbnf", "root ::= " + " ".join(f"r{i}?" for i in range(3000)) + "".join(f'\nr{i} ::= "a"' for i in range(3000))),
    lambda rng: ("gbnf", "root ::= " + "(" * rng.choice([90, 5000]) + '"a"' + ")" * 5000),
    lambda rng: ("gbnf", rng.choice(['root ::= root root | ""', 'root ::= "a"{1000000000}', 'root ::= ("a"?){50}', "root ="])),
    lambda rng: ("lark", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3000)) + '\nr3000: "a"'),
    lambda rng: ("lark", "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)) + '\nR40: "a"'),
    lambda rng: ("lark", "start: j\nj: %json " + json.dumps(rng.choice(SCHEMAS)(rng))),
    lambda rng: ("lark", json.dumps({"grammars": [{"json_schema": rng.choice(SCHEMAS)(rng)}]})),
    lambda rng: ("lark", f"start: T\nT: /{_pattern(rng)}/ & ~/{_pattern(rng)}/"),
    lambda rng: ("lark", rng.choice(["%llguidance {}\nstart: a", "start: start", 'start: ("a"~1000)~1000', "start: /(/"])),
    lambda rng: ("regex", _pattern(rng)),
    lambda rng: ("regex", "(" * 50_000 + ")" * rng.choice([0, 50_000])),
]  # fmt: skip
TEMPLATES = [
    "{{ 'a' * 10**9 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{",
    None,
    3,
]


def _text(rng: random.Random) -> str:
    return rng.choice([
        "", "\x00", "\ud800", "\U0010ffff", "a" * 100_000, "‮" * 50, "<|im_end|>", "é" * 9999, "{{ 1 }}", "\n" * 5000,
        "<think>" * 500, "<tool_call>" * 500, "\ufeff", "ﷺ" * 999, "a\u0301" * 3000, "1" * 5000, "$ref", "__class__",
    ])  # fmt: skip


def _junk(rng: random.Random, depth: int = 0) -> Any:
    made = rng.randrange(14 if depth < 3 else 10)
    if made < 8:
        return [None, True, 0, -1, 10**400, 1e308, 2**63, -0.0][made]
    if made < 10:
        return _text(rng)
    if made == 10:
        return [_junk(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    if made == 11:
        return {_text(rng)[:99]: _junk(rng, depth + 1) for _ in range(rng.randint(0, 4))}
    if made == 12:
        return [rng.choice([0, "", None, {}])] * rng.choice([9000, 70_000])
    value: Any = 1
    for _ in range(rng.choice([50, 70, 900])):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


@contextlib.contextmanager
def _listening() -> Iterator[socket.socket]:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        yield made


def serve() -> None:
    """The toy engine behind the whole application, until the process is ended."""
    import uvicorn

    from dflash_ggml.config import EngineConfig
    from dflash_ggml.server.app import create_app, make_service
    from dflash_ggml.server.dialect import Settings
    from dflash_ggml.server.grammar_sandbox import Vetter
    from dflash_ggml.server.runner import Runner
    from dflash_ggml.session.session import Session
    from reference.fake_engine import TOOL_TEMPLATE, FakeEngine, byte_vocabulary

    config = EngineConfig(model=Path("toy.gguf"), n_ctx=512, n_batch=64)
    engine: Any = FakeEngine(config, byte_vocabulary(template=TOOL_TEMPLATE))
    vetter = Vetter.of(engine.tokenizer)

    def opened(progress: object) -> Runner:
        return Runner(Session(engine, vet=vetter), vetter.close)

    app = create_app(make_service(opened, Settings(names=("toy",))))
    with _listening() as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        listening.listen(64)
        print(listening.getsockname()[1], flush=True)
        server.run([listening])


if __name__ == "__main__":
    serve()
