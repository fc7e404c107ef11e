"""Writing in a child process, so that the trainer keeps its interpreter to itself."""

from __future__ import annotations

import ctypes
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Final, cast

from ..core.errors import Diagnostic, RunError, printable
from ..results import ApplyReport
from .child import LENGTH, raise_packed
from .jobs import StoppedError, Work
from .memory import shared_at

# the trainer's path comes before the first import: the folder that it runs in is no part of it
_CODE: Final = "import sys; sys.path[:] = {}; from migrate.staging.child import main; main()"
# seconds after which a cancelled job is noticed
_HEARD: Final = 0.1
# and for which it may remove what it has in a store
_ENDING: Final = 60.0


def write_apart(
    work: Work, progress: Callable[[int, int], None], stop: threading.Event
) -> ApplyReport:
    """Writes in a child process, which sees the memory of the snapshot. RunError M980 if it ends
    without an answer: it was killed, say.
    """
    work.source.ready()
    message = work.message()
    descriptors, places = _places(work.source.storages)
    try:
        head = json.dumps(
            {
                **message["head"],
                "out": work.out.given,
                "name": work.out.name,
                "stored": work.out.stored,
                "storages": places,
                "trainer": os.getpid(),
            }
        ).encode()
        child = subprocess.Popen(
            [sys.executable, "-c", _CODE.format([str(place) for place in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=descriptors,
            cwd=message["head"]["folder"],
            # an interrupt from the terminal is the trainer's to answer
            start_new_session=True,
        )
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    given, answers = cast("IO[bytes]", child.stdin), cast("IO[bytes]", child.stdout)
    try:
        # a child that has died says so at its end
        with suppress(BrokenPipeError), given:
            given.write(len(head).to_bytes(LENGTH, "little") + head)
            given.write(message["stream"])
        ended = _follow(answers, progress, stop)
    except BaseException:
        if work.out.stored:
            # the child alone can remove what it has in the store
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(_ENDING)
        child.kill()
        raise
    finally:
        answers.close()
        status = child.wait()
    if "report" in ended:
        return ApplyReport.from_json(ended["report"])
    if "diagnostics" in ended:
        raise_packed(ended["diagnostics"])
    where, notes = work.out.shown, tuple[str, ...]()
    if work.out.stored:
        notes = (f"`migrate clean {printable(where, 240)}` removes what it has left there",)
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    raise RunError(
        [
            Diagnostic(
                "M980",
                f"the process that wrote {printable(where, 300)} {how}",
                help="save the snapshot again; what it said stands in the standard error",
                notes=notes,
            )
        ]
    )


def _follow(
    answers: IO[bytes], progress: Callable[[int, int], None], stop: threading.Event
) -> Mapping[str, Any]:
    """The last that the child says; `StoppedError` once `stop` is set."""
    rest = b""
    last: dict[str, Any] = {}
    while True:
        if stop.is_set():
            raise StoppedError
        if not select.select([answers], [], [], _HEARD)[0]:
            continue
        read = os.read(answers.fileno(), 1 << 16)
        if not read:
            return last
        *lines, rest = (rest + read).split(b"\n")
        for line in lines:
            last = json.loads(line)
            if "progress" in last:
                progress(*last["progress"])


def _places(storages: Sequence[memoryview]) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Descriptors for a child, and of each storage its descriptor, where it begins there and how
    long it is.
    """
    blocks: dict[int, int] = {}
    descriptors: list[int] = []
    places: list[tuple[int, int, int]] = []
    try:
        for storage in storages:
            if not storage.nbytes:
                places.append((-1, 0, 0))
                continue
            address = ctypes.addressof(ctypes.c_ubyte.from_buffer(storage))
            block = shared_at(address)
            if block is None:
                # made by an object's own method, in memory of torch's
                descriptors.append(os.memfd_create("migrate-staging", os.MFD_CLOEXEC))
                with open(descriptors[-1], "wb", closefd=False) as copy:
                    copy.write(storage)
                places.append((descriptors[-1], 0, storage.nbytes))
                continue
            if block.address not in blocks:
                blocks[block.address] = block.give()
                descriptors.append(blocks[block.address])
            places.append((blocks[block.address], address - block.address, storage.nbytes))
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors, places
