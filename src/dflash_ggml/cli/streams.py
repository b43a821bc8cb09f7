"""Standard streams that the caller closed. No engine is needed here: `dflash-doctor` starts without one."""

from __future__ import annotations

import os
import sys


def replace_closed_streams() -> None:
    """Stand the null device in for every standard stream that the caller closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it stands for a stream, until the end
