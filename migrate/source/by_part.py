"""What the parts of one checkpoint hold beside the model, kept in the tree that they become.

A tree that several parts were joined into is that of the first of them. What others have otherwise
(the rank in their arguments, random states) stands under a key of its root that is kept for it,
`parts`: a dict by part, in the order of parts and with the first, of what makes the part's root out
of the first one's. It is plain data, so that it travels wherever the tree does, and its tensors are
tensors like any others beside the model.

    {"args": {"rank": 3},    a dict or an object of fields: what differs in it
     "rng_state": […],       another value, whole
     "note": (),             nothing: the part lacks it
     "size": ((1, 2),),      a value that could be read as one of these, in a tuple of its own
     "log": ({…}, […])}      a dict whose keys are in another order, with this order

What stands in the model of several parts is one tensor. States of modules are where they are equal;
where they are not, that of the first part is the model's, and those of the others stand at
`migrate.states` beside what else these have.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ..core.errors import fail, printable
from .pickle.jsonform import to_json
from .pickle.tree import OBJECTS, SCALARS, DictNode, ListNode, holders
from .target import node_of
from .tree import KEPT as KEPT
from .tree import PARTS as PARTS
from .tree import STATES as STATES
from .tree import TENSORS, FileTree, kept_by_part

# kinds of dicts that are nothing but their pairs
_DICTS = frozenset({"dict", "OrderedDict", *OBJECTS})
_HASHABLE = SCALARS - {bytearray}
_TEXT = frozenset({str})
_Fields = dict[int, tuple[DictNode, dict[Any, int] | None]]
_Twos = list[tuple[tuple[Any, Any], tuple[Any, Any]]]


def names_of(root: Any) -> list[str]:
    """The parts whose own values the root keeps, in order; none for a root that keeps none."""
    return [name for name, _ in kept_by_part(root)]


def part_name(path: str) -> str:
    """What a part is called by the path of its weights: the folder around them, else the file,
    without what says its format.
    """
    return os.path.dirname(path) or os.path.splitext(path)[0]


def is_optimizer(key: Any, value: Any) -> bool:
    """Whether an entry of a root is the state of an optimizer, which follows its parameters or goes
    by a word, and is kept in no other way.
    """
    return type(key) is str and "optim" in key.lower() and type(value) in (DictNode, ListNode)


def without_optimizers(root: DictNode) -> DictNode:
    """The root without the state of its optimizers."""
    pairs = tuple(pair for pair in root.pairs if not is_optimizer(*pair))
    if len(pairs) == len(root.pairs):
        return root
    return DictNode(root.kind, pairs, root.node, root.attributes)


def of_part(root: DictNode, called: str) -> DictNode | None:
    """The root as the part of this name has it, with the first part's model in it; None where
    nothing is kept of such a part. M906 for what is kept in no way that this module writes.
    """
    kept = root.get(PARTS)
    if called not in names_of(root):
        return None
    return _Applied(called).to(without_parts(root), kept.get(called))


def without_parts(root: DictNode) -> DictNode:
    """The root as the first part has it."""
    return _without(root, PARTS) if names_of(root) else root


def without_kept(root: DictNode) -> DictNode:
    """The root as another part than the first has it: what was cut off tensors stands once."""
    return root if root.get(KEPT) is None else _without(root, KEPT)


def without_states(root: DictNode) -> tuple[DictNode, dict[str, Any]]:
    """The root without what the part has otherwise than the model, and that by its keys there."""
    held = root.get(STATES)
    if type(held) is not DictNode:
        return root, {}
    return _without(root, STATES), {key: value for key, value in held.pairs if type(key) is str}


def with_states(root: DictNode, states: Mapping[str, Any]) -> DictNode:
    """The root with what the part has otherwise than the model."""
    if not states:
        return root
    root, before = without_states(root)
    pairs = (*root.pairs, (STATES, _dict((before | {**states}).items())))
    return DictNode(root.kind, pairs, root.node, root.attributes)


def _without(root: DictNode, name: str) -> DictNode:
    pairs = tuple(pair for pair in root.pairs if pair[0] != name)
    return DictNode(root.kind, pairs, root.node, root.attributes)


def without_keys(root: DictNode, keys: Collection[str]) -> DictNode:
    """The root with nothing kept of values that it has no more, and as the first part has it where
    nothing else is kept and it is nothing but a model.
    """
    names = names_of(root) if keys else []
    if not names:
        return root
    kept = []
    for name, entry in root.get(PARTS).pairs:
        if type(entry) is DictNode:
            left = tuple(pair for pair in entry.pairs if pair[0] not in keys)
            entry = DictNode(entry.kind, left, entry.node, entry.attributes)
        kept.append((name, entry))
    if len(root.pairs) == 2 and all(type(e) is DictNode and not e.pairs for _, e in kept):
        return without_parts(root)
    pairs = tuple((key, _dict(kept) if key == PARTS else value) for key, value in root.pairs)
    return DictNode(root.kind, pairs, root.node, root.attributes)


def with_parts(first: FileTree, others: Sequence[tuple[str, FileTree]], called: str) -> FileTree:
    """The tree of the part that is `called` so, with what the `others` have otherwise. What is kept
    in each of them of further parts is kept here.
    """
    base = without_parts(first.root)
    compared, like = _Compared(), without_kept(base)
    kept: dict[str, Any] = dict(kept_by_part(first.root)) or {called: _dict(())}
    for name, other in others:
        # the model is not among what differs
        compared.take(first.table, other.table)
        root = without_parts(other.root)
        # the first of a name, as `of_part` has it
        entries = dict(reversed(kept_by_part(other.root)))
        names, fields = names_of(other.root) or [name], _Fields()
        kept[names[0]] = compared.difference(like, without_kept(root))
        for further in names[1:]:
            found = _Applied(further, fields).to(root, entries[further])
            kept[further] = compared.difference(like, without_kept(found))
    pairs = (*base.pairs, (PARTS, _dict(kept.items())))
    return first._replace(root=DictNode(base.kind, pairs, base.node, base.attributes))


class Sharing:
    """Gives the roots of parts the values of the first one in the place of equal ones, in the dicts
    and objects of fields that are their values: parts say nearly all of it alike.
    """

    def __init__(self, first: DictNode) -> None:
        named = all(type(key) is str for key, _ in first.pairs)
        self._first = dict(first.pairs) if named else {}
        # what the first root of each form became
        self._forms: dict[int, tuple[Any, DictNode, DictNode]] = {}

    def root(self, root: DictNode, form: Any) -> DictNode:
        """The root of a part; roots of one `form` hold the same objects but for what is their
        own.
        """
        _, like, made = self._forms.get(id(form), (None, None, None)) if form else (None,) * 3
        if like is None or made is None:
            compared = _Compared()
            pairs = [(key, self._value(key, value, compared)) for key, value in root.pairs]
            made = DictNode(root.kind, tuple(pairs), root.node, root.attributes)
            if form is not None:
                # kept with the form, so that nothing else gets its identity
                self._forms[id(form)] = form, root, made
            return made
        pairs = [
            (key, _again(value, was, now))
            for (key, value), (_, was), (_, now) in zip(
                root.pairs, like.pairs, made.pairs, strict=True
            )
        ]
        return DictNode(root.kind, tuple(pairs), root.node, root.attributes)

    def _value(self, key: Any, value: Any, compared: _Compared) -> Any:
        known = self._first.get(key) if type(key) is str else None
        if (
            type(value) is not DictNode
            or type(known) is not DictNode
            or not TENSORS.isdisjoint([type(held) for _, held in value.pairs])
            or compared.unlike(value, known) is None
        ):
            return value
        made = [
            other
            if pair[1] is other[1] or compared.same(pair[1], other[1])
            else (other[0], pair[1])
            for pair, other in zip(value.pairs, known.pairs, strict=True)
        ]
        return DictNode(value.kind, tuple(made), known.node, known.attributes)


def _again(value: Any, was: Any, now: Any) -> Any:
    """What becomes of a value beside another one that `was` and is `now`."""
    if was is now or value is was:
        return now if value is was else value
    made = [
        new if pair is old else (new[0], pair[1])
        for pair, old, new in zip(value.pairs, was.pairs, now.pairs, strict=True)
    ]
    return DictNode(value.kind, tuple(made), now.node, now.attributes)


def _dict(pairs: Iterable[tuple[Any, Any]]) -> DictNode:
    return DictNode("dict", tuple(pairs), None)


class _Compared:
    """Values that were compared, containers and other nodes once for each two of them."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], bool] = {}
        self._made: dict[tuple[int, int], Any] = {}
        # what was compared, so that nothing else gets its identity
        self._held: list[Any] = []

    def take(self, one: Any, other: Any) -> None:
        """Takes two values for the same."""
        self._known[id(one), id(other)] = True
        self._held += (one, other)

    def same(self, one: Any, other: Any) -> bool:
        """Whether two values are one in all that is written of them; of tensors nothing is
        known.
        """
        kind = type(one)
        if one is other or kind is not type(other):
            return one is other
        if kind is str or kind is int or kind is bool:
            return bool(one == other)
        if kind in SCALARS:
            return repr(one) == repr(other)
        if kind in TENSORS:
            return False
        two = id(one), id(other)
        found = self._known.get(two)
        if found is None:
            found = self._known[two] = self._compare(one, other)
            self._held += (one, other)
        return found

    def _compare(self, one: Any, other: Any) -> bool:
        if type(one) is DictNode:
            unlike = self.unlike(one, other)
            return (
                unlike is not None
                and (one.kind in _DICTS or _text(_dict_of(one)) == _text(_dict_of(other)))
                and all(self.same(a[1], b[1]) for a, b in unlike)
            )
        if type(one) is ListNode and one.kind in ("list", "tuple"):
            return (
                one.kind == other.kind
                and len(one.items) == len(other.items)
                and all(map(self.same, one.items, other.items))
            )
        if any(id(value) in holders(value, TENSORS) for value in (one, other)):
            return False
        return _text(one) == _text(other)

    def unlike(self, one: DictNode, other: DictNode) -> _Twos | None:
        """The pairs that are not one object, of two dicts of one kind with the same keys in one
        order; None for others.
        """
        if one.kind != other.kind:
            return None
        # of an object without fields its node says how it was made
        if not one.pairs and one.kind in OBJECTS and _text(one) != _text(other):
            return None
        unlike = self._unlike(one.pairs, other.pairs)
        return unlike if self.same(one.attributes, other.attributes) else None

    def _unlike(
        self, some: Sequence[tuple[Any, Any]], others: Sequence[tuple[Any, Any]]
    ) -> _Twos | None:
        """The pairs that are not one object, which most are, of as many with the same keys in one
        order; None for others.
        """
        if len(some) != len(others):
            return None
        unlike = [two for two in zip(some, others, strict=True) if two[0] is not two[1]]
        keys, there = [a[0] for a, _ in unlike], [b[0] for _, b in unlike]
        if _TEXT.issuperset(map(type, keys)) and _TEXT.issuperset(map(type, there)):
            return unlike if keys == there else None
        return unlike if all(map(self.same, keys, there)) else None

    def difference(self, one: DictNode, other: DictNode) -> Any:
        """What makes the `other` dict out of the `one`, as `of_part` reads it."""
        unlike = self._unlike(one.pairs, other.pairs)
        if unlike is not None:
            return _dict(
                (key, self._entry(was, value))
                for (key, was), (_, value) in unlike
                if was is not value and not self.same(was, value)
            )
        before = {_known(key): value for key, value in one.pairs}
        after = {_known(key): (key, value) for key, value in other.pairs}
        pairs: list[tuple[Any, Any]] = []
        order = []
        for key, was in one.pairs:
            known = _known(key)
            if known not in after:
                pairs.append((key, ListNode("tuple", (), None)))
                continue
            order.append(known)
            value = after[known][1]
            if not self.same(was, value):
                pairs.append((key, self._entry(was, value)))
        for known, (key, value) in after.items():
            if known not in before:
                order.append(known)
                pairs.append((key, self._entry(None, value)))
        if order == list(after):
            return _dict(pairs)
        keys = ListNode("list", tuple(key for key, _ in other.pairs), None)
        return ListNode("tuple", (_dict(pairs), keys), None)

    def _entry(self, was: Any, value: Any) -> Any:
        if type(value) is DictNode and type(was) is DictNode:
            same = was.kind == value.kind and was.kind in _DICTS
            # of an object without fields its node says how it was made
            if same and value.pairs and self.same(was.attributes, value.attributes):
                two = id(was), id(value)
                # one dict can stand in many places
                if two not in self._made:
                    self._made[two] = self.difference(was, value)
                    self._held += (was, value)
                return self._made[two]
            if value.kind == "dict":
                return ListNode("tuple", (value,), None)
        if type(value) is ListNode and value.kind == "tuple":
            return ListNode("tuple", (value,), None)
        return value


def difference(one: DictNode, other: DictNode) -> Any:
    """What makes the `other` dict out of the `one`, as `of_part` reads it."""
    return _Compared().difference(one, other)


def _dict_of(node: DictNode) -> DictNode:
    """A dict of the kind and with nothing in it."""
    return DictNode(node.kind, (), node.node, None)


def _known(key: Any) -> Any:
    """A key so that it is equal to those that are the same key, of the same type."""
    return (type(key), key) if type(key) in _HASHABLE else (None, _text(key))


def _text(value: Any) -> str:
    """A text that is the same for values that are written in the same way, and for no others."""
    return repr(to_json(node_of(value)))


_ABSENT = object()


class _Applied:
    """What entries make of the first part's values, each two of them once: one dict can stand in
    many places.
    """

    def __init__(self, called: str, fields: _Fields | None = None) -> None:
        self._called = called
        # where the keys of dicts stand, which are those of all parts
        self._fields: _Fields = {} if fields is None else fields
        self._made: dict[tuple[int, int], DictNode] = {}

    def to(self, base: DictNode, entry: Any) -> DictNode:
        """The dict that an entry makes out of the first part's."""
        two = id(base), id(entry)
        if two not in self._made:
            self._made[two] = self._make(base, entry)
        return self._made[two]

    def _make(self, base: DictNode, entry: Any) -> DictNode:
        order = None
        if type(entry) is ListNode and entry.kind == "tuple" and len(entry.items) == 2:
            entry, order = entry.items
        if type(entry) is not DictNode or (order is not None and type(order) is not ListNode):
            _damaged(self._called)
        if order is None and (quick := self._same_fields(base, entry)) is not None:
            return quick
        kept: Mapping[Any, tuple[Any, Any]] = {_known(key): (key, v) for key, v in entry.pairs}
        made: dict[Any, tuple[Any, Any]] = {}
        for key, value in base.pairs:
            known = _known(key)
            made[known] = (key, self._value(value, kept[known][1]) if known in kept else value)
        for known, (key, value) in kept.items():
            if known not in made:
                made[known] = (key, self._value(None, value))
        made = {known: pair for known, pair in made.items() if pair[1] is not _ABSENT}
        if order is not None:
            places = {_known(key): place for place, key in enumerate(order.items)}
            if places.keys() != made.keys():
                _damaged(self._called)
            made = {known: made[known] for known in places}
        return DictNode(base.kind, tuple(made.values()), base.node, base.attributes)

    def _same_fields(self, base: DictNode, entry: DictNode) -> DictNode | None:
        """The dict where all keys are texts and the first part has them all, as nearly always; None
        for any other.
        """
        if not _TEXT.issuperset([type(key) for key, _ in entry.pairs]):
            return None
        known = self._fields.get(id(base))
        if known is None:
            places = {key: place for place, (key, _) in enumerate(base.pairs)}
            texts = _TEXT.issuperset([type(key) for key, _ in base.pairs])
            # kept with the dict, so that nothing else gets its identity
            known = self._fields[id(base)] = base, places if texts else None
        _, places_of = known
        if places_of is None:
            return None
        pairs = list(base.pairs)
        for key, kept in entry.pairs:
            place = places_of.get(key)
            if place is None:
                return None
            value = self._value(pairs[place][1], kept)
            if value is _ABSENT:
                return None
            pairs[place] = (key, value)
        return DictNode(base.kind, tuple(pairs), base.node, base.attributes)

    def _value(self, base: Any, entry: Any) -> Any:
        """The part's value, from the first part's and what is kept."""
        if type(entry) is ListNode and entry.kind == "tuple":
            if len(entry.items) > 2:
                _damaged(self._called)
            if not entry.items:
                return _ABSENT
            if len(entry.items) == 1:
                return entry.items[0]
        elif type(entry) is not DictNode or type(base) is not DictNode or entry.kind != "dict":
            return entry
        return self.to(base, entry) if type(base) is DictNode else _damaged(self._called)


def _damaged(called: str) -> NoReturn:
    fail(
        "M906",
        f"what is kept of {printable(called)} at `{PARTS}` is nothing that migrate writes",
        help="the file was changed by hand: fetch it again, or remove the entry",
    )
