"""Placement: the devices of an engine, and the layers on each."""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ..config import EngineConfig
from ..errors import ConfigError
from ..files.gguf import GGUFFile
from ..ggml.device import Device, DeviceInfo, list_devices
from ..ggml.weights import Source, has_matmul_layout
from ..models.ranks import rank_of
from ..models.target import Target

log = logging.getLogger("dflash_ggml")
LAYER = re.compile(r"blk\.(\d{1,6})\.")


def choose_device(config: EngineConfig) -> Device:
    """Open the configured devices.

    The named ones, else the GPU `main_gpu`, or all GPUs if layers are distributed, else the CPU (the only one with
    `reference` kernels).

    Returns:
        The device, or the first of several, with the others as its sides (see `Device.join`).

    Raises:
        ConfigError: Devices are missing or of different backends.
    """
    infos = _chosen(config)
    if config.split_mode == "tensor":
        _check_ranks(config, infos)
    elif config.splits_layers and len(infos) == 1:
        log.warning("split_mode, tensor_split: all layers lie on %s, the only one here", infos[0].name)
    device = _open(infos[0], config)
    for info in infos[1:]:
        device.join(_open(info, config))
    if config.split_mode == "tensor":
        device.rank_with(device.sides[1])
        return device
    if config.draft_device is not None:
        info = _named(config.draft_device, "draft_device", list_devices())
        if not (info.is_gpu and info.name in [side.info.name for side in device.sides]):
            _check_kinds([*infos, info])
            device.join(_open(info, config), has_layers=False)
    return device


def as_computed(target: Target, file: GGUFFile, device: Device) -> Target:
    """The target adapted to the device: split into ranks with `split_mode tensor`, and with a copy of a tied embedding as
    output matrix where that takes a layout made for matmuls.

    Raises:
        ConfigError: The target cannot be split into ranks.
    """
    if device.n_ranks > 1:
        return target.ranked(device.n_ranks)
    name = target.embedding_name
    info = file.tensors[name]
    if target.tied_head and has_matmul_layout(device, Source(info.type, info.shape, file.data(name))):
        return replace(target, tied_head=False)
    return target


def _check_ranks(config: EngineConfig, infos: Sequence[DeviceInfo]) -> None:
    """Raises ConfigError for options that exclude halves of layers."""
    names = ", ".join(info.name for info in infos)
    if len(infos) != 2:
        raise ConfigError(
            f"split_mode tensor: wants two devices, not {names}; name them (--device), or share whole layers (-sm layer)"
        )
    if len(set(config.tensor_split or ())) > 1:
        raise ConfigError(
            "split_mode tensor: both devices take a half; tensor_split is for whole layers (-sm layer)"
        )
    if config.draft_device is not None or config.n_cpu_moe:
        raise ConfigError("split_mode tensor: the draft lies on the first device, and nothing with the host")


def open_cpu(config: EngineConfig) -> Device:
    """The CPU, for a target or for experts beside a GPU."""
    # an explicit count fixes the bits: attention of one column is summed per thread
    yielding = config.n_threads is None and not config.reproducible and not config.reference
    return Device.cpu(config.n_threads, reference=config.reference, yielding=yielding, stock=config.stock)


def _open(info: DeviceInfo, config: EngineConfig) -> Device:
    return Device(info, config.n_threads, stock=config.stock) if info.is_gpu else open_cpu(config)


def _chosen(config: EngineConfig) -> list[DeviceInfo]:
    """The devices that hold layers, in the order of the layers."""
    there = list_devices()
    gpus, cpu = [d for d in there if d.is_gpu], next(d for d in there if not d.is_gpu)
    if config.device and config.device != ("none",):
        found = [_named(name, "device", there) for name in config.device]
        names = [d.name for d in found if d.is_gpu]
        if len(set(names)) < len(names):
            raise ConfigError(f"device: {', '.join(names)} names a GPU twice")
        _check_kinds(found)
        if config.reference and names:
            raise ConfigError(f"device: reference kernels exist on the CPU only, not on {names[0]}")
    elif config.n_gpu_layers == 0 or config.reference or not gpus or config.device:
        if config.n_gpu_layers > 0 and not gpus:
            log.warning(
                "n_gpu_layers=%d: this build or machine has no GPU, decoding on the CPU", config.n_gpu_layers
            )
        return [cpu]
    else:
        found = gpus
    if config.splits_layers or config.split_mode == "tensor":
        return found
    if config.main_gpu >= len(found):
        raise ConfigError(f"main_gpu: {config.main_gpu}, but there are {len(found)} GPUs")
    return [found[config.main_gpu]]


def _named(name: str, field: str, there: Sequence[DeviceInfo]) -> DeviceInfo:
    """The device with ggml's name `name`. Raises ConfigError that lists the devices."""
    for info in there:
        if info.name.lower() == name.lower():
            return info
    listed = ", ".join(f"{d.name} ({d.description})" for d in there)
    raise ConfigError(f"{field}: there is no device {name!r} here, only {listed}")


def _check_kinds(infos: Sequence[DeviceInfo]) -> None:
    """Raises ConfigError for devices of several backends, which round differently."""
    if len({info.name.rstrip("0123456789") for info in infos}) > 1:
        names = ", ".join(info.name for info in infos)
        raise ConfigError(
            f"device: {names} are of several backends, and layers and draft are distributed within one; experts go to the CPU "
            "with --n-cpu-moe"
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """The side of each part of the models, by number.

    The embedding is on the side of the first layer, the output matrix on that of the last.

    Attributes:
        layers: Side of each of the target's layers; empty if everything is on the first side.
        draft: Side of the draft.
        n_ranks: Above 1, each of the first `n_ranks` sides has a part of every layer, and parts count as layers of their
            own; everything else is on the first side.
    """

    layers: tuple[int, ...] = ()
    draft: int = 0
    n_ranks: int = 1

    def side(self, name: str) -> int:
        """The side of one of the target's tensors."""
        if self.n_ranks > 1 or not self.layers:
            return rank_of(name)
        if (found := LAYER.match(name)) is not None:
            return self.layers[int(found[1])]
        return self.layers[0] if name.startswith("token_embd") else self.layers[-1]

    def has_layers(self, side: int) -> bool:
        """Whether a side has layers of the target."""
        return side in self.layers if self.layers else side == 0

    @property
    def head(self) -> int:
        """The side of the output matrix, unless that is the embedding."""
        return self.layers[-1] if self.layers and self.n_ranks == 1 else 0

    def facts(self, device: Device) -> list[Any]:
        """The devices and their parts, as plain data."""
        where = [[side.info.description for side in device.sides], self.layers, self.draft]
        return where if self.n_ranks == 1 else [*where, self.n_ranks]

    def words(self, device: Device, side: int, has_draft: bool) -> str:
        """Description of a side's parts, for messages."""
        own = [layer for layer, of in enumerate(self.layers) if of == side]
        some = f"layers {own[0]} to {own[-1]}" if len(own) > 1 else f"layer {own[0]}" if own else ""
        if self.n_ranks > 1:
            some = f"{('one', 'the other')[side]} half of every layer" if side < self.n_ranks else ""
        parts = [some] if some else []
        if self.layers and (side < self.n_ranks > 1 or side == self.layers[0]):
            parts.append("the embedding")
        if self.layers and side == self.head:
            parts.append("the output")
        if has_draft and side == self.draft:
            parts.append("the draft")
        what = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
        return f"{device.sides[side].label}: {what or 'nothing'}"


ONE_SIDE = Placement()  # all on the first


def in_ranks(n_layers: int, n_ranks: int) -> Placement:
    """A part of every layer on each of the first sides."""
    return Placement(tuple(rank for rank in range(n_ranks) for _ in range(n_layers)), 0, n_ranks)


def draft_side(device: Device, config: EngineConfig) -> int:
    """The side of the draft: the configured one, else that of the output matrix."""
    if device.n_ranks > 1:
        return 0
    if config.draft_device is None:
        return max(i for i, part in enumerate(shares(device, config)) if part)
    name = config.draft_device.lower()
    own = [side.index for side in device.sides if not side.has_layers and side is not device.host]
    return own[0] if own else next(side.index for side in device.sides if side.info.name.lower() == name)


def shares(device: Device, config: EngineConfig) -> list[float]:
    """Each side's configured share of the layers; equal shares by default, 0 for sides without layers.

    Raises:
        ConfigError: There are too many shares, or all are 0.
    """
    n = sum(side.has_layers for side in device.sides)
    if n == 1:
        return [1.0]
    asked = list(config.tensor_split or [1.0] * n)
    if len(asked) > n or not any(asked):
        parts = ",".join(f"{part:g}" for part in asked)
        raise ConfigError(
            f"tensor_split: {parts} is for {len(asked)} devices, and there are {n} to share layers"
        )
    return asked + [0.0] * (n - len(asked))


def place_layers(
    device: Device, config: EngineConfig, layers: Sequence[int], taken: Mapping[int, int], free: Sequence[int]
) -> Placement:
    """Distribute the layers over the sides: by `tensor_split`, else by free memory.

    Args:
        layers: Bytes of each layer with its state.
        taken: Bytes of everything else, by side.
        free: Bytes by side.
    """
    draft, asked = draft_side(device, config), shares(device, config)
    if len(asked) == 1:
        return Placement((), draft)
    sizes = [1.0] * len(layers)  # as llama.cpp distributes them
    if not config.tensor_split:
        left = [float(max(free[side] - taken.get(side, 0), 0)) for side in range(len(asked))]
        asked, sizes = left if any(left) else asked, [float(max(size, 1)) for size in layers]
    ends = [end / sum(asked) for end in accumulate(asked)][:-1]
    middles = (before + size / 2 for before, size in zip(accumulate([0.0, *sizes]), sizes))
    whole = sum(sizes)
    return Placement(tuple(bisect_right(ends, middle / whole) for middle in middles), draft)
