"""The allow-list, and the walk that turns inert nodes into a tree of known values.

What may be read is a pair of names, the way it is called, and the number of arguments: never a
module, never a prefix. Nothing stops at the first unknown name. It becomes an opaque leaf, and the
report says which names there are and where they sit; whether such entries are refused or dropped is
the caller's question. What contradicts itself is no question: all of it is raised at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ...core.errors import Diagnostic, option, printable, raise_all
from ..jsontext import collector_paused
from . import python_objects, quantized_tensors, settings, torch_objects
from .decoding import (
    STORAGES,
    ContradictionError,
    Decoder,
    Decoding,
    ForeignError,
    NestedError,
    Table,
)
from .nodes import ABSENT, JSON_SCALARS, Call, Dict, Global, Persistent, Set, kind_of
from .tree import (
    SCALARS,
    Constant,
    DictNode,
    ListNode,
    Opaque,
    Storage,
    TensorRecord,
    dotted,
    inside,
)

DECODERS: Table = {
    **torch_objects.DECODERS, **python_objects.DECODERS, **quantized_tensors.DECODERS,
    **settings.DECODERS,
}  # fmt: skip
# names that are values, or that may stand where a class is asked for
NAMES = frozenset(
    {
        *torch_objects.CONSTANTS, *torch_objects.SUBCLASSES, *torch_objects.WRAPPED,
        *quantized_tensors.NAMES,
        *STORAGES, *torch_objects.DTENSOR, torch_objects.WRAPPER, ("numpy", "ndarray"),
        *((module, name) for module, name, _, _ in DECODERS),
    }
)  # fmt: skip
# what our files may name: also what a defaultdict calls, and how a class is asked for its method
WRITTEN = NAMES | {("builtins", name) for name in (*python_objects.FACTORIES, "getattr")}

# How many places and names a report holds; the rest is counted. Past the last number a file is
# refused without looking further.
MOST_PATHS, MOST_NAMES, MOST_OPAQUE = 20, 1000, 100_000
_SCALARS = JSON_SCALARS | {bytes, bytearray}


@dataclass(frozen=True, slots=True)
class Outside:
    """One name outside the allow-list: `reason` why it is not read, `count` places it was found at,
    the first of them as `paths`.
    """

    name: str
    reason: str
    count: int
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Decoded:
    """What one stream holds: `tree`, its storages by key, what is `outside` the allow-list.

    `hidden` are the keys of the storages that only opaque leaves refer to. `finished` has what each
    node was decoded to, by its identity, and `kept` the nodes that decoders made. `form` is one
    object for streams that say the same but for plain values, whose trees have all else in common
    but tensors and what holds them; None for one that was read by itself.
    """

    tree: Any
    storages: Mapping[str, Storage]
    outside: tuple[Outside, ...]
    hidden: frozenset[str]
    finished: Mapping[int, Any]
    kept: Any
    form: Any = None


def decode(root: Any, name: str, records: Mapping[str, int] | None = None) -> Decoded:
    """The tree of what `machine.read_pickle` returned. `records` are the bytes of each storage by
    key, where the container knows them.

    What is shared in the stream is one object in the tree. Raises CheckpointError with all
    contradictions: M936 for tensors that lie outside their storages, storages described in two
    ways, of another size than their record, or missing, records that nothing refers to, and known
    names with impossible arguments; M914 for tensors that are expanded beyond four times what is
    stored; M935 alone for more than 100,000 values outside the allow-list.
    """
    walker = _Walk(Decoding(name, records))
    finished: dict[int, Any] = {}
    with collector_paused():
        tree = walker.run(root, finished)
    decoding = walker.decoding
    outside = walker.names() if walker.places else ()
    hidden = frozenset(decoding.storages) - _seen_storages(tree) if outside else frozenset()
    if records is not None:
        for key in records:
            if key not in decoding.storages:
                decoding.problems.add(
                    "M936",
                    f"record {printable(key)} holds {records[key]:,} bytes that no tensor refers "
                    "to",
                    help="what is in the file and in no tensor would be lost; save the checkpoint "
                    "again",
                )
    decoding.check_expansion(tree)
    if decoding.problems.count:
        decoding.problems.check()
    return Decoded(tree, decoding.storages, outside, hidden, finished, decoding.kept)


def decode_around(root: Any, name: str, finished: dict[int, Any]) -> tuple[Any] | None:
    """The tree of nodes of which those below some are `finished`; None where there are tensors,
    contradictions or names outside the allow-list among the others, which is for `decode`.
    """
    walker = _Walk(Decoding(name))
    tree = walker.run(root, finished)
    decoding = walker.decoding
    if walker.places or decoding.problems.count or decoding.storages or decoding.spent:
        return None
    return (tree,)


def _seen_storages(tree: Any) -> set[str]:
    """The keys of the storages that decoded values refer to."""
    keys: set[str] = set()
    met: set[int] = set()
    stack = [tree]
    while stack:
        value = stack.pop()
        if type(value) in SCALARS or id(value) in met:
            continue
        met.add(id(value))
        if type(value) is TensorRecord:
            keys.add(value.storage.key)
        elif type(value) is Storage:
            keys.add(value.key)
        elif type(value) is DictNode:
            stack += [key for key, _ in value.pairs]
        stack += [held for _, held in inside(value)]
    return keys


def together(outside: Iterable[Outside]) -> tuple[Outside, ...]:
    """What several streams hold outside the allow-list, each name once: files of ranks repeat each
    other.
    """
    found: dict[tuple[str, str], Outside] = {}
    for one in outside:
        before = found.get((one.name, one.reason))
        if before is not None:
            paths = dict.fromkeys((*before.paths, *one.paths))
            count = before.count + one.count
            one = Outside(one.name, one.reason, count, tuple(paths)[:MOST_PATHS])
        found[one.name, one.reason] = one
    return tuple(found.values())


def refusal(outside: tuple[Outside, ...], name: str, help: str | None = None) -> Diagnostic:
    """The M935 that says which names are outside the allow-list, why, and where they sit."""
    shown = ", ".join(printable(o.name) for o in outside[:MOST_PATHS])
    more = f" and {len(outside) - MOST_PATHS} more" if len(outside) > MOST_PATHS else ""
    notes = []
    for found in outside[:MOST_PATHS]:
        others = found.count - len(found.paths[:3])
        places = ", ".join(found.paths[:3]) + (f" and {others:,} more" if others else "")
        notes.append(f"{printable(found.name)} ({found.reason}) at {places}")
    names = "a name" if len(outside) == 1 else f"{len(outside)} names"
    return Diagnostic(
        "M935",
        f"{printable(name, 400)}: {names} outside the allow-list: {shown}{more}; nothing was "
        "executed",
        notes=tuple(notes),
        help=help
        or f"{option('allow', 'opaque')} drops these entries and says so; "
        f"{option('allow', 'carry')} writes them again as they are, without reading them; or save "
        "the checkpoint again without them",
        permit="" if help else "opaque",
    )


class _Frame:
    """A container being decoded: its `parts`, those that are `done`, and what is made of them."""

    __slots__ = ("done", "make", "node", "numbered", "paired", "parts")

    def __init__(
        self,
        node: Any,
        parts: list[Any],
        make: Callable[[list[Any]], Any],
        paired: int = 0,
        numbered: bool = False,
    ) -> None:
        self.node, self.parts, self.make, self.paired, self.numbered = (
            node,
            parts,
            make,
            paired,
            numbered,
        )
        self.done: list[Any] = []


class _Walk:
    """One pass from the leaves up, without recursion. A node that is met twice is decoded once."""

    __slots__ = ("_known", "_scanned", "decoding", "places", "stack")

    def __init__(self, decoding: Decoding) -> None:
        self.decoding = decoding
        self.stack: list[_Frame] = []
        self._known: dict[tuple[Global, str, int], Decoder | None] = {}
        # of each opaque leaf, the paths at which it was met
        self.places: dict[int, tuple[Opaque, int, list[str]]] = {}
        self._scanned: set[int] = set()
        decoding.here = self.here

    def here(self) -> str:
        """The path of the value in hand."""
        path: list[Any] = []
        for frame in self.stack:
            at = len(frame.done)
            if at < frame.paired:
                path.append(frame.parts[at - at % 2])
            elif frame.numbered:
                path.append(at)
        return dotted(tuple(path))

    def run(self, root: Any, finished: dict[int, Any]) -> Any:
        top = _Frame(None, [root], itemgetter(0))
        stack = self.stack
        stack.append(top)
        known, decoding = self._known, self.decoding
        while True:
            frame = stack[-1]
            parts, done = frame.parts, frame.done
            while len(done) < len(parts):
                part = parts[len(done)]
                kind = type(part)
                if kind in _SCALARS:
                    done.append(part)
                    continue
                if id(part) in finished:
                    value = finished[id(part)]
                    if type(value) is Opaque:
                        self._met(value)
                    done.append(value)
                    continue
                if kind is Call:
                    sort = (part.function, part.how, len(part.arguments))
                    if sort not in known:
                        function = part.function
                        known[sort] = DECODERS.get((function.module, function.name, *sort[1:]))
                    decoder = known[sort]
                    if decoder is not None and decoder.parts is not None:
                        stack.append(self._called(part, decoder))
                        break
                    try:
                        value = (
                            decoder.make(part, None, decoding)
                            if decoder is not None
                            else self._opaque(part)
                        )
                    except ForeignError as no:
                        value = self._opaque(part, str(no))
                    except ContradictionError as no:
                        decoding.problem(str(no))
                        value = Opaque("", str(no), part)
                elif kind is tuple and _SCALARS.issuperset(map(type, part)):
                    value = ListNode("tuple", part, part)
                elif kind in (tuple, list, Dict, Set):
                    stack.append(_opened(part, kind))
                    break
                else:
                    value = self._leaf(part)
                finished[id(part)] = value
                done.append(value)
            else:
                try:
                    value = frame.make(done)
                except ForeignError as no:
                    stack.pop()
                    value = self._opaque(frame.node, str(no))
                except NestedError as no:
                    stack.pop()
                    # its place was noted with what it is made of
                    value = Opaque(no.inner.name, no.inner.reason, frame.node)
                except ContradictionError as no:
                    stack.pop()
                    decoding.problem(str(no))
                    value = Opaque("", str(no), frame.node)
                else:
                    stack.pop()
                if not stack:
                    return value
                finished[id(frame.node)] = value
                stack[-1].done.append(value)

    def _called(self, call: Call, decoder: Decoder) -> _Frame:
        parts = decoder.parts(call) if decoder.parts is not None else []
        # decoders may make nodes; no other object may get their identity
        self.decoding.kept.append(parts)
        paired = 2 * len(call.pairs or ()) if decoder.keyed else 0
        return _Frame(
            call,
            parts,
            lambda done: decoder.make(call, done, self.decoding),
            paired,
            decoder.numbered,
        )

    def _leaf(self, node: Any) -> Any:
        if type(node) is Global:
            constant = torch_objects.CONSTANTS.get((node.module, node.name))
            return Constant(*constant, node) if constant is not None else self._opaque(node)
        if type(node) is Persistent:
            try:
                return self.decoding.storage(node)
            except ForeignError as no:
                return self._opaque(node, str(no))
            except ContradictionError as no:
                self.decoding.problem(str(no))
                return Opaque("", str(no), node)
        return self._opaque(node)

    def _opaque(self, node: Any, reason: str = "") -> Opaque:
        if type(node) is Call:
            name = torch_objects.shown(node.function)
            reason = reason or _why(node)
        else:
            name = torch_objects.shown(node) if type(node) is Global else kind_of(node)
            reason = reason or "a name that is not a value here"
        value = Opaque(name, reason, node)
        self._met(value)
        return value

    def _met(self, value: Opaque) -> None:
        if not value.name:
            return
        if len(self.places) == MOST_OPAQUE and id(value) not in self.places:
            way_out = f"a file with more than {MOST_OPAQUE:,} such values is not read"
            found = refusal(self.names(), self.decoding.problems.name, help=way_out)
            raise_all([found])
        held, count, paths = self.places.get(id(value), (value, 0, []))
        if len(paths) < MOST_PATHS:
            paths.append(self.here())
        self.places[id(value)] = (held, count + 1, paths)

    def names(self) -> tuple[Outside, ...]:
        """All names outside, also those inside of opaque values, each with its places. Registers
        the storages that opaque values refer to.

        An opaque value that is refused for one inside it is reported under its own name alone.
        """
        found: dict[tuple[str, str], tuple[int, list[str]]] = {}
        for value, count, paths in self.places.values():
            inner = self._scan(value)
            if type(value.node) is not Call or not _listed(value.node) or not inner:
                inner = {value.name: value.reason, **inner}
            for name, reason in inner.items():
                row = (
                    (name, reason)
                    if (name, reason) in found or len(found) < MOST_NAMES
                    else ("others", "too many names to list")
                )
                total, places = found.get(row, (0, []))
                places += [p for p in paths if p not in places][: MOST_PATHS - len(places)]
                found[row] = (total + count, places)
        return tuple(
            Outside(name, reason, count, tuple(paths))
            for (name, reason), (count, paths) in found.items()
        )

    def _scan(self, value: Opaque) -> dict[str, str]:
        """The names outside that an opaque value holds, with reasons. Each composite is looked
        through once for the whole stream.
        """
        found: dict[str, str] = {}
        stack = [value.node]
        while stack:
            node = stack.pop()
            kind = type(node)
            if kind is Global:
                if (node.module, node.name) not in NAMES:
                    found.setdefault(torch_objects.shown(node), value.reason)
                continue
            if kind in _SCALARS or id(node) in self._scanned:
                continue
            if kind is Call:
                if not _listed(node) and node is not value.node:
                    found[torch_objects.shown(node.function)] = _why(node)
                self._scanned.add(id(node))
                stack += [
                    node.arguments,
                    *(node.items or ()),
                    *(part for pair in node.pairs or () for part in pair),
                ]
                if node.state is not ABSENT:
                    stack.append(node.state)
            elif kind is Persistent:
                self._hidden(node)
                stack.append(node.id)
            elif kind in (tuple, list, Set):
                self._scanned.add(id(node))
                stack += node.items if kind is Set else node
            elif kind is Dict:
                self._scanned.add(id(node))
                stack += [part for pair in node.pairs for part in pair]
        return found

    def _hidden(self, node: Persistent) -> None:
        try:
            self.decoding.storage(node)
        except ForeignError:
            pass
        except ContradictionError as no:
            self.decoding.problem(str(no))


def _opened(node: Any, kind: type) -> _Frame:
    if kind is Dict:
        parts = python_objects.flat(node.pairs)
        return _Frame(
            node,
            parts,
            lambda done: DictNode("dict", python_objects.paired(done, len(node.pairs)), node),
            len(parts),
        )
    if kind is Set:
        kept = python_objects.distinct
        return _Frame(
            node,
            list(node.items),
            lambda done: ListNode("frozenset" if node.frozen else "set", tuple(kept(done)), node),
        )
    return _Frame(
        node, list(node), lambda done: ListNode(kind.__name__, tuple(done), node), numbered=True
    )


def _listed(call: Call) -> bool:
    return (call.function.module, call.function.name, call.how, len(call.arguments)) in DECODERS


def _why(call: Call) -> str:
    """Why a call is not read, in words."""
    module, name = call.function.module, call.function.name
    reason = torch_objects.REFUSED.get((module, name))
    if reason is not None:
        return reason
    if any((module, name) == (m, n) for m, n, _, _ in DECODERS):
        return f"made in another way than is known, with {len(call.arguments)} arguments"
    if module.startswith(("torch.nn.modules.", "transformers.models.")):
        return "a whole module; save its state_dict()"
    return "not on the allow-list"
