"""Streams that say nearly the same, as the parts of one checkpoint do: what they say alike is read
once.

A stream that was read is a form for the next ones. Where another one has other plain values
(numbers, texts, None) the form is left open, and a stream with the form's bytes around its own
values is what the form was read as, with these values in their places. The machine never looks into
a plain value unless it is compared, as a key or a member of a set, and a form is not open there;
the walk decodes anew what holds an open place, and goes no further where that is a tensor or
anything outside the allow-list. So what comes out is what reading all of the stream would give, and
whatever does not fit is read so.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise, repeat
from typing import Any, NamedTuple

from ...core.errors import CheckpointError
from .machine import LENGTHS, OPERANDS, lengthy, read_pickle
from .nodes import ARCHIVE, COMPOSITES, Call, Dict, Global, Persistent, Set, WrongError
from .policy import Decoded, decode, decode_around
from .tree import (
    OBJECTS,
    Composite,
    DictNode,
    ListNode,
    LocalShard,
    TensorRecord,
    holders,
)

# forms that are kept, and places that one is open at
_MOST_FORMS, _MOST_OPEN = 16, 20_000
# a name that stands in the form's stream for an open place
_OPEN = "migrate.open"
_TENSORS = frozenset({TensorRecord, Composite, LocalShard})
_PLAIN = {0x4E: None, 0x88: True, 0x89: False}
_INTEGER, _integer = 0x4A, struct.Struct("<i").unpack_from
_LONG = 0x8A
# numbers of a random state, below 2**31 and from there on; and how many of them in a row are worth
# more than a look at each
_OF_STATE = rb"(?:J...[\x00-\x7f]|\x8a\x05....\x00)"
_NUMBER = re.compile(rb"(?:J|\x8a\x05)(....)\x00?", re.DOTALL)
_ROW = 16


# where a row begins among the children of a sequence and among the open places, and how long it is
_Stretch = tuple[int, int, int]


class _Row(NamedTuple):
    """Open places with nothing between them: how many there are, what finds all of them, and what
    reads their numbers.
    """

    length: int
    pattern: re.Pattern[bytes]
    numbers: Callable[[bytes], tuple[int, ...]]


class StreamsAlike:
    """Reads streams of one kind one after the other; `runs` counts those that the machine read."""

    def __init__(self) -> None:
        self.runs = 0
        self._forms: list[_StreamForm] = []

    def decode(self, stream: bytes, sizes: Mapping[str, int], name: str) -> Decoded:
        """What `policy.decode` makes of the stream; raises as it and `machine.read_pickle`. Values
        without tensors can be those of an earlier stream, tensors are always others.
        """
        found = self._known(stream, sizes, name)
        if found is None:
            self.runs += 1
            nodes = read_pickle(stream, ARCHIVE, name=f"{name}: data.pkl", persistent=True)
            found = decode(nodes, name, sizes)
            if not found.outside:
                self._forms = [_StreamForm(stream, sizes, name), *self._forms[: _MOST_FORMS - 1]]
        return found

    def _known(self, stream: bytes, sizes: Mapping[str, int], name: str) -> Decoded | None:
        like = [form for form in self._forms if form.sizes == sizes]
        for form in like:
            if (values := form.values(stream)) is not None:
                return form.filled(values, name)
        for form in like:
            places = form.places_of(stream)
            if places is None or form.failed:
                continue
            self.runs += 1
            if form.open_at(places) and (values := form.values(stream)) is not None:
                return form.filled(values, name)
        return None


class _StreamForm:
    """A stream that was read whole, and the offsets of the opcodes that others have otherwise."""

    def __init__(self, stream: bytes, sizes: Mapping[str, int], name: str) -> None:
        self.stream, self.sizes, self.name = stream, sizes, name
        self.failed = _OPEN.encode() in stream
        self._places: tuple[int, ...] = ()
        self._texts: tuple[bytes, ...] | None = None
        self._rows: dict[int, _Row] = {}
        self._starts: list[int] = []
        # of nodes that hold an open place: which of their children do, and of a place its number
        self._holding: dict[int, list[int]] = {}
        self._open: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._root: Any = None
        self._nodes: Any = None
        # of sequences that hold open places, in which rows these are, and what else holds some
        self._stretches: dict[int, tuple[list[_Stretch], list[int]]] = {}
        # what was decoded, by the identities of nodes: without tensors, and with, as numbers of
        # copies, which are those of tensors and then of what holds them and where
        self._values: dict[int, Any] = {}
        self._copies: list[tuple[int, int]] = []
        self._records: list[TensorRecord] = []
        self._copied: list[tuple[Any, list[tuple[int, int]]]] = []
        self._decoded: Decoded | None = None
        # of nodes that hold an open place, those below others first, what each was decoded to and
        # where in it others stand, None where that is to be decoded anew, and where copies do
        self._recipes: list[
            tuple[int, Any, list[tuple[int, Any]] | None, list[tuple[int, int]]]
        ] = []

    def values(self, stream: bytes) -> list[Any] | None:
        """What the stream has in the open places; None unless it is the form otherwise."""
        if self.failed or self._texts is None:
            return None
        *texts, last = self._texts
        from_bytes = int.from_bytes
        at, found, size = 0, list[Any](), len(stream)
        number, count = 0, len(texts)
        while number < count:
            if text := texts[number]:
                if not stream.startswith(text, at):
                    return None
                at += len(text)
            row = self._rows.get(number)
            if row is not None and (many := row.pattern.match(stream, at)) is not None:
                found += row.numbers(b"".join(_NUMBER.findall(many[0])))
                at, number = many.end(), number + row.length
                continue
            number += 1
            if at + 5 <= size and stream[at] == _INTEGER:
                found += _integer(stream, at + 1)
                at += 5
                continue
            if at + 7 <= size and stream[at] == _LONG and stream[at + 1] == 5:
                found.append(from_bytes(stream[at + 2 : at + 7], "little", signed=True))
                at += 7
                continue
            read = _plain_value(stream, at)
            if read is None:
                return None
            value, at = read
            found.append(value)
        return found if len(stream) == at + len(last) and stream.endswith(last) else None

    def places_of(self, stream: bytes) -> list[int] | None:
        """Where the form must be open for the stream to be one of it; None if that cannot be."""
        starts = self._starts = self._starts or _opcodes(self.stream)
        at = there = number = 0
        found: list[int] = []
        while len(found) < _MOST_OPEN:
            place = (*self._places[number : number + 1], len(self.stream))[0]
            same = _alike(self.stream, at, stream, there, place - at)
            at, there = at + same, there + same
            if at < place:
                # the opcode in hand begins where both are still the same
                start = starts[bisect_right(starts, at) - 1]
                at, there = start, there - (at - start)
            elif place == len(self.stream):
                return found if there == len(stream) else None
            else:
                number += 1
            one, other = _plain_value(self.stream, at), _plain_value(stream, there)
            if one is None or other is None:
                return None
            found.append(at)
            at, there = one[1], other[1]
        return None

    def open_at(self, places: list[int]) -> bool:
        """Reads the form once more, open at these places; whether it can be."""
        mine = []
        texts = []
        at = 0
        for place in places:
            value, end = _plain_value(self.stream, place) or (None, place)
            mine.append(value)
            texts.append(self.stream[at:place])
            at = end
        texts.append(self.stream[at:])
        marked = b"".join(
            part
            for number, text in enumerate(texts)
            for part in (b"c%s\nn%d\n" % (_OPEN.encode(), number - 1) if number else b"", text)
        )
        self._places, self._texts = tuple(places), tuple(texts)
        self._rows = _rows(texts)
        self._holding, self._open, self._numbers = {}, {}, {}
        self._stretches = {}
        try:
            self._root = read_pickle(marked, ARCHIVE, name=self.name, persistent=True)
        except CheckpointError:
            self.failed = True
            return False
        self._find(self._root, {})
        self.failed |= len(self._numbers) != len(mine)
        return not self.failed and self._decode(mine)

    def _decode(self, values: list[Any]) -> bool:
        # kept, for what was decoded is known by the identity of nodes
        made: dict[int, Any] = {}
        self._nodes = nodes = self._fill(self._root, values, made)
        self._decoded = found = decode(nodes, self.name, self.sizes)
        holding: set[int] = set()
        met: set[int] = set()
        holders(found.tree, _TENSORS, holding, met)
        self._values = {}
        with_tensors: list[tuple[int, Any]] = []
        for number, value in found.finished.items():
            kind = type(value)
            if kind is not TensorRecord and id(value) not in holding:
                if kind is Composite or kind is LocalShard:
                    self.failed = True
                self._values[number] = value
                continue
            state = value.state if kind is TensorRecord else None
            if kind not in (TensorRecord, DictNode, ListNode) or id(state) in holding:
                self.failed = True
            with_tensors.append((number, value))
        if self.failed:
            return False
        known = self._copied_from(with_tensors)
        self._recipes = []
        for number, node in self._open.items():
            value = found.finished.get(id(made.get(number)))
            places = _places(node, value, self._holding[number])
            held = [] if places is None or id(value) not in known else _known_in(value, known)
            self._recipes.append((number, value, places, held))
        return not self.failed

    def _copied_from(self, with_tensors: list[tuple[int, Any]]) -> dict[int, int]:
        """How values with tensors are copied; their numbers by identity: of tensors, then of what
        holds them.
        """
        records = {id(v): v for _, v in with_tensors if type(v) is TensorRecord}
        holding = {id(v): v for _, v in with_tensors if type(v) is not TensorRecord}
        known = {one: number for number, one in enumerate(records)}
        self._records, self._copied = list(records.values()), []
        for one, value in holding.items():
            self._copied.append((value, _known_in(value, known)))
            known[one] = len(known)
        self._copies = [(number, known[id(value)]) for number, value in with_tensors]
        return known

    def filled(self, values: list[Any], name: str) -> Decoded | None:
        """What the form is with these values in its open places; None where that has to be read by
        itself.
        """
        if self._decoded is None:
            return None
        nodes_of: dict[int, Any] = {}
        nodes = self._fill(self._root, values, nodes_of)
        # as `core.types.records` makes them
        copies: list[Any] = list(map(tuple.__new__, repeat(TensorRecord), self._records))
        for value, held in self._copied:
            copies.append(_with_copies(value, held, copies))
        finished = dict(self._values)
        finished.update([(number, copies[at]) for number, at in self._copies])
        made: dict[int, Any] = {}
        for number, like, places, held in self._recipes:
            node = nodes_of[number]
            if places is not None:
                value = self._renewed(_with_copies(like, held, copies), node, places, values, made)
            else:
                around = decode_around(node, name, finished)
                if around is None:
                    return None
                (value,) = around
            made[number] = finished[id(node)] = value
        tree = made[id(self._root)] if self._recipes else finished.get(id(nodes), nodes)
        known = self._decoded
        return Decoded(tree, known.storages, (), known.hidden, {}, None, known)

    def _renewed(
        self,
        like: Any,
        node: Any,
        places: list[tuple[int, Any]],
        values: list[Any],
        made: dict[int, Any],
    ) -> Any:
        """What a node is decoded to, which is `like` another one but for what stands in these
        places.
        """
        if type(like) is ListNode and like.items is like.node:
            # a tuple of plain values
            return ListNode(like.kind, node, node)
        numbers = self._numbers
        here = [(at, values[numbers[one]] if one in numbers else made[one]) for at, one in places]
        if type(like) is DictNode:
            if type(node) is Call:
                # the fields of an object are those of its state
                ((_, fields),) = here
                return DictNode(like.kind, fields.pairs, node)
            pairs = list(like.pairs)
            for at, value in here:
                pairs[at] = (pairs[at][0], value)
            return DictNode(like.kind, tuple(pairs), node)
        items = list(like.items)
        for at, value in here:
            items[at] = value
        return ListNode(like.kind, tuple(items), node)

    def _find(self, node: Any, met: dict[int, bool], compared: bool = False) -> bool:
        """Whether a node holds an open place, noted for all below it; the form fails where such a
        place is `compared` or names a storage.
        """
        kind = type(node)
        if kind is Global and node.module == _OPEN:
            self.failed |= compared
            self._numbers[id(node)] = int(node.name[1:])
            return True
        if kind not in COMPOSITES:
            return False
        if id(node) in met:
            self.failed |= compared and met[id(node)]
            return met[id(node)]
        compared |= kind is Set or kind is Persistent
        held = [self._find(child, met, compared) for child in _children(node, kind)]
        if kind is Dict or kind is Call:
            for key, _ in node.pairs or ():
                self._find(key, met, True)
        met[id(node)] = found = any(held)
        if found:
            self._holding[id(node)] = [number for number, one in enumerate(held) if one]
            self._open[id(node)] = node
        return found

    def _fill(self, node: Any, values: list[Any], made: dict[int, Any]) -> Any:
        """The node with these values in the open places; itself where it holds none."""
        if id(node) in self._numbers:
            return values[self._numbers[id(node)]]
        here = self._holding.get(id(node))
        if here is None:
            return node
        if id(node) in made:
            return made[id(node)]
        kind = type(node)
        filled: Any
        if kind is Dict:
            filled = Dict(self._filled_pairs(node.pairs, here, values, made))
        elif kind is Call:
            filled = Call(node.how, node.function, self._fill(node.arguments, values, made))
            filled.state = self._fill(node.state, values, made)
            filled.items = self._fill(node.items, values, made)
            every = range(len(node.pairs or ()))
            filled.pairs = node.pairs and self._filled_pairs(node.pairs, every, values, made)
        else:
            items = list(node)
            rows, below = self._in_rows(node, here)
            for number, place, count in rows:
                items[number : number + count] = values[place : place + count]
            for number in below:
                items[number] = self._fill(items[number], values, made)
            filled = tuple(items) if kind is tuple else items
        made[id(node)] = filled
        return filled

    def _in_rows(self, node: Any, here: list[int]) -> tuple[list[_Stretch], list[int]]:
        """Which of these children of a sequence are open places, in rows as long as there are, and
        which hold some.
        """
        found = self._stretches.get(id(node))
        if found is None:
            rows: list[_Stretch] = []
            below = []
            for number in here:
                place = self._numbers.get(id(node[number]))
                if place is None:
                    below.append(number)
                elif rows and (number, place) == (sum(rows[-1][::2]), sum(rows[-1][1:])):
                    rows[-1] = (*rows[-1][:2], rows[-1][2] + 1)
                else:
                    rows.append((number, place, 1))
            found = self._stretches[id(node)] = rows, below
        return found

    def _filled_pairs(
        self,
        pairs: list[tuple[Any, Any]],
        here: Iterable[int],
        values: list[Any],
        made: dict[int, Any],
    ) -> list[tuple[Any, Any]]:
        filled = list(pairs)
        for number in here:
            key, value = pairs[number]
            filled[number] = (key, self._fill(value, values, made))
        return filled


def _known_in(value: Any, known: Mapping[int, int]) -> list[tuple[int, int]]:
    """Where in a container values stand that are `known` by identity, and their numbers."""
    held = [one for _, one in value.pairs] if type(value) is DictNode else value.items
    return [(at, known[id(one)]) for at, one in enumerate(held) if id(one) in known]


def _with_copies(value: Any, held: list[tuple[int, int]], copies: list[Any]) -> Any:
    """The container with the copies that it holds."""
    if not held:
        return value
    if type(value) is DictNode:
        pairs = list(value.pairs)
        for at, number in held:
            pairs[at] = (pairs[at][0], copies[number])
        return DictNode(value.kind, tuple(pairs), value.node, value.attributes)
    items = list(value.items)
    for at, number in held:
        items[at] = copies[number]
    return ListNode(value.kind, tuple(items), value.node)


def _rows(texts: list[bytes]) -> dict[int, _Row]:
    """The long rows of open places by the number of their first, where `texts` are before them."""
    firsts = [number for number, text in enumerate(texts) if text or not number]
    counts = {first: after - first for first, after in pairwise(firsts)}
    return {
        first: _Row(
            count,
            re.compile(_OF_STATE + b"{%d}" % count, re.DOTALL),
            struct.Struct(f"<{count}I").unpack,
        )
        for first, count in counts.items()
        if count >= _ROW
    }


def _places(node: Any, value: Any, here: list[int]) -> list[tuple[int, Any]] | None:
    """Where children of a node stand in the value that it was decoded to, with the identities of
    the children; None where that is not known.
    """
    kind = type(node)
    if kind is Call:
        # an object that is its fields is decoded from its state alone
        known = type(value) is DictNode and value.kind in OBJECTS and here == [1]
        return [(0, id(node.state))] if known and type(node.state) is Dict else None
    if kind is Dict:
        known = type(value) is DictNode and value.attributes is None
        return [(at, id(node.pairs[at][1])) for at in here] if known else None
    known = (kind is tuple or kind is list) and type(value) is ListNode
    return [(at, id(node[at])) for at in here] if known else None


def _children(node: Any, kind: type) -> Iterable[Any]:
    """What a composite holds, without the keys of its pairs."""
    if kind is Dict:
        return [value for _, value in node.pairs]
    if kind is Call:
        pairs = [value for _, value in node.pairs or ()]
        return [node.arguments, node.state, node.items, *pairs]
    if kind is Persistent:
        return [node.id]
    return node.items if kind is Set else node  # type: ignore[no-any-return]


def _plain_value(data: bytes, at: int) -> tuple[Any, int] | None:
    """The plain value whose opcode begins there, and where the next one begins; None for others."""
    try:
        op = data[at]
        if op == _INTEGER:
            return _integer(data, at + 1)[0], at + 5
        if op == _LONG:
            end = at + 2 + data[at + 1]
            if end > len(data) or data[at + 1] > ARCHIVE.integer:
                return None
            return int.from_bytes(data[at + 2 : end], "little", signed=True), end
        if op == 0x4B:
            return data[at + 1], at + 2
        if op == 0x4D:
            return struct.unpack_from("<H", data, at + 1)[0], at + 3
        if op in _PLAIN:
            return _PLAIN[op], at + 1
        if op == 0x47:
            return struct.unpack_from(">d", data, at + 1)[0], at + 9
        if op == 0x58:
            value, end = lengthy(op, data, at, ARCHIVE)
            return (value, end) if end <= len(data) else None
    except (IndexError, struct.error, UnicodeDecodeError, WrongError):
        pass
    return None


def _opcodes(data: bytes) -> list[int]:
    """Where the opcodes of a stream that was read begin."""
    found = [0]
    at = 2
    while at < len(data):
        found.append(at)
        op = data[at]
        if op == 0x63:
            at = data.index(b"\n", data.index(b"\n", at) + 1) + 1
        elif op == 0x8A or op == 0x8C:
            at += 2 + data[at + 1]
        elif op in LENGTHS:
            _, at = lengthy(op, data, at, ARCHIVE)
        else:
            at += 1 + OPERANDS.get(op, 0)
    return found


def _alike(one: bytes, at: int, other: bytes, there: int, most: int) -> int:
    """How many bytes from these places on are the same."""
    most = min(most, len(other) - there)
    same, step = 0, 64
    while same < most:
        size = min(step, most - same)
        if one[at + same : at + same + size] == other[there + same : there + same + size]:
            same, step = same + size, 2 * step
        elif size == 1:
            return same
        else:
            most, step = same + size, max(1, size // 2)
    return same
