"""The HTTP application: routes, authentication, and errors in each API's format."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from ..errors import DflashError
from ..text.tokenizer import Tokenizer
from . import (
    anthropic,
    embeddings,
    llamacpp,
    ollama,
    ollama_models,
    openai_chat,
    openai_completions,
    openai_responses,
)
from .answers import AnswersEncoder
from .auth import KeyRing
from .catalogue import model_list, model_object
from .choices import alternative
from .constraint_fields import note_unbound
from .dialect import ApiCall, Settings, new_id, note_selection
from .embeddings import EmbeddingCall
from .errors import ApiError, anthropic_body, from_exception, is_anthropic, is_ollama, openai_body
from .exchange import respond
from .host_guard import HostGuard
from .intake import Intake
from .limits import parse_json
from .metrics import CONTENT_TYPE, Metrics
from .notes import HEADER as NOTES
from .page import page_routes
from .response_store import ResponseStore, page
from .runner import Progress, Runner, work
from .series import Series, Work
from .worker import Worker

log = logging.getLogger(__name__)

# headers exposed to pages of other origins
EXPOSED = (NOTES, "x-request-id", "request-id", "retry-after", "x-should-retry", "www-authenticate")

# parser of a body: a call, or the answer if that needs no model
Read = Callable[[dict[str, Any], Settings], Any]
Begin = Callable[["Service", Runner, Any], Iterable[Work]]
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class Service:
    """State shared by the routes.

    Attributes:
        drain_seconds: How long running answers may continue after SIGTERM.
    """

    worker: Worker[Runner]
    settings: Settings
    keys: KeyRing
    metrics: Metrics
    drain_seconds: float = 10.0
    store: ResponseStore = field(default_factory=ResponseStore)
    intake: Intake = field(init=False)

    def __post_init__(self) -> None:
        self.intake = Intake(self.settings.limits)


def create_app(
    service: Service, *, allowed_hosts: Sequence[str] = (), cors_origins: Sequence[str] = ()
) -> Starlette:
    """The ASGI application. It starts the worker and, at shutdown, stops it and frees the engine.

    Args:
        allowed_hosts: Allowed Host headers (empty: any), against DNS rebinding.
        cors_origins: Web origins that may call the API.
    """
    middleware = []
    if allowed_hosts:
        middleware.append(Middleware(HostGuard, allowed=allowed_hosts, answer=partial(_error, service)))
    if cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(cors_origins),
                allow_methods=["*"],
                allow_headers=["*"],  # clients add headers of their own
                allow_private_network=True,
                expose_headers=EXPOSED,
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

    def spoken(read: Callable[[dict[str, Any], Settings, Tokenizer], ApiCall]) -> Read:
        return lambda data, settings: read(data, settings, service.worker.require_ready().tokenizer)

    def completions(data: dict[str, Any], settings: Settings) -> ApiCall | dict[str, Any]:
        """Handler of a path shared by OpenAI's and llama.cpp's clients, distinguished by n_predict."""
        own = "n_predict" in data and "max_tokens" not in data
        return (spoken(llamacpp.read_completion) if own else openai_completions.read_call)(data, settings)

    worker, settings, store = service.worker, service.settings, service.store

    def embedding(data: dict[str, Any], settings: Settings) -> EmbeddingCall:
        return embeddings.read_call(data, settings, worker.require_ready().info()["n_embd"])

    def count(runner: Runner, asked: ApiCall) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": runner.count(asked.request)}

    # path -> parser of a call that needs the engine
    generating: dict[str, Read] = {
        **dict.fromkeys(("/v1/chat/completions", "/chat/completions"), openai_chat.read_call),
        "/v1/completions": openai_completions.read_call,
        "/completions": completions,
        **dict.fromkeys(("/v1/responses", "/responses"), responses),
        "/v1/messages": anthropic.read_call,
        "/completion": spoken(llamacpp.read_completion),
        "/infill": spoken(llamacpp.read_infill),
        "/api/chat": ollama.read_chat,
        "/api/generate": ollama.read_generate,
    }
    embedded: dict[str, Read] = {
        **dict.fromkeys(("/v1/embeddings", "/embeddings"), embedding),
        "/embedding": embeddings.read_llama_call,
        "/api/embed": ollama.read_embed,
        "/api/embeddings": ollama.read_embeddings,
    }
    # path -> parser, and the runner's immediate answer
    asking: dict[str, tuple[Read, Callable[[Runner, Any], dict[str, Any]]]] = {
        "/v1/messages/count_tokens": (
            anthropic.read_count,
            lambda runner, asked: {"input_tokens": runner.count(asked)},
        ),
        "/v1/responses/input_tokens": (responses, count),
        "/tokenize": (llamacpp.read_tokenize, llamacpp.tokenize),
        "/detokenize": (llamacpp.read_detokenize, llamacpp.detokenize),
        "/apply-template": (openai_chat.read_call, llamacpp.apply_template),
        "/api/show": (ollama_models.read_show, ollama_models.show),
    }
    # path -> handler of a request without a body
    telling: dict[str, Callable[[Request], Any]] = {
        **dict.fromkeys(
            ("/v1/models", "/v1/models/", "/models"), lambda request: model_list(worker.runner, settings)
        ),
        "/v1/models/{name:path}": lambda request: model_object(
            settings.known(request.path_params["name"]), settings, worker.runner
        ),
        "/v1/responses/{response_id}/input_items": lambda request: page(
            store.items(request.path_params["response_id"]), request.query_params
        ),
        "/api/tags": lambda request: ollama_models.tags(worker.runner, settings),
        "/api/ps": lambda request: ollama_models.running(worker.runner, settings),
        "/api/version": lambda request: ollama_models.VERSION,
        "/props": lambda request: llamacpp.props(worker.require_ready(), settings),
        "/tokenizer_info": lambda request: worker.require_ready().vocabulary(),
        "/slots": partial(_slots, service),
        "/metrics": lambda request: Response(
            service.metrics.render(), headers={"content-type": CONTENT_TYPE}
        ),
    }

    def stored(request: Request) -> dict[str, Any]:
        response_id = request.path_params["response_id"]
        if request.method != "DELETE":
            return store.body(response_id)
        store.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    posts: dict[str, Handler] = {
        **{path: partial(_queue, service, read, _works) for path, read in generating.items()},
        **{path: partial(_queue, service, read, _embeddings) for path, read in embedded.items()},
        **{path: partial(_ask, service, *how) for path, how in asking.items()},
    }
    gets: dict[str, Handler] = {path: partial(_tell, tell) for path, tell in telling.items()}
    routes: list[Route | Mount] = [
        *(Route(path, _guarded(service, handler), methods=["POST"]) for path, handler in posts.items()),
        *(Route(path, _guarded(service, handler), methods=["GET"]) for path, handler in gets.items()),
        Route(
            "/v1/responses/{response_id}",
            _guarded(service, partial(_tell, stored)),
            methods=["GET", "DELETE"],
        ),
        Route("/health", partial(_health, service)),
        Route("/v1/health", partial(_health, service)),
        *page_routes(),
    ]
    handlers = {HTTPException: partial(_http_error, service), Exception: partial(_crash, service)}
    return Starlette(routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers=handlers)


def _guarded(service: Service, handler: Handler) -> Handler:
    """Authenticate, run, and render errors in the client's format."""

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
    if is_ollama(path):
        body: dict[str, Any] = {"error": error.named()}
    else:
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
    # Ollama's documented examples send no content type.
    page = {"origin", "sec-fetch-site"} & set(request.headers.keys())
    if kind != "application/json" and (page or not is_ollama(request.url.path)):
        # A web page of any origin can send other types without a preflight request.
        raise ApiError(415, "send the body as content-type: application/json", code="unsupported_media_type")
    body = await service.intake.read(request)
    return await service.intake.run(lambda: read(parse_json(body, service.settings.limits)))


async def _queue(service: Service, read: Read, begin: Begin, request: Request) -> Response:
    """Handle a call that needs the engine: parse, prepare, queue its jobs, answer."""
    call = await _json(service, request, lambda data: note_unbound(read(data, service.settings)))
    if isinstance(call, dict):
        return JSONResponse(call)
    # an invalid prompt is refused before queueing, while the status can still be set
    runner = service.worker.require_ready()
    works = await service.intake.run(lambda: begin(service, runner, call))
    return await respond(
        request,
        call,
        Series(service.worker, request.state.client, works),
        drain_seconds=service.drain_seconds,
        send_seconds=service.settings.limits.send_seconds,
    )


def _works(service: Service, runner: Runner, call: ApiCall) -> Iterable[Work]:
    """The jobs of a generating call, one for each answer."""
    prompts = [runner.prepare(asked) for asked in (call.request, *call.more)]
    note_selection(prompts, call.notes)
    if runner.info()["prefill_fp8"]:
        call.notes.say("prompts are prefilled in 8-bit floats (lossy, --prefill-fp8)")
    if isinstance(call.encoder, AnswersEncoder):
        call.encoder.prepared(prompts)
    return (work(alternative(prompt, i), service.metrics) for prompt in prompts for i in range(call.n))


def _embeddings(service: Service, runner: Runner, call: EmbeddingCall) -> Iterable[Work]:
    """The jobs of a call for embeddings."""
    return embeddings.works(embeddings.tokens_of(runner, call), call.normalise)


async def _ask(
    service: Service, read: Read, answer: Callable[[Runner, Any], dict[str, Any]], request: Request
) -> Response:
    """Answer a request with a body without running the engine."""
    asked = await _json(service, request, lambda data: read(data, service.settings))
    runner = service.worker.require_ready()
    return JSONResponse(await service.intake.run(lambda: answer(runner, asked)))


async def _tell(tell: Callable[[Request], Any], request: Request) -> Response:
    """Answer a request without a body."""
    answer = tell(request)
    return answer if isinstance(answer, Response) else JSONResponse(answer)


def _slots(service: Service, request: Request) -> list[dict[str, Any]]:
    worker = service.worker
    if worker.running >= worker.slots and request.query_params.get("fail_on_no_slot"):
        raise ApiError(503, "all slots are busy", code="no_slot", retry_after=1, retry=True)
    return llamacpp.slots(worker.require_ready(), service.settings, worker.running)


async def _health(service: Service, request: Request) -> Response:
    """Health check, without authentication as in llama.cpp: load balancers have no key."""
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
    open_runner: Callable[[Progress], Runner],
    settings: Settings,
    *,
    keys: Sequence[str] = (),
    queue_limit: int = 256,
    client_limit: int | None = None,
    drain_seconds: float = 10.0,
) -> Service:
    """Create a service whose worker opens its runner in the worker's thread."""
    worker: Worker[Runner] = Worker(open_runner, queue_limit=queue_limit, client_limit=client_limit)
    metrics = Metrics(lambda: worker.running, lambda: worker.waiting, lambda: worker.load)
    worker.on_finished = metrics.seconds
    return Service(worker, settings, KeyRing(keys), metrics, drain_seconds)
