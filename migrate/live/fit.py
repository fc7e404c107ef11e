"""How migrated tensors meet the places of a live module, known before the first of them is written.

Shapes must be equal. A dtype may be another one where the module's holds every value of the
tensor's, which is said; where it does not, `copy_` would round, and that is a loss to be allowed.
Which names are left over on either side is told both ways.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.diagnostics import Report, did_you_mean, listed, plural, printable
from ..core.templates import collapse
from ..elements.numbers import holds
from .module import is_plain

if TYPE_CHECKING:
    from ..core.diagnostics import Diagnostic
    from ..core.spec import Spec
    from .module import Slot

# names for which a near one is looked for, because comparing all with all takes long
_NEAR = 4


@dataclass(frozen=True, slots=True)
class Fit:
    """What came of the comparison: for each output that has a place the slot's key, what is left
    over on both sides, and what is wrong.

    `missing` are keys of slots, `unexpected` are outputs. `problems` are shapes (M960) and losses
    (M961), `notes` casts that lose nothing.
    """

    places: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    problems: tuple[Diagnostic, ...]
    notes: tuple[str, ...]

    def left_over(self) -> Diagnostic | None:
        """M960 for names on either side, with the nearest of the other; None if there are none."""
        if not (self.missing or self.unexpected):
            return None
        report, notes = Report(), []
        if self.missing:
            notes.append(
                f"the module has, and the migrated checkpoint has not: {_collapsed(self.missing)}"
            )
        if self.unexpected:
            notes.append(
                "the migrated checkpoint has, and the module has not: "
                f"{_collapsed(self.unexpected)}"
            )
        near = (
            (key, did_you_mean(key, list(self.missing)))
            for key in self.unexpected[:_NEAR]
            if self.missing
        )
        notes += [f"{printable(key)}: {hint}" for key, hint in near if hint]
        short = [f"{plural(len(self.missing), 'key')} of the module would not be filled"] * bool(
            self.missing
        )
        long = [
            f"{plural(len(self.unexpected), 'key')} of the checkpoint would have no place"
        ] * bool(self.unexpected)
        way_out = "build the module as the checkpoint is, or load with strict=False"
        report.add("M960", " and ".join(short + long), notes=tuple(notes), help=way_out)
        return report.diagnostics[0]


def fit(
    specs: Mapping[str, Spec],
    others: Iterable[str],
    slots: Mapping[str, Slot],
    allow: frozenset[str],
    *,
    cast: bool = True,
    loose: Container[str] = (),
) -> Fit:
    """Compares outputs (`specs`, and `others` that are no tensors) with slots. Outputs are named as
    the model itself names its own.

    Without `cast` the module takes the outputs' dtypes (`assign=True`), but for parameters of other
    classes than torch's. `loose` are those of `others` that are tensors after all, of a kind that
    no rule takes.
    """
    by_name: dict[str, list[str]] = {}
    for key, slot in slots.items():
        by_name.setdefault(slot.plain, []).append(key)
    places: dict[str, str] = {}
    unexpected, shapes, casts, losses = [], [], dict[str, list[str]](), dict[str, list[str]]()
    values: list[str] = []
    for name in (*specs, *others):
        keys = by_name.get(name, ())
        # a name that the wrappers' own segments make equal to another one means nothing
        if name in keys:
            key = name
        elif len(keys) == 1:
            key = keys[0]
        else:
            unexpected.append(name)
            continue
        places[name] = key
        there, made = slots[key].spec, specs.get(name)
        if made is None and slots[key].tensor is not None and name not in loose:
            values.append(name)
        if there is None or made is None or there is made:
            continue
        if there.shape != made.shape:
            shapes.append(
                f"{printable(name)}: {list(made.shape)}, the module's is {list(there.shape)}"
            )
        elif (cast or not is_plain(slots[key].tensor)) and there.dtype != made.dtype:
            kind = casts if holds(there.dtype, made.dtype) else losses
            kind.setdefault(f"{made.dtype} -> {there.dtype}", []).append(name)
    filled = set(places.values())
    report = Report()
    if shapes:
        report.add(
            "M960",
            f"other shapes than the module's in {plural(len(shapes), 'migrated tensor')}",
            notes=(*shapes[:8], *[f"and {len(shapes) - 8} more"] * (len(shapes) > 8)),
            help="build the module with the sizes of the checkpoint",
        )
    if values:
        what = (
            "values that are no tensors stand for parameters or buffers of the module: "
            f"{_collapsed(values)}"
        )
        report.add(
            "M960",
            what,
            help="the checkpoint was written by other code than its names say; leave these values "
            "out",
        )
    if losses and "lossy" not in allow:
        report.add(
            "M961",
            "the module's dtypes cannot hold all values of the checkpoint's",
            notes=tuple(f"{how}: {_collapsed(names)}" for how, names in losses.items()),
            help='allow={"lossy"}, or build the module in the dtype of the checkpoint',
            permit="lossy",
        )
        losses = {}
    return Fit(
        places,
        tuple(key for key in slots if key not in filled),
        tuple(unexpected),
        tuple(report.diagnostics),
        tuple(
            f"cast {how}: {_collapsed(names)}" for how, names in (*casts.items(), *losses.items())
        ),
    )


def _collapsed(keys: Sequence[str]) -> str:
    return listed([one.text for one in collapse(list(keys))], 8)
