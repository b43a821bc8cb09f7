"""Report of a decoding step for clients: the candidate tree, its texts and the accepted path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine.step import Step
    from ..text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, as a client sees it. A step without a draft has no nodes.

    Attributes:
        tokens, parents, texts, log_probs: Of each node of the tree; node 0 is the root (the pending token).
        path: The accepted nodes, root first.
        emitted: The texts that the step added.
        times: Milliseconds by part of the step.
        sources: Source of each node: 0 for the root, 1 a draft model, 2 prompt lookup, 3 both.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    texts: tuple[str, ...]
    log_probs: tuple[float, ...]
    path: tuple[int, ...]
    accepted: int
    emitted: tuple[str, ...]
    mode: str
    times: Mapping[str, float]
    sources: tuple[int, ...] = ()

    @classmethod
    def of(cls, step: Step, tokenizer: Tokenizer) -> StepReport:
        """The report of an engine's Step."""

        def text(token: int) -> str:
            return tokenizer.piece(int(token)).decode("utf-8", "replace")

        tree = step.tree
        tokens = tuple(int(t) for t in tree.tokens) if tree is not None else ()
        sources: tuple[int, ...] = (0, *[1] * (len(tokens) - 1)) if tokens else ()
        if tree is not None and tree.sources is not None:
            sources = tuple(tree.sources.tolist())
        names = ("draft", "tree", "verify", "commit", "host")
        # rejected tokens of prompt lookup may come from another client's answer
        hidden = {i for i, source in enumerate(sources) if source & 2 and i not in step.path}
        tokens = tuple(-1 if i in hidden else token for i, token in enumerate(tokens))
        return cls(
            tokens=tokens,
            parents=tuple(int(p) for p in tree.parents) if tree is not None else (),
            texts=tuple("" if t < 0 else text(t) for t in tokens),
            log_probs=tuple(round(float(p), 4) for p in tree.log_probs) if tree is not None else (),
            path=tuple(int(i) for i in step.path),
            accepted=int(step.n_accepted),
            emitted=tuple(text(t) for t in step.tokens),
            mode=step.mode,
            times={n: round(float(getattr(step.timings, n)), 3) for n in names},
            sources=sources,
        )
