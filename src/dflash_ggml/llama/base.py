"""The loaded half of `Llama`: choosing the draft, opening the engine, and the attributes that others look at."""

from __future__ import annotations

import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..config import FILES
from ..decode.recommended import recommended, told
from ..errors import ConfigError, DeviceError, DflashError
from ..files.named import model_path
from ..session.session import Session
from . import left_out
from .cache import BaseLlamaCache
from .context import LlamaContext
from .model import LlamaModel
from .options import LLAMA_DEFAULT_SEED, FoundDraft, LlamaOptions
from .tokenizer import LlamaTokenizer

if TYPE_CHECKING:
    from ..engine.engine import Engine


class LlamaBase:
    """One model with one context. See `Llama` for the constructor's keywords."""

    def __init__(self, options: LlamaOptions) -> None:
        options = self._options = replace(options, model_path=model_path(options.model_path))
        self.model_path = options.model_path
        self.verbose = options.verbose
        if not os.path.exists(options.model_path):
            raise ValueError(f"Model path does not exist: {options.model_path}")
        options.check()
        self._engine: Engine | None = None
        self._session: Session | None = None
        if options.vocab_only:
            self._model = LlamaModel(path_model=options.model_path)
            n_ctx = options.n_ctx or self._model.n_ctx_train()
        else:
            engine = self._engine = self._open_engine()
            self._session = Session(engine, cache_bytes=options.prefix_cache_bytes)
            self._model = LlamaModel.of(options.model_path, engine.tokenizer, engine.params, engine.metadata)
            n_ctx = engine.n_ctx
        self._n_ctx, self.n_seq_max = n_ctx, options.n_seq_max
        self._n_vocab = self._model.n_vocab()
        self._ctx = LlamaContext.of(self)
        self.metadata = self._model.metadata()
        found = recommended({} if self._engine is None else self._engine.metadata)
        self._recommended = {name: value for name, value in found.items() if name in left_out.NAMES}
        if self._recommended and self.verbose:
            print(
                f"sampling as the model file has it, where not given: {told(self._recommended)}",
                file=sys.stderr,
            )
        for key, value in (options.kv_overrides or {}).items():
            self.metadata[key] = str(value)
        self.n_batch = min(n_ctx, options.n_batch)
        from ..ggml.device import physical_cores

        # one pool for single tokens and batches
        self.n_threads = self.n_threads_batch = (
            options.threads or physical_cores() if self._engine is None else self._engine.device.n_threads
        )
        self.context_params = SimpleNamespace(
            n_ctx=n_ctx,
            n_batch=self.n_batch,
            n_ubatch=min(self.n_batch, options.n_ubatch),
            n_threads=self.n_threads,
        )
        self.model_params = SimpleNamespace(n_gpu_layers=options.n_gpu_layers, main_gpu=options.main_gpu)
        self.last_n_tokens_size = options.last_n_tokens_size
        self.draft_model = options.draft_model
        self.tensor_split, self.kv_overrides = options.tensor_split, options.kv_overrides
        self.lora_base, self.lora_scale, self.lora_path = (
            options.lora_base,
            options.lora_scale,
            options.lora_path,
        )
        self.numa, self.spm_infill = options.numa, options.spm_infill
        self.cache: BaseLlamaCache | None = None
        self.tokenizer_ = options.tokenizer or LlamaTokenizer(self)
        self.n_tokens = 0
        self.input_ids: npt.NDArray[np.intc] = np.zeros(n_ctx, np.intc)
        self._logits_all = options.logits_all
        self._scores_buffer: npt.NDArray[np.single] | None = None
        self._seed = options.seed or LLAMA_DEFAULT_SEED
        self._token_eos, self._token_nl = self.token_eos(), self.token_nl()
        self._is_hybrid, self._is_recurrent, self._requires_eval = True, False, True

    # --- loading

    def _open_engine(self) -> Engine:
        """The engine with the draft that was named, or lies beside the target, or none: said aloud."""
        from ..engine.engine import Engine

        options = self._options
        options.engine_config(None)  # a bad value is told before files are looked at
        draft, found, own = self._choose_draft()
        config = options.engine_config(draft, own)
        try:
            return Engine.load(config)
        except DflashError as error:
            if draft is None or not found or config.mode != "auto":  # any other mode asks for a draft
                raise
            reason = str(error)
        engine = Engine.load(options.engine_config(None, True))  # the target's own head drafts, if it has one
        how = (
            "drafting with the target's prediction head"
            if engine.has_draft
            else "decoding without a draft model"
        )
        warnings.warn(f"the draft that was found is not used, {how}: {reason}", stacklevel=4)
        return engine

    def _choose_draft(self) -> tuple[Path | None, bool, bool]:
        """(draft path or None, whether it was found rather than named, whether the target's prediction head drafts in its place).

        Raises ConfigError if a named one is missing."""
        named = self._options.draft_model
        if isinstance(named, (str, os.PathLike)):
            path = Path(named)
            if not path.exists():
                raise ConfigError(f"draft_model: {path} does not exist")
            return path, isinstance(named, FoundDraft), False
        spec = self._options.spec
        if named is False or self._options.mode == "plain" or self._options.lookup:
            return None, False, False
        if spec is not None and not any(name in FILES for name in spec):
            return None, False, "mtp" in spec
        from ..drafts.beside import draft_beside

        beside = draft_beside(Path(self.model_path))
        none = beside.path is None and not beside.own
        if none and self._options.mode in ("chain", "tree") and "suffix" not in (spec or ()):
            raise ConfigError(f"mode {self._options.mode} needs a draft: {beside.why}; pass draft_model=PATH")
        if named is not None:  # another Python drafter
            instead = (
                f"drafting with {beside.path.name}"
                if beside.path
                else beside.own or "decoding without a draft model"
            )
            warnings.warn(
                f"draft_model: a {type(named).__name__} does not draft here, pass the path of a DFlash draft; {instead}",
                stacklevel=5,
            )
        elif beside.path is None and not beside.own:
            why = beside.why.replace("draft", "DFlash draft", 1)
            warnings.warn(
                f"{why}: decoding without a draft model; pass draft_model=PATH for speculation, "
                "draft_model=False to silence this",
                stacklevel=5,
            )
        return beside.path, True, bool(beside.own)

    def __getattr__(self, name: str) -> Any:
        if name in ("_batch", "_candidates", "_sampler", "_stack"):
            raise AttributeError(f"{name}: there is no libllama behind this Llama, so its parts do not exist")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def engine(self) -> Engine:
        """The engine. Raises ConfigError after close() or with vocab_only."""
        if self._engine is None:
            raise self._no_weights()
        return self._engine

    @property
    def session(self) -> Session:
        """The session on the engine, for typed requests. Raises as `engine`."""
        if self._session is None:
            raise self._no_weights()
        return self._session

    def _no_weights(self) -> ConfigError:
        if self._options.vocab_only:
            return ConfigError("this Llama was opened with vocab_only=True: it has no weights")
        return ConfigError("this Llama is closed; open the model again")

    # --- what others look at

    @property
    def model(self) -> int | None:
        """A handle of the model for `llama_cpp.llama_model_*`; None after close()."""
        return self._model.model

    @property
    def ctx(self) -> int | None:
        """A handle of the context for `llama_cpp.llama_decode` and the like."""
        return self._ctx.ctx

    @property
    def _input_ids(self) -> npt.NDArray[np.intc]:
        return self.input_ids[: self.n_tokens]

    @property
    def scores(self) -> npt.NDArray[np.single]:
        """Logits by position, single [n_ctx or n_batch, n_vocab]; filled with logits_all only, allocated when touched."""
        if self._scores_buffer is None:
            rows = self._n_ctx if self._logits_all else self.n_batch
            self._scores_buffer = np.zeros((rows, self._n_vocab), np.single)
        return self._scores_buffer

    @property
    def _scores(self) -> npt.NDArray[np.single]:
        return self.scores[: self.n_tokens, :]

    @property
    def eval_tokens(self) -> deque[int]:
        """The evaluated tokens."""
        return deque(self._input_ids.tolist(), maxlen=self._n_ctx)

    @property
    def eval_logits(self) -> deque[list[float]]:
        """Logits of the evaluated tokens; only the last row without logits_all."""
        return deque(self._scores.tolist(), maxlen=self._n_ctx if self._logits_all else 1)

    def n_ctx(self) -> int:
        """Context window in tokens."""
        return self._n_ctx

    def n_embd(self) -> int:
        """Width of the model's hidden state."""
        return self._model.n_embd()

    def n_vocab(self) -> int:
        """Width of a logits row."""
        return self._n_vocab

    def token_eos(self) -> int:
        """End-of-sequence id, -1 if there is none."""
        return self._model.token_eos()

    def token_bos(self) -> int:
        """Begin-of-sequence id; that of <|endoftext|> where the file declares none, -1 without either."""
        return self._model.token_bos()

    def token_nl(self) -> int:
        """Id of a line feed."""
        return self._model.token_nl()

    def tokenizer(self) -> LlamaTokenizer:
        """The model's own tokenizer."""
        return LlamaTokenizer(self)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Ids of UTF-8 text."""
        return self.tokenizer_.tokenize(text, add_bos, special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """Bytes of ids."""
        return self.tokenizer_.detokenize(tokens, prev_tokens=prev_tokens, special=special)

    # --- life

    def __getstate__(self) -> dict[str, Any]:
        """The constructor's arguments: unpickling loads the model again."""
        return {**self._options.as_dict(), "seed": self._seed, "n_ctx": self._n_ctx}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _between_steps(self, work: Callable[[], None]) -> None:
        """Do something while no slot is needed: a stream that this thread left open ends, that of another is waited for."""
        session = getattr(self, "_session", None)
        if session is None:
            work()
        else:
            session.scheduler.borrow(lambda slot: work())

    def close(self) -> None:
        """Free the model; a second call does nothing. Tokenising still works, what needs weights says that it is closed."""
        try:
            self._between_steps(self._free)
        except DeviceError:  # there was nothing to wait for
            self._free()

    def _free(self) -> None:
        engine, self._engine, self._session = getattr(self, "_engine", None), None, None
        if "_model" in vars(self):
            self._model.close()
        if engine is not None:
            engine.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._free()  # what still runs is as unreachable as this
