"""Load test with real HTTP clients: random arrivals, a limit on concurrency; total throughput, time to first token,
percentiles.

    python bench/server_load.py [--requests 64] [--clients 1 8] [--rounds N] [--rate R] [--json FILE] [dflash-serve options]
    python bench/server_load.py --llama-server PATH --llama-options "-m MODEL.gguf -np 8 ..." [...]
    python bench/server_load.py --mix prompts [--rounds N] [--against http://HOST:PORT ...] [dflash-serve options]
    python bench/server_load.py --soak 5000 --disconnects 1000 [dflash-serve options]

Arrivals are Poisson: `--rate` requests a second on average (0: as fast as the clients come free), at most `--clients` at a
time; a request that finds all clients busy waits, and that counts. Every number of clients is a row, with a server of its own:
the next row sends the same requests, and prompt lookup could match answers of the row before. A llama-server is started in the
same run, alternating with ours, with the options that it is given, and gets the same requests. Besides wall time there is
processor time, of the server and of the clients here: on a shared machine only that is to be trusted.

`--mix prompts` is a load in which prefilling and decoding compete: prompts of 100 to 4,000 words, answers of 150 tokens, and a
third of the clients disconnect midway, in the first quarter of what they requested. Its warm-up is of the same kind, because
every size of a pass is a graph to build. Servers that run already get the same load with `--against`; without options for a
dflash-serve only those do. Every iteration has prompts of its own, but a server may still hold those of an earlier run: restart
it.

A soak has clients that disconnect. It begins once caches that fill to a limit have done so, after five parts at most: graphs,
one for each shape of a pass, and past outputs for prompt lookup. Snapshots of prompts are another such cache; `--cache-mb 0`
keeps none. The exit code tells whether the server's memory after the last of five parts is within 1 % of that after the first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common import header, save

from dflash_ggml.bench.servers import Server
from dflash_ggml.drafts.prompt_lookup import PAST_TOKENS

PROMPTS = (
    "def fibonacci(n):\n",
    "class Stack:\n    def push(self, item):\n",
    "import os\n\n\ndef walk(path):\n",
    "# Sort a list of numbers\n",
    "for line in open(name):\n",
    "The difference between a list and a tuple is",
    "def read_config(path: str) -> dict:\n",
    "    return [x for x in items if",
)
WORDS = (
    "the house of a river and its stone bridge where people walk in early morning light before they open small shops for "
    "bread or paper while children run along old walls to school under tall trees that turn yellow every autumn"
)
MIXES: dict[str, dict[str, Any]] = {  # requests where no option names them
    "even": {"requests": 64, "clients": [1, 8], "tokens": 128, "words": (0, 0)},
    "prompts": {"requests": 48, "clients": [8], "tokens": 150, "words": (100, 4000)},
}
TEXT = re.compile(rb'"text":"[^"]')  # a piece of an answer that is not empty
STARTED_SECONDS = 600.0
FLAT = 1.01  # memory at the end of a soak, to that after its first fifth
HANG = 300.0  # seconds after which a request counts as lost


@dataclass
class Seen:
    """What one request came to. Seconds since it arrived; `first` of its first token; gap: the longest between two pieces of its
    answer; tokens by the server's own count, or the pieces that came before its client hung up."""

    arrived: float
    first: float = 0.0
    gap: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    end: str = ""


@dataclass
class Load:
    """What is asked. left: requests whose client hangs up, after three pieces of the answer at most, or (midway) as many as a
    quarter of its tokens. words: fewest and most in front of each prompt."""

    requests: int
    clients: int
    rate: float = 0.0
    tokens: int = 128
    temperature: float = 0.0
    left: int = 0
    seed: int = 0
    words: tuple[int, int] = (0, 0)
    midway: bool = False
    model: str | None = None
    prompts: tuple[str, ...] = field(default=PROMPTS, repr=False)

    def body(self, i: int) -> dict[str, object]:
        """Request i."""
        rng = random.Random(f"{self.seed} {i}")
        before = " ".join(rng.choices(WORDS.split(), k=rng.randint(*self.words)))
        return {
            **({"model": self.model} if self.model else {}),
            "prompt": f"# {self.seed} {i}\n{before}\n{self.prompts[i % len(self.prompts)]}",
            "ignore_eos": self.midway,
            "max_tokens": self.tokens,
            "temperature": self.temperature,
            "seed": i,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def arrivals(self) -> list[float]:
        """Seconds at which the requests come."""
        rng, at, found = random.Random(self.seed), 0.0, []
        for _ in range(self.requests):
            found.append(at)
            at += rng.expovariate(self.rate) if self.rate else 0.0
        return found

    def leaves(self) -> set[int]:
        """The requests whose client hangs up."""
        return set(random.Random(self.seed + 1).sample(range(self.requests), self.left))


async def ask(url: str, body: dict[str, object], seen: Seen, leave_after: int | None, start: float) -> None:
    """One request, to its end or until so many pieces of it have come."""
    data, parts = json.dumps(body).encode(), urlsplit(url)
    path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/completions"
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        status = (await reader.readline()).split(b" ")[1].decode()
        pieces, last = 0, 0.0
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            if (
                b'"usage":{' in line
            ):  # the last; the others are not parsed, for these clients share the server's cores
                seen.tokens = json.loads(line[6:])["usage"]["completion_tokens"]
            elif TEXT.search(line):
                at, pieces = time.perf_counter() - start, pieces + 1
                seen.first = seen.first or at - seen.arrived
                seen.gap, last = max(seen.gap, at - (last or at)), at
            if leave_after is not None and pieces >= leave_after:
                seen.end, seen.tokens = "left", pieces
                return
        seen.end = status
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def run(url: str, load: Load) -> list[Seen]:
    """All requests of a load."""
    free, start = asyncio.Semaphore(load.clients), time.perf_counter()
    leaves, rng = load.leaves(), random.Random(load.seed + 2)

    async def one(i: int, at: float) -> Seen:
        await asyncio.sleep(max(0.0, at - (time.perf_counter() - start)))
        # with no rate, a request comes when its client is free
        seen = Seen(time.perf_counter() - start)
        pieces = rng.randrange(1, max(load.tokens // 4, 2)) if load.midway else rng.randrange(4)
        async with free:
            if not load.rate:
                seen.arrived = time.perf_counter() - start
            try:
                leave_after = pieces if i in leaves else None
                await asyncio.wait_for(ask(url, load.body(i), seen, leave_after, start), HANG)
            except (OSError, IndexError, ValueError, asyncio.TimeoutError) as error:
                seen.end = type(error).__name__
        seen.seconds = time.perf_counter() - start - seen.arrived
        return seen

    return list(await asyncio.gather(*(one(i, at) for i, at in enumerate(load.arrivals()))))


def percentile(values: list[float], part: float) -> float:
    """The value below which `part` of all lie; 0 without any."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def summary(seen: list[Seen]) -> dict[str, Any]:
    """A row: counts, tokens per second in sum, percentiles and worst of first tokens, the longest gap in an answer (both ms), and
    percentiles of a request's own tokens per second."""
    done = [one for one in seen if one.end == "200"]
    wall = max((one.arrived + one.seconds for one in seen), default=0.0)
    first = [1e3 * one.first for one in seen if one.first]
    own = [one.tokens / one.seconds for one in done if one.tokens and one.seconds > 0]
    ends: dict[str, int] = {}
    for one in seen:
        ends[one.end] = ends.get(one.end, 0) + 1
    return {
        "requests": len(seen),
        "ends": dict(sorted(ends.items())),
        "errors": sum(one.end not in ("200", "left") for one in seen),
        "seconds": round(wall, 2),
        "tokens": sum(one.tokens for one in seen),
        "tokens_per_second": round(sum(one.tokens for one in seen) / wall, 1) if wall else 0.0,
        "first_ms": [round(percentile(first, part), 1) for part in (0.5, 0.9, 0.99)],
        "first_worst_ms": round(max(first, default=0.0), 1),
        "gap_ms": round(1e3 * max((one.gap for one in seen), default=0.0), 1),
        "own_tokens_per_second": [round(percentile(own, part), 1) for part in (0.01, 0.1, 0.5)],
    }


def children(pid: int) -> list[int]:
    """The processes that a process has started (Linux)."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for listed in lists for child in listed.read_text().split()]


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and of those that it started, in seconds (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(child) for child in children(pid))


def resident_mib(pid: int) -> float:
    """Resident set of a process and of those that it started, in MiB (Linux)."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    own = int(found.group(1)) / 1024 if found else 0.0
    return own + sum(resident_mib(child) for child in children(pid))


def started(command: list[str], port: int) -> subprocess.Popen[bytes]:
    """A server that answers on this port. Raises SystemExit when it ends first."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + STARTED_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer,
        ):
            if answer.status == 200:
                return process
        time.sleep(0.1)
    process.kill()
    raise SystemExit(f"{command[0]} does not answer; run it by hand: {shlex.join(command)}")


def free_port() -> int:
    """A free port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def local(port: int) -> str:
    """The address of a server that was started here."""
    return f"http://127.0.0.1:{port}"


def metric(url: str, pattern: str) -> float:
    """A value from a server's /metrics; 0 where it has none."""
    try:
        with urllib.request.urlopen(url.rstrip("/").removesuffix("/v1") + "/metrics", timeout=30) as answer:
            found = re.search(rf"^{pattern} (\S+)", answer.read().decode(), re.MULTILINE)
    except OSError:  # it has none
        return 0.0
    return float(found.group(1)) if found else 0.0


def load_results(url: str, load: Load) -> dict[str, Any]:
    """Results of a load on a running server; with the columns of a decode pass, None if the server does not report them."""

    def counted() -> tuple[float, float]:
        columns, passes = (metric(url, rf"dflash_\w*{name}_total") for name in ("columns", "passes"))
        return columns, passes

    before = counted()
    found = summary(asyncio.run(run(url, load)))
    columns, passes = (after - earlier for after, earlier in zip(counted(), before))
    return {"clients": load.clients, **found, "columns": round(columns / passes, 2) if passes else None}


def warm_up(url: str, load: Load) -> None:
    """Requests of the same kind, so that graphs are built and costs known before anything is measured."""
    few = replace(load, requests=2 * load.clients if load.midway else 8, left=0, rate=0.0, seed=99)
    asyncio.run(run(url, few if load.midway else replace(few, clients=4, tokens=16)))


def measured(name: str, command: list[str], port: int, load: Load) -> dict[str, Any]:
    """The row of a load, from a server that is started for it and warmed up."""
    process = started(command, port)
    try:
        warm_up(local(port), load)
        spent, own = cpu_seconds(process.pid), time.process_time()
        found = load_results(local(port), load)
        per_token = 1e3 / max(int(found["tokens"]), 1)
        row = {
            "server": name,
            **found,
            "cpu_ms_per_token": round(per_token * (cpu_seconds(process.pid) - spent), 3),
            "clients_cpu_ms_per_token": round(per_token * (time.process_time() - own), 3),
            "resident_mib": round(resident_mib(process.pid), 1),
        }
    finally:
        process.terminate()
        process.wait(30)
    print(line(row), flush=True)
    return row


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    cpu = ""
    if "cpu_ms_per_token" in row:
        cpu = f", processor ms/token {row['cpu_ms_per_token']} + {row['clients_cpu_ms_per_token']}"
    columns = f", {row['columns']} columns a pass" if row["columns"] else ""
    return (
        f"{row['server']:14} {row['clients']:3} clients {row['seconds']:7} s, {row['tokens']} tokens, "
        f"{row['tokens_per_second']} tokens/s{cpu}, first token ms {row['first_ms']} (50, 90, 99 %), worst "
        f"{row['first_worst_ms']}, longest gap ms {row['gap_ms']}, own tokens/s {row['own_tokens_per_second']} (1, 10, 50 %)"
        f"{columns}, {row['errors']} errors, {row['ends']}"
    )


def soaked(
    command: list[str], port: int, requests: int, left: int, clients: int, tokens: int
) -> dict[str, Any]:
    """A soak in five parts, after those that warm up, five at most; what is known after each."""
    process, parts = started(command, port), list[dict[str, Any]]()

    def is_warm() -> bool:
        written = sum(part["tokens"] for part in parts)
        return len(parts) > 1 and parts[-1]["graphs"] == parts[-2]["graphs"] and written >= PAST_TOKENS

    def part(kind: str) -> None:
        load = Load(requests // 5, clients, tokens=tokens, left=left // 5, seed=len(parts))
        found = summary(asyncio.run(run(local(port), load)))
        memory, graphs = round(resident_mib(process.pid), 1), int(metric(local(port), "dflash_graphs"))
        parts.append({"kind": kind, "memory_mib": memory, "graphs": graphs, **found})
        print(
            f"{kind} {len(parts)}: {memory} MiB, {graphs} graphs, {found['tokens_per_second']} tokens/s, {found['ends']}",
            flush=True,
        )

    try:
        while len(parts) < 5 and not is_warm():
            part("warm-up")
        for _ in range(5):
            part("measured")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as answer:
            health = json.loads(answer.read())
    finally:
        process.terminate()
        process.wait(30)
    return {"requests": requests, "left": left, "parts": parts, "health": health}


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mix", choices=MIXES, default="even", help="what is asked where no option says it")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--clients", type=int, nargs="+", help="at a time, a row each")
    parser.add_argument("--rounds", type=int, default=1, help="of all rows, in turn")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="requests a second, 0: as fast as clients come free"
    )
    parser.add_argument("--tokens", type=int, help="per answer")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument(
        "--words", type=int, nargs=2, metavar=("LEAST", "MOST"), help="in front of every prompt"
    )
    parser.add_argument("--soak", type=int, metavar="N", help="so many requests, and look at the memory")
    parser.add_argument(
        "--disconnects", type=int, default=0, metavar="N", help="of a soak's requests: clients that hang up"
    )
    parser.add_argument(
        "--against", nargs="+", default=[], metavar="URL", help="running servers to ask the same"
    )
    parser.add_argument("--llama-server", metavar="PATH", help="another server to start and ask the same")
    parser.add_argument("--llama-options", default="", metavar="WORDS", help="its options, in one string")
    parser.add_argument("--json", help="file for the result")
    args, rest = parser.parse_known_args()
    for name, value in MIXES[args.mix].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    facts, port = header(), free_port()
    print(f"commit {facts['commit']}, {facts['cpu']}, {facts['cpus']} CPUs, load average {facts['load']}")
    ours = [
        sys.executable,
        "-m",
        "dflash_ggml.server.cli",
        "--port",
        str(port),
        "--queue",
        "512",
        "--queue-per-client",
        "512",
    ]
    ours += rest
    if args.soak:
        found = soaked(ours, port, args.soak, args.disconnects, max(args.clients), args.tokens)
        save(args.json, {**facts, "soak": found})
        first, last = (found["parts"][at]["memory_mib"] for at in (-5, -1))
        idle = found["health"] == {"status": "ok", "running": 0, "waiting": 0}
        print(f"memory {first} to {last} MiB; {'nothing runs or waits' if idle else found['health']}")
        return 0 if last <= FLAT * first and idle else 1
    midway = args.mix == "prompts"
    left, words = args.requests // 3 if midway else 0, tuple(args.words)
    loads = [
        Load(args.requests, clients, args.rate, args.tokens, args.temp, left, words=words, midway=midway)
        for clients in args.clients
    ]
    servers = [Server(url) for url in args.against]
    for server in servers:
        server.open()
        warm_up(server.url, replace(loads[0], model=server.model))
    rows = []
    for load in [replace(load, seed=n) for n in range(args.rounds) for load in loads]:
        if rest or not servers:
            rows.append(measured("dflash-serve", ours, port, load))
        if args.llama_server:
            other = free_port()
            command = [args.llama_server, "--port", str(other), *shlex.split(args.llama_options)]
            rows.append(measured("llama-server", command, other, load))
        for server in servers:
            found = load_results(server.url, replace(load, model=server.model))
            rows.append({"server": server.url, **found})
            print(line(rows[-1]), flush=True)
    save(
        args.json,
        {
            **facts,
            "load": asdict(loads[0]),
            "options": rest,
            "llama_options": args.llama_options,
            "rows": rows,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
