"""The extra states of a checkpoint: those that are objects beside its tensors (the lists and dicts
of 0.1 to 0.5, None, and the `io.BytesIO` of later releases), and which release wrote them all.

Names and shapes are alike in all releases, so the bytes say which it is. Detection of a
layout asks for it and nothing else does: what becomes of a state is decided by what that state
holds. States of one checkpoint were written by one release, so what counts is which release can
have written all of them. Where several can, their forms do not differ, and the latest is meant.
"""

from __future__ import annotations

import io
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from ..core.errors import CheckpointError, printable
from ..core.keys import Pattern
from ..core.spec import Spec, spec
from ..core.templates import group, matching
from ..source.blobs import Blob, BytesBlob, Stored, read_rows, rows_of
from ..source.pickle.tree import Buffer, DictNode, ListNode, TensorRecord
from ..source.target import ValuesByPath, output_record
from ..source.tree import CheckpointTree, is_state, replace_dict, tensor_records
from .record import Object

if TYPE_CHECKING:
    from ..source.blobs import StoredTensor
    from ..source.index import Index, Source

_CONTAINERS = frozenset({DictNode, ListNode, dict, OrderedDict, list, tuple})


def objects(
    index: Index, asked: Callable[[str], bool] = is_state, *, none: bool = True
) -> Iterator[Object]:
    """The states of a checkpoint that stand beside its tensors, under keys that are `asked` for;
    also those that are None, unless there are to be `none` of these.
    """
    if index.tree is None:
        for key, item in index.items.items():
            if (
                type(item) is io.BytesIO or type(item) in _CONTAINERS or (none and item is None)
            ) and asked(key):
                yield Object(key, 0, key, item)
        return
    several, new = len(index.tree.parts) > 1, tuple.__new__
    for rank, part in enumerate(index.tree.parts):
        for key, value in part.table.pairs if part.table is not None else ():
            kind = type(value)
            if (
                (none if value is None else kind is Buffer or kind in _CONTAINERS)
                and type(key) is str
                and asked(key)
            ):
                # there may be as many as tensors
                yield new(Object, (f"{key}@{rank}" if several else key, rank, key, value))


def lift_states(source: Source, patterns: Sequence[Pattern], *, alike: bool = False) -> None:
    """Puts the states that are objects and that a pattern takes among the tensors of the source,
    and takes them from where they were. A state that no rule reads stays the object that it was.
    `alike`: what is None on all ranks stands under one name, without a rank.

    Calling it again changes nothing. M950 for a state that is made of what no extra state is made
    of.
    """
    there = list(objects(source.index, bool)) if patterns else []
    asked = _asked(patterns, {one.key for one in there})
    found = [one for one in there if one.key in asked]
    if not found:
        return
    if alike and source.index.tree is not None and len(source.index.tree.parts) > 1:
        found = _without_ranks(found, len(source.index.tree.parts), source.index.tensors)
    from .write import content

    lifted = dict(source.index.lifted)
    lifted.update([(one.name, one.value) for one in found])
    index = replace(source.index, lifted=lifted)
    tensors = dict(index.tensors)
    blobs: list[Blob] = list(source.blobs)
    # modules without a state, of which there are thousands, have one that is stored once
    without: Stored | None = None
    for one in found:
        name, _, _, value = one
        if value is None and without is not None:
            tensors[name] = without
            continue
        data = content(one, index, source.blobs)
        tensors[name] = made = Stored(spec("uint8", (len(data),)), len(blobs), 0)
        blobs.append(BytesBlob(name, data))
        without = made if value is None else without
    if index.tree is None:
        items = {key: value for key, value in index.items.items() if key not in tensors}
        source.index = replace(index, tensors=tensors, items=items)
    else:
        tree = _without(index.tree, found, tensors)
        source.index = replace(index, tensors=tensors, items=ValuesByPath(tree.parts), tree=tree)
    source.blobs = tuple(blobs)


def _without_ranks(
    found: Iterable[Object], ranks: int, tensors: Mapping[str, StoredTensor]
) -> list[Object]:
    """The states, of which those that are None on all of so many ranks are named by their keys."""
    none = Counter(one.key for one in found if one.value is None)
    alike = {key for key, count in none.items() if count == ranks and key not in tensors}
    new = tuple.__new__
    return [new(Object, (one.key, *one[1:])) if one.key in alike else one for one in found]


def _asked(patterns: Sequence[Pattern], keys: Iterable[str]) -> set[str]:
    """Those of the keys that a pattern takes, under whatever reading."""
    found: set[str] = set()
    for template in group(keys):
        for pattern in patterns:
            if not pattern.has_flat:
                found.update(compress(template.keys, matching(pattern, template)))
    return found


def _without(
    outline: CheckpointTree, found: list[Object], tensors: Mapping[str, StoredTensor]
) -> CheckpointTree:
    """The trees with a tensor's place for each state, without tensors that were in states only."""
    names = dict(outline.names)
    parts = list(outline.parts)
    # by the identities of specs
    records: dict[int, TensorRecord] = {}
    new = tuple.__new__
    for rank, several in groupby(found, attrgetter("rank")):
        part = parts[rank]
        table = part.table
        if table is None:
            continue
        placed: dict[str, tuple[str, TensorRecord]] = {}
        for name, _, key, _ in several:
            at = tensors[name].spec
            like = records.get(id(at))
            if like is None:
                like = records[id(at)] = output_record(at)
            # one for each place
            record = new(TensorRecord, like)
            names[id(record)] = name
            placed[key] = (key, record)
        pairs = [
            placed.get(pair[0], pair)
            if type(pair[1]) is not TensorRecord and type(pair[0]) is str
            else pair
            for pair in table.pairs
        ]
        made = DictNode(table.kind, tuple(pairs), table.node, table.attributes)
        parts[rank] = part._replace(root=replace_dict(part.root, table, made))
    if next(tensor_records([one.value for one in found]), None) is None:
        # the states hold no tensors, so that all others are where they were
        return replace(outline, parts=tuple(parts), names=names)
    left = {id(leaf) for leaf in tensor_records([part.root for part in parts])}
    names = {number: name for number, name in names.items() if number in left}
    kept = set(names.values())
    carried = {key: stored for key, stored in outline.passed_through.items() if key in kept}
    gone = outline.passed_through.keys() - carried.keys()
    ties = {key: first for key, first in outline.ties.items() if gone.isdisjoint((key, first))}
    return replace(outline, parts=tuple(parts), names=names, passed_through=carried, ties=ties)


# how many states are looked at; the others are of the same release
MOST = 256
_LARGEST = 1 << 26
_RANGE = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})(?: to ([0-9]{1,3})\.([0-9]{1,3})| (and later))?")
_NO_END = (1 << 30, 0)
_Release = tuple[int, int]


class Range(NamedTuple):
    """Releases (major, minor) from `first` to `last`, both counted."""

    first: _Release
    last: _Release

    def __str__(self) -> str:
        first, last = (f"{major}.{minor}" for major, minor in self)
        return (
            f"{first} and later"
            if self.last == _NO_END
            else first
            if self.first == self.last
            else f"{first} to {last}"
        )


def ranges(text: str) -> list[Range]:
    """The ranges in a text such as `0.3 to 0.11 and 2.0 to 2.3`, `1.13` or `2.18 and later`."""
    found = []
    for a, b, c, d, later in _RANGE.findall(text):
        first = (int(a), int(b))
        found.append(Range(first, _NO_END if later else (int(c), int(d)) if c else first))
    return found


class Age(NamedTuple):
    """The latest releases that can have written all states, None without, and the evidence."""

    releases: Range | None
    evidence: str


@dataclass(eq=False, slots=True)
class States:
    """The extra states of one opened checkpoint, read when somebody asks how old they are."""

    _source: Source
    _age: Age | None = None

    @property
    def beside(self) -> Mapping[str, Spec]:
        """States that are objects, by the keys that rules see, without those that are None; their
        length is not known.
        """
        return {
            found.name: spec("uint8", (0,)) for found in objects(self._source.index, none=False)
        }

    def age(self) -> Age:
        """Found once. A state that is not understood is of no release."""
        if self._age is None:
            self._age = _age(self._written())
        return self._age

    def _written(self) -> Iterator[tuple[str, str]]:
        """(key, the releases that write such a state, in words, "" for none) for each state."""
        for key, stored in self._source.index.tensors.items():
            if is_state(key):
                yield key, self._releases(key, stored)
        for found in objects(self._source.index, none=False):
            from .write import content

            try:
                yield (
                    found.name,
                    _releases(found.name, content(found, self._source.index, self._source.blobs)),
                )
            except CheckpointError:
                yield found.name, ""

    def _releases(self, key: str, stored: StoredTensor) -> str:
        found, rows = stored.spec, rows_of(stored)
        if found.dtype == "float32" and not found.numel:
            # what te.ops of 1.13 keeps without FP8; from 2.9 on it is bytes
            return "1.13 to 2.8"
        if (
            found.dtype != "uint8"
            or len(found.shape) != 1
            or found.nbytes > _LARGEST
            or rows is None
        ):
            return ""
        return _releases(key, read_rows(rows, self._source.blobs))


def _releases(key: str, data: bytes) -> str:
    from .verdict import judged

    try:
        return judged(data, key).like.releases
    except CheckpointError:
        return ""


def _age(states: Iterator[tuple[str, str]]) -> Age:
    common: list[Range] = []
    before = ""
    for number, (key, words) in enumerate(islice(states, MOST)):
        said = ranges(words)
        if not said:
            return Age(None, f"{printable(key)} is not a state of a known release")
        both = (
            [Range(max(a.first, b.first), min(a.last, b.last)) for a in common for b in said]
            if number
            else said
        )
        common = [one for one in both if one.first <= one.last]
        if not common:
            return Age(None, f"{printable(key)} is of {words}, {before}")
        if not before or words not in before:
            before = f"{printable(key)} of {words}"
    if not common:
        return Age(None, "no key is an extra state")
    latest = max(common, key=lambda one: one.last)
    return Age(latest, f"the extra states can be of {latest}")
