"""``python -m dflash_ggml`` is the command ``dflash-run``."""

from __future__ import annotations

import sys

from dflash_ggml.start import run

if __name__ == "__main__":
    sys.exit(run())
