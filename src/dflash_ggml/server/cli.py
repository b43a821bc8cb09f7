"""`dflash-serve`: the HTTP server, from command line to clean exit."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from ..cli.arguments import (
    USUAL,
    add_model_options,
    engine_config,
    file_metadata,
    token_limit,
    warn_of_threads,
)
from ..cli.chat_options import add_chat_options, session_options
from ..cli.command import exit_code, run_command
from ..cli.option_table import add_table
from ..cli.parser import Parser
from ..cli.sampling_options import add_sampling_options, sampling_params
from ..config import MAX_PARALLEL
from ..errors import ConfigError, DflashError
from ..ggml.host import free_memory

try:
    import uvicorn

    from .app import Service, create_app, make_service
    from .auth import require_safe_bind
    from .dialect import Settings
    from .host_guard import check_name
    from .limits import Limits
    from .listening import bare, in_url, listen
    from .opening import Opener
    from .runner import Progress, Runner
    from .supervisor import Supervised
except ImportError as error:  # the server extra is optional
    raise SystemExit(f"dflash-serve: {error.name} is missing: pip install 'dflash-ggml[server]'") from None

log = logging.getLogger("dflash_ggml.server")

SWITCH_SECONDS = 0.001
NO_LIMIT = 1 << 62  # bytes

EXAMPLES = """examples:
  dflash-serve -m Qwen3.5-27B-Q4_K_M.gguf -md Qwen3.5-27B-DFlash.gguf -c 32768
  dflash-serve -hf unsloth/Qwen3.6-27B-GGUF:Q4_K_M       # downloads its draft, too: --list-pairs
  dflash-serve -hf unsloth/Qwen3.5-27B-GGUF:Q4_K_M -hfd z-lab/Qwen3.5-27B-DFlash
  dflash-serve --host 0.0.0.0 --api-key-file keys.txt

The chat page is at http://HOST:PORT/, OpenAI's API at /v1, Anthropic's at /v1/messages."""


_SERVER = """
--host _ str 127.0.0.1 | address to listen on (default 127.0.0.1; others need an API key)
--port _ int 8080 | port, 0: any free one (default 8080)
--api-key KEY,... names | accept these keys; may be repeated
--api-key-file FILE | accept the keys in this file, one per line
-a --alias NAME,... names | names of the model, instead of the file's; may be repeated
--strict | refuse fields that are not honoured, instead of naming them in the header x-dflash-notes
--strict-model | answer a request for another model name with 404, instead of accepting any name
-np --parallel N int 0 | slots: requests that are decoded in one batch; they share the context's tokens (default 0, or -1: by
    free memory, as many as leave one the full context)
--queue N int 256 | most waiting requests; beyond them 503 (default 256)
--queue-per-client N int | most waiting requests of one client, a key and an address; beyond them 429 (default half)
-n --predict --n-predict --max-tokens N limit | tokens per answer for requests that set no limit of their own, -1: none (default)
--max-body BYTES int 8388608 | largest request body (default 8 MiB)
--drain S float 10 | seconds a running answer may take after SIGTERM
--supervise | run the engine in a separate process, and restart it when it dies
--cache-mb MB int | memory for cached prefixes, 0: none, -1: no limit (default: an eighth of what is free, 1024 to 8192)
--cache-disk DIR path | folder for long prefixes, which survive a restart; the files contain your prompts' tokens and are readable
    by you alone
--cache-disk-mb MB int 32768 | limit of the files of --cache-disk; the least recently used go first (default 32768)
--allowed-host NAME hosts | further Host header to accept without a key, as sent through a proxy or from a container; *.NAME: its
    subdomains
--cors-origin URL,... names | allow pages of these origins to call the API, *: all; may be repeated
"""
_USUAL = f"--host --port --api-key --api-key-file -a -np -n --cache-mb --think -v {USUAL}"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(
        prog="dflash-serve",
        description="Serve a model over OpenAI's and Anthropic's APIs, with DFlash drafts and DDTree.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usual=_USUAL,
    )
    add = parser.add_argument_group("server").add_argument
    names = {"type": _listed, "action": "extend", "default": []}
    hosts = {"action": "append", "default": []}
    limit = {"type": token_limit, "dest": "max_tokens"}
    add_table(add, _SERVER, names=names, hosts=hosts, limit=limit)
    add_chat_options(add)
    add("-v", "--verbose", action="store_true", help="log requests")
    add_model_options(parser)
    add_sampling_options(parser)
    return parser


def _listed(text: str) -> list[str]:
    """Comma-separated non-empty words."""
    words = text.split(",")
    if not all(map(str.strip, words)):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return words


def read_keys(args: argparse.Namespace) -> list[str]:
    """Keys from the options and the key file.

    Raises:
        ConfigError: The file is unreadable or empty.
    """
    keys = list(args.api_key)
    if args.api_key_file is not None:
        try:
            lines = Path(args.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file: {error}") from None
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise ConfigError(f"--api-key-file: {args.api_key_file} holds no key")
        keys += found
    return keys


def allowed_hosts(host: str, extra: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Host headers to accept (empty: all): without a key those of this machine, against DNS rebinding.

    Raises:
        ConfigError: A name is not a valid host name.
    """
    if keys:
        return []
    return [check_name(name) for name in ("localhost", "127.0.0.1", "::1", host, *extra)]


class Server(uvicorn.Server):
    """uvicorn's server with draining: at SIGTERM or SIGINT the worker stops accepting requests and gets `drain_seconds`, and
    requests that are not completely received are refused.

    A second Ctrl-C ends running answers at their next step, with an error; a third ends the process.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._is_urged = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop accepting requests at the first signal; see the class for further ones."""
        if not self.should_exit:
            self._service.worker.drain()
            self._cancel_after(self._service.drain_seconds)
            super().handle_exit(sig, frame)
        elif sig == signal.SIGINT:
            if self._is_urged:
                os._exit(130)  # uvicorn's forced exit prints a traceback for each client
            self._is_urged = True
            self._cancel_after(0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse incompletely received requests, then shut down like uvicorn."""
        if half_sent := self._service.intake.end_reads():
            log.warning("incomplete requests refused at shutdown: %d", half_sent)
        await super().shutdown(sockets)

    def _cancel_after(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._service.worker.cancel_running)
        timer.daemon = True
        timer.start()


def cache_bytes(mb: int | None, free: int) -> int:
    """Memory for cached prefixes, by --cache-mb and the host's free bytes."""
    if mb is None:
        return min(max(free // 8, 1 << 30), 8 << 30)
    return NO_LIMIT if mb == -1 else mb << 20


def run(args: argparse.Namespace) -> int:
    """Check the options, load in the background, serve until a signal; returns the exit code."""
    keys = read_keys(args)
    args.host = bare(args.host)
    require_safe_bind(args.host, keys)
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port: {args.port} is outside 0..65535")
    if not -1 <= args.parallel <= MAX_PARALLEL:
        raise ConfigError(f"--parallel: {args.parallel} is outside 0..{MAX_PARALLEL}")
    if args.cache_mb is not None and args.cache_mb < -1:
        raise ConfigError(f"--cache-mb: {args.cache_mb} is neither -1 nor a size")
    if args.queue < 1:
        raise ConfigError(f"--queue: {args.queue} is below 1")
    per_client = (args.queue + 1) // 2 if args.queue_per_client is None else args.queue_per_client
    if not 1 <= per_client <= args.queue:
        raise ConfigError(f"--queue-per-client: {per_client} is outside 1..{args.queue}")
    config = engine_config(args)
    warn_of_threads(args.threads)
    settings = Settings(
        names=tuple(args.alias) or (config.model.stem,),
        sampling=sampling_params(args, file_metadata(config.model)),
        max_tokens=args.max_tokens,
        limits=Limits(body_bytes=args.max_body),
        strict=args.strict,
        strict_model=args.strict_model,
    )
    if args.cache_disk_mb < 1:
        raise ConfigError(f"--cache-disk-mb: {args.cache_disk_mb} is below 1")
    if args.cache_disk is not None and args.cache_mb == 0:
        raise ConfigError("--cache-disk: needs cached prefixes; give --cache-mb")
    sockets = listen(args.host, args.port)
    opener = Opener(
        config,
        cache_bytes=cache_bytes(args.cache_mb, free_memory()),
        sampling=settings.sampling,
        think=args.think,
        disk=args.cache_disk,
        disk_bytes=args.cache_disk_mb << 20,
        parallel=max(args.parallel, 0),
        chats=session_options(args),
    )
    open_runner: Callable[[Progress], Runner] = Supervised(opener) if args.supervise else opener
    service = make_service(
        open_runner,
        settings,
        keys=keys,
        queue_limit=args.queue,
        client_limit=per_client,
        drain_seconds=args.drain,
    )
    app = create_app(
        service,
        allowed_hosts=allowed_hosts(args.host, args.allowed_host, keys),
        cors_origins=args.cors_origin,
    )
    server = Server(
        uvicorn.Config(
            app,
            host=args.host,
            port=args.port,
            log_level="info" if args.verbose else "warning",
            access_log=args.verbose,
            server_header=False,
            timeout_graceful_shutdown=int(args.drain) + 5,
            timeout_keep_alive=30,
            limit_concurrency=512,
        ),
        service,
    )

    def stop(*signal_and_frame: object) -> None:
        server.should_exit = True

    service.worker.on_failed = stop
    # uvicorn installs its own handlers while it runs and re-raises the signal afterwards: exit cleanly
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, stop)
    # switch interval: other threads yield to the event loop this soon
    sys.setswitchinterval(SWITCH_SECONDS)
    threading.Thread(target=_announce, args=(server, service), daemon=True).start()
    server.run(sockets)
    failure = service.worker.failure
    return 0 if failure is None else exit_code(failure)


def _announce(server: Server, service: Service) -> None:
    """Print when the model is ready; stop the server if it cannot be loaded."""
    try:
        service.worker.wait_ready()
    except (DflashError, OSError):  # logged by the worker
        server.should_exit = True
        return
    if service.worker.runner is None:  # stopped while loading
        return
    while not server.started:
        if server.should_exit:
            return
        time.sleep(0.02)
    sockets = server.servers[0].sockets
    if not sockets:  # stopped meanwhile
        return
    port = sockets[0].getsockname()[1]
    names = ", ".join(service.settings.names)
    scorer = service.worker.runner.info()["prompt_scorer"]
    part = f", prompts scored by {scorer} where a request wants them read in part" if scorer else ""
    print(
        f"dflash-serve: {names} ready at http://{in_url(server.config.host)}:{port}/{part}",
        file=sys.stderr,
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit codes: 0 stopped by a signal, 1 failed, 2 bad option or file."""
    return run_command("dflash-serve", build_parser, run, argv, writes_output=False)


if __name__ == "__main__":
    sys.exit(main())
