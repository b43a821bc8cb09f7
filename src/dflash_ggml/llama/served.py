"""`llama_cpp.server`: its `create_app` and settings, on this package's own server."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..cli.arguments import file_metadata
from ..decode.recommended import recommended
from ..decode.sampling_params import SamplingParams
from ..errors import ConfigError
from ..session.session import Session
from ..text.chat_formats import FORMATS
from .llama import Llama
from .options import LlamaOptions

_OWN = ("model", "model_alias", "host", "port", "api_key", "verbose", "chat_format")


class ServerSettings(SimpleNamespace):
    """host and port, for the caller that starts the app, and api_key. Any other keyword is kept and has no effect."""

    def __init__(
        self, host: str = "localhost", port: int = 8000, api_key: str | None = None, **more: Any
    ) -> None:
        super().__init__(host=host, port=port, api_key=api_key, **more)


class ModelSettings(SimpleNamespace):
    """model, its path; model_alias, the name to answer to; and the keywords of Llama."""

    def __init__(self, model: str, model_alias: str | None = None, **more: Any) -> None:
        super().__init__(model=model, model_alias=model_alias, **more)


class Settings(SimpleNamespace):
    """ServerSettings and ModelSettings in one."""

    def __init__(self, model: str, **more: Any) -> None:
        server, served = vars(ServerSettings(**more)), vars(ModelSettings(model, **more))
        super().__init__(**{**served, **server})


def create_app(
    settings: Any = None, server_settings: Any = None, model_settings: Sequence[Any] | None = None
) -> Any:
    """The ASGI application that dflash-serve runs, for one model; it opens the model when it starts. Needs the server extra.

    Of several models the first is served, with a warning.

    Raises:
        ConfigError: There is no model.
    """
    try:
        from ..server.app import create_app as create
        from ..server.app import make_service
        from ..server.dialect import Settings as Served
    except ImportError as error:
        raise ConfigError(
            f"llama_cpp.server: {error.name} is missing: pip install 'dflash-ggml[server]'"
        ) from None
    if settings is None and not model_settings:
        raise ConfigError("create_app: expected settings, or server_settings and model_settings")
    models = list(model_settings or [settings])
    if len(models) > 1:
        warnings.warn(f"one model is served: {models[0].model}", stacklevel=2)
    model, server = models[0], server_settings if server_settings is not None else settings
    keys = [key] if (key := getattr(server, "api_key", None)) else []
    names = (model.model_alias or Path(model.model).stem,)
    options: dict[str, Any] = {**recommended(file_metadata(Path(model.model)))}
    served = Served(names=names, sampling=SamplingParams(**options))
    return create(make_service(_opener(model), served, keys=keys))


def _opener(model: Any) -> Callable[[Any], Any]:
    """What the inference thread calls to open the model."""
    from ..server.runner import Runner

    given = {k: v for k, v in vars(model).items() if v is not None and k not in _OWN}
    options = {k: v for k, v in given.items() if k in LlamaOptions.__dataclass_fields__}
    if options.get("draft_model") == "prompt-lookup-decoding":
        del options["draft_model"]
    form = getattr(model, "chat_format", None)
    if form is not None and form not in FORMATS:
        raise ConfigError(f"chat_format: the server knows {', '.join(sorted(FORMATS))}, not {form!r}")

    class LlamaRunner(Runner):
        """Keeps the Llama whose engine it runs."""

        def __init__(self) -> None:
            self.llama = Llama(model.model, verbose=False, **options)
            template = None if form is None else FORMATS[form].template
            cache_bytes = self.llama._options.prefix_cache_bytes
            super().__init__(Session(self.llama.engine, cache_bytes=cache_bytes, template=template))

        def close(self) -> None:
            self.llama.close()

    return lambda progress: LlamaRunner()
