"""Parts of one rank as one: a tree as a single file would have it, the tensors of all of them under
the keys of the whole model, and which of these stand in several parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, NoReturn

from ..core.errors import fail, listed, printable
from ..core.spec import spec
from ..source.blobs import ChunkedTensor, Stored, StoredTensor
from ..source.by_part import with_parts, with_states
from ..source.grids import Replica
from ..source.pickle.jsonform import to_json
from ..source.pickle.policy import together
from ..source.pickle.tree import Composite, DictNode, TensorRecord
from ..source.target import node_of
from ..source.tree import (
    STATE,
    FileTree,
    name_tensors_outside,
    replace_dict,
    tensor_records,
)
from . import _megatron
from .torchzip import TorchFile

MIXED = "move away what does not belong here, or fetch the part again"


def contradict(label: str, what: str, *notes: str, help: str = MIXED) -> NoReturn:
    """M924: parts that do not agree."""
    fail("M924", f"{label}: {what}", notes=notes, help=help)


class Member(NamedTuple):
    """A part of the rank: the path of its file, what it is called, its stage, what it holds."""

    path: str
    called: str
    stage: int
    content: TorchFile


class _Keys(NamedTuple):
    """The stage of a part, the keys and the types of the values in its dict of the model, and how
    many tensors these are.
    """

    stage: int
    keys: tuple[Any, ...]
    kinds: tuple[type, ...]
    tensors: int


class _Joined(NamedTuple):
    """How the parts of a rank were joined, by the numbers of their pairs, and of their tensors,
    when those of all parts stand in a row: which `pairs` the model has, each with the number of the
    part, and which others have the key of another one; the keys of the tensors with their numbers,
    and of what stands in several parts the places in all of them, with the number of the part.
    """

    parts: Sequence[_Keys]
    pairs: Sequence[tuple[int, int]]
    there: Sequence[tuple[int, int]]
    tensors: Mapping[str, int]
    replicas: Mapping[str, Sequence[tuple[int, int]]]


class RanksAlike:
    """How the first tensor-parallel rank was joined: others have the same keys, and what follows
    from keys alone is found out once.
    """

    def __init__(self) -> None:
        self.forms = cache(_megatron.forms_of_experts)
        self.ordered = cache(in_order)
        self.joined: _Joined | None = None


class RankOfParts:
    """The parts of one tensor-parallel rank, joined: the tree of the first, with what all of them
    hold in the dict of the model.
    """

    def __init__(
        self,
        members: Sequence[Member],
        tied: bool,
        label: str,
        alike: RanksAlike,
    ) -> None:
        self.label = label
        # what stands in several parts
        self.replicas: dict[str, list[Replica]] = {}
        self._tensors: dict[str, Stored] = {}
        # what expert groups have of a tensor of all experts
        self._grouped: dict[str, list[Stored]] = {}
        # the CRC-32 of each storage of a part by where it begins, where somebody asked
        self._sums: dict[str, dict[int, int | None]] = {}
        # states of modules that a part has otherwise than the one before it
        own_states: dict[str, dict[str, Any]] = {}
        # by the number of its file
        self._members = {member.content.number: member for member in members}
        first = members[0].content
        names: dict[int, str] = {}
        parts = [_keys_of(member) for member in members]
        found = self._as_joined(members, parts, alike.joined, names)
        if found is None:
            found = self._join(members, parts, tied, alike, names, own_states)
        pairs, tensors = found
        versions: dict[Any, Any] = {}
        for member in members:
            versions.update(_versions(member.content))
        table = first.part.table
        if table is None:
            contradict(label, f"{members[0].called} has no dict of tensors")
        made = DictNode(
            table.kind, tuple(pairs), table.node, _attributes(table.attributes, versions)
        )
        tree = first.part._replace(root=replace_dict(first.part.root, table, made))
        beside = [
            (
                member.called,
                member.content.part._replace(
                    root=with_states(member.content.part.root, own_states.get(member.called, {}))
                ),
            )
            for member in members[1:]
        ]
        tree = with_parts(tree, beside, members[0].called)
        others, paths = _outside(tree, members, own_states)
        self.joined = replace(
            first,
            part=tree,
            tensors=tensors,
            others=others,
            names=names,
            paths=paths,
            outside=together(one for member in members for one in member.content.outside),
            carried=together(one for member in members for one in member.content.carried),
            plain=False,
            notes=tuple(dict.fromkeys(note for member in members for note in member.content.notes)),
        )

    def _join(
        self,
        members: Sequence[Member],
        parts: Sequence[_Keys],
        tied: bool,
        alike: RanksAlike,
        names: dict[int, str],
        own_states: dict[str, dict[str, Any]],
    ) -> tuple[Sequence[Any], dict[str, StoredTensor]]:
        """The pairs of the model, and its tensors by key; `names` are entered by identity, and in
        `own_states` what a part has otherwise.
        """
        # what the model has under a key, with the key
        values: dict[Any, tuple[Any, Any]] = {}
        self._check_groups(members, parts, alike.forms)
        for member in members:
            one = member.content
            own = one.names
            for pair in _pairs(one):
                key, value = pair
                if tied and key == _megatron.OUTPUT and _megatron.EMBEDDING in self._tensors:
                    continue
                there = values.setdefault(key, pair)
                if there is pair:
                    if type(value) is TensorRecord and value.state is None:
                        names[id(value)] = key
                    elif value is not None:
                        names.update(_named(value, own))
                elif (
                    type(key) is str
                    and key.endswith(STATE)
                    and self._is_other(key, there[1], value, member)
                ):
                    own_states.setdefault(member.called, {})[key] = value
                else:
                    self._compare(key, there[1], value, members, member)
            others = own_states.get(member.called, ())
            for key, stored in one.tensors.items():
                # a file holds each tensor in one place
                if (
                    isinstance(stored, Stored)
                    and key not in others
                    and (tied or self._tensors.setdefault(key, stored) is not stored)
                ):
                    self._add(key, stored, member, tied)
        self.replicas = {k: self.replicas[k] for k in self._tensors if k in self.replicas}
        every: dict[str, StoredTensor] = {**self._tensors}
        for key, several in self._grouped.items():
            _, record = values[key]
            every[key] = whole = self._of_groups(key, several)
            made = record._replace(shape=whole.spec.shape, strides=(whole.spec.shape[1], 1))
            values[key] = (key, made)
            names[id(made)] = key
        order = alike.ordered(tuple(values))
        # those of objects have keys of their own, and stand behind the others
        tensors = {key: every[key] for key in order if key in every}
        if len(tensors) < len(every):
            tensors.update(every)
        if not (tied or own_states or self._grouped or alike.joined):
            alike.joined = self._joined(members, parts, [values[key] for key in order], tensors)
        return [values[key] for key in order], tensors

    def _joined(
        self,
        members: Sequence[Member],
        parts: Sequence[_Keys],
        pairs: Sequence[Any],
        tensors: Mapping[str, StoredTensor],
    ) -> _Joined | None:
        """How these parts were joined; None where their keys do not say it all."""
        if any(part.kinds.count(TensorRecord) != part.tensors for part in parts):
            return None
        row = [(n, pair) for n, one in enumerate(members) for pair in _pairs(one.content)]
        numbers = {id(pair): number for number, (_, pair) in enumerate(row)}
        chosen = [numbers[id(pair)] for pair in pairs]
        first = {key: number for number, (key, _) in zip(chosen, pairs, strict=True)}
        others = set(range(len(row))).difference(chosen)
        there = [(number, first[row[number][1][0]]) for number in sorted(others)]
        stored = _stored(members)
        if len(stored) < sum(part.tensors for part in parts):
            return None
        of = [n for n, member in enumerate(members) for _ in member.content.tensors]
        at = {id(one): number for number, one in enumerate(stored)}
        return _Joined(
            parts,
            [(row[number][0], number) for number in chosen],
            there,
            {key: at[id(one)] for key, one in tensors.items()},
            {
                key: [(of[at[id(one.stored)]], at[id(one.stored)]) for one in several]
                for key, several in self.replicas.items()
            },
        )

    def _as_joined(
        self,
        members: Sequence[Member],
        parts: Sequence[_Keys],
        like: _Joined | None,
        names: dict[int, str],
    ) -> tuple[Sequence[Any], dict[str, StoredTensor]] | None:
        """As `_join`, of parts that are `like` those of another rank; None where they are not, or
        where values have to be compared.
        """
        if like is None or like.parts != parts:
            return None
        row = [pair for member in members for pair in _pairs(member.content)]
        for number, first in like.there:
            (key, value), other = row[number], row[first][1]
            tensor = type(value) is TensorRecord is type(other)
            if value is not other and (not tensor or (type(key) is str and key.endswith(STATE))):
                return None
        stored = _stored(members)
        if len(stored) < sum(part.tensors for part in parts):
            return None
        replicas = {}
        for key, places in like.replicas.items():
            several = [Replica(members[n].path, stored[at]) for n, at in places]
            if any(one.stored.spec != several[0].stored.spec for one in several):
                return None
            replicas[key] = several
        pairs = []
        for n, number in like.pairs:
            pair = row[number]
            pairs.append(pair)
            key, value = pair
            if type(value) is TensorRecord and value.state is None:
                names[id(value)] = key
            elif value is not None:
                names.update(_named(value, members[n].content.names))
        self.replicas = replicas
        return pairs, {key: stored[number] for key, number in like.tensors.items()}

    def _check_groups(
        self,
        members: Sequence[Member],
        parts: Sequence[_Keys],
        forms: Callable[[tuple[Any, ...]], frozenset[Any]],
    ) -> None:
        """M924 unless expert groups of a stage have the same, but for the numbers of experts, which
        `forms` leaves out.
        """
        known: dict[int, tuple[str, frozenset[Any]]] = {}
        for (_, called, stage, _), part in zip(members, parts, strict=True):
            own = forms(part.keys)
            first, keys = known.setdefault(stage, (called, own))
            if keys != own:
                unlike = sorted(map(str, keys ^ own))
                contradict(
                    self.label,
                    f"{first} and {called} are expert groups of one stage and do not have "
                    f"the same keys: {listed(unlike, 4)}",
                )

    def _is_other(self, key: str, one: Any, other: Any, member: Member) -> bool:
        """Whether a part has the state of a module otherwise: of tensors, as far as the sums of
        the archives tell.
        """
        held, stored = self._tensors.get(key), member.content.tensors.get(key)
        if isinstance(held, Stored) and isinstance(stored, Stored):
            sums = self._sum(self._members[held.blob], held), self._sum(member, stored)
            return held.spec != stored.spec or (None not in sums and sums[0] != sums[1])
        return one is not other and bool(to_json(node_of(one)) != to_json(node_of(other)))

    def _sum(self, member: Member, stored: Stored) -> int | None:
        """The CRC-32 of the storage that a tensor begins."""
        known = self._sums.get(member.called)
        if known is None:
            places = member.content.places.values()
            known = self._sums[member.called] = {one.offset: one.crc for one in places}
        return known.get(stored.offset)

    def _add(self, key: str, stored: Stored, member: Member, tied: bool) -> None:
        own = key
        if tied and key == _megatron.OUTPUT and _megatron.EMBEDDING in self._tensors:
            key = _megatron.EMBEDDING
        there = self._tensors.get(key)
        if there is None:
            self._tensors[key] = stored
            return
        home = self._members[there.blob]
        if there.spec != stored.spec:
            contradict(
                self.label,
                f"{printable(key)} is {there.spec} in {home.called} and {stored.spec} in "
                f"{member.called}",
            )
        if _megatron.GROUPED.fullmatch(key):
            self._grouped.setdefault(key, [there]).append(stored)
            return
        found = self.replicas.get(key)
        if found is None:
            found = self.replicas[key] = [Replica(home.path, there)]
        found.append(Replica(member.path, stored, own if own != key else ""))

    def _compare(
        self, key: Any, one: Any, other: Any, members: Sequence[Member], member: Member
    ) -> None:
        """M924 unless two parts have equal values under a key; tensors are compared in a run."""
        tensors = [type(value) in (TensorRecord, Composite) for value in (one, other)]
        if all(tensors):
            return
        if any(tensors) or to_json(node_of(one)) != to_json(node_of(other)):
            home = next(m for m in members if any(k == key for k, _ in _pairs(m.content)))
            contradict(
                self.label,
                f"{printable(str(key))} is not the same in {home.called} and in {member.called}",
            )

    def _of_groups(self, key: str, several: Sequence[Stored]) -> ChunkedTensor:
        """The tensor of all experts, of which each group's is a run of bytes, and so of rows. M925
        where it is none.
        """
        found, size = _megatron.GROUPED.fullmatch(key), len(several)
        one = several[0].spec
        shape = one.shape
        if found is not None and len(shape) == 2:
            shape = (shape[0], shape[1] * size) if found[2] == "1" else (shape[0] * size, shape[1])
        if len(shape) != 2 or shape[0] % size or any(held.strides for held in several):
            fail(
                "M925",
                f"{self.label}: {printable(key)}, of all experts, is {one} in each of {size} "
                "groups, which is no run of rows of the whole",
                help="save it with another implementation of experts (`SequentialMLP` or "
                "Transformer Engine's), or as a distributed checkpoint",
            )
        rows = shape[0] // size
        part = spec(one.dtype, (rows, shape[1]))
        return ChunkedTensor(
            spec(one.dtype, shape),
            tuple(held._replace(spec=part) for held in several),
            tuple((rows * n, 0) for n in range(size)),
        )


def _outside(
    tree: FileTree, members: Sequence[Member], states: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Stored], dict[int, str]]:
    """The tensors beside the model in all parts by path, `states` of modules among them that a part
    has otherwise, and their paths by identity.
    """
    stored = {
        number: member.content.others[path]
        for member in members
        for number, path in member.content.paths.items()
    }
    stored |= {
        id(value): at
        for member in members
        for key, value in states.get(member.called, {}).items()
        if isinstance(at := member.content.tensors.get(key), Stored)
    }
    named = name_tensors_outside(tree)
    return (
        {name: stored[id(record)] for name, record in named},
        {id(record): name for name, record in named},
    )


def _pairs(one: TorchFile) -> Sequence[tuple[Any, Any]]:
    return one.part.table.pairs if one.part.table is not None else ()


def _keys_of(member: Member) -> _Keys:
    one = member.content
    pairs = _pairs(one)
    keys, values = zip(*pairs, strict=True) if pairs else ((), ())
    return _Keys(member.stage, keys, tuple(map(type, values)), len(one.tensors))


def _stored(members: Sequence[Member]) -> list[Stored]:
    """The tensors of all parts in a row."""
    every = (at for member in members for at in member.content.tensors.values())
    return [at for at in every if isinstance(at, Stored)]


def _named(value: Any, own: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """The identities and keys of the tensors of one value."""
    for record in tensor_records([value]):
        if id(record) in own:
            yield id(record), own[id(record)]


def _versions(one: TorchFile) -> Mapping[Any, Any]:
    table = one.part.table
    attributes = table.attributes if table is not None else None
    said = attributes.get("_metadata") if type(attributes) is DictNode else None
    return dict(said.pairs) if type(said) is DictNode else {}


def _attributes(attributes: Any, versions: Mapping[Any, Any]) -> Any:
    said = attributes.get("_metadata") if type(attributes) is DictNode else None
    if type(said) is not DictNode:
        return attributes
    made = DictNode(said.kind, tuple(versions.items()), said.node, said.attributes)
    return with_value(attributes, "_metadata", made)


def in_order(keys: tuple[Any, ...]) -> Sequence[Any]:
    """The keys in the order of the model: what stands before its layers, these by number, the
    rest.
    """
    numbers = [_megatron.layer_of(key) if type(key) is str else None for key in keys]
    start = next((place for place, number in enumerate(numbers) if number is not None), 0)
    ranks = [
        (number, place) if number is not None else (-1 if place < start else len(keys), place)
        for place, number in enumerate(numbers)
    ]
    return [keys[place] for _, place in sorted(ranks)]


def with_value(node: DictNode, name: str, value: Any) -> DictNode:
    """The dict with another value under a key."""
    pairs = tuple((key, value if key == name else held) for key, held in node.pairs)
    return DictNode(node.kind, pairs, node.node, node.attributes)
