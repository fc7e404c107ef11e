"""JSON from a checkpoint, read strictly: in one way only, bounded, each failure a diagnostic.

Python's json accepts what other readers refuse or read differently: duplicate names (the last
wins), NaN, lone surrogates, integers of any length. Two programs that read one header differently
are an attack, so all of that is refused here. The cyclic collector is paused while large headers
are parsed: it doubles the time and finds nothing.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ..core.errors import fail, listed, printable


class _RefusedError(ValueError):
    pass


_MANY = 10_000  # containers; to look at them takes a millisecond


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic garbage collection inside; afterwards as before.

    Much that was made inside joins the oldest generation unseen: it is kept, and looking at it
    takes a third of the time that it took to make.
    """
    running = gc.isenabled()
    gc.disable()
    before = gc.get_count()[0]
    try:
        yield
    finally:
        if running:
            # objects that the process has frozen stay so, and are counted one by one
            if gc.get_count()[0] - before > _MANY and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def parse(
    data: bytes | bytearray, where: str, *, floats: bool = False, constants: bool = False
) -> Any:
    """The JSON value in `data`. M906 if it is not strict JSON in UTF-8, M914 if it is too deep or
    too large to hold.

    Objects come as dicts, in the file's order. Numbers are integers unless `floats`; `where` names
    the file in messages. `constants`: NaN and Infinity are read, which Python writes into
    configurations.
    """
    # brackets become containers of 60 to 100 bytes: a text of little else fills the memory
    if data.count(b"[") + data.count(b"{") > len(data) // 8 + 1000:
        fail("M914", f"{where}: JSON that consists of brackets")
    try:
        text = data.decode("utf-8")
        # int() is quadratic: Python limits its digits since 3.10.7, unless the limit was lifted
        if not getattr(sys, "get_int_max_str_digits", int)() and re.search(rb"[0-9]{4301}", data):
            raise _RefusedError("a number of more than 4300 digits")
        with collector_paused():
            value = json.loads(
                text,
                object_pairs_hook=_distinct,
                parse_constant=None if constants else _constant,
                parse_float=float if floats else _fraction,
                parse_int=_natural if b"-0" in data and not floats else None,
            )
        if b"\\ud" in data or b"\\uD" in data:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        fail("M906", f"{where}: JSON that is not UTF-8, at byte {error.start}")
    except UnicodeEncodeError as error:
        fail(
            "M906",
            f"{where}: JSON with half a surrogate pair, "
            f"{printable(error.object[error.start : error.end])}",
        )
    except json.JSONDecodeError as error:
        fail(
            "M906",
            f"{where}: not JSON: {error.msg[:1].lower()}{error.msg[1:]} at line {error.lineno}, "
            f"column {error.colno}",
            help="correct the file there, or fetch it again",
        )
    except _RefusedError as error:
        fail("M906", f"{where}: {error}")
    except ValueError:
        fail("M906", f"{where}: a number of more than 4300 digits")
    except RecursionError:
        fail("M914", f"{where}: JSON nested too deeply")
    except MemoryError:
        fail("M914", f"{where}: JSON that does not fit into memory")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = [k for k, _ in pairs if k in seen or seen.add(k)]  # type: ignore[func-returns-value]
        raise _RefusedError(f"the same name twice in one JSON object: {listed(twice)}")
    return made


def _constant(text: str) -> NoReturn:
    raise _RefusedError(f"{text} is not JSON")


def _fraction(text: str) -> NoReturn:
    raise _RefusedError(f"{printable(text, 40)} where only integers can stand")


def _natural(text: str) -> int:
    if text.startswith("-0"):
        raise _RefusedError(f"{text} where only integers can stand")
    return int(text)
