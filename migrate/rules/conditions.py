"""What `where` asks of the values of captures: the values or limits that are written, with params.

A param that is a list of modules (`modules: true`) selects as the library does that wrote it, by
`re:` or `*`; any other value is itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..core.errors import OpError
from ..core.keys import CaptureType
from .arguments import PARAM, integer

if TYPE_CHECKING:
    from ..source.module_lists import ModuleList


class ModuleNames(list[str]):
    """The value of a param that is a list of modules, and the library that reads it."""

    library: str

    @classmethod
    def of(cls, names: list[str], library: str) -> ModuleNames:
        made = cls(names)
        made.library = library
        return made


def written(condition: Any) -> Iterator[tuple[str | None, Any]]:
    """(limit, value) of each value that a condition is written with; a list has no limit."""
    pairs = condition.items() if isinstance(condition, Mapping) else [(None, condition)]
    for limit, value in pairs:
        for item in value if isinstance(value, (list, tuple)) else [value]:
            yield limit, item


def resolve_conditions(
    where: Mapping[str, Any],
    types: Mapping[str, CaptureType],
    maps: Mapping[str, Mapping[Any, Any]],
    params: Mapping[str, Any],
) -> dict[str, Any]:
    """The conditions on captures with params filled in (None: not written); OpError M114, M509, and
    M513 for a list of modules that cannot be read.
    """
    out = {n: _resolved(n, types[n], w, params) for n, w in where.items() if not n.startswith("$")}
    # a mapped int capture takes exactly the numbers its map lists, beside what `where` says of it
    return out | {
        f"{n}\0map": [int(k) for k in v] for n, v in maps.items() if types[n].kind == "int"
    }


def selects(item: Any) -> bool:
    """Whether an item of a resolved condition is a list of modules."""
    return hasattr(item, "selects")


def allows(wanted: Any) -> Callable[[Any], bool]:
    """The test of one value that a resolved condition, which is not None, makes."""
    if not isinstance(wanted, Mapping):
        return _is_among(wanted)
    low, high = wanted.get("min"), wanted.get("max")
    multiple, remainder = wanted.get("multiple_of"), wanted.get("remainder") or 0
    but = _is_among(refused) if (refused := wanted.get("not")) is not None else None
    return lambda value: (
        (low is None or value >= low)
        and (high is None or value <= high)
        and (multiple is None or value % multiple == remainder)
        and (but is None or not but(value))
    )


def _is_among(wanted: Any) -> Callable[[Any], bool]:
    items = wanted if isinstance(wanted, (list, tuple)) else [wanted]
    lists = [item for item in items if selects(item)]
    values = {str(item) for item in items if not selects(item)}
    return lambda value: str(value) in values or any(one.selects(str(value)) for one in lists)


def _resolved(name: str, kind: CaptureType, condition: Any, params: Mapping[str, Any]) -> Any:
    if not isinstance(condition, Mapping):
        return _values(name, kind, condition, params, chosen=True)
    limits = {
        k: integer(v, params, f"where: `{k}` of {{{name}}}")
        for k, v in condition.items()
        if k != "not"
    }
    if (multiple := limits.get("multiple_of")) is not None and multiple < 1:
        raise OpError(
            "M114",
            f"where: `multiple_of` of {{{name}}} is {multiple}",
            help="give a number above 0",
        )
    if "not" in condition:
        limits["not"] = _values(name, kind, condition["not"], params, chosen=False)
    return limits


def _values(
    name: str, kind: CaptureType, condition: Any, params: Mapping[str, Any], *, chosen: bool
) -> Any:
    if not isinstance(condition, (list, tuple)):
        return _value(name, kind, condition, params, chosen)
    items: list[Any] = []
    for item in condition:
        value = _value(name, kind, item, params, chosen)
        if isinstance(value, (list, tuple)):
            items += value
        elif value is not None:
            items.append(value)
    return items if items or not condition else None


def _value(
    name: str, kind: CaptureType, written: Any, params: Mapping[str, Any], chosen: bool
) -> Any:
    if isinstance(written, str) and PARAM.fullmatch(written):
        value = params.get(written[1:])
        return _selected(written, value, chosen) if isinstance(value, ModuleNames) else value
    if kind.kind == "int" and isinstance(written, str):
        return integer(written, params, f"where: {{{name}}}")
    return written


def _selected(param: str, names: ModuleNames, chosen: bool) -> list[ModuleList] | None:
    """What a list of modules selects. A class, which keys do not show, is all modules where it is
    chosen, and none where it is left out.
    """
    from ..source.module_lists import ModuleList, RegexError, is_class

    if chosen and any(map(is_class, names)):
        return None
    try:
        return [ModuleList(names, names.library)]
    except RegexError as error:
        raise OpError(
            "M513",
            f"{param}: the expression {error}",
            help="it cannot be read in one pass over a name; list the modules that it means",
        ) from None
