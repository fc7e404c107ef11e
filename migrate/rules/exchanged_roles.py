"""The roles of a rule that exchanges the parts of one number format for those of another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from .. import codecs, ops
from ..ops.base import OpCall, ValueOp
from .arguments import ROLE, is_reference

if TYPE_CHECKING:
    from ..core.errors import Report, Span


def check_exchange(
    step: OpCall,
    via: Iterable[OpCall],
    sides: Mapping[str, Collection[str | None]],
    bound: Collection[str],
    place: Span,
    report: Report,
) -> None:
    """An op that exchanges the parts of one number format for those of another finds both under
    their names, as far as no param says which formats these are.

    `sides` are the roles of `from` and of `to`, `bound` the captures before the op.
    """
    if ROLE not in bound:
        report.add(
            "M203",
            f"{step.op} takes the parts of a tensor, and `from` has no roles",
            spans=(place,),
            help="write `from: {weight: …, scale: …}`, and `to` likewise",
        )
    takes = [s for s in via if _has_roles(s)]
    if len(takes) > 1:
        report.add(
            "M204",
            f"{step.op} is not the only op of its rule that takes or makes roles",
            spans=(place,),
            help="exchange the parts in an edge of its own",
        )
    for side, there in sides.items():
        said = (step.args or {}).get(side)
        codec = said.get("codec") if isinstance(said, Mapping) else None
        if codec is None or is_reference(codec):
            continue
        try:
            found = codecs.get(codec)
        except LookupError:
            # `validate` says so
            continue
        odd = [str(r) for r in there if r not in found.parts]
        missing = [r for r in found.parts if r not in there and r not in found.optional]
        if odd or missing:
            report.add(
                "M203",
                f"{step.op}: the parts of {codec} are {', '.join(found.parts)}; `{side}` has "
                f"{_listed(there) if None not in there else 'none'}",
                spans=(place,),
                help=f"write `{side}: {{{', '.join(f'{r}: …' for r in found.parts)}}}`",
            )


def _has_roles(step: OpCall) -> bool:
    """Whether the op takes or makes roles."""
    op = ops.get(step.op)
    return isinstance(op, ValueOp) and (
        op.kind == "exchange" or bool(op.roles(str((step.args or {}).get("codec", ""))))
    )


def _listed(patterns: Iterable[str | None]) -> str:
    return ", ".join(str(role) for role in patterns)
