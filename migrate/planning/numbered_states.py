"""Which parameters the numbers in an optimizer's state are.

`torch.optim` numbers parameters in the order of its groups. Where torch wrote `param_names` beside
them, these say it; else the order of the tensors in the checkpoint, if the numbers fit in it in one
way only: nothing is guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import fail, option, printable
from ..source.blobs import Stored
from ..source.pickle.tree import DictNode, ListNode
from ..source.tree import tensors_of
from .optimizer_states import may_train
from .request import OPTIMIZER_NAMES

if TYPE_CHECKING:
    from ..source.index import Index
    from ..source.tree import FileTree
    from .optimizer_states import ObjectCodes

Shape = tuple[int, ...]
# how numbers are known where torch wrote names beside them
NAMED = "by `param_names`"
# how, where no names are given
ORDERED = "by the order of the tensors"
# and where a person said them, or did so to an earlier run
GIVEN, REMEMBERED = f"by `{OPTIMIZER_NAMES}`", f"by the stamp, which has `{OPTIMIZER_NAMES}`"
Found = tuple[dict[int, str], dict[int, int], str]


class GivenNames(NamedTuple):
    """The names of an optimizer's parameters in the order of their numbers, how they are known,
    GIVEN or REMEMBERED, and where remembered the names `earlier` than the run that did.
    """

    names: Sequence[str]
    known: str
    earlier: Sequence[str] = ()


def parameters_of(
    groups: Any,
    records: Mapping[int, Mapping[str, Any]],
    part: FileTree,
    index: Index,
    given: GivenNames | None,
    objects: Mapping[str, ObjectCodes],
) -> Found | None:
    """Number -> name of the parameter, number -> group, and how that is known; None where it is
    not.

    `records`: the tensors of each number by moment; `objects`: parameters that are objects. M410
    where names that a person `given` do not fit; those of a stamp are then not used.
    """
    of_group, names = _groups(groups)
    if not of_group or any(number not in of_group for number in records):
        return None
    shapes = {number: _shape(records.get(number, {})) for number in of_group}
    there = {key: index.tensors[key].spec.shape for key, _ in tensors_of(part.table)}
    there |= {name: one.shape for name, one in objects.items()}
    if given is not None:
        called = given.names
        if len(called) != len(of_group) and given.known == GIVEN:
            return None
        owners = dict(zip(of_group, called, strict=False))
        wrong = [
            name for number, name in owners.items() if not _fits(there.get(name), shapes[number])
        ]
        if not wrong and len(set(called)) == len(called) == len(of_group):
            return owners, of_group, given.known
        if given.known == GIVEN:
            what = printable(wrong[0]) if wrong else "one of them, which stands twice"
            fail(
                "M410",
                f"`{OPTIMIZER_NAMES}` names {what}, and the optimizer state of its number does not "
                "fit",
                help="name the parameters in the order of the optimizer, one a line",
            )
    if names is not None:
        owners = dict(zip(of_group, names, strict=True))
        fit = all(_fits(there.get(name), shapes[number]) for number, name in owners.items())
        return (owners, of_group, NAMED) if fit else None
    order = _in_order(of_group, shapes, _candidates(part, index, objects))
    return None if order is None else (order, of_group, ORDERED)


def read_names(value: Any) -> list[str]:
    """The names that `--set optimizer_names=@FILE` gives, one a line, or those of a list."""
    if isinstance(value, str) and value.startswith("@"):
        try:
            with open(value[1:], encoding="utf-8") as file:
                return [line.strip() for line in file if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            fail("M115", f"`{OPTIMIZER_NAMES}`: {printable(value[1:])}: {printable(str(error))}")
    elif isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
        return list(value)
    return fail(
        "M115",
        f"`{OPTIMIZER_NAMES}` is a file of names, one a line",
        help=option("params", f"{OPTIMIZER_NAMES}=@FILE"),
    )


def _groups(groups: Any) -> tuple[dict[int, int], list[str] | None]:
    """Number -> group, in order, and the names of all, if each group has them."""
    found: dict[int, int] = {}
    names: list[str] | None = []
    for at, group in enumerate(groups.items if type(groups) is ListNode else ()):
        held = group.get("params") if type(group) is DictNode else None
        if type(held) is not ListNode or any(type(number) is not int for number in held.items):
            return {}, None
        called = group.get("param_names")
        found.update((number, at) for number in held.items)
        if type(called) is ListNode and len(called.items) == len(held.items) and names is not None:
            names += called.items
        else:
            names = None
    if names is not None and not all(type(name) is str for name in names):
        names = None
    return found, names


def _shape(moments: Mapping[str, Any]) -> Shape | None:
    """The shape of a parameter, as its state says; None where it does not."""
    shapes = {tuple(value.shape) for name, value in moments.items() if name != "step"}
    shapes.discard(())
    return shapes.pop() if len(shapes) == 1 else None


def _fits(there: Shape | None, wanted: Shape | None) -> bool:
    return there is not None and wanted in (None, there)


def _candidates(
    part: FileTree, index: Index, objects: Mapping[str, ObjectCodes]
) -> list[tuple[str, Shape]]:
    """The tensors that may be parameters, in the order of the model's dict; of tied ones the first,
    which is all that a module counts.
    """
    out = []
    places: set[Any] = set()
    starts = {one.components[0]: name for name, one in objects.items()}
    inside = {key for one in objects.values() for key in one.components}
    for key, _ in tensors_of(part.table):
        if key in starts:
            out.append((starts[key], objects[starts[key]].shape))
        if key in inside:
            continue
        at = index.tensors[key]
        if not may_train(at.spec):
            continue
        if isinstance(at, Stored) and at.storage is not None:
            place = at.storage, at.offset, at.spec
            if place in places:
                continue
            places.add(place)
        out.append((key, at.spec.shape))
    return out


def _in_order(
    of_group: Mapping[int, int],
    shapes: Mapping[int, Shape | None],
    candidates: Sequence[tuple[str, Shape]],
) -> dict[int, str] | None:
    """The numbers in the order of the candidates, if one order only fits."""
    numbers = list(of_group)
    if len(set(of_group.values())) == 1:
        first = _embed([shapes[n] for n in numbers], candidates)
        last = _embed([shapes[n] for n in reversed(numbers)], candidates[::-1])
        if first is None or last is None or first != last[::-1]:
            return None
        return dict(zip(numbers, first, strict=True))
    # several groups: the numbers of one shape are in one group, and all tensors of that shape
    counts = Counter(shape for _, shape in candidates)
    out: dict[int, str] = {}
    by_shape: dict[Shape | None, list[int]] = {}
    for number in numbers:
        by_shape.setdefault(shapes[number], []).append(number)
    for shape, alike in by_shape.items():
        one = len({of_group[number] for number in alike}) == 1
        if shape is None or not one or counts[shape] != len(alike):
            return None
        out.update(zip(alike, (key for key, own in candidates if own == shape), strict=True))
    return {number: out[number] for number in numbers}


def _embed(
    shapes: Sequence[Shape | None], candidates: Sequence[tuple[str, Shape]]
) -> list[str] | None:
    """The first candidates, in order, that have these shapes."""
    found: list[str] = []
    for key, shape in candidates:
        if len(found) < len(shapes) and _fits(shape, shapes[len(found)]):
            found.append(key)
    return found if len(found) == len(shapes) else None
