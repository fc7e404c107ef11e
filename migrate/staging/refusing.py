"""Why a state cannot be staged: every path and reason, found by a second walk, after a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any, Final

import numpy
import torch

from ..core.errors import Diagnostic, MigrateError, QuestionError, printable
from .kinds import copies_itself
from .paths import DEEPEST, children, objects
from .tensors import NotCopiedError, Storages, describe
from .walk import Walk

# stages objects that copy themselves, and raises as they do
Trial = Callable[[list[Any]], object]


def refusals(state: Any, error: Exception, trial: Trial | None = None) -> list[tuple[str, str]]:
    """(path, reason) of all that cannot be staged: tensors, what does not reduce, what `error`
    tells of, and what does not copy itself when `trial` asks it to.
    """
    found: list[tuple[str, str]] = []
    culprits = {id(obj): said for obj, said in getattr(error, "culprits", ())}
    if trial is not None:
        culprits |= _failing([obj for obj in _own(state) if id(obj) not in culprits], trial)
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


def _own(state: Any) -> list[Any]:
    """The objects that copy themselves, as far down as a state is staged."""
    found = []
    for _, obj, depth in objects(state):
        if depth > DEEPEST:
            break
        if copies_itself(type(obj)) and not isinstance(obj, numpy.ndarray):
            found.append(obj)
    return found


def _failing(own: Sequence[Any], trial: Trial) -> dict[int, str]:
    """By id, why some of these objects cannot be staged. All are tried at once, and fewer only
    where that does not tell which it is.
    """
    if not own:
        return {}
    try:
        trial(list(own))
    except Exception as error:  # noqa: BLE001 - methods of the objects may raise anything
        told = {id(obj): said for obj, said in getattr(error, "culprits", ())}
        named = {id(obj): told[id(obj)] for obj in own if id(obj) in told}
        if named:
            return named | _failing([obj for obj in own if id(obj) not in named], trial)
        if len(own) == 1:
            if isinstance(error, MigrateError):
                # no memory for the trial
                return {}
            said = str(error)
            if not isinstance(error, NotCopiedError):
                said = f"a {type(own[0]).__qualname__} cannot be copied: {said}"
            return {id(own[0]): said}
        half = len(own) // 2
        return _failing(own[:half], trial) | _failing(own[half:], trial)
    return {}


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


def refusal(state: Any, error: Exception, trial: Trial | None = None) -> QuestionError:
    """M975 with every path that cannot be staged; what `error` says if a walk finds none."""
    known = refusals(state, error, trial)
    found = [f"{_path(path)}: {printable(reason)}" for path, reason in known]
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
