"""The target's transformers checkpoint as a frozen torch model: tapped layers, tables, and sampled sequences."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, ModelFileError
from .block_net import Tables
from .corpus import Rows
from .gated_delta import use_chunked_delta_nets
from .recipe import TargetSizes

Report = Callable[[str], None]


class TargetModel:
    """A transformers checkpoint, its weights frozen.

    Raises:
        ModelFileError: The folder has none.
    """

    def __init__(self, path: Path, device: str, dtype: torch.dtype) -> None:
        logging.getLogger("transformers").setLevel(logging.ERROR)
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()

        if not (path / "config.json").exists():
            raise ModelFileError(
                f"{path}: no config.json; the target must be a folder with a transformers checkpoint"
            )
        try:
            opened: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
            self.model = opened.to(device).eval()
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, KeyError, ImportError) as reason:
            raise ModelFileError(
                f"{path}: transformers cannot open it ({str(reason).splitlines()[0]})"
            ) from None
        self.path, self.device = path, device
        self.model.requires_grad_(False)
        decoder = getattr(self.model, "model", None)
        self.decoder: Any = getattr(decoder, "language_model", decoder)
        if not hasattr(self.decoder, "layers") or not hasattr(self.decoder, "norm"):
            raise ModelFileError(f"{path}: a {type(self.model).__name__} has no list of layers to tap")
        use_chunked_delta_nets(self.model)
        self.sizes = _sizes(self.model.config, path)
        head = self.model.get_output_embeddings().weight
        self.tables = Tables(self.model.get_input_embeddings().weight, head)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts, no special ones added."""
        return self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]

    def render(self, messages: list[dict[str, Any]], answer: bool) -> str:
        """Messages in the chat format."""
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    def mask_id(self) -> int:
        """A token id for masked columns: the tokenizer's mask token, or an unused row of the embedding."""
        own = self.tokenizer.mask_token_id
        if own is None and "<|mask|>" in self.tokenizer.get_vocab():
            own = self.tokenizer.convert_tokens_to_ids("<|mask|>")
        if own is not None:
            return int(own)
        if len(self.tokenizer) < self.sizes.n_vocab:
            return len(self.tokenizer)
        raise ConfigError(
            f"{self.path}: no token is left for the mask; --mask-id names one that texts do not have"
        )

    @torch.no_grad()
    def features(self, ids: Tensor, taps: Sequence[int]) -> Tensor:
        """Concatenated outputs of the tapped layers, [B, T, taps * D]; without taps the last one after the output norm."""
        found: dict[int, Tensor] = {}

        def keep(i: int):
            def hook(module: Any, args: Any, output: Any) -> None:
                found[i] = output[0] if isinstance(output, tuple) else output

            return hook

        hooks = [self.decoder.layers[i].register_forward_hook(keep(i)) for i in taps]
        try:
            last = self.decoder(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([found[i] for i in taps], -1) if taps else last

    def step(self, ids: Tensor, cache: Any, length: int) -> tuple[Tensor, Any]:
        """Logits [B, V] after ids [B, T], which follow the cached tokens, and the cache; None before the first ones.

        Args:
            length: Most tokens of a row.
        """
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1], out.past_key_values

    @torch.no_grad()
    def write(
        self,
        prompts: list[list[int]],
        length: int,
        temperatures: Sequence[float],
        batch: int,
        seed: int,
        done: int = 0,
        report: Report = lambda line: None,
    ) -> Iterator[Rows]:
        """Generate the target's output for each prompt, up to `length` tokens in total or its end of text, in batches of rows.

        Short prompts come first; a batch depends only on the seed and its index. Prompts of similar length are batched; the
        longer ones of a batch are prefilled token by token while the shorter ones are already decoded, so no row is padded.

        Args:
            prompts: Token ids of each prompt.
            length: Tokens of prompt and answer.
            temperatures: Sampling temperatures, used cyclically.
            batch: Rows of a batch.
            seed: Seed of all draws.
            done: Rows generated earlier, to be skipped.
            report: Called with lines about the progress.
        """
        starts = np.array([min(len(p), length) for p in prompts])
        order = np.argsort(starts, kind="stable")
        for at in range(done, len(order), batch):
            rows = order[at : at + batch]
            own_seed = int(np.random.SeedSequence((seed, at)).generate_state(1)[0])
            generator = torch.Generator(self.device).manual_seed(own_seed)
            ids, ends = self._write(
                [prompts[i] for i in rows], length, [temperatures[i] for i in rows], generator, report
            )
            kept = ends - starts[rows] >= 2
            yield Rows(ids[kept], starts[rows][kept].astype(np.int64), ends[kept].astype(np.int64))

    def _write(
        self,
        prompts: list[list[int]],
        length: int,
        temperatures: list[float],
        generator: torch.Generator,
        report: Report,
    ):
        device, n = self.device, len(prompts)
        known = torch.full((n, length), -1, device=device)
        for row, prompt in zip(known, prompts):
            row[: len(prompt)] = torch.tensor(prompt[:length], device=device)
        first = min(length, min(map(len, prompts)))
        ids, ends = known.clone(), torch.full((n,), length, device=device)
        heat = torch.tensor(temperatures, device=device)[:, None]
        given, cache, began = known[:, :first], None, time.monotonic()
        reported = began
        for at in range(first, length):
            logits, cache = self.step(given, cache, length)
            logits = logits.float()
            noise = -torch.empty_like(logits).exponential_(generator=generator).log()
            token = torch.where(known[:, at] >= 0, known[:, at], (logits + heat * noise).argmax(-1))
            ids[:, at] = token
            ended = (token == self.sizes.eos) & (known[:, at] < 0)
            ends = torch.where(ended, ends.clamp_max(at + 1), ends)
            given = token[:, None]
            if at % 16 == 0:
                if bool((ends <= at).all()):
                    break
                if (now := time.monotonic()) - reported > 5:
                    rate, reported = (at - first) * n / (now - began), now
                    report(f"text: position {at} of {length} in {n} rows, {rate:.0f} tokens/s")
        return ids.clamp_min(0).int().cpu().numpy(), ends.cpu().numpy()


def _sizes(config: Any, path: Path) -> TargetSizes:
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    eos = text.eos_token_id if text.eos_token_id is not None else config.eos_token_id
    theta = rope.get("rope_theta", getattr(text, "rope_theta", None))
    if theta is None:
        raise ModelFileError(f"{path}: config.json names no rope_theta")
    return TargetSizes(
        n_layers=text.num_hidden_layers,
        n_embd=text.hidden_size,
        n_ff=getattr(text, "intermediate_size", None) or 3 * text.hidden_size,
        n_vocab=text.vocab_size,
        rope_theta=float(theta),
        rms_eps=float(text.rms_norm_eps),
        n_ctx=getattr(text, "max_position_embeddings", None) or 32768,
        eos=int(eos[0] if isinstance(eos, list) else eos if eos is not None else 0),
    )
