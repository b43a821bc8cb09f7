"""Tokens in a row that the text itself foretold, against a slow search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash_ggml.decode.repetition import LOOK_BACK, ORDER, Repetition


def foretold(tokens: list[int]) -> int:
    """By searching backwards for the newest place with the same three tokens before it."""
    run = 0
    for end in range(len(tokens) - 1, ORDER - 1, -1):
        before = tokens[end - ORDER : end]
        places = [i for i in range(ORDER, end) if tokens[i - ORDER : i] == before]
        if not places or tokens[places[-1]] != tokens[end]:
            break
        run += 1
    return run


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_in_any_pieces_as_a_search_finds(tokens: list[int], cuts: list[int]):
    looked = Repetition()
    for cut in sorted(cuts):
        assert looked.follow(tokens[:cut]) == foretold(tokens[:cut])
    assert looked.follow(tokens) == foretold(tokens)


def test_of_a_long_prompt_the_end_is_looked_at():
    prompt = list(range(100_000, 0, -1))
    looked = Repetition()
    assert looked.follow(prompt) == 0
    assert looked.follow(prompt + prompt[-LOOK_BACK // 2 :]) == LOOK_BACK // 2 - ORDER
    assert looked.follow(prompt + prompt[-LOOK_BACK // 2 :] + prompt[:50]) == 0
