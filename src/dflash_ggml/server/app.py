"""The HTTP application: routes, authentication, and errors in the shape of the API they belong to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from ..errors import DflashError
from ..text.tokenizer import TooManyTokens
from . import anthropic, openai_chat, openai_completions, openai_responses
from .auth import KeyRing
from .dialect import ApiCall, Settings, new_id
from .errors import ApiError, anthropic_body, bad_request, from_exception, is_anthropic, openai_body
from .exchange import respond
from .intake import Intake
from .limits import parse_json
from .metrics import CONTENT_TYPE, Metrics
from .page import page_routes
from .response_store import ResponseStore
from .runner import Runner, work
from .schema import Body, parse
from .worker import Worker

log = logging.getLogger(__name__)


ReadCall = Callable[[dict[str, Any], Settings], ApiCall]
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class Service:
    """Everything the routes share. `drain_seconds`: how long a running answer may go on after SIGTERM."""

    worker: Worker[Runner]
    settings: Settings
    keys: KeyRing
    metrics: Metrics
    drain_seconds: float = 10.0
    store: ResponseStore = field(default_factory=ResponseStore)
    intake: Intake = field(init=False)

    def __post_init__(self) -> None:
        self.intake = Intake(self.settings.limits)


class TokenizeBody(Body):
    """Request of /tokenize, as in llama.cpp's server."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Body):
    """Request of /detokenize."""

    tokens: list[Annotated[int, Field(ge=0)]]


def create_app(
    service: Service, *, allowed_hosts: Sequence[str] = (), cors_origins: Sequence[str] = ()
) -> Starlette:
    """The ASGI application. It starts the worker and, at shutdown, stops it and frees the engine.

    allowed_hosts: names that a Host header may carry (none: any), a guard against DNS rebinding. cors_origins:
    web origins whose pages may call the API (none: none).
    """
    middleware = []
    if allowed_hosts:
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=list(allowed_hosts)))
    if cors_origins:
        headers = ["authorization", "x-api-key", "content-type", "anthropic-version", "anthropic-beta"]
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["*"], allow_headers=headers
            )
        )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> Any:
        service.worker.start()
        yield
        stopped = await asyncio.to_thread(service.worker.stop)
        service.intake.close()
        if not stopped:
            log.error("the inference thread did not end in time")

    responses = partial(openai_responses.read_call, store=service.store)
    generating: list[tuple[str, ReadCall]] = [
        ("/v1/chat/completions", openai_chat.read_call),
        ("/v1/completions", openai_completions.read_call),
        ("/v1/responses", responses),
        ("/v1/messages", anthropic.read_call),
    ]
    plain: list[tuple[str, Callable[[Service, Request], Awaitable[Response]], str]] = [
        ("/v1/messages/count_tokens", _count_tokens, "POST"),
        ("/v1/models", _models, "GET"),
        ("/v1/models/{name:path}", _model, "GET"),
        ("/metrics", _metrics, "GET"),
        ("/tokenize", _tokenize, "POST"),
        ("/detokenize", _detokenize, "POST"),
        ("/props", _props, "GET"),
    ]
    routes: list[Route | Mount] = [
        Route(path, _guarded(service, partial(_generate, service, read_call)), methods=["POST"])
        for path, read_call in generating
    ]
    routes += [
        Route(path, _guarded(service, partial(handler, service)), methods=[method])
        for path, handler, method in plain
    ]
    routes += [
        Route("/health", partial(_health, service)),
        *page_routes(),
    ]
    handlers = {HTTPException: partial(_http_error, service), Exception: partial(_crash, service)}
    return Starlette(routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers=handlers)


def _guarded(service: Service, handler: Handler) -> Handler:
    """Authenticate, run, and turn an error into the response its client expects."""

    async def endpoint(request: Request) -> Response:
        request.state.id = new_id("req_")
        try:
            request.state.client = (
                service.keys.authorise(request.headers),
                getattr(request.client, "host", ""),
            )
            response = await handler(request)
        except (ApiError, DflashError) as error:
            response = _error(service, request, from_exception(error))
        finally:
            service.intake.release(request)
        response.headers["x-request-id"] = response.headers["request-id"] = request.state.id
        return response

    return endpoint


def _error(service: Service, request: Request, error: ApiError) -> Response:
    service.metrics.failed(error.status)
    path = request.url.path
    request_id = getattr(request.state, "id", None) or new_id("req_")
    body = anthropic_body(error, request_id) if is_anthropic(path) else openai_body(error)
    return JSONResponse(body, error.status, error.headers())


async def _http_error(service: Service, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    texts = {
        404: f"there is no {request.url.path} here",
        405: f"{request.method} is not allowed on {request.url.path}",
    }
    response = _error(
        service, request, ApiError(error.status_code, texts.get(error.status_code, str(error.detail)))
    )
    response.headers.update(error.headers or {})
    return response


async def _crash(service: Service, request: Request, error: Exception) -> Response:
    return _error(
        service,
        request,
        ApiError(500, "internal error (the server's log has the details)", code="internal_error"),
    )


async def _json(service: Service, request: Request, read: Callable[[dict[str, Any]], Any]) -> Any:
    """Read, parse and validate a body with `read`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A web page of any origin may send other types without asking first.
        raise ApiError(415, "send the body as content-type: application/json", code="unsupported_media_type")
    body = await service.intake.read(request)
    return await service.intake.run(lambda: read(parse_json(body, service.settings.limits)))


async def _generate(service: Service, read_call: ReadCall, request: Request) -> Response:
    call: ApiCall = await _json(service, request, lambda data: read_call(data, service.settings))
    # a prompt that cannot be is refused before it waits, while there is a status
    prepare = service.worker.require_ready().prepare
    prompts = await service.intake.run(lambda: [prepare(asked) for asked in (call.request, *call.more)])
    if call.on_prepared is not None:
        call.on_prepared(prompts)
    job = service.worker.submit(request.state.client, work(prompts, service.metrics, call.n))
    return await respond(
        request,
        call,
        job,
        service.worker,
        drain_seconds=service.drain_seconds,
        send_seconds=service.settings.limits.send_seconds,
    )


async def _count_tokens(service: Service, request: Request) -> Response:
    asked = await _json(service, request, lambda data: anthropic.read_count(data, service.settings))
    count = service.worker.require_ready().count
    n = await service.intake.run(lambda: count(asked))
    return JSONResponse({"input_tokens": n})


def _model_object(service: Service, name: str) -> dict[str, Any]:
    """One object that both the OpenAI and the Anthropic client can read."""
    created = service.settings.created
    runner = service.worker.runner
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "dflash-ggml",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, timezone.utc).isoformat(),
        "max_input_tokens": runner.n_ctx if runner is not None else None,
    }


async def _models(service: Service, request: Request) -> Response:
    names = service.settings.names
    data = [_model_object(service, name) for name in names]
    return JSONResponse(
        {"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    )


async def _model(service: Service, request: Request) -> Response:
    return JSONResponse(_model_object(service, service.settings.known(request.path_params["name"])))


async def _tokenize(service: Service, request: Request) -> Response:
    body: TokenizeBody = await _json(service, request, partial(parse, TokenizeBody))
    tokenizer = service.worker.require_ready().tokenizer
    most = max(service.worker.require_ready().n_ctx, service.settings.limits.tokens)

    def answer() -> Response:
        try:
            tokens = tokenizer.encode(body.content, special=body.parse_special, most=most)
        except TooManyTokens:
            raise bad_request(f"content: more than {most} tokens; send it in parts", "content") from None
        if body.add_special:
            tokens = tokenizer.bos_ids + tokens
        if body.with_pieces:
            pieces = [{"id": t, "piece": _piece(tokenizer.token_bytes(t))} for t in tokens]
            return JSONResponse({"tokens": pieces})
        return JSONResponse({"tokens": tokens})

    return await service.intake.run(answer)


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def _detokenize(service: Service, request: Request) -> Response:
    body: DetokenizeBody = await _json(service, request, partial(parse, DetokenizeBody))
    tokenizer = service.worker.require_ready().tokenizer

    def answer() -> Response:
        for i, token in enumerate(body.tokens):
            if token >= tokenizer.n_vocab:
                raise ApiError(400, f"{token} is not a token of this model", f"tokens[{i}]", "invalid_value")
        text = tokenizer.decode_bytes(body.tokens, special=True).decode("utf-8", "replace")
        return JSONResponse({"content": text})

    return await service.intake.run(answer)


async def _props(service: Service, request: Request) -> Response:
    info = service.worker.require_ready().info()
    sampling = service.settings.sampling
    defaults = {
        name: getattr(sampling, name) for name in sampling.__dataclass_fields__ if name != "logit_bias"
    }
    settings = {"n_ctx": info["n_ctx"], "params": defaults}
    model = service.settings.names[0]
    return JSONResponse(
        {"model_alias": model, "total_slots": 1, "default_generation_settings": settings, **info}
    )


async def _metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def _health(service: Service, request: Request) -> Response:
    """Open to everyone, like llama.cpp's: load balancers have no key."""
    worker = service.worker
    if worker.ready:
        return JSONResponse({"status": "ok", "running": worker.running, "waiting": worker.waiting})
    if worker.failure is not None:
        return JSONResponse({"status": "failed"}, 503)
    stage, done, total = worker.loading
    status = "stopping" if worker.runner is not None else "loading"
    return JSONResponse(
        {"status": status, "stage": stage, "done": done, "total": total}, 503, {"retry-after": "2"}
    )


def make_service(
    open_runner: Callable[[Callable[[str, int, int], None]], Runner],
    settings: Settings,
    *,
    keys: Sequence[str] = (),
    queue_limit: int = 64,
    client_limit: int | None = None,
    drain_seconds: float = 10.0,
) -> Service:
    """A service whose worker will open its runner in its own thread."""
    worker: Worker[Runner] = Worker(open_runner, queue_limit=queue_limit, client_limit=client_limit)
    metrics = Metrics(lambda: worker.running, lambda: worker.waiting)
    worker.on_finished = metrics.seconds
    return Service(worker, settings, KeyRing(keys), metrics, drain_seconds)
