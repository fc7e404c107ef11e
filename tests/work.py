"""How much work a call is, in numbers that hold on any machine; the only place in the tests that
reads a clock.

Steps are counted where the work is done in Python, and are the same in every run. Where much of it
happens in C, processor time is divided by that of a yardstick which the same process runs just
before; a limit on such a ratio has a factor of ten to spare.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

# seconds after which a child process hangs rather than works: no finding about speed
HANG = 600


def steps(call: Callable[[], Any]) -> int:
    """The lines of Python that the call runs in this thread, calls and turns of loops among
    them.
    """
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def loop() -> None:
    """Some milliseconds of what Python does mostly: calls, short texts, a dict."""
    seen: dict[str, int] = {}
    for n in range(20_000):
        text = str(n)
        seen[text[-3:]] = seen.get(text[:3], 0) + len(text)


def times(call: Callable[[], Any], yardstick: Callable[[], Any] = loop, best_of: int = 3) -> float:
    """How many times the processor time of `yardstick` the call takes: the quickest of some runs of
    each, the yardstick first.
    """
    yard = processor(yardstick, best_of)
    return processor(call, best_of) / yard


def processor(call: Callable[[], Any], best_of: int = 3) -> float:
    """The least processor time of this process that a run of the call takes; a divisor, so never
    nothing.
    """
    least = float("inf")
    for _ in range(best_of):
        began = time.process_time()
        call()
        least = min(least, time.process_time() - began)
    return max(least, 1e-6)
