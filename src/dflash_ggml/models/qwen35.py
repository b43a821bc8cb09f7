"""Target `qwen35`: Qwen3.5 and later, dense, every size. Gated delta-net layers with an attention layer every few.

Shapes are in ggml's order; D = embedding length, n = columns of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..errors import ConfigError
from ..files.gguf import GGUFFile
from ..ggml.bindings import Tensor
from ..ggml.graph import Graph
from ..ggml.weights import Source
from ..state.spec import Conv, Delta, KvLayer, Recurrent, StateSpec
from ..state.state import TargetState
from .attention import attention
from .checks import MAX_HEADS, MAX_LAYERS, in_range
from .experts import Experts, FeedForward
from .feed_forward import Dense
from .layers import Taps, columns_of, declare_outputs, gated_delta_net, pass_bytes
from .prediction import Head, read_head
from .ranks import Cut, is_on_every_rank, name_of, of_rank, part_of
from .reading import Keys, check_file, common_fields, normalise_scales, scales_beside
from .rope import Rope, read_scaling
from .target import Batch, Target
from .tensors import attention_tensors, outer_tensors, with_scales

# further tensors of Ollama's files: the vision tower, its projector, and its form of the prediction block
_OTHER_PARTS = ("v.", "mm.", "mtp.")
_CONV = "ssm_conv1d.weight"  # not a matmul operand: its rows are filters


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35(Target):
    """Sizes of the trunk; blocks for multi-token prediction, last in the file, are not counted as layers.

    A layer is recurrent (gated delta net: `ssm_*`, `conv_kernel`) or full attention (`n_heads` to `n_rot`). Subclasses differ in
    their feed-forward layers (`ffn`), and in how a file stores the delta nets' matrices (`stored`).
    """

    longest_answer: ClassVar[int] = 81_920
    # whether the value heads of a key head are adjacent in the delta nets' gates and output matrices
    grouped: ClassVar[bool] = False

    n_ff: int  # width of a feed-forward layer, or of one expert
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_rot: int  # rotated leading dimensions of a head
    conv_kernel: int
    ssm_state: int  # S: key and value dimension of a delta-net head
    ssm_k_heads: int
    ssm_v_heads: int  # value head h uses key head h % ssm_k_heads
    ssm_inner: int  # ssm_v_heads * ssm_state
    recurrent: tuple[bool, ...]  # [n_layers]
    scales: tuple[str, ...] = ()  # the `.scale` tensors of matrices (NVFP4)
    n_ranks: int = 1  # above 1, heads and `n_ff` are one rank's (see `ranked`)
    experts: Experts | None = None
    joined: frozenset[int] = frozenset()  # blocks with gate and up of an expert as one matrix in the file

    @property
    def ffn(self) -> FeedForward:
        """The feed-forward layer of every block."""
        return self.experts or Dense(self.n_embd, self.n_ff)

    @property
    def conv_channels(self) -> int:
        """Channels of a delta-net layer's convolution: q, k and v concatenated."""
        return 2 * self.ssm_k_heads * self.ssm_state + self.ssm_inner

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Qwen35:
        """Read and check keys and tensors.

        Raises:
            ModelFileError: A key or tensor is missing or wrong; it names it.
        """

        keys = Keys(file)
        count, number = keys.count, keys.number
        _normalise_names(file)
        blocks = count("block_count", MAX_LAYERS)
        trunk = blocks - count("nextn_predict_layers", blocks - 1, 0, default=0)
        recurrent = _recurrent(file, blocks, trunk, count("full_attention_interval", MAX_LAYERS, default=4))
        params = cls(
            n_layers=trunk,
            n_heads=_heads(file, "attention.head_count", blocks, recurrent),
            n_kv_heads=_heads(file, "attention.head_count_kv", blocks, recurrent),
            head_dim=count("attention.key_length"),
            n_rot=count("rope.dimension_count"),
            rope_theta=number("rope.freq_base"),
            conv_kernel=count("ssm.conv_kernel", 64, 2),
            ssm_state=count("ssm.state_size"),
            ssm_k_heads=count("ssm.group_count", MAX_HEADS),
            ssm_v_heads=count("ssm.time_step_rank", MAX_HEADS),
            ssm_inner=count("ssm.inner_size"),
            recurrent=recurrent,
            **cls._read_ffn(file, trunk),
            **common_fields(keys),
        )
        params._check_relations(keys)
        params._check_rope(file)
        shapes = params.stored(file)
        matrices = (name for name, shape in shapes.items() if len(shape) > 1 and not name.endswith(_CONV))
        params = replace(params, scales=scales_beside(file, matrices))

        def ignored(name: str) -> bool:
            return trunk <= _block(name) < blocks or name.startswith(_OTHER_PARTS)

        check_file(file, params.stored(file), ignored, floats=_CONV)
        return params

    @classmethod
    def _read_ffn(cls, file: GGUFFile, trunk: int) -> dict[str, Any]:
        """Read the fields of `ffn`; `trunk`: layers."""
        return {"n_ff": Keys(file).one("feed_forward_length")}

    def stored(self, file: GGUFFile) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor in a file, if they differ from the graph's."""
        return self.tensors()

    def ranked(self, n: int) -> Qwen35:
        """See Target.ranked."""
        names = ("n_heads", "n_kv_heads", "ssm_k_heads", "ssm_v_heads", "ssm_inner", "n_ff")
        sizes = {name: getattr(self, name) for name in names}
        if type(self) is not Qwen35 or any(size % n for size in sizes.values()):
            heads = f"{self.n_heads} and {self.n_kv_heads} heads, {self.ssm_v_heads} and {self.ssm_k_heads} of delta nets"
            why = f"{heads}, n_ff {self.n_ff}" if type(self) is Qwen35 else "experts"
            raise ConfigError(
                f"split_mode tensor: layers of this model ({why}) cannot be shared by {n} devices; share whole layers (-sm layer)"
            )
        return replace(self, n_ranks=n, **{name: size // n for name, size in sizes.items()})

    def sources(self, file: GGUFFile) -> dict[str, Source]:
        """See Target.sources; of several ranks, the parts of each."""
        if self.n_ranks == 1:
            return super(Qwen35, self).sources(file)
        wanted, cuts, found = self.tensors(), self._cuts, dict[str, Source]()
        for name, info in file.tensors.items():
            whole, cut = (
                Source(info.type, info.shape, file.data(name)),
                cuts.get(re.sub(r"^blk\.\d+\.", "", name)),
            )
            for rank in range(self.n_ranks):
                if (own := name_of(name, rank)) in wanted:
                    found[own] = part_of(name, whole, cut, rank, self.n_ranks) if cut else whole
        return found

    @property
    def _cuts(self) -> dict[str, Cut]:
        """How a block is divided among ranks. Value heads come in groups that use all key heads in order."""
        values = self.ssm_v_heads // self.ssm_k_heads
        rows = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
        return {
            **{f"{name}.weight": Cut(1) for name in rows},
            "attn_output.weight": Cut(0),
            "ffn_down.weight": Cut(0),
            "attn_qkv.weight": Cut(1, 2 + values),
            _CONV: Cut(1, 2 + values),
            **{f"{name}.weight": Cut(1, values) for name in ("attn_gate", "ssm_alpha", "ssm_beta")},
            "ssm_dt.bias": Cut(0, values),
            "ssm_a": Cut(0, values),
            "ssm_out.weight": Cut(0, values),
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape (ggml order) of every tensor that the graph uses."""
        own = self._tensors()
        return {
            name_of(name, rank): shape
            for rank in range(self.n_ranks)
            for name, shape in own.items()
            if rank == 0 or is_on_every_rank(name)
        }

    def _tensors(self) -> dict[str, tuple[int, ...]]:
        """`tensors` of one rank."""
        d, keys, values = self.n_embd, self.ssm_k_heads * self.ssm_state, self.ssm_inner
        shapes = outer_tensors(d, self.n_vocab, self.tied_head)
        common = {"attn_norm.weight": (d,), "post_attention_norm.weight": (d,)}
        attention = attention_tensors(d, self.n_heads, self.n_kv_heads, self.head_dim, gated=True)
        delta_net = {
            "attn_qkv.weight": (d, 2 * keys + values),
            "attn_gate.weight": (d, values),
            "ssm_conv1d.weight": (self.conv_kernel, 2 * keys + values),
            "ssm_dt.bias": (self.ssm_v_heads,),
            "ssm_a": (self.ssm_v_heads,),
            "ssm_alpha.weight": (d, self.ssm_v_heads),
            "ssm_beta.weight": (d, self.ssm_v_heads),
            "ssm_norm.weight": (self.ssm_state,),
            "ssm_out.weight": (values, d),
        }
        ffn = {joined: self.ffn.tensors(joined) for joined in (False, True)}
        for i, recurrent in enumerate(self.recurrent):
            layer = common | (delta_net if recurrent else attention) | ffn[i in self.joined]
            shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
        return with_scales(shapes, self.scales)

    def state_spec(self) -> StateSpec:
        """Conv window and delta-net state of the recurrent layers, K/V of the others."""
        kv = KvLayer(self.n_kv_heads, self.head_dim)
        delta = Delta(self.ssm_state, self.ssm_k_heads, self.ssm_v_heads)
        recurrent = Recurrent(Conv(self.conv_kernel, self.conv_channels), delta)
        layers = tuple(recurrent if is_recurrent else kv for is_recurrent in self.recurrent)
        return StateSpec(layers * self.n_ranks, n_ranks=self.n_ranks)

    def prediction_head(self, file: GGUFFile) -> Head | None:
        """See Target.prediction_head."""
        head = Head(
            block=self.n_layers,
            n_embd=self.n_embd,
            ffn=self.ffn,
            n_vocab=self.n_vocab,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            n_rot=self.n_rot,
            rope_theta=self.rope_theta,
            rms_eps=self.rms_eps,
        )
        return read_head(file, head)

    def scratch_bytes(self, columns: int, rows: int, n_taps: int) -> int:
        """The widest layer with a state, the features, and the mask of a pass of few columns."""
        per_column = self.ffn.per_column + 2 * self.conv_channels + (4 + n_taps) * self.n_embd
        state = self.ssm_state**2 * self.ssm_v_heads
        return pass_bytes(columns, rows, per_column, n_taps * self.n_embd, state)

    def build(self, batch: Batch, state: TargetState, weights: Mapping[str, Tensor]) -> Graph:
        """See Target.build."""
        # a composed delta net takes 110
        g = Graph(state.device, 4096 + self.n_ranks * self.n_layers * (128 + self.ffn.nodes))
        x = self._trunk(g, batch, state.of_rank(0), weights)
        declare_outputs(g, weights, self.head_name, x, self.rms_eps, batch)
        for rank in range(1, self.n_ranks):  # the sums make every rank's x equal, so one has the outputs
            without_outputs = replace(batch, taps=(), append=None, rank=rank)
            g.expand(self._trunk(g, without_outputs, state.of_rank(rank), of_rank(weights, rank)))
        return g

    def _trunk(self, g: Graph, batch: Batch, state: TargetState, w: Mapping[str, Tensor]):
        """The layers of one rank: residual columns [D, n]."""
        eps, ffn, rope = self.rms_eps, self.ffn, Rope(self.n_rot, self.rope_theta)
        sizes: dict[str, Any] = {"heads": self.n_heads, "kv_heads": self.n_kv_heads}
        sizes |= {"head_dim": self.head_dim, "eps": eps}
        columns = columns_of(g, batch)
        taps = Taps(g, columns, state)
        x = g.get_rows(w["token_embd.weight"], columns.ids)
        for i, layer in enumerate(state.spec.layers[: self.n_layers]):
            name = f"blk.{i}."
            y = g.expand(g.rms_norm(x, eps, w[name + "attn_norm.weight"]))
            if isinstance(layer, Recurrent):
                y = gated_delta_net(g, w, name, y, columns, state, i, layer, eps, grouped=self.grouped)
            else:
                y = attention(g, w, name + "attn_", y, columns, state.cache(i), rope, **sizes)
            y = state.summed(g, y)
            taps.flush()
            x = g.add(x, y)
            y = g.rms_norm(x, eps, w[name + "post_attention_norm.weight"])
            x = g.add(x, state.summed(g, ffn.build(g, w, name, y)))
            taps.take(i, x)
        taps.finish()
        return x

    def _check_relations(self, keys: Keys) -> None:
        """Check sizes that must divide or equal each other."""
        file, values = keys.file, f"{self.ssm_v_heads} value heads of {self.ssm_state}"
        # Ollama's key: whether value heads that share a key head are apart
        order = f"{keys.arch}.ssm.v_head_reordered"
        if file.get(order, bool) is self.grouped:
            raise file.error(
                f"key {order!r} is {str(self.grouped).lower()}: value heads in that order are not supported"
            )
        value_dim = file.get(f"{keys.arch}.attention.value_length", int)
        keys.check(
            ("attention.value_length", value_dim in (None, self.head_dim), f"the key length {self.head_dim}"),
            ("attention.head_count_kv", self.n_heads % self.n_kv_heads == 0, f"a divisor of {self.n_heads}"),
            ("rope.dimension_count", self.n_rot in range(2, self.head_dim + 1, 2), "even, within a head"),
            ("ssm.group_count", self.ssm_v_heads % self.ssm_k_heads == 0, f"a divisor of {self.ssm_v_heads}"),
            ("ssm.inner_size", self.ssm_inner == self.ssm_v_heads * self.ssm_state, values),
        )

    def _check_rope(self, file: GGUFFile) -> None:
        """Check that plain rotary positions give the right angles: no scaling, no pair on an axis that text does not use."""
        arch = file.arch
        scaling = read_scaling(file, f"{arch}.rope.scaling.")
        if scaling.kind != "none":
            raise file.error(scaling.refusal("'none'"))
        key = f"{arch}.rope.dimension_sections"
        sections = file.get_array(key, int)
        if sections is None:
            return
        # Pair j follows axis j % 3 while j < 3 * sections[j % 3], else the fourth axis.
        if len(sections) < 3 or any(j >= 3 * sections[j % 3] for j in range(self.n_rot // 2)):
            raise file.error(f"key {key!r}: {sections} do not cover the {self.n_rot // 2} rotated pairs")


def _block(name: str) -> int:
    """The block of a tensor, -1 for tensors outside the blocks."""
    match = re.match(r"blk\.(\d{1,6})\.", name)
    return int(match[1]) if match else -1


def _normalise_names(file: GGUFFile) -> None:
    """Rename other converters' tensors to llama.cpp's names: Ollama's `ssm_dt`, and scales."""
    normalise_scales(file)
    names = {name: f"{name}.bias" for name in file.tensors if re.fullmatch(r"blk\.\d+\.ssm_dt", name)}
    file.rename({old: new for old, new in names.items() if new not in file.tensors})


def _heads(file: GGUFFile, key: str, blocks: int, recurrent: tuple[bool, ...]) -> int:
    """Heads of the attention layers: one number, or, in Ollama's files, one per block, which must agree."""
    key = f"{file.arch}.{key}"
    if not isinstance(file.metadata.get(key), (list, np.ndarray)):
        return in_range(file.error, f"key {key!r}", file.require(key, int), 1, MAX_HEADS)
    counts = file.require_array(key, int)
    if len(counts) not in (blocks, len(recurrent)):
        raise file.error(f"key {key!r} has {len(counts)} entries (expected {blocks})")
    found = sorted({n for n, is_recurrent in zip(counts, recurrent) if not is_recurrent})
    if len(found) != 1:
        raise file.error(
            f"key {key!r}: attention layers with {found} heads (expected one number for all of them)"
        )
    return in_range(file.error, f"key {key!r}", found[0], 1, MAX_HEADS)


def _recurrent(file: GGUFFile, blocks: int, trunk: int, interval: int) -> tuple[bool, ...]:
    """Which trunk layers are recurrent: an explicit array takes precedence over the interval of the attention layers."""
    key = f"{file.arch}.attention.recurrent_layers"
    flags = file.get_array(key, bool)
    if flags is None:
        return tuple((i + 1) % interval != 0 for i in range(trunk))
    if len(flags) not in (blocks, trunk):
        raise file.error(f"key {key!r} has {len(flags)} entries (expected {blocks})")
    return tuple(flags[:trunk])
