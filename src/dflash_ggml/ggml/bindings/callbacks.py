"""Python side of ggml's callbacks: log messages, and the traceback before an abort."""

from __future__ import annotations

import atexit
import faulthandler
import logging
import sys

from dflash_ggml.ggml.bindings._bindings import ffi, lib

logger = logging.getLogger("dflash_ggml.ggml")

_LEVELS = {
    lib.GGML_LOG_LEVEL_DEBUG: logging.DEBUG,
    lib.GGML_LOG_LEVEL_INFO: logging.INFO,
    lib.GGML_LOG_LEVEL_WARN: logging.WARNING,
    lib.GGML_LOG_LEVEL_ERROR: logging.ERROR,
}
_SILENT = 2**31 - 1


@ffi.def_extern()
def dflash_log_message(level: int, text: ffi.CData) -> None:
    """Pass a message of ggml to Python's logging."""
    line = ffi.string(text).decode("utf-8", "replace").rstrip("\n")
    if line:
        logger.log(_LEVELS.get(level, logging.INFO), "%s", line)


@ffi.def_extern()
def dflash_abort_trace() -> None:
    """Print Python's stacks when ggml aborts the process."""
    sys.stdout.flush()
    # the failing thread may have no Python stack, so print all threads
    faulthandler.dump_traceback(file=2, all_threads=True)


def set_log_level(min_level: int) -> None:
    """Send ggml's messages of at least ``min_level`` (``lib.GGML_LOG_LEVEL_*``) to the logger."""
    lib.dflash_log_install(min_level)


def install() -> None:
    """Route ggml's warnings to :mod:`logging` and explain aborts; called once, as the binding loads."""
    lib.dflash_abort_install()
    set_log_level(lib.GGML_LOG_LEVEL_WARN)
    # worker threads must not call into Python while the interpreter shuts down
    atexit.register(set_log_level, _SILENT)
