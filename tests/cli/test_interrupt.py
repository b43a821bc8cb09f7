"""Tests of Ctrl-C: noted the first time, immediate exit the second time."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from dflash_ggml.cli.interrupt import Interrupt


def test_interrupt_leaves_no_trace() -> None:
    """It notes the first Ctrl-C; afterwards signals go where they went before."""
    before = signal.getsignal(signal.SIGINT)
    for _ in range(3):
        with Interrupt() as interrupt:
            assert not interrupt.asked
            signal.raise_signal(signal.SIGINT)
            while not interrupt.asked:
                time.sleep(0.01)
    assert signal.getsignal(signal.SIGINT) is before and signal.set_wakeup_fd(-1) == -1


def test_second_interrupt() -> None:
    """The second Ctrl-C ends the process in the middle of a pass that never returns to Python."""
    script = """if True:
        import ctypes, threading, time
        from dflash_ggml.cli.interrupt import Interrupt

        def tell():
            while not interrupt.asked:
                time.sleep(0.01)
            print("asked", flush=True)

        with Interrupt() as interrupt:
            threading.Thread(target=tell, daemon=True).start()
            libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
            print("ready", flush=True)
            while True:
                libc.pthread_mutex_lock(mutex)
    """
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == b"asked\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(300) == 130
        finally:
            process.kill()
