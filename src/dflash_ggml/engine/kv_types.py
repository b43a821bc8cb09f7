"""Choice of K/V cache types: those requested, the device's default, or smaller ones where the context needs them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..config import EngineConfig
from ..errors import ConfigError
from ..state.kv_type import KvType

# fallbacks for an explicit context that does not fit: keys need more bits than values (bench/notes-kv-types.md)
SMALLER = ("q8_0", "q4_0")


@dataclass(frozen=True, slots=True)
class KvTypes:
    """Types of the target's caches and of the draft's.

    Attributes:
        note: A message about an automatic choice.
    """

    target: KvType
    draft: KvType
    note: str = ""


def kv_types(
    config: EngineConfig, is_gpu: bool, head_dims: Collection[int], draft_head_dims: Collection[int] = ()
) -> list[KvTypes]:
    """The types of caches to plan with, in order of preference: the first that fits is taken.

    More than one only on a GPU, for an explicit context without an explicit type.

    Args:
        config: The engine's options.
        is_gpu: The device is a GPU.
        head_dims: Head dimensions of the target's attention layers.
        draft_head_dims: Those of the draft's.

    Raises:
        ConfigError: Blocks of a type do not divide the heads.
    """
    usual = "f16" if is_gpu else "f32"
    chosen = [_pair(config, usual, usual, head_dims, draft_head_dims)]
    asked = (config.type_k, config.type_v, config.draft_type_k, config.draft_type_v)
    if is_gpu and config.n_ctx and set(asked) == {"auto"}:
        try:
            smaller = _pair(config, *SMALLER, head_dims, draft_head_dims)
        except ConfigError:
            return chosen
        note = f"{config.n_ctx} tokens of context do not fit with K/V caches of {usual}: they are {smaller.target} (-ctk, -ctv)"
        chosen.append(KvTypes(smaller.target, smaller.draft, note))
    return chosen


def _pair(
    config: EngineConfig, k: str, v: str, head_dims: Collection[int], draft_head_dims: Collection[int]
) -> KvTypes:
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
    return KvTypes(target, draft)


def _or_default(asked: str, default: str) -> str:
    return default if asked == "auto" else asked
