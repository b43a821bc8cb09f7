"""Tests of the acceptance walk: only the target's tokens, one draw each, in order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ggml.decode.accept import greedy, walk
from dflash_ggml.decode.tree import Tree
from reference.trees import chain


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any tree, not only best-first ones; few tokens, so that choices often hit a child."""
    width = draw(st.integers(1, 40))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, width)]
    tokens = draw(st.lists(st.integers(0, 5), min_size=width, max_size=width))
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return Tree(
        tokens=np.array(tokens, np.int32),
        parents=np.array(parents, np.int32),
        depths=np.array(depths, np.int32),
        log_probs=np.zeros(width, np.float32),
    )


def children(tree: Tree, node: int) -> dict[int, int]:
    return {int(tree.tokens[i]): i for i in range(tree.width) if tree.parents[i] == node}


def choices(tree: Tree, data: st.DataObject) -> np.ndarray:
    return np.array([data.draw(st.integers(0, 5)) for _ in range(tree.width)], np.int32)


@given(trees(), st.data())
def test_every_token_is_the_targets_choice(tree: Tree, data: st.DataObject) -> None:
    argmax = choices(tree, data)
    drawn: list[int] = []

    def choose(node: int) -> int:
        drawn.append(node)
        return int(argmax[node])

    accepted = walk(tree, choose)
    assert list(accepted.path) == drawn, "choose is called once per visited node, in order, and nowhere else"
    assert list(accepted.tokens) == [argmax[node] for node in accepted.path]
    assert accepted.path[0] == 0 and accepted.n_accepted == len(accepted.tokens) - 1
    for node, child, token in zip(accepted.path, accepted.path[1:], accepted.tokens, strict=False):
        assert tree.parents[child] == node and tree.tokens[child] == token
    assert accepted.tokens[-1] not in children(tree, accepted.path[-1]), "ended although a child matched"
    assert not accepted.stopped
    assert greedy(tree, argmax) == accepted


@given(trees(), st.data())
def test_stop_cuts_the_same_walk(tree: Tree, data: st.DataObject) -> None:
    argmax = choices(tree, data)
    limit = data.draw(st.integers(1, 6))
    seen: list[int] = []

    def stop(token: int) -> bool:
        seen.append(token)
        return len(seen) == limit

    full, cut = greedy(tree, argmax), greedy(tree, argmax, stop)
    assert cut.tokens == full.tokens[:limit] == tuple(seen)
    assert cut.path == full.path[: len(cut.tokens)]
    assert cut.stopped == (len(full.tokens) >= limit)
    # a drafted token is drafted, also where the output ends with it
    assert cut.kept == full.path[: limit + 1] and cut.n_accepted == min(limit, full.n_accepted)


def test_a_chain_is_accepted_up_to_the_first_difference() -> None:
    tree = chain(1, [2, 3, 4])
    assert greedy(tree, np.array([2, 3, 9, 9], np.int32)).tokens == (2, 3, 9)
    assert greedy(tree, np.array([2, 3, 4, 5], np.int32)).path == (0, 1, 2, 3)
    assert greedy(tree, np.array([9, 3, 4, 5], np.int32)).path == (0,)


def test_the_root_token_is_no_child() -> None:
    assert greedy(chain(1, [2]), np.array([1, 1], np.int32)).path == (0,)


def test_a_failing_choice_reaches_the_caller() -> None:
    def choose(node: int) -> int:
        raise RuntimeError("grammar")

    with pytest.raises(RuntimeError, match="grammar"):
        walk(chain(1, [2]), choose)


def test_too_few_argmax_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="width 4"):
        greedy(chain(1, [2, 3, 4]), np.zeros(3, np.int32))
