"""Training loop: batches, steps, validation on held-out rows, checkpoints to resume from."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from .blocks import draw_anchors
from .corpus import Rows
from .publish import publish
from .recipe import Run, Shape, config_json, depth_weights, settings
from .target import TargetModel

CHECKPOINT = "training.pt"


@dataclass(frozen=True, slots=True)
class Checked:
    """Validation result.

    Attributes:
        accepted: Tokens per step of a chain, the target's own included.
        right: [L], share of right tokens at each depth.
    """

    accepted: float
    right: list[float]
    blocks: int

    def __str__(self) -> str:
        depths = " ".join(f"{share:.2f}" for share in self.right)
        chain = f"a chain has {self.accepted:.2f} tokens a step accepted, {self.blocks} blocks"
        return f"held-out rows: {chain}; right by depth: {depths}"


class Features:
    """The target's features of all rows, cached on the device as far as they fit; otherwise computed each time.

    Args:
        target: The target.
        rows: Token ids.
        taps: Tapped layers.
        room: Bytes for the cache.
    """

    def __init__(self, target: TargetModel, rows: Rows, taps: tuple[int, ...], room: float) -> None:
        self.target, self.rows, self.taps = target, rows, taps
        width = max(1, len(taps)) * target.sizes.n_embd
        dtype = target.tables.embedding.dtype
        size = rows.ids.size * width * dtype.itemsize
        self.kept: Tensor | None = None
        if 0 < size <= room:
            self.kept = torch.empty((*rows.ids.shape, width), dtype=dtype, device=target.device)
        self.known = np.zeros(len(rows), bool)
        self.ids = torch.from_numpy(rows.ids).to(target.device)

    def batch(self, picked: Any, at: Tensor) -> tuple[Tensor, Tensor]:
        """ids [B, T] and features [B, T, F] of rows `picked`, with their indices on the device in `at`."""
        ids = self.ids[at].long()
        if self.kept is None:
            return ids, self.target.features(ids, self.taps)
        if not self.known[picked].all():
            self.kept[at] = self.target.features(ids, self.taps)
            self.known[picked] = True
        return ids, self.kept[at]


class Replayed:
    """A training step as a CUDA graph: captured at its first call, on copies of its arguments, then replayed.

    Kernels of a small draft take less time than Python needs to launch them; a graph launches them all at once.
    """

    def __init__(self, step: Callable[..., Tensor]) -> None:
        self.step, self.graph = step, torch.cuda.CUDAGraph()
        self.inputs: list[Tensor] = []
        self.result: Tensor | None = None
        self.before: Any = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The step's result.

        Raises:
            ConfigError: It cannot be captured.
        """
        if self.result is None:
            self.inputs = [x.clone() for x in inputs]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):  # warm-up: libraries initialise
                    self.step(*self.inputs)
            torch.cuda.current_stream().wait_stream(side)
            try:
                with torch.cuda.graph(self.graph):
                    self.result = self.step(*self.inputs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as reason:
                first = str(reason).splitlines()[0]
                raise ConfigError(
                    f"--graph: a step of this draft cannot be recorded ({first}); leave it out"
                ) from None
        for mine, given in zip(self.inputs, inputs):
            mine.copy_(given)
        if self.before is not None:
            self.before.synchronize()  # one step ahead is enough
        self.graph.replay()
        self.before = torch.cuda.Event()
        self.before.record()
        return self.result.clone()


class Trainer:
    """Trains `net` on rows and writes to `folder`: the published draft, and a checkpoint to resume from.

    Args:
        net: The draft's network.
        shape: Its sizes.
        run: How it is trained.
        target: The target.
        train, held: Training rows, and held-out rows.
        folder: Output folder.
        room: Bytes for cached features.
        compiled: Run steps through torch.compile.
        graph: Replay steps as a CUDA graph.
    """

    def __init__(
        self,
        net: Any,
        shape: Shape,
        run: Run,
        target: TargetModel,
        train: Rows,
        held: Rows,
        folder: Path,
        room: float = 0.0,
        compiled: bool = False,
        graph: bool = False,
    ) -> None:
        self.net, self.shape, self.run, self.target, self.folder = net, shape, run, target, folder
        self.train, self.held = train, held
        taps = () if shape.kind == "mtp" else shape.taps
        self.features = Features(target, train, taps, room)
        self.held_features = Features(target, held, taps, 0)
        device = target.device
        self.by_depth = torch.tensor(depth_weights(shape.depth, run.gamma), device=device)
        matrices = [p for p in net.parameters() if p.ndim > 1]
        others = [p for p in net.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": run.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        rate = torch.tensor(run.lr, device=device) if graph else run.lr
        self.optimiser = torch.optim.AdamW(
            groups, lr=rate, betas=(0.9, 0.95), fused=device != "cpu", capturable=graph
        )
        self.step, self.seconds = 0, 0.0
        self.loss = torch.compile(net.loss, dynamic=False) if compiled else net.loss
        self.update = Replayed(self._update) if graph else self._update
        self.cached = not graph  # weights as bfloat16 must not outlive a step that is replayed

    def _autocast(self) -> Any:
        if self.target.device == "cpu":
            return nullcontext()
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=self.cached)

    def _update(self, ids: Tensor, features: Tensor, anchors: Tensor, stop: Tensor) -> Tensor:
        with self._autocast():
            loss = self.loss(self.target.tables, ids, features, anchors, stop, self.by_depth)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    def one(self) -> Tensor:
        """One step; returns its loss. The batch depends only on the seed and the step's number."""
        rng = np.random.default_rng((self.run.seed, self.step))
        picked = rng.choice(len(self.train), min(self.run.batch, len(self.train)), replace=False)
        rows = self.train.take(picked)
        drawn = draw_anchors(rng, rows.start, rows.stop, self.run.anchors)
        at, stop, anchors = self._to_device(picked, rows.stop, drawn)
        ids, features = self.features.batch(picked, at)
        rate = self.run.rate(self.step, self.run.progress(self.step, self.seconds))
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        loss = self.update(ids, features, anchors, stop)
        self.step += 1
        return loss

    def _to_device(self, picked: Any, stop: Any, anchors: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Upload a batch in one asynchronous copy."""
        device, n = self.target.device, len(picked)
        flat = torch.from_numpy(np.concatenate([picked, stop, anchors.reshape(-1)]))
        if device != "cpu":
            flat = flat.pin_memory().to(device, non_blocking=True)
        return flat[:n], flat[n : 2 * n], flat[2 * n :].view(n, -1)

    def fit(self, report: Callable[[str], None], stop: Callable[[], bool] = lambda: False) -> bool:
        """Train to the end; False if `stop` ended it earlier. The draft and the checkpoint are written either way."""
        began, before = time.monotonic(), self.seconds
        saved = reported = began
        losses: list[Tensor] = []
        first = self.step
        while self.run.progress(self.step, self.seconds) < 1 and not stop():
            losses.append(self.one())
            now = time.monotonic()
            self.seconds = before + now - began
            if now - reported >= 5 or self.step <= first + 2:
                report(self._line(self._mean(losses), (self.step - first) / (now - began)))
                losses, reported = [], now
            if now - saved >= 60 * self.run.save_minutes:
                self._mean(losses)
                self.save()
                report(f"step {self.step}: {self.check()}")
                saved = now
        if losses:
            report(self._line(self._mean(losses), (self.step - first) / (now - began)))
        self.save()
        return self.run.progress(self.step, self.seconds) >= 1

    def _mean(self, losses: list[Tensor]) -> float:
        """The mean, 0 of none. Raises ConfigError for NaN, so that such weights do not overwrite good ones."""
        loss = float(torch.stack(losses).mean()) if losses else 0.0
        if not np.isfinite(loss):
            raise ConfigError(f"the loss is {loss} at step {self.step}; a smaller --lr may help")
        return loss

    def _line(self, loss: float, rate: float) -> str:
        done = self.run.progress(self.step, self.seconds)
        left = self.seconds * (1 - done) / done if done else 0.0
        tokens = rate * self.run.batch * self.features.rows.ids.shape[1]
        return (
            f"step {self.step}: loss {loss:.3f}, {100 * done:.0f} %, {rate:.2f} steps/s ({tokens:.0f} tokens/s), "
            f"{left / 60:.1f} minutes left"
        )

    @torch.no_grad()
    def check(self, n: int = 32) -> Checked:
        """Acceptance of chains on the held-out rows, `n` blocks per row."""
        rng = np.random.default_rng(self.run.seed)
        right: list[Tensor] = []
        counted: list[Tensor] = []
        for at in range(0, len(self.held), self.run.batch):
            picked = np.arange(at, min(at + self.run.batch, len(self.held)))
            rows = self.held.take(picked)
            room = np.maximum(
                rows.stop - self.shape.depth, rows.start + 2
            )  # complete blocks, if there are any
            at_device, stop, anchors = self._to_device(
                picked, rows.stop, draw_anchors(rng, rows.start, room, n)
            )
            ids, features = self.held_features.batch(picked, at_device)
            with self._autocast():
                drafted = self.net.chain(self.target.tables, ids, features, anchors)
            labels, _, counts = self.net.behind(ids, anchors, stop)
            right.append(((drafted == labels) & counts).flatten(0, 1))
            counted.append(counts.flatten(0, 1))
        ok, there = torch.cat(right).float(), torch.cat(counted).float()
        return Checked(
            1 + float(ok.cumprod(-1).sum(-1).mean()),
            (ok.sum(0) / there.sum(0).clamp_min(1)).tolist(),
            len(ok),
        )

    def save(self) -> None:
        """Write the published draft and the checkpoint."""
        if self.shape.kind == "mtp":
            publish(self.folder, self.net, mtp_config(self.target))
        else:
            publish(self.folder, self.net, config_json(self.shape, self.target.sizes))
        state = {
            "net": self.net.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "settings": settings(self.shape, self.run),
        }
        beside = self.folder / f"{CHECKPOINT}.part"
        torch.save(state, beside)
        os.replace(beside, self.folder / CHECKPOINT)

    def resume(self) -> None:
        """Resume from the checkpoint in the folder.

        Raises:
            ConfigError: There is none, or it has another shape.
        """
        path = self.folder / CHECKPOINT
        try:
            state = torch.load(path, map_location=self.target.device, weights_only=True)
        except (OSError, RuntimeError, ValueError) as reason:
            raise ConfigError(f"{path}: nothing to go on from ({str(reason).splitlines()[0]})") from None
        mine = settings(self.shape, self.run)["shape"]
        parted = [key for key, value in state["settings"]["shape"].items() if mine.get(key) != value]
        if parted:
            raise ConfigError(
                f"{path}: its draft differs in {', '.join(parted)}; give the options that it began with"
            )
        self.net.load_state_dict(state["net"])
        groups = self.optimiser.state_dict()["param_groups"]  # options of execution may differ
        self.optimiser.load_state_dict(state["optimiser"] | {"param_groups": groups})
        self.step, self.seconds = state["step"], state["seconds"]


def mtp_config(target: TargetModel) -> dict[str, Any]:
    """The target's config.json with one prediction layer."""
    config = dict(target.model.config.to_dict())
    config.pop("_name_or_path", None)  # a path on this machine
    text = config.get("text_config")
    (config if text is None else text)["mtp_num_hidden_layers"] = 1
    return config
