"""Why a state cannot be staged: every path and reason, found by a second walk, after a failure."""

from __future__ import annotations

from contextlib import suppress
from types import CodeType
from typing import Any, Final

import torch

from ..core.errors import Diagnostic, QuestionError, printable
from .paths import DEEPEST, children, objects
from .tensors import NotCopiedError, Storages, describe
from .walk import Walk


def refusals(state: Any, error: Exception) -> list[tuple[str, str]]:
    """(path, reason) of all that cannot be staged: tensors, what does not reduce, and what `error`
    tells of.
    """
    found: list[tuple[str, str]] = []
    culprits = {id(obj): said for obj, said in getattr(error, "culprits", ())}
    code = _called(error)
    for path, obj, depth in objects(state):
        reason = _reason(obj) or culprits.get(id(obj))
        if reason is None and code is not None and code in _codes(obj):
            reason = f"a {type(obj).__qualname__} cannot be built: {type(error).__name__}: {error}"
        if depth > DEEPEST:
            return [*found, (path, f"nested deeper than {DEEPEST} levels")]
        if reason is not None:
            found.append((path, reason))
    return found


def _called(error: Exception) -> CodeType | None:
    """What raised while a structure was built: the function that the builder has called."""
    found = None
    building = False
    trace = error.__traceback__
    while trace is not None:
        ours = trace.tb_frame.f_globals.get("__name__") == Walk.__module__
        if building and not ours:
            found, building = trace.tb_frame.f_code, False
        building = ours
        trace = trace.tb_next
    return found


def _codes(obj: Any) -> set[Any]:
    """The functions that make an object of this class from its stream."""
    cls = type(obj)
    called = [getattr(cls, name, None) for name in _MAKING]
    with suppress(Exception):
        called.append(obj.__reduce_ex__(4)[0])
    return {getattr(getattr(f, "__func__", f), "__code__", None) for f in called}


_MAKING: Final = ("__init__", "__new__", "__setstate__", "__tensor_unflatten__")
_SHOWN: Final = 20


def _path(path: str) -> str:
    # the end of a long path says no more than its beginning, and the reason has to be seen
    return printable(path) if path else "the state itself"


def refusal(state: Any, error: Exception) -> QuestionError:
    """M975 with every path that cannot be staged; what `error` says if a walk finds none."""
    found = [f"{_path(path)}: {printable(reason)}" for path, reason in refusals(state, error)]
    if not found and isinstance(error, NotCopiedError):
        found = [str(error)]
    elif not found:
        found = [f"{type(error).__name__}: {error}"]
    named = ", ".join(found[:_SHOWN])
    more = f" … and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return QuestionError(
        [
            Diagnostic(
                "M975",
                f"the state cannot be staged: {named}{more}",
                help="leave these out of the state, nothing of it has been copied",
            )
        ]
    )


def too_deep(state: Any) -> bool:
    """Whether a state has more levels than are staged."""
    return any(depth > DEEPEST for _, _, depth in objects(state))


def _reason(obj: Any) -> str | None:
    try:
        if isinstance(obj, torch.Tensor):
            walk = Walk()
            walk.reducer_override(obj)
            for x in walk.tensors:
                describe(x, Storages())
        children(obj)
    except NotCopiedError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - as above
        return f"a {type(obj).__qualname__} cannot be copied: {error}"
    return None
