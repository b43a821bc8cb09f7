"""Wording of counts."""

from __future__ import annotations


def count(n: int, noun: str) -> str:
    """A count with its noun: "1 thread", "2 threads"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
