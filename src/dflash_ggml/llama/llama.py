"""`Llama`: the class of llama-cpp-python, call for call, on this engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any

from ..config import Calibrate, DraftType, Mode
from ..errors import ConfigError
from ..session.session import CACHE_BYTES
from ..text.grammar import LlamaGrammar
from .chat import LlamaChat
from .chat_handlers import ChatHandler
from .completion import Heading, completion_body, completion_chunks
from .left_out import MIN_P, REPEAT_PENALTY, TEMPERATURE, TOP_K, TOP_P
from .merged import merged
from .options import LLAMA_DEFAULT_SEED, LlamaOptions
from .pretrained import fetch_pretrained
from .requests import (
    completion_request,
    hooks_of,
)
from .runs import Batch
from .several import is_one
from .state import LlamaState, LogitsProcessorList, StoppingCriteriaList

if TYPE_CHECKING:
    from ..engine.step import Step

__all__ = ["Llama", "LlamaGrammar", "LlamaState", "LogitsProcessorList", "StoppingCriteriaList"]


class Llama(LlamaChat):
    """A model with its draft behind the interface of llama_cpp.Llama 0.3.36.

    Keywords that work as there: model_path, n_gpu_layers (0: CPU, else a GPU if there is one), main_gpu, vocab_only,
    seed, n_ctx (0: as trained), n_batch (512: chosen), n_threads, logits_all, last_n_tokens_size, chat_format, chat_handler,
    tokenizer, pooling_type (-1 is the mean), type_k and type_v (ggml type numbers), kv_overrides (chat template only),
    spm_infill, verbose (statistics on stderr). Without meaning here, accepted with one warning: memory mapping, device
    splits, NUMA and the like. Refused: LoRA, other rope settings than the file's. Unknown keywords are swallowed.

    draft_model: path of a DFlash draft; None: the one beside the model, if there is one; False: plain decoding; a
        LlamaPromptLookupDecoding: text that stood before, and no draft model.
    mode, budget, candidates, chain_seed, calibrate, reproducible, draft_window, draft_type, spec, draft_max: how to speculate
        (see EngineConfig).
    n_seq_max: sequences that are decoded as a batch, of several prompts or choices; they share the n_ctx tokens.
    n_cpu_moe: layers whose experts the host keeps beside a GPU (None: as few as it takes); cpu_moe: those of all.
    prefix_cache_bytes: host memory for cached prefixes. penalize_prompt: penalties count the prompt too; as there, they
    count what is generated only.

    Raises ValueError for a missing file, ModelFileError, ConfigError or DeviceError.
    """

    def __init__(
        self,
        model_path: str,
        *,
        n_gpu_layers: int = 0,
        split_mode: int = 1,
        main_gpu: int = 0,
        tensor_split: list[float] | None = None,
        vocab_only: bool = False,
        use_mmap: bool = True,
        use_mlock: bool = False,
        kv_overrides: Mapping[str, bool | int | float | str] | None = None,
        seed: int = LLAMA_DEFAULT_SEED,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        rope_scaling_type: int | None = -1,
        pooling_type: int = -1,
        attention_type: int = -1,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float = -1.0,
        yarn_attn_factor: float = 1.0,
        yarn_beta_fast: float = 32.0,
        yarn_beta_slow: float = 1.0,
        yarn_orig_ctx: int = 0,
        logits_all: bool = False,
        embedding: bool = False,
        offload_kqv: bool = True,
        flash_attn: bool = False,
        op_offload: bool | None = None,
        swa_full: bool | None = None,
        no_perf: bool = False,
        last_n_tokens_size: int = 64,
        lora_base: str | None = None,
        lora_scale: float = 1.0,
        lora_path: str | None = None,
        numa: bool | int = False,
        chat_format: str | None = None,
        chat_handler: ChatHandler | None = None,
        draft_model: Any = None,
        tokenizer: Any = None,
        type_k: int | None = None,
        type_v: int | None = None,
        spm_infill: bool = False,
        verbose: bool = True,
        mode: Mode = "auto",
        budget: int = 31,
        candidates: int | None = None,
        chain_seed: bool = False,
        calibrate: Calibrate = "cached",
        reproducible: bool = False,
        draft_window: int | None = None,
        draft_type: DraftType | None = None,
        spec: Sequence[str] | None = None,
        draft_max: int = 3,
        n_seq_max: int = 1,
        cpu_moe: bool = False,
        n_cpu_moe: int | None = None,
        prefix_cache_bytes: int = CACHE_BYTES,
        penalize_prompt: bool = False,
        **kwargs: Any,
    ) -> None:
        given = locals()
        options = LlamaOptions(**{name: given[name] for name in LlamaOptions.__dataclass_fields__})
        super().__init__(options)
        self._choose_handler(chat_format, chat_handler)

    def create_completion(
        self,
        prompt: str | Sequence[int] | Sequence[str],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = TEMPERATURE,
        top_p: float = TOP_P,
        min_p: float = MIN_P,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | list[str] | None = None,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = REPEAT_PENALTY,
        top_k: int = TOP_K,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: Mapping[int, float] | None = None,
        *,
        mode: str | None = None,
        budget: int | None = None,
        on_step: Callable[[Step], None] | None = None,
        n: int | None = None,
    ) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """Continue a text (or token list): one dict, or with stream=True an iterator of chunks.

        max_tokens None or <= 0 fills the context. logprobs: how many alternatives per token; with echo the prompt's
        own are reported too, and the prompt is read anew. suffix needs a model with
        fill-in-the-middle tokens. tfs_z has no effect, as in llama-cpp-python. mode, budget: speculation for this
        call. on_step sees every engine step. The last chunk and the dict carry `usage` and `timings`. n: choices of each prompt,
        with the seed, seed + 1 and so on; prompt may be a list of texts: all in one dict, decoded as a batch (see n_seq_max).
        Raises ContextOverflowError, ConfigError (both ValueErrors), with stream=True at the first next().
        """
        arguments = {k: v for k, v in locals().items() if k not in ("self", "prompt", "seed", "n", "stream")}
        prompts: list[Any] = [prompt] if is_one(prompt) else list(prompt)
        n = 1 if n is None else n
        if len(prompts) == 1 and n == 1:
            return self._completion(prompts[0], seed, stream, **arguments)()
        if stream:
            raise ConfigError("stream: one answer at a time; leave out n and lists of prompts, or the stream")
        return merged(self._completions(prompts, seed, n, arguments), n)

    __call__ = create_completion

    def _completion(
        self,
        prompt: str | Sequence[int],
        seed: int | None,
        stream: bool,
        *,
        suffix: str | None = None,
        max_tokens: int | None = 16,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | list[str] | None = None,
        tfs_z: float = 1.0,
        model: str | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        mode: str | None = None,
        budget: int | None = None,
        on_step: Callable[[Step], None] | None = None,
        batch: Batch | None = None,
        **sampling: Any,
    ) -> Callable[[], dict[str, Any] | Iterator[dict[str, Any]]]:
        """A completion made ready: its seed is drawn, what cannot be is refused, and one of a batch begins."""
        params = self._sampling(seed, **sampling)
        request = completion_request(
            self._prompt(prompt, suffix),
            params,
            logprobs=logprobs,
            max_tokens=max_tokens,
            stop=stop,
            grammar=grammar,
            penalize_prompt=self._options.penalize_prompt,
            mode=mode,
            budget=budget,
            suffix=suffix,
            suffix_first=self._options.spm_infill,
            prompt_logprobs=echo and logprobs is not None,
        )
        head = Heading(self.model_path if model is None else model)
        events = self._events(request, hooks_of(logits_processor, stopping_criteria, on_step), batch)
        text = None
        if echo:
            text = prompt if isinstance(prompt, str) else self.detokenize(prompt).decode("utf-8", "ignore")
        return partial(completion_chunks if stream else completion_body, events, head, echo=text)

    def _prompt(self, prompt: str | Sequence[int], suffix: str | None) -> str | list[int]:
        """The prompt as given, or its ids where a tokenizer of the caller's replaces the model's own. Raises TypeError."""
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

        filename and additional_files are names or glob patterns that match one file each. A draft beside the model in
        its repository, else the published one, is fetched too, unless draft_model or mode="plain" says otherwise; any
        fault in it is a warning. local_dir_use_symlinks has no effect any more.
        """
        want_draft = kwargs.get("draft_model") is None and kwargs.get("mode") != "plain"
        path, draft = fetch_pretrained(
            repo_id, filename, additional_files or (), local_dir, cache_dir, want_draft
        )
        if draft is not None:
            kwargs["draft_model"] = draft
        return cls(model_path=path, **kwargs)
