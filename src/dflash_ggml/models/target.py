"""The contract of a target: what an architecture declares and builds, so that other packages do not depend on it by name.

A target is a frozen dataclass of parameters, read from a file, with a method that builds the graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..errors import ConfigError
from ..files.gguf import GGUFFile
from ..ggml.bindings import Tensor
from ..ggml.graph import Graph
from ..ggml.weights import Source
from ..state.mask import ResidentMask
from ..state.spec import StateSpec
from ..state.state import TargetState
from ..state.window import DecodeWindow
from .prediction import Head

Outputs = Literal["last", "every", "hidden"]

# (graph, features [n_taps * D, n], ids, positions and cache rows int32 [n]): the draft takes in these tokens. A long batch
# comes in several calls, in order; the draft's own inputs are set by its functions in `graph.fillers`.
Append = Callable[[Graph, Tensor, Tensor, Tensor, Tensor], object]


@dataclass(frozen=True, slots=True)
class Reduction:
    """Sizes of a logits reduction: the `kept` largest, `watched` named ones, masses by blocks of `block` ids.

    Attributes:
        each: Whether each column has its own temperature.
    """

    kept: int
    watched: int
    block: int
    each: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """The shape of one pass, from which a target builds its graph.

    Attributes:
        columns: Tokens.
        n_kv: Cache rows that attention reads.
        mask: The mask of a tree, whose columns see their ancestors and do not change the committed state; None: tokens
            that follow the committed ones and advance it.
        taps: Layers whose output goes to the draft: for a tree to the state's features, otherwise to `append`, in the
            same graph, or, for a single token without `append`, to the column of the state's features in the input
            `column`.
        reduction: Also declare the output `reduced`.
        window: The attention window of the columns, None: full attention.
        outputs: For a linear batch, logits and choice of the last token or of every one, or `hidden` instead.
        seqs: Entries of the input `seqs`, int32 [3, seqs]: state index, first column and number of columns of each
            sequence of the pass, 0 columns where there is none; 0: one sequence, in state index 0.
        is_forest: The columns are concatenated trees of those sequences. Visible prefix rows are given by the inputs
            `ranges`, first row and the one after the last, int32 [columns, 2], and `spans`, int32 [2, seqs], all that
            each sequence sees, its own rows included; features go to the columns in the input `column`. The pass
            commits sequences of one column, but no others.
            rank: The rank whose part of the layers the pass computes.
            forest: For a linear batch, a forest whose columns come first in the same pass, so that every matrix is read
            once for both. The forest's inputs keep their names, those of the linear columns have the prefix `chunk `,
            and `joined` is ids | positions | cache rows of all. Outputs: the forest's, followed by the last token's
            column.
    """

    columns: int
    n_kv: int
    mask: ResidentMask | None = None
    taps: tuple[int, ...] = ()
    append: Append | None = None
    reduction: Reduction | None = None
    outputs: Outputs = "last"
    window: DecodeWindow | None = None
    seqs: int = 0
    is_forest: bool = False
    rank: int = 0
    forest: Batch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(ABC):
    """A target model: what every architecture has. Subclasses are frozen dataclasses."""

    # answer tokens with reasoning, as recommended by the family's publisher
    longest_answer: ClassVar[int] = 32_768

    n_layers: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    rope_theta: float  # base of the rotation, in full-attention layers
    rms_eps: float
    tied_head: bool  # the file has no `output.weight`: the embedding is the output matrix

    @classmethod
    @abstractmethod
    def from_gguf(cls, file: GGUFFile) -> Target:
        """Read and check keys and tensors.

        Raises:
            ModelFileError: A key or tensor is missing or wrong; it names it.
        """

    @abstractmethod
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape (ggml order) of every tensor that the graph uses."""

    def sources(self, file: GGUFFile) -> dict[str, Source]:
        """Name -> bytes of every one of `tensors` in an open file, in the graph's row order; without an output matrix, the
        embedding's bytes."""
        sources = sources_of(file, self.tensors())
        if not self.tied_head:
            sources.setdefault("output.weight", sources[self.embedding_name])
        return sources

    @abstractmethod
    def state_spec(self) -> StateSpec:
        """The state of a sequence, by layer."""

    @abstractmethod
    def build(self, batch: Batch, state: TargetState, weights: Mapping[str, Tensor]) -> Graph:
        """The graph of a pass.

        Inputs: `ints` = ids | positions | cache rows | parents (-1 for the first of a linear batch and the root of a tree),
        each `columns`; for a linear batch also path (0, 1, ...), and the first row that each column sees | the one after
        the last; those of a tree's mask; `column` int32 [1] if a single token's features are stored.
        Outputs: logits float32 [n_vocab, columns] and choice int32 [columns], the best of each; of a linear batch only
        those of the last token by default. With a reduction also its inputs and output (see layers.reduced_logits). `hidden`
        float32 [n_embd, columns] is the input of the output matrix.
        """

    @abstractmethod
    def scratch_bytes(self, columns: int, rows: int, n_taps: int) -> int:
        """Estimated scratch memory of a linear pass over `rows` cache rows."""

    def prediction_head(self, file: GGUFFile) -> Head | None:
        """The head for multi-token prediction in its open file, if there is a usable one.

        Raises:
            ModelFileError: It is damaged.
        """
        return None

    def ranked(self, n: int) -> Target:
        """The target of n ranks, devices that each compute a part of every layer: the same model with the sizes of one rank.

        `tensors` and `sources` are then those of all ranks, and the state's layers those of the ranks in order.

        Raises:
            ConfigError: Heads or widths cannot be divided.
        """
        raise ConfigError(
            "split_mode tensor: only dense Qwen3.5 targets can be shared so; share whole layers (-sm layer)"
        )

    @property
    def embedding_name(self) -> str:
        """Name of the embedding matrix."""
        return "token_embd.weight"

    @property
    def head_name(self) -> str:
        """Name of the output matrix."""
        return self.embedding_name if self.tied_head else "output.weight"


def sources_of(file: GGUFFile, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Source]:
    """Name -> bytes of those tensors of an open file that have a shape in `wanted`, with that shape."""
    return {
        name: Source(info.type, wanted[name], file.data(name))
        for name, info in file.tensors.items()
        if name in wanted
    }
