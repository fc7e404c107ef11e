"""What the tensors of a checkpoint say of params: dtypes, sizes, how many there are of a kind, and
names that are numbered.

Only tensors that a step reads in its direction count, and backwards none that it makes anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..core.errors import listed, printable
from ..core.keys import Pattern, TwoReadings, parse
from ..core.spec import ALIASES
from ..core.templates import (
    Ranked,
    Template,
    as_seen,
    group,
    matching,
    rank_of,
    ranked,
    rows,
    seen_by,
    takes,
)
from ..rules import params as parameters
from .graph import Tensor

if TYPE_CHECKING:
    from ..rules.compiled import CompiledRule
    from ..rules.param_model import Dtype, Groups, Param, Shape
    from ..source.blobs import StoredTensor


class WalkedEdge(Protocol):
    """What is asked of a step: its direction, its rules, and the patterns that it reads."""

    @property
    def backwards(self) -> bool: ...

    @property
    def rules(self) -> tuple[tuple[CompiledRule, Mapping[str, Any]], ...]: ...

    def reads(self) -> list[Pattern]: ...


@dataclass(eq=False)
class Asked:
    """The tensors of a step that params ask, their keys grouped by form when the first does.

    Of a checkpoint that is `partial`, one part of those that it was cut into, neither what is
    counted over tensors nor that there is none says anything of the whole.
    """

    tensors: Mapping[str, Tensor | StoredTensor]
    partial: bool = False

    @cached_property
    def templates(self) -> list[Ranked]:
        """Each form, and what it is without its rank."""
        return ranked(self.tensors)


def dtypes_of(
    step: WalkedEdge, dtype: Dtype, asked: Asked, known: Any
) -> Iterator[tuple[str, str]]:
    """(place for messages, dtype) of the named tensors; of those of one dtype only the first.

    Where they differ, `known` says which of them counts.
    """
    first: dict[str, str] = {}
    for _, _, found in _named(step, dtype.key, asked, alike=False):
        for key in _keys(found):
            first.setdefault(asked.tensors[key].spec.dtype, key)
    chosen = ALIASES.get(str(known), str(known))
    yield from (
        (f"{parameters.DTYPE_OF}{printable(key)}", name)
        for name, key in first.items()
        if chosen not in first or name == chosen
    )


def sizes_of(step: WalkedEdge, shape: Shape, asked: Asked) -> Iterator[tuple[str, int]]:
    """(place for messages, size) of the named tensors; of those of one size only the first."""
    if asked.partial and (shape.count is not None or shape.sum is not None):
        return
    seen: set[int] = set()
    for text, pattern, found in _named(step, shape.key, asked):
        if shape.count is not None:
            if found:
                at = pattern.captures.index(shape.count)
                # a key that stands in one file has rank 0
                every = chain.from_iterable(rows(pattern, fit.seen) for fit in found)
                values = {row[at] for row in every if row is not None}
                yield f"the values of {{{shape.count}}} in {text}", len(values)
            continue
        for group_of in _together(pattern, shape.sum, found, asked.tensors):
            sizes = [asked.tensors[key].spec.shape for key in group_of]
            if not all(-len(of) <= shape.dim < len(of) for of in sizes):
                continue
            size = sum(of[shape.dim] for of in sizes)
            if size not in seen:
                seen.add(size)
                place = printable(group_of[0])
                place += f" and what {{{shape.sum}}} counts" if shape.sum is not None else ""
                yield f"axis {shape.dim} of {place}", size


def _together(
    pattern: Pattern,
    capture: str | None,
    found: Sequence[_Fitting],
    tensors: Mapping[str, Tensor | StoredTensor],
) -> Iterable[Sequence[str]]:
    """The keys of tensors that differ in the value of one capture at most; without a capture the
    first key of each spec.
    """
    if capture is None:
        # equal specs are mostly one object, and there are as many keys as tensors
        first: dict[int, str] = {}
        for key in _keys(found):
            first.setdefault(id(tensors[key].spec), key)
        return zip(first.values())
    at = pattern.captures.index(capture)
    groups: dict[tuple[Any, ...], list[str]] = {}
    for key, row in _rows(pattern, found):
        groups.setdefault((*row[:at], *row[at + 1 :]), []).append(key)
    return groups.values()


def presence_of(
    step: WalkedEdge, name: str, param: Param, asked: Asked
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place for messages, {param: value}) where the param is whether there is a tensor, or of
    which kind there is one. Backwards that is silent.
    """
    for value, keys in ((True, param.absent), *(param.present or {}).items()):
        if keys is None or step.backwards:
            continue
        there = next((held[0].keys[0] for _, _, held in _named(step, keys, asked) if held), None)
        if there is not None:
            found = False if keys is param.absent else value
            yield f"the tensor {printable(there)}", {name: found}
        elif keys is param.absent and not asked.partial:
            yield f"no tensor {listed(list(keys))}", {name: True}


def names_of(tensors: Iterable[str]) -> Iterator[str]:
    """The names of modules and tensors, the root's empty one too, in key order without ranks."""
    known = {""}
    yield ""
    for key in tensors:
        name = key if rank_of(key) is None else key.rpartition("@")[0]
        at = -1
        while (at := name.find(".", at + 1)) >= 0:
            if (above := name[:at]) not in known:
                known.add(above)
                yield above
        if name not in known:
            known.add(name)
            yield name


def grouped_names(
    step: WalkedEdge, groups: Groups, tensors: Mapping[str, Tensor]
) -> list[str] | str:
    """The names that the numbered tensors give, if all of them do; else why not.

    Only tensors that the edge reads in the direction in which it is walked.
    """
    pattern = parse(groups.key)
    reads = step.reads()
    of, over = pattern.captures.index(groups.of), pattern.captures.index(groups.over)
    found: dict[tuple[str, int | None], dict[int, str]] = {}
    for t in group(tensors):
        keys = [
            key
            for key, fits in zip(t.keys, matching(pattern, seen_by(pattern, t)), strict=True)
            if fits
        ]
        if not keys or not any(takes(p, keys[0]) for p in reads):
            continue
        for key in keys:
            try:
                row = pattern.match(as_seen(pattern, key))
            except TwoReadings:
                return f"{printable(key)} has two readings under {groups.key}"
            if row is not None:
                found.setdefault((str(row[of]), rank_of(key)), {})[int(row[over])] = key
    odd: list[str] = []
    names = dict.fromkeys(name for name, _ in found)
    for (name, _), keys_of in found.items():
        known = len(odd)
        specs = {tensors[key].spec for key in keys_of.values()}
        if len(keys_of) < 2 or sorted(keys_of) != list(range(len(keys_of))):
            odd.append(
                f"{printable(name) or repr('')} has {groups.over} = "
                f"{listed([str(n) for n in sorted(keys_of)], 4)}"
            )
        elif len(specs) > 1 or (
            groups.ndim is not None and groups.ndim != len(next(iter(specs)).shape)
        ):
            odd.append(
                f"{printable(name) or repr('')} has "
                f"{listed([str(s) for s in sorted(map(str, specs))], 3)}"
            )
        if len(odd) > known:
            names.pop(name, None)
    if not found:
        return parameters.why_no_names(groups)
    if odd:
        alike = "numbered from 0 without a gap, two or more, of one shape and dtype"
        return (
            f"the tensors of {groups.key} do not determine it, because not all are {alike}: "
            f"{listed(odd, 4)}"
            + (
                f"; these are: {listed([printable(name) or repr('') for name in names], 8)}"
                if names
                else ""
            )
        )
    return list(names)


class _Fitting(NamedTuple):
    """Keys of one form that a pattern fits, and the same as the pattern sees them."""

    keys: Sequence[str]
    seen: Template


def _named(
    step: WalkedEdge, texts: Iterable[str], asked: Asked, *, alike: bool = True
) -> Iterator[tuple[str, Pattern, list[_Fitting]]]:
    """(text, pattern, keys) of each key or pattern that a param's place names.

    Backwards a key that the edge takes and makes again is another tensor, and says nothing about
    the one before; unless `alike`, nor does what it made under another name.
    """
    for text in texts:
        pattern = parse(text)
        plain = text.replace("{{", "{").replace("}}", "}")
        if plain in asked.tensors and not pattern.captures:
            found = [_Fitting([plain], seen_by(pattern, group([plain])[0]))]
        else:
            found = [
                fit
                for t, cut in asked.templates
                for seen in (seen_by(pattern, t, cut),)
                if (fit := _fit(t.keys, seen, matching(pattern, seen))) is not None
            ]
        if step.backwards:
            sides = [
                side
                for rule, _ in step.rules
                for side in (rule.sources, *(() if alike else (rule.targets,)))
            ]
            others = [p for side in sides for p in side.values() if not p.params]
            found = [
                fit
                for keys, seen in found
                if (fit := _fit(keys, seen, [not any(takes(p, k) for p in others) for k in keys]))
                is not None
            ]
        yield text, pattern, found


def _fit(keys: Sequence[str], seen: Template, chosen: Sequence[bool]) -> _Fitting | None:
    """The chosen ones of the keys; None where there are none."""
    if all(chosen):
        return _Fitting(keys, seen) if keys else None
    if not any(chosen):
        return None
    few = Template(
        seen.text, [*compress(seen.keys, chosen)], [*compress(seen.ints, chosen)], seen.literal
    )
    return _Fitting([*compress(keys, chosen)], few)


def _keys(found: Iterable[_Fitting]) -> Iterator[str]:
    return chain.from_iterable(fit.keys for fit in found)


def _rows(pattern: Pattern, found: Iterable[_Fitting]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Keys that the pattern fits, one way, with the values of its captures."""
    for keys, seen in found:
        yield from (
            (key, row)
            for key, row in zip(keys, rows(pattern, seen), strict=True)
            if row is not None
        )
