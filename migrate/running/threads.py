"""Work that several threads do, of which the caller is one: as many as can be had.

Not `threading.Thread`: its `start` waits until the new thread reports, and one that finds no memory
for its first steps never does.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable


def run_together(work: Callable[[int], None], threads: int, stop: Callable[[], None]) -> None:
    """Calls `work(0)` here and `work(1)` to `work(threads - 1)` in threads of their own; returns
    when all that began have ended.

    Threads that cannot be started are left out, so `work` must not count on them; what it raises
    outside of the caller's thread is its own to carry. `stop` is called when something interrupts
    the caller, and has to make the others end.
    """
    state = threading.Condition()
    running, closed = 0, False

    def help_out(number: int) -> None:
        nonlocal running
        with state:
            if closed:
                return
            running += 1
        try:
            work(number)
        finally:
            with state:
                running -= 1
                state.notify_all()

    interrupted: BaseException | None = None
    try:
        for number in range(1, threads):
            try:
                _thread.start_new_thread(help_out, (number,))
            except (RuntimeError, MemoryError):
                break
        work(0)
    except BaseException as error:  # noqa: BLE001 - raised again below, when the others have ended
        interrupted = error
        stop()
    while True:
        try:
            with state:
                closed = True
                while running:
                    state.wait(0.5)
            break
        except BaseException as error:  # noqa: BLE001 - as above
            interrupted = interrupted or error
            stop()
    if interrupted is not None:
        raise interrupted
