"""How much device memory a configuration needs, before anything is loaded, and the longest context that fits."""

from __future__ import annotations

from dataclasses import dataclass

from ..drafts.dflash.params import DraftParams
from ..errors import DeviceError
from ..models.qwen35_params import TargetParams

MIB = 1 << 20
MARGIN = 512 * MIB  # left free: the driver, cuBLAS, fragmentation, a desktop
KV_BYTES = {"f16": 2, "f32": 4}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by part for `n_ctx` tokens of context, on a device with `free` bytes."""

    n_ctx: int
    parts: dict[str, int]
    free: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total + MARGIN <= self.free

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / MIB:.0f}" for name, size in self.parts.items() if size)
        return f"{self.n_ctx} tokens of context: {parts}; {self.total / MIB:.0f} of {self.free / MIB:.0f} MiB free"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a plan is made from. Weight sizes in bytes; `width`: columns of the widest tree, 0 without a draft."""

    target: TargetParams
    target_bytes: int
    draft: DraftParams | None
    draft_bytes: int
    width: int
    n_batch: int
    kv_type: str

    def plan(self, n_ctx: int, free: int) -> MemoryPlan:
        """The plan for `n_ctx` tokens."""
        p, element = self.target, KV_BYTES[self.kv_type]
        n_delta = sum(p.recurrent)
        heads = p.ssm_state * p.ssm_v_heads
        rows = n_ctx + self.width
        parts = {
            "target weights": self.target_bytes,
            "target K/V": 2 * (p.n_layers - n_delta) * p.n_kv_heads * p.head_dim * element * rows,
            "recurrent state": 4 * n_delta * (heads * p.ssm_state + (p.conv_kernel - 1) * p.conv_channels),
        }
        taps = 0
        if self.draft is not None:
            d = self.draft
            taps = len(d.taps)
            parts["tree"] = self.width * (self.tree_bytes_per_node() + taps * p.n_embd * 4 + 2 * rows)
            parts["draft weights"] = self.draft_bytes
            parts["draft K/V"] = 2 * d.n_layers * d.n_kv_heads * d.head_dim * element * (rows + d.block_size)
        # the widest passes: a prefill batch with its features, and the logits of a tree
        batch = self.n_batch * (3 * p.n_ff + 2 * p.conv_channels + (4 + 2 * taps) * p.n_embd + rows // 2)
        parts["graphs (estimate)"] = 4 * max(batch, 2 * max(self.width, 1) * p.n_vocab)
        return MemoryPlan(n_ctx, parts, free)

    def tree_bytes_per_node(self) -> int:
        """Bytes that a tree node leaves for the commit: delta-net factors u | k | G, and conv inputs, over all layers."""
        p = self.target
        factors = p.ssm_state * (p.ssm_v_heads + p.ssm_k_heads) + p.ssm_v_heads
        return 4 * sum(p.recurrent) * (factors + p.conv_channels)

    def fit(self, n_ctx: int, free: int, longest: int) -> MemoryPlan:
        """The plan for `n_ctx`; with 0, for the longest context up to `longest` that fits.

        Raises DeviceError that names the largest part and what to lower when it does not fit.
        """
        if n_ctx:
            plan = self.plan(n_ctx, free)
            if plan.fits:
                return plan
        else:
            plan = self.plan(longest, free)
            if plan.fits:
                return plan
            low, high = 0, longest // 256
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if self.plan(middle * 256, free).fits else (low, middle - 1)
            if low:
                return self.plan(low * 256, free)
            plan = self.plan(min(256, longest), free)
        biggest = max(plan.parts, key=plan.parts.__getitem__)
        advice = {
            "target K/V": "lower the context (-c; 0 takes what fits)",
            "tree": "lower the budget (--budget)",
            "graphs (estimate)": "lower the batch size (-b)",
        }.get(biggest, "take a smaller quantisation of the model, or stay on the CPU (-ngl 0)")
        raise DeviceError(
            f"not enough device memory for {plan} (and {MARGIN // MIB} MiB of margin); the largest part is {biggest}: {advice}"
        )
