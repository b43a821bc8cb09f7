"""The contract of a target: what an architecture declares and builds, so that no package above knows it by name.

A target is its parameters, a frozen dataclass read from a file, with the graph beside them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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

# (graph, features [n_taps * D, n], ids, positions and cache rows int32 [n]): let the draft take in these tokens. A long batch
# comes in several calls, in order; inputs of the draft's own are set by what it adds to `graph.fillers`.
Append = Callable[[Graph, Tensor, Tensor, Tensor, Tensor], object]


@dataclass(frozen=True, slots=True)
class Reduction:
    """What sampling reads of the logits: the `kept` largest, `watched` named ones, masses by blocks of `block` ids.

    Attributes:
        each: Columns have temperatures of their own.
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
        n_kv: Cache rows that attention looks at.
        mask: Of a tree, whose columns see their ancestors and leave the committed state alone; None: tokens that
            follow the committed ones and advance it.
        taps: Layers whose output is the draft's; of a tree they go to the state's features. Otherwise to `append`, in
            the same graph, or, for a single token without `append`, to the column of the state's features that the
            input `column` names.
        reduction: Also declare the output `reduced`.
        window: All that the columns see of the text, None: all of it.
        outputs: Of a linear batch, logits and choice of the last token or of every one, or `hidden` instead of them.
        seqs: Entries of the input `seqs`, int32 [3, seqs]: state index, first column and number of columns of each
            sequence of the pass, 0 columns where there is none; 0: one sequence, in state index 0.
        is_forest: The columns are trees of those sequences, one after another. What they see of their prefixes is the
            input `ranges`, rows from and to, int32 [columns, 2], and `spans`, int32 [2, seqs], all that each sequence
            sees, its own rows included; features go to the columns that the input `column` names. A sequence of one
            column is committed by the pass, the others are not.
        rank: Whose part of the layers the pass computes, where several share them.
        beside: Of a linear batch, a forest whose columns come first in the same pass, so that every matrix is read
            once for both. Its inputs have their own names, those of the linear columns begin with `chunk `, and
            `joined` is ids | positions | cache rows of all. Outputs: those of the forest, with the last token's
            column behind them.
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
    beside: Batch | None = None


class Target(ABC):
    """A model that verifies. Subclasses are frozen dataclasses with at least these fields."""

    longest_answer: ClassVar[int] = 32_768  # tokens with thoughts, as the family's publisher recommends

    n_layers: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    rope_theta: float
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
        """Name -> bytes of every one of `tensors` in an open file, in the order in which it has them; where it has no output
        matrix, the embedding's."""
        wanted, found = self.tensors(), file.tensors
        sources = {
            name: Source(info.type, wanted[name], file.data(name))
            for name, info in found.items()
            if name in wanted
        }
        if not self.tied_head:
            sources.setdefault("output.weight", sources[self.embedding_name])
        return sources

    @abstractmethod
    def state_spec(self) -> StateSpec:
        """What it keeps of a sequence."""

    @abstractmethod
    def build(self, batch: Batch, state: TargetState, weights: Mapping[str, Tensor]) -> Graph:
        """The graph of a pass.

        Inputs: `ints` = ids | positions | cache rows | parents (-1 for the first of a linear batch and the root of a tree),
        each `columns`; for a linear batch also path (0, 1, ...), and the first row that each column sees | the one after
        the last; those of a tree's mask; `column` int32 [1] where a single token's features are kept.
        Outputs: logits float32 [n_vocab, columns] and choice int32 [columns], the best of each; of a linear batch only
        those of the last token unless it asks for every one. With a reduction also its inputs and output (see
        layers.reduced_logits). `hidden` float32 [n_embd, columns] is what the output matrix would be multiplied with.
        """

    @abstractmethod
    def scratch_bytes(self, columns: int, rows: int, n_taps: int) -> int:
        """About how much scratch memory a linear pass takes over `rows` cache rows."""

    def prediction_head(self, file: GGUFFile) -> Head | None:
        """The head for multi-token prediction in its open file, which can draft for it; None if there is none that could.

        Raises:
            ModelFileError: It is damaged.
        """
        return None

    def ranked(self, n: int) -> Target:
        """The target of n ranks, devices that compute a part of every layer each: the same model with the sizes of one of them.

        `tensors` and `sources` are then those of all ranks, the state's layers those of one rank after the other.

        Raises:
            ConfigError: Heads or widths cannot be shared out.
        """
        raise ConfigError(
            "split_mode tensor: only dense Qwen3.5 targets can be shared so; share whole layers (-sm layer)"
        )

    def untied(self) -> Target:
        """The same with an output matrix of its own, which is the embedding a second time."""
        return replace(self, tied_head=False)  # type: ignore[type-var]  # subclasses are dataclasses

    @property
    def embedding_name(self) -> str:
        """The matrix whose rows are the tokens' embeddings."""
        return "token_embd.weight"

    @property
    def head_name(self) -> str:
        """The matrix that makes logits."""
        return self.embedding_name if self.tied_head else "output.weight"
