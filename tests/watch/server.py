"""`fedveil watch` as a process of its own, for tests that need a real one."""

import contextlib
import signal
import subprocess
import sys


@contextlib.contextmanager
def served(folder, *options, **more):
    """Start it; gives (process, address), and ends it with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fedveil", "watch", str(folder), "--while-stdin", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **more,
    )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
