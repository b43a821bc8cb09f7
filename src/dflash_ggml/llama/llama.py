"""`Llama`: the class of llama-cpp-python, call for call, on this engine."""

from __future__ import annotations

import os
import random
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from inspect import Parameter, signature
from operator import index
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import numpy as np
import numpy.typing as npt

from ..decode.recommended import described, recommended
from ..decode.sampling import Sampler, log_softmax
from ..errors import ConfigError
from ..files.named import model_path as find_model
from ..session.prefix_cache import common_prefix
from ..session.processors import RowKeeper
from ..session.requests import NamedTool
from ..session.session import Session
from ..text.grammar import LlamaGrammar
from ..text.tools import check_tools
from . import keywords
from .cache import BaseLlamaCache
from .chat_completion import chat_body, chat_chunks
from .chat_handlers import ChatHandler, get_chat_completion_handler
from .completion import Heading, completion_body, completion_chunks
from .context import LlamaContext
from .embedding import vectors
from .formatter import TemplateHandler
from .keywords import RECOMMENDABLE, arguments, for_handler, sampling_of, settled, takes
from .lenient import warn, whole
from .merged import merged
from .model import LlamaModel
from .opening import open_engine
from .options import LLAMA_DEFAULT_SEED, LlamaOptions
from .pretrained import fetch_pretrained
from .requests import (
    as_tuple,
    chat_request,
    completion_request,
    grammar_spec,
    hooks_of,
    legacy_tools,
    sampling_params,
)
from .runs import Batch, all_of, events_of, is_one
from .state import LlamaState, LogitsProcessorList, StoppingCriteriaList
from .tokenizer import LlamaTokenizer

if TYPE_CHECKING:
    from ..engine.engine import Engine

__all__ = ["Llama", "LlamaGrammar", "LlamaState", "LogitsProcessorList", "StoppingCriteriaList"]

P = ParamSpec("P")
# attributes of Llama from its context and options: NAME, or NAME=FIELD
_CONTEXT = (
    "n_tokens input_ids scores _input_ids=ids _scores_buffer=scores_buffer _requires_eval=requires_eval"
)
_OPTIONS = """model_path verbose last_n_tokens_size draft_model tensor_split kv_overrides lora_base lora_scale lora_path numa
    spm_infill chat_format chat_handler _logits_all=logits_all"""


def _with_keywords_of(
    options: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Decorator: a constructor takes the keywords of another; unknown ones are ignored."""

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        first, *rest = signature(options).parameters.values()
        positional = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), first]
        named = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in rest]
        more = Parameter("kwargs", Parameter.VAR_KEYWORD, annotation="Any")
        init.__signature__ = signature(init).replace(parameters=[*positional, *named, more])  # type: ignore[attr-defined]
        return init

    return decorate


class Llama:
    """A model with its draft behind the interface of llama_cpp.Llama 0.3.36.

    Keywords that work as there: model_path, n_gpu_layers (0: CPU, else a GPU if there is one), main_gpu, split_mode (0: one
    GPU; by layers only where tensor_split or `device` is given), tensor_split, vocab_only, seed, n_ctx (0: as trained), n_batch
    (512: chosen), n_threads, logits_all, last_n_tokens_size, chat_format, chat_handler, tokenizer, pooling_type (-1 is the
    mean), type_k and type_v (ggml type numbers), kv_overrides (chat template only), spm_infill, verbose (statistics on
    stderr). Without meaning here, accepted with one warning: memory mapping, NUMA and the like. Refused: LoRA, other rope
    settings than the file's. Unknown keywords are swallowed.

    Args:
        draft_model: Path of a DFlash draft; None: the one beside the model, if there is one; False: plain decoding; a
            LlamaPromptLookupDecoding: prompt lookup, and no draft model.
        mode, budget, candidates, chain_seed, calibrate, reproducible, draft_window, draft_type, spec, draft_max: How to
            speculate (see EngineConfig).
        n_seq_max: Sequences that are decoded as a batch, of several prompts or choices; they share the n_ctx tokens.
        device: Names of the devices that may be used, several to share the layers.
        draft_device: The draft's device (see EngineConfig).
        n_cpu_moe: Layers whose experts the host keeps beside a GPU (None: as few as it takes).
        cpu_moe: The experts of all layers.
        prefix_cache_bytes: Host memory for cached prefixes.
        prefill_fp8: Prefill with 8-bit floats where a GPU can: faster, lossy (see EngineConfig).
        penalize_prompt: Penalties count the prompt too; as there, they count what is generated only.

    Raises:
        ValueError: The file is missing.
        ModelFileError: A file is damaged, or the draft does not fit.
        ConfigError: A keyword has a value that cannot be.
        DeviceError: Something does not fit the device.
    """

    # set by name from `_CONTEXT` and `_OPTIONS`; declared for type checkers
    n_tokens: int
    input_ids: npt.NDArray[np.intc]
    scores: npt.NDArray[np.single]
    model_path: str
    verbose: bool
    chat_format: str | None
    chat_handler: ChatHandler | None

    @_with_keywords_of(LlamaOptions)
    def __init__(self, model_path: str, **keywords: Any) -> None:
        known = {k: v for k, v in keywords.items() if k in LlamaOptions.__dataclass_fields__}
        model_path = find_model(model_path)
        options = self._options = LlamaOptions(model_path, **known)
        for name, field in _named(_OPTIONS):
            setattr(self, name, getattr(options, field))
        if not os.path.exists(model_path):
            raise ValueError(f"Model path does not exist: {model_path}")
        options.check()
        engine = None if options.vocab_only else self._open_engine()
        if engine is None:
            self._model = LlamaModel(path_model=model_path)
        else:
            self._model = LlamaModel.of(model_path, engine.tokenizer, engine.params, engine.metadata)
        ctx = self._ctx = LlamaContext.of(options, self._model, engine)
        self._n_ctx, self._n_vocab = ctx.n_ctx(), self._model.n_vocab()
        found = recommended({} if engine is None else engine.metadata)
        self._recommended = {name: value for name, value in found.items() if name in RECOMMENDABLE}
        if self._recommended and self.verbose:
            what = described(self._recommended)
            print(f"sampling as the model file has it, where not given: {what}", file=sys.stderr)
        overrides = {key: str(value) for key, value in (options.kv_overrides or {}).items()}
        self.metadata = {**self._model.metadata(), **overrides}
        self.n_batch, self.n_seq_max = ctx.n_batch, ctx.n_seq_max
        self.n_threads = self.n_threads_batch = ctx.n_threads
        shown = {name: getattr(ctx, name) for name in ("n_batch", "n_ubatch", "n_threads")}
        self.context_params = SimpleNamespace(n_ctx=self._n_ctx, **shown)
        self.model_params = SimpleNamespace(n_gpu_layers=options.n_gpu_layers, main_gpu=options.main_gpu)
        self.cache: BaseLlamaCache | None = None
        self.tokenizer_ = options.tokenizer or LlamaTokenizer(self)
        self._seed = options.seed or LLAMA_DEFAULT_SEED
        self._token_eos, self._token_nl = self.token_eos(), self.token_nl()
        self._is_hybrid, self._is_recurrent = True, False
        self._warned: set[str] = set()
        templates = {k: v for k, v in self.metadata.items() if k.startswith("tokenizer.chat_template")}
        own = templates.pop("tokenizer.chat_template", None)
        named = {key.removeprefix("tokenizer."): self._handler(source) for key, source in templates.items()}
        self._chat_handlers: dict[str, ChatHandler] = {**named}
        if own:
            self._chat_handlers["chat_template.default"] = self._handler(own)
        if self.chat_format is None and self.chat_handler is None:
            self.chat_format = "chat_template.default" if own else "chatml"

    def _open_engine(self) -> Engine:
        return open_engine(self._options)

    def _handler(self, source: str) -> TemplateHandler:
        """A handler of one of the model's templates, compiled now to detect errors early."""
        if not self._options.vocab_only:
            self.session.templates.of(source)
        return TemplateHandler(source)

    def __getattr__(self, name: str) -> Any:
        if name in ("_batch", "_candidates", "_sampler", "_stack"):
            raise AttributeError(f"{name}: there is no libllama behind this Llama, so its parts do not exist")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- public attributes

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            ConfigError: The model is closed, or was opened with vocab_only.
        """
        return self._ctx.engine

    @property
    def session(self) -> Session:
        """The session on the engine, for typed requests.

        Raises:
            ConfigError: The model is closed, or was opened with vocab_only.
        """
        return self._ctx.session

    @property
    def model(self) -> int | None:
        """A handle of the model for `llama_cpp.llama_model_*`; None after close()."""
        return self._model.model

    @property
    def ctx(self) -> int | None:
        """A handle of the context for `llama_cpp.llama_decode` and the like; None after close()."""
        return self._ctx.ctx

    @property
    def _scores(self) -> npt.NDArray[np.single]:
        return self.scores[: self.n_tokens, :]

    @property
    def eval_tokens(self) -> deque[int]:
        """The evaluated tokens."""
        return deque(self._ctx.ids.tolist(), maxlen=self._n_ctx)

    @property
    def eval_logits(self) -> deque[list[float]]:
        """Logits of the evaluated tokens; only the last row without logits_all."""
        return deque(self._scores.tolist(), maxlen=self._n_ctx if self._options.logits_all else 1)

    def n_ctx(self) -> int:
        """Context window in tokens."""
        return self._n_ctx

    def n_embd(self) -> int:
        """Width of the model's hidden state."""
        return self._model.n_embd()

    def n_vocab(self) -> int:
        """Width of a logits row."""
        return self._n_vocab

    def pooling_type(self) -> int:
        """How a text's states become one vector: 0 not at all, 1 mean (also -1), 2 first, 3 last."""
        return self._options.pooling_type

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

    @staticmethod
    def logits_to_logprobs(logits: npt.ArrayLike, axis: int = -1) -> npt.NDArray[np.single]:
        """Log-softmax along an axis, in single precision."""
        return np.apply_along_axis(log_softmax, axis, np.asarray(logits, np.single))

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
        """How many leading tokens are equal."""
        return common_prefix(a, b)

    # --- low-level evaluation

    def set_seed(self, seed: int) -> None:
        """Seed of the next sampled answer."""
        self._seed = seed

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """Set a cache of whole saved states, asked before and filled after each completion; None for no such cache."""
        self._ctx.between_steps(lambda: setattr(self, "cache", cache))

    def reset(self) -> None:
        """Empty the context.

        Raises:
            ConfigError: The model is closed.
        """
        self._ctx.reset()

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the first n_tokens of input_ids.

        Raises:
            ContextOverflowError: They do not fit.
            ConfigError: The model is closed, or an id is outside the vocabulary.
        """
        self._ctx.eval(tokens)

    def _sampler_of(
        self, options: Mapping[str, Any], n_prompt: int, keeper: RowKeeper | None = None, n_exempt: int = 0
    ) -> Sampler:
        """A sampler by the keywords of a call; n_prompt: length of the text that the grammar does not bind."""
        spec = grammar_spec(options["grammar"])
        rules = [] if spec is None else [self.session.grammars.processor(spec, n_prompt)]
        first = [] if keeper is None else [keeper]
        params = self._params(self._seed, options)
        processors = [*first, *as_tuple(options["logits_processor"]), *rules]
        return Sampler(params, self._n_vocab, processors, n_exempt=n_exempt)

    def _params(self, seed: int, options: Mapping[str, Any]) -> Any:
        chosen = settled(sampling_of(options), self._recommended)
        return sampling_params(
            seed=seed, last_n_tokens_size=self.last_n_tokens_size, n_vocab=self._n_vocab, **chosen
        )

    @takes(keywords.sample)
    def sample(self, options: dict[str, Any]) -> int:
        """A token from the logits after the last evaluated token, or after position idx (needs logits_all).

        Penalties count all tokens so far, since the prompt's length is unknown. tfs_z and penalize_nl have no effect, as in
        llama-cpp-python.

        Raises:
            ConfigError: Nothing was evaluated.
        """
        _ = self.session  # raises first if closed or without weights
        if self.n_tokens == 0:
            raise ConfigError("sample: nothing has been evaluated yet; call eval first")
        return self._ctx.draw(self._sampler_of(options, self.n_tokens), options["idx"])

    @takes(keywords.generate)
    def generate(self, options: dict[str, Any]) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens after a prompt, including end-of-generation tokens: the caller breaks.

        Tokens passed to send() are appended. reset=False continues the current context. Ends when the context is full or
        stopping_criteria(ids so far, logits after them) is true.
        """
        before = [] if options["reset"] else self._ctx.ids.tolist()
        ids = before + [int(t) for t in options["tokens"]]
        criteria = as_tuple(options["stopping_criteria"])
        keeper = RowKeeper() if criteria or self._options.logits_all else None
        exempt = 0 if self._options.penalize_prompt else len(ids)
        sampler = self._sampler_of(options, len(ids), keeper, exempt)
        sent: Sequence[int] | None = []
        while sent is not None:
            sent = None
            with closing(self._ctx.stream(ids, sampler, keeper, criteria)) as stream:
                for token in stream:
                    sent = yield token
                    ids.append(token)
                    if sent is not None:
                        ids += [int(t) for t in sent]
                        break

    def save_state(self) -> LlamaState:
        """The evaluated context, for load_state of this or an equal model."""
        return self._ctx.on_slot(lambda slot: self._ctx.state(slot, self._seed))

    def load_state(self, state: LlamaState) -> None:
        """Restore a saved context and its seed.

        Raises:
            ConfigError: The state is from a model of another shape.
        """
        self._ctx.restore(state, lambda: self.set_seed(state.seed))

    # --- completions

    @takes(keywords.create_completion)
    def create_completion(self, options: dict[str, Any]) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """Continue a prompt: one dict, or with stream=True an iterator of chunks. Both carry `usage` and `timings`.

        Keywords are those of llama-cpp-python; tfs_z has no effect, as there.

        Args:
            prompt: A text or its ids; or a list of prompts, all answered in one dict and decoded as a batch (see n_seq_max).
            suffix: Text behind the gap; needs a model with fill-in-the-middle tokens.
            max_tokens: None or <= 0 fills the context.
            logprobs: How many alternatives per token; with `echo` the prompt's own are reported too, and it is prefilled anew.
            n: Choices of each prompt, with the seed, seed + 1 and so on.
            mode, budget: Speculation for this call (see EngineConfig).
            on_step: Called with every engine step.

        Raises:
            ContextOverflowError: The prompt fills the context (a ValueError); with stream=True at the first next().
            ConfigError: An option cannot be honoured (a ValueError); with stream=True at the first next().
        """
        prompt, seed, n = options["prompt"], options["seed"], 1 if options["n"] is None else options["n"]
        prompts: list[Any] = [prompt] if is_one(prompt) else list(prompt)
        if len(prompts) == 1 and n == 1:
            return self._completion(prompts[0], seed, options)()
        if options["stream"]:
            raise ConfigError("stream: one answer at a time; leave out n and lists of prompts, or the stream")
        return merged(self._completions(prompts, seed, n, options), n)

    __call__ = create_completion

    def create_completions(
        self, prompts: Sequence[str | Sequence[int]], *, n: int = 1, seed: int | None = None, **options: Any
    ) -> list[dict[str, Any]]:
        """Continue several prompts as a batch.

        Args:
            prompts: Texts, or the ids of each.
            n: Choices of each prompt.
            seed: That of the first choice; the next ones count on.
            options: Further keywords of create_completion.

        Returns:
            A dict for each prompt, of n choices, in their order.

        Raises:
            ContextOverflowError, ConfigError: As create_completion, for the first failing prompt, once all others have ended.
        """
        _refuse_stream("create_completions", options)
        bodies = self._completions(prompts, seed, n, arguments("create_completion", self, "", **options))
        return [merged(bodies[i : i + n], n) for i in range(0, len(bodies), n)]

    def _completions(
        self, prompts: Sequence[Any], seed: int | None, n: int, options: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        each = [(prompt, own) for prompt in prompts for own in self._drawn(seed, n)]
        with self._batch(len(each)) as batch:
            return all_of([self._completion(*one, options, batch) for one in each])

    def _completion(
        self, prompt: Any, seed: int | None, options: Mapping[str, Any], batch: Batch | None = None
    ) -> Callable[[], Any]:
        """Prepare a completion: draw its seed, check its options, and start it if it is part of a batch."""
        params = self._next_params(seed, options)
        ids = self._prompt(prompt, options["suffix"])
        request = completion_request(ids, params, options, self._options)
        head = Heading(self.model_path if options["model"] is None else options["model"])
        events = events_of(self, request, hooks_of(options), batch)
        text = None
        if options["echo"]:
            text = prompt if isinstance(prompt, str) else self.detokenize(prompt).decode("utf-8", "ignore")
        return partial(completion_chunks if options["stream"] else completion_body, events, head, echo=text)

    def _prompt(self, prompt: Any, suffix: str | None) -> str | list[int]:
        """The prompt, or its ids if the caller has replaced the tokenizer. Raises TypeError."""
        if isinstance(prompt, bytes):  # a sequence of numbers, too, but not of tokens
            raise TypeError("prompt: expected text or token ids, got bytes; decode them first")
        if isinstance(prompt, str) and self._options.tokenizer is not None and suffix is None:
            return list(self.tokenize(prompt.encode("utf-8"), add_bos=True, special=True))
        if isinstance(prompt, str):
            return prompt
        try:
            return [index(token) for token in prompt]
        except TypeError:
            raise TypeError(f"prompt: expected text or token ids, got {prompt!r:.60}") from None

    # --- conversations

    @takes(keywords.create_chat_completion)
    def create_chat_completion(self, options: dict[str, Any]) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """Answer a conversation: one dict, or with stream=True an iterator of chunks.

        Reasoning comes as `reasoning_content`, tool calls as `tool_calls` with every tool_choice. response_format takes
        json_object and json_schema. A chat_handler gets all keywords.

        Args:
            chat_template_kwargs: Variables of the template. This and all below are of this package alone.
            enable_thinking: Whether the template asks for reasoning.
            reasoning_budget: Tokens of reasoning before its end is forced.
            reasoning_effort: A name for such a budget.
            parallel_tool_calls: False ends the answer after one call.
            mode, budget, on_step: As in create_completion.

        Raises:
            ContextOverflowError, ConfigError: As create_completion.
        """
        return self._handler_in_use()(llama=self, **for_handler(options))

    def create_chat_completions(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        *,
        n: int = 1,
        seed: int | None = None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Answer several conversations as a batch, as `create_completions` continues prompts.

        Raises:
            ContextOverflowError, ConfigError: As create_completions.
        """
        _refuse_stream("create_chat_completions", options)
        each = [(messages, own) for messages in conversations for own in self._drawn(seed, n)]
        # custom handlers answer one conversation after the other
        defers = getattr(self._handler_in_use(), "only_prompts", False)
        calls: list[Any] = []
        with self._batch(len(each)) as batch:
            for messages, own in each:
                call = partial(self.create_chat_completion, messages=messages, seed=own, **options)  # type: ignore[arg-type]
                calls.append(call(stream=batch) if defers and batch is not None else call)  # type: ignore[arg-type]
            bodies = all_of(calls)
        return [merged(bodies[i : i + n], n) for i in range(0, len(bodies), n)]

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> Any:
        """As create_chat_completion, in the types of the openai package (which must be installed)."""
        try:
            from openai.types.chat import ChatCompletion, ChatCompletionChunk
        except ImportError:
            raise ImportError(
                "create_chat_completion_openai_v1 needs the openai package: pip install openai"
            ) from None
        answer: Any = self.create_chat_completion(*args, **kwargs)
        if kwargs.get("stream", False):
            return (ChatCompletionChunk(**chunk) for chunk in answer)
        return ChatCompletion(**answer)

    def _handler_in_use(self) -> ChatHandler:
        handler = self.chat_handler or self._chat_handlers.get(self.chat_format or "")
        return handler or get_chat_completion_handler(str(self.chat_format))

    def _chat(self, template: str, messages: Sequence[Mapping[str, Any]], **given: Any) -> Any:
        """A chat's body, with `stream` its chunks; in a batch a function that returns the body.

        given: keywords of create_chat_completion, and stopping_criteria.
        """
        criteria = given.pop("stopping_criteria", None)
        options = arguments("create_chat_completion", self, messages, **given)
        stream, model = options["stream"], options["model"]
        params = self._next_params(options["seed"], options)
        tools, choice = legacy_tools(
            *(options[k] for k in ("functions", "function_call", "tools", "tool_choice"))
        )
        request = chat_request(template, params, tools, choice, options, self._options)
        check_tools(tools)
        head = Heading(self.model_path if model is None else model)
        hooks = hooks_of(
            {**options, "stopping_criteria": criteria},
            new_call_id=lambda index, name: f"call__{index}_{name}_{head.id}",
        )
        batch = stream if isinstance(stream, Batch) else None
        legacy = isinstance(request.tool_choice, NamedTool) or options["functions"] is not None
        answer = chat_chunks if stream and batch is None else chat_body
        made = partial(answer, events_of(self, request, hooks, batch), head, legacy_call=legacy)
        return made() if batch is None else made

    # --- running a request

    def _next_params(self, seed: int | None, options: Mapping[str, Any]) -> Any:
        """Sampler options with the call's seed, or the next of the constructor seed's chain."""
        self.set_seed(random.Random(self._seed).randint(0, 2**32) if seed is None else whole("seed", seed))
        return self._params(self._seed, options)

    def _drawn(self, seed: int | None, n: int) -> list[int]:
        """Seeds of n choices: the given one and its successors, so that choices differ and are reproducible; n times fresh
        entropy; or the next of the constructor seed's chain."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ConfigError(f"n: expected 1 or more, got {n!r}")
        if seed is not None:
            seed &= 0xFFFFFFFF
            if seed == LLAMA_DEFAULT_SEED:
                return [seed] * n
            return [(seed + i) % LLAMA_DEFAULT_SEED for i in range(n)]  # the last seed is followed by 0
        drawn = []
        for _ in range(n):
            drawn.append(random.Random(self._seed).randint(0, 2**32))
            self.set_seed(drawn[-1])
        return drawn

    def _batch(self, n: int) -> AbstractContextManager[Batch | None]:
        """A batch for n generations; None if they run one by one. Warns about features of the context, which a batch does not
        use."""
        if self.n_seq_max == 1 or n == 1:
            return nullcontext()
        left_out = {
            "set_cache: the cache is neither asked nor filled": self.cache is not None,
            "logits_all: scores are not kept": self._options.logits_all,
        }
        new = [message for message, asked in left_out.items() if asked and message not in self._warned]
        self._warned |= set(new)
        warn([f"{message} where several sequences are decoded as a batch" for message in new])
        return Batch(self.session.scheduler)

    # --- embeddings

    def create_embedding(self, input: str | list[str], model: str | None = None) -> dict[str, Any]:
        """Normalised vectors in OpenAI's shape; pooling 0 gives a list of vectors, one per token.

        Texts beyond the context are cut.

        Raises:
            ConfigError: A text is empty.
        """
        found, n_tokens = self._vectors(input, normalize=True, truncate=True)
        return {
            "object": "list",
            "data": [{"object": "embedding", "embedding": v, "index": i} for i, v in enumerate(found)],
            "model": self.model_path if model is None else model,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }

    def embed(
        self,
        input: str | list[str],
        normalize: bool = False,
        truncate: bool = True,
        return_count: bool = False,
    ) -> Any:
        """Embed a text or a list of texts.

        Args:
            input: The texts.
            normalize: Give vectors the length 1.
            truncate: Cut texts beyond the context.
            return_count: Also give the number of tokens.

        Returns:
            The vector of a text, or a list of them; with `return_count` a tuple of that and the number of tokens.

        Raises:
            ConfigError: A text is empty.
            ContextOverflowError: A text exceeds the context, without `truncate`.
        """
        found, n_tokens = self._vectors(input, normalize, truncate)
        output = found[0] if isinstance(input, str) else found
        return (output, n_tokens) if return_count else output

    def _vectors(self, given: str | list[str], normalize: bool, truncate: bool) -> tuple[list[Any], int]:
        texts = [given] if isinstance(given, str) else given
        ids = [self.tokenize(text.encode("utf-8")) for text in texts]
        return vectors(self._ctx, ids, normalize, truncate)

    # --- life

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None,
        additional_files: list[str] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        local_dir_use_symlinks: bool | str = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> Llama:
        """Fetch a model from the Hugging Face hub and open it; needs huggingface_hub.

        A draft beside the model in its repository, else the published one, is fetched too, unless draft_model or mode="plain"
        says otherwise; any fault in it is a warning.

        Args:
            repo_id: The repository.
            filename: Name of the model's file, or a glob pattern that matches one.
            additional_files: Names or patterns of further files.
            local_dir: Folder to put the files in.
            local_dir_use_symlinks: Without effect.
            cache_dir: The hub's cache, if not the usual one.
            kwargs: Keywords of the constructor.

        Raises:
            ConfigError: A pattern matches no file or several.
            HubError: The hub does not deliver the model, or it cannot be loaded yet.
        """
        want_draft = kwargs.get("draft_model") is None and kwargs.get("mode") != "plain"
        path, draft = fetch_pretrained(
            repo_id, filename, additional_files or (), local_dir, cache_dir, want_draft
        )
        if draft is not None:
            kwargs["draft_model"] = draft
        return cls(model_path=path, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """The constructor's arguments: unpickling loads the model again."""
        return {**self._options.as_dict(), "seed": self._seed, "n_ctx": self._n_ctx}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def close(self) -> None:
        """Free the model; a second call has no effect. Tokenising still works, operations with weights raise an error."""
        self._ctx.close()
        self._model.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_ctx" in vars(self):
            self._ctx.free()  # running generations are unreachable too


def _named(words: str) -> Iterator[tuple[str, str]]:
    """(attribute of Llama, where its value is) of words such as `_scores_buffer=scores_buffer`."""
    for word in words.split():
        name, _, field = word.partition("=")
        yield name, field or name


def _of_context(field: str) -> property:
    return property(lambda llm: getattr(llm._ctx, field), lambda llm, value: setattr(llm._ctx, field, value))


for _name, _field in _named(_CONTEXT):
    setattr(Llama, _name, _of_context(_field))


def _refuse_stream(method: str, options: Mapping[str, Any]) -> None:
    if "stream" in options:
        raise TypeError(f"{method}() got an unexpected keyword argument 'stream'")
