"""``python -m dflash_ggml`` is the command ``dflash-run``."""

from __future__ import annotations

import sys

from dflash_ggml.cli.run import main

if __name__ == "__main__":
    sys.exit(main())
