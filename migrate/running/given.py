"""What a run of a plan is given, whatever carries it out: one process, parts, or a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .prepare import what_is_read

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..source.index import Source
    from .resources import RunOptions
    from .undo import UndoFolder


def given_to_run(
    made: Plan,
    source: Source,
    out: Any,
    options: RunOptions,
    kept: UndoFolder | None = None,
    known: Callable[[], Mapping[str, bytes]] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a run of the plan takes by place and by name, whatever carries it out."""
    tensors, side_files = what_is_read(made, source, kept)
    target, hashed = made.target, dict[str, Any]()
    if made.parts is not None or made.expected is not None:
        from .restored import parts_of_run

        target, hashed["parts"] = parts_of_run(made, tensors, known)
    named = {"digest": made.digest, "side_files": side_files, "checks": made.checks}
    return (made.written, tensors, target, out), {**named, "options": options, **hashed}
