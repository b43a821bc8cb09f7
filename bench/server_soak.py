"""Soak test: load a running server in the ways that once stopped it, while another process polls /health.

    python bench/server_soak.py [--seconds 8] [--json FILE] [dflash-serve options]

Prints a row per kind of load: how often and how fast /health answered, what the clients got, and the server's resident memory
at its end (Linux). The exit code is 0 if 99 of 100 health checks of every row took less than 50 ms and the server still answers
at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from common import header, save

HEALTH_MS = 50.0
POST = "POST {} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {}\r\n\r\n"
NUMBERS = itertools.count()


def post(path: str, body: object) -> bytes:
    """A request as bytes; a body of bytes is sent as it is."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return POST.format(path, len(data)).encode() + data


def chat(text: str, **more: object) -> bytes:
    """A short chat."""
    return post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}
    )


def schema() -> dict[str, object]:
    """A schema that was not seen before, as large as they come."""
    n = next(NUMBERS)
    properties = {f"field {n} {i}": {"type": "integer", "minimum": i} for i in range(400)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def schema_chat() -> bytes:
    """A chat that asks for an answer of such a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema()}}
    return chat("x", response_format=form)


TEXT = "def f(x): return x + 1\n" * 300_000
SEVEN = chat(TEXT)
COUNT = post("/v1/messages/count_tokens", {"model": "soak", "messages": [{"role": "user", "content": TEXT}]})
SMALL = post("/v1/chat/completions", b'{"messages": [' + b",".join([b'""'] * 2_600_000) + b"]}")
IDS = post("/v1/completions", b'{"prompt": [' + b",".join([b"1.5"] * 1_900_000) + b"]}")
# kind of load -> clients at once, what each sends over and over
LOADS: dict[str, tuple[int, Callable[[], bytes]]] = {
    "nothing": (0, lambda: b""),
    "one long answer": (1, lambda: chat("x", max_tokens=400, stream=True)),
    "32 clients": (32, lambda: chat(f"def f{next(NUMBERS)}(x):")),
    "texts of 7 MB": (4, lambda: SEVEN),
    "texts of 7 MB to count": (2, lambda: COUNT),
    "2.6 million empty strings": (2, lambda: SMALL),
    "1.9 million numbers": (2, lambda: IDS),
    "schemas of 400 fields": (4, schema_chat),
    "clients that go away": (8, lambda: chat(f"def g{next(NUMBERS)}(x):", max_tokens=200, stream=True)),
}


def resident_mib(pid: int) -> float:
    """Resident set of a process in MiB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found.group(1)) / 1024 if found else float("nan")


def probe(port: int, seconds: float) -> None:
    """Ask for /health for a while, each time on a new connection; prints the milliseconds as JSON."""
    end, times = time.perf_counter() + seconds, []
    while time.perf_counter() < end:
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        times.append(1e3 * (time.perf_counter() - began))
        time.sleep(0.01)
    print(json.dumps(times))


async def client(port: int, data: bytes, leave: bool, rng: random.Random) -> str:
    """Send a request and read its answer, or leave in the middle of either; the status, or how it ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if leave and rng.random() < 0.3:
            writer.write(data[: rng.randrange(20, len(data))])
            await writer.drain()
            return "left while asking"
        writer.write(data)
        await writer.drain()
        status = (await reader.readline()).split(b" ")[1].decode()
        if leave:
            await reader.read(rng.randrange(1, 2000))
            return "left while reading"
        await reader.read()
        return status
    except (OSError, IndexError):
        return "connection lost"
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def load(port: int, kind: str, seconds: float, rng: random.Random) -> tuple[Counter[str], list[float]]:
    """One kind of load for a while: what the clients saw, and the milliseconds of the health checks."""
    at_once, make = LOADS[kind]
    seen: Counter[str] = Counter()
    command = [sys.executable, __file__, "--probe", str(port), "--seconds", str(seconds)]
    watcher = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    output = asyncio.ensure_future(watcher.communicate())

    async def one() -> None:
        async for _ in until(output):
            seen[await client(port, make(), "go away" in kind, rng)] += 1

    await asyncio.gather(*(one() for _ in range(at_once)))
    out, _ = await output
    return seen, json.loads(out)


async def until(task: asyncio.Future[object]) -> AsyncIterator[None]:
    """Again and again, until the task is done."""
    while not task.done():
        yield
        await asyncio.sleep(0)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="per kind of load")
    parser.add_argument("--json", help="file for the result")
    parser.add_argument("--probe", type=int, help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.probe:
        probe(args.probe, args.seconds)
        return 0
    command = [sys.executable, "-m", "dflash_ggml.server.cli", "--port", "0", "--alias", "soak", *rest]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    line = server.stderr.readline()
    found = re.search(r":(\d+)/", line)
    if found is None:
        print(line, server.stderr.read(), file=sys.stderr)
        return 1
    port, rng, rows = int(found.group(1)), random.Random(0), []
    facts = header()
    print(f"commit {facts['commit']}, {facts['cpu']}, {facts['cpus']} CPUs, load average {facts['load']}\n")
    print(
        "| load | health checks | median ms | p99 ms | longest ms | clients saw | resident MiB |\n|---|---|---|---|---|---|---|"
    )
    try:
        for kind in LOADS:
            seen, times = asyncio.run(load(port, kind, args.seconds, rng))
            times.sort()
            row = {
                "load": kind,
                "checks": len(times),
                "median_ms": round(times[len(times) // 2], 1),
                "p99_ms": round(times[int(0.99 * (len(times) - 1))], 1),
                "longest_ms": round(times[-1], 1),
                "seen": dict(sorted(seen.items())),
                "resident_mib": round(resident_mib(server.pid)),
            }
            rows.append(row)
            saw = ", ".join(f"{n} x {status}" for status, n in row["seen"].items())
            cells = [
                kind,
                *(row[k] for k in ("checks", "median_ms", "p99_ms", "longest_ms")),
                saw,
                row["resident_mib"],
            ]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        status = asyncio.run(client(port, chat("x"), False, rng))
        save(args.json, {**facts, "rows": rows, "status_at_the_end": status})
        return 0 if status == "200" and all(row["p99_ms"] <= HEALTH_MS for row in rows) else 1
    finally:
        server.terminate()
        server.communicate()


if __name__ == "__main__":
    sys.exit(main())
