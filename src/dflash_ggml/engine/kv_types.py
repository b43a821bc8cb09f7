"""Choice of K/V cache types: those requested, the device's default, or smaller ones where the context needs them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace

from ..config import EngineConfig
from ..errors import ConfigError
from ..state.kv_type import KvType

# fallbacks for an explicit context that does not fit: keys need more bits than values (bench/notes-kv-types.md)
SMALLER = ("q8_0", "q4_0")
SCORER_SMALLER = KvType.named("q8_0", "q8_0")


@dataclass(frozen=True, slots=True)
class KvTypes:
    """Types of the caches of the target, of the draft and of the prompt scorer.

    Attributes:
        note: A message about an automatic choice.
    """

    target: KvType
    draft: KvType
    scorer: KvType
    note: str = ""


def kv_types(
    config: EngineConfig,
    is_gpu: bool,
    head_dims: Collection[int],
    draft_head_dims: Collection[int] = (),
    scorer_head_dims: Collection[int] = (),
) -> list[KvTypes]:
    """The types of caches to plan with, in order of preference: the first that fits is taken.

    More than one only on a GPU, for an explicit context: a scorer's caches shrink before the others, and these only without
    an explicit type.

    Args:
        config: The engine's options.
        is_gpu: The device is a GPU.
        head_dims: Head dimensions of the target's attention layers.
        draft_head_dims: Those of the draft's.
        scorer_head_dims: Those of the scorer's; none without one.

    Raises:
        ConfigError: Blocks of a type do not divide the heads.
    """
    usual = "f16" if is_gpu else "f32"
    scorer = KvType.named(usual, usual)
    chosen = [KvTypes(*_pair(config, usual, usual, head_dims, draft_head_dims), scorer)]
    too_long = f"{config.n_ctx} tokens of context do not fit with"
    if is_gpu and config.n_ctx and scorer_head_dims:
        with suppress(ConfigError):
            for d in scorer_head_dims:
                SCORER_SMALLER.check(d, "scorer")
            scorer = SCORER_SMALLER
            note = f"{too_long} the prompt scorer's K/V caches in {usual}: they are {scorer}"
            chosen.append(replace(chosen[0], scorer=scorer, note=note))
    asked = (config.type_k, config.type_v, config.draft_type_k, config.draft_type_v)
    if is_gpu and config.n_ctx and set(asked) == {"auto"}:
        try:
            smaller = _pair(config, *SMALLER, head_dims, draft_head_dims)
        except ConfigError:
            return chosen
        note = f"{too_long} K/V caches of {usual}: they are {smaller[0]} (-ctk, -ctv)"
        chosen.append(KvTypes(*smaller, scorer, note))
    return chosen


def _pair(
    config: EngineConfig, k: str, v: str, head_dims: Collection[int], draft_head_dims: Collection[int]
) -> tuple[KvType, KvType]:
    """Target and draft with `k` and `v` for "auto"; a draft without its own takes the target's."""
    target = KvType.named(_or_default(config.type_k, k), _or_default(config.type_v, v))
    for d in head_dims:
        target.check(d, "target")
    draft = KvType.named(
        *(
            _or_default(own, _or_default(of_target, default))
            for own, of_target, default in (
                (config.draft_type_k, config.type_k, k),
                (config.draft_type_v, config.type_v, v),
            )
        )
    )
    for d in draft_head_dims:
        draft.check(d, "draft")
    return target, draft


def _or_default(asked: str, default: str) -> str:
    return default if asked == "auto" else asked
