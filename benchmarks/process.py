"""Runs one whole process and says what it took: wall clock, CPU, peak private memory.

Private memory is RssAnon, sampled from /proc, with what a process and its children share counted
once: ru_maxrss and VmHWM count the mapped pages of files
too, which belong to the page cache and show gigabytes for a program that has allocated a few
megabytes.
"""

from __future__ import annotations

import os
import platform
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

INTERVAL = 0.005


class Taken(NamedTuple):
    """`wall` and `cpu` in seconds, `private` in bytes (0 when the process was gone before the first
    sample).
    """

    wall: float
    cpu: float
    private: int
    stdout: str


class RunError(RuntimeError):
    """The command did not exit with 0."""


def run(
    argv: Sequence[str | os.PathLike[str]],
    env: dict[str, str] | None = None,
    statuses: Sequence[int] = (0,),
    cwd: Path | None = None,
) -> Taken:
    """Runs `argv` with both streams captured; `RunError` with the tail of stderr when it exits with
    another than `statuses`.

    The command may keep its bytecode, as an installed one does, whatever this process was told.
    """
    env = {
        k: v
        for k, v in (os.environ if env is None else env).items()
        if k != "PYTHONDONTWRITEBYTECODE"
    }
    peak = 0
    out, err = os.memfd_create("out"), os.memfd_create("err")
    try:
        start = time.perf_counter()
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd
        )
        finished = threading.Event()

        def sample() -> None:
            nonlocal peak
            while not finished.wait(INTERVAL):
                peak = max(peak, private(process.pid))

        sampler = threading.Thread(target=sample, daemon=True)
        sampler.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            finished.set()
            process.kill()
            process.wait()
            raise
        wall = time.perf_counter() - start
        finished.set()
        sampler.join()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in statuses:
            shown = " ".join(map(str, argv))
            raise RunError(f"exit {process.returncode}: {shown}\n{_text(err)[-3000:]}")
        return Taken(wall, usage.ru_utime + usage.ru_stime, peak, _text(out))
    finally:
        os.close(out)
        os.close(err)


def private(pid: int, names: Sequence[str] = ("RssAnon:", "RssShmem:")) -> int:
    """RssAnon of `pid` and of its children, and what they share, in bytes."""
    total = 0
    try:
        with open(f"/proc/{pid}/status") as file:
            for line in file:
                if line.startswith(tuple(names)):
                    total += int(line.split()[1]) * 1024
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = file.read().split()
    except (OSError, ValueError):
        return total
    return total + sum(private(int(child), ("RssAnon:",)) for child in children)


def _text(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(os.dup(descriptor), encoding="utf-8", errors="replace") as file:
        return file.read()


def versions(python: str, names: Sequence[str]) -> dict[str, str]:
    """Installed versions of `names` in the interpreter `python`; what is missing is left out."""
    code = (
        "import importlib.metadata as m, sys\n"
        "for n in sys.argv[1:]:\n"
        "    try: print(n, m.version(n))\n"
        "    except m.PackageNotFoundError: pass"
    )
    lines = subprocess.run(
        [python, "-c", code, *names], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return dict(line.split(" ", 1) for line in lines)


def cpu_name() -> str:
    """The processor's model, as /proc/cpuinfo or, without one, the platform has it."""
    known = Path("/proc/cpuinfo")
    for line in known.read_text().splitlines() if known.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "unknown"
