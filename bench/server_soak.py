"""Abuse a running server with clients that go away, and print its memory: JSON lines, one per round.

    python bench/server_soak.py --rounds 10 --clients 100 [dflash-serve options]

Each client is one of: cuts its request half way, cuts a stream after the first bytes, goes away from a whole
answer, sends malformed JSON, reads to the end. Memory is the server's resident set (Linux); it should level off
after the first rounds. The exit code says only whether the server still answered at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

KINDS = ("half a request", "cut stream", "cut answer", "malformed", "whole stream")


def resident_mib(pid: int) -> float:
    """Resident set of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found.group(1)) / 1024 if found else float("nan")


def post(path: str, body: bytes) -> bytes:
    """A request as bytes."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


async def client(port: int, kind: str, rng: random.Random) -> str:
    """Play one client; returns the status line's code, or "-" when it did not wait for one."""
    prompt = f"def f{rng.randrange(1 << 30)}(x):"
    body = {
        "prompt": prompt,
        "max_tokens": 24 if kind == "whole stream" else 400,
        "stream": kind != "cut answer",
    }
    data = post("/v1/completions", b'{"prompt": "a", ' if kind == "malformed" else json.dumps(body).encode())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if kind == "half a request":
            writer.write(data[: rng.randrange(20, len(data))])
            await writer.drain()
            return "-"
        writer.write(data)
        await writer.drain()
        if kind == "cut answer":
            await asyncio.sleep(rng.random() * 0.2)
            return "-"
        status = (await reader.readline()).split(b" ")[1].decode()
        if kind == "cut stream":
            await reader.read(rng.randrange(1, 2000))
        else:
            await reader.read()
        return status
    finally:
        writer.transport.abort()  # no polite end of the connection
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def play(port: int, clients: int, at_once: int, rng: random.Random) -> dict[str, int]:
    """Play a round of clients; counts of the status codes they saw."""
    gate = asyncio.Semaphore(at_once)
    seen: dict[str, int] = {}

    async def one(kind: str) -> None:
        async with gate:
            try:
                status = await client(port, kind, rng)
            except (OSError, IndexError, asyncio.IncompleteReadError):
                status = "connection lost"
        seen[status] = seen.get(status, 0) + 1

    await asyncio.gather(*(one(rng.choice(KINDS)) for _ in range(clients)))
    return seen


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, default=100, help="per round")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args, rest = parser.parse_known_args()
    command = [sys.executable, "-m", "dflash_ggml.server.cli", "--port", "0", *rest]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    line = server.stderr.readline()
    found = re.search(r":(\d+)/", line)
    if found is None:
        print(line, server.stderr.read(), file=sys.stderr)
        return 1
    port, rng = int(found.group(1)), random.Random(args.seed)
    try:
        for number in range(args.rounds + 1):
            began = time.perf_counter()
            seen = asyncio.run(play(port, args.clients, args.at_once, rng)) if number else {}
            row = {
                "clients": number * args.clients,
                "resident_mib": round(resident_mib(server.pid), 1),
                "seconds": round(time.perf_counter() - began, 2),
                "statuses": dict(sorted(seen.items())),
            }
            print(json.dumps(row), flush=True)
        status = "503"
        while status == "503":  # the queue may still hold requests whose clients are gone
            time.sleep(0.1)
            status = asyncio.run(client(port, "whole stream", rng))
        print(json.dumps({"answers_at_the_end": status == "200"}))
        return 0 if status == "200" else 1
    finally:
        server.terminate()
        server.communicate()


if __name__ == "__main__":
    sys.exit(main())
