"""Bytes and objects to a `StateRecord`. Everything that is there is understood or the whole state
is refused: nothing is skipped.

The machine says what the stream holds, memo and all; here each name is looked up in a closed list
together with the way in which it is used. A value that was met is decoded once, so that what shares
its parts costs no more than it is long.

A storage inside a plain pickle of a tensor is a torch.save stream of the old form in a string of
bytes:

    magic number, protocol version, system    three pickles, the same in every stream of a program
    the storage's persistent id, its keys     two pickles
    int64 count of elements, their bytes

A state holds one stream for each tensor and a checkpoint thousands of states, so the three that
never change are read once, and of states that differ in numbers alone one is decoded and the others
are compared with it. In a state of delayed scaling the numbers of each storage lie in one run of
bytes that no opcode reads, and a storage's key, an address, stands in two places of its own stream.
All other bytes decide what the state is. So a payload that has these bytes, digits where the keys
stand and the same digits in both places, would be decoded to the same record with other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

from ..core.errors import fail, printable
from ..source.blobs import BytesBlob
from ..source.pickle import torch_objects
from ..source.pickle.decoding import (
    MAGIC,
    PROTOCOL,
    STORAGES,
    ContradictionError,
    Decoding,
    ForeignError,
    is_global,
    plain,
)
from ..source.pickle.machine import read_pickle
from ..source.pickle.nodes import (
    ABSENT,
    EXTRA_STATE,
    JSON_SCALARS,
    Call,
    Dict,
    Global,
    Persistent,
    kind_of,
)
from ..source.pickle.python_objects import encoded
from ..source.pickle.torch_objects import DECODERS
from ..source.pickle.tree import ITEMSIZE
from .record import (
    BUFFERS,
    EXTRAS,
    FIELDS,
    FORMAT,
    FORMAT_HELPER,
    FORMATS,
    FUNCTIONS,
    HOW_TO_ADD,
    INVERSES,
    KEYS,
    MARK,
    MODES,
    OLD_MODES,
    PARAMETERS,
    RECIPE,
    RECIPES,
    SCALING,
    STATELESS,
    Function,
    Parameters,
    Recipe,
    ScalingState,
    StateForm,
    StateRecord,
    StateTensor,
)

MOST_HEADS = 16


class StoredState(NamedTuple):
    """A storage's persistent id, its bytes, and the stream that they end."""

    node: Persistent
    data: memoryview
    stream: bytes


class Heads:
    """The beginnings of streams that were read and found sound."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: list[bytes] = []

    def end(self, data: bytes, name: str) -> int:
        """The offset behind the three pickles that every stream begins with."""
        for head in self._known:
            if data.startswith(head):
                return len(head)
        window = data[:4096]
        magic, at = read_pickle(window, EXTRA_STATE, name=f"{name}: magic number", whole=False)
        protocol, at = read_pickle(
            window, EXTRA_STATE, name=f"{name}: protocol version", start=at, whole=False
        )
        system, end = read_pickle(
            window, EXTRA_STATE, name=f"{name}: system", start=at, whole=False
        )
        if (
            type(magic) is not int
            or magic != MAGIC
            or type(protocol) is not int
            or protocol != PROTOCOL
        ):
            raise ContradictionError(
                "a storage whose stream does not begin as torch.save begins it"
            )
        if type(system) is not Dict or system.get("little_endian") is not True:
            raise ContradictionError("a storage that was not written by a little-endian machine")
        if len(self._known) < MOST_HEADS:
            self._known.append(data[:end])
        return int(end)


HEADS = Heads()


def stored(data: bytes, name: str, heads: Heads = HEADS) -> StoredState:
    """The one storage of a stream, to the last byte. ContradictionError, M93x from the machine."""
    at = heads.end(data, name)
    # what stands in front of the numbers is short, and the machine copies what it reads
    window = data[at : at + 4096]
    node, end = read_pickle(window, EXTRA_STATE, name=name, whole=False, persistent=True)
    keys, end = read_pickle(window, EXTRA_STATE, name=f"{name}: keys", start=end, whole=False)
    at += end
    numel, itemsize, key = _described(node)
    if type(keys) is not list or len(keys) != 1 or type(keys[0]) is not str or keys[0] != key:
        raise ContradictionError("a storage under another key than it is listed with")
    if (
        len(data) < at + 8
        or int.from_bytes(data[at : at + 8], "little") != numel
        or len(data) - at - 8 != numel * itemsize
    ):
        raise ContradictionError(
            f"a storage of {numel:,} elements with {max(0, len(data) - at - 8):,} bytes"
        )
    return StoredState(node, memoryview(data)[at + 8 :], data)


def _described(node: Any) -> tuple[int, int, str]:
    """The number of elements, the size of one and the key of a persistent id."""
    identity = node.id if type(node) is Persistent else None
    if type(identity) is not tuple or len(identity) not in (5, 6) or identity[0] != "storage":
        raise ContradictionError("a stream of torch.save that holds something other than a storage")
    _, cls, key, _, numel = identity[:5]
    if (
        type(cls) is not Global
        or (cls.module, cls.name) not in STORAGES
        or type(key) is not str
        or type(numel) is not int
    ):
        raise ContradictionError("a storage whose class, key or size is of another type")
    dtype = STORAGES[cls.module, cls.name]
    if not 0 <= numel < 1 << 40:
        raise ContradictionError("a storage of an impossible size")
    return numel, 1 if dtype is None else ITEMSIZE[dtype], key


T = TypeVar("T")
# a key that is shorter is no address, and may stand anywhere
_SHORTEST_KEY = 6
# what is longer is decoded faster than it is compared
MOST_TWINS, LONGEST = 64, 64 << 10


class _StreamShape(NamedTuple):
    """`fixed` are (start, end, bytes) that must be equal, `keys` the (start, start, length) of the
    two places of each key.

    `numbers` are (start, end) of what each storage holds, in their order.
    """

    fixed: tuple[tuple[int, int, bytes], ...]
    keys: tuple[tuple[int, int, int], ...]
    numbers: tuple[tuple[int, int], ...]

    def fits(self, payload: bytes) -> bool:
        # thousands are compared, with a dozen runs each
        for a, b, held in self.fixed:
            if payload[a:b] != held:
                return False
        for a, b, n in self.keys:
            key = payload[a : a + n]
            if payload[b : b + n] != key or not key.isdigit():
                return False
        return True


class Reference(Generic[T]):
    """What is known of payloads, by all of their bytes but numbers and keys."""

    __slots__ = ("_count", "_shapes")

    def __init__(self) -> None:
        self._shapes: dict[int, list[tuple[_StreamShape, T]]] = {}
        self._count = 0

    def find_known(self, payload: bytes) -> tuple[T, Sequence[tuple[int, int]]] | None:
        """What was added for a payload with other numbers and keys, and where the numbers lie."""
        return next(
            (
                (known, shape.numbers)
                for shape, known in self._shapes.get(len(payload), ())
                if shape.fits(payload)
            ),
            None,
        )

    def add(self, payload: bytes, storages: Sequence[StoredState], known: T) -> None:
        """Remembers `known` for the payload, unless one of its `storages` cannot be placed."""
        if self._count >= MOST_TWINS or len(payload) > LONGEST or not storages:
            return
        shape = _shape(payload, storages)
        if shape is not None:
            self._shapes.setdefault(len(payload), []).append((shape, known))
            self._count += 1


def _shape(payload: bytes, storages: Sequence[StoredState]) -> _StreamShape | None:
    holes: list[tuple[int, int]] = []
    keys: list[tuple[int, int, int]] = []
    runs: list[tuple[int, int]] = []
    for held in storages:
        at = payload.find(held.stream)
        # a stream that stands in two places could be compared in the wrong one
        if at < 0 or payload.rfind(held.stream) != at:
            return None
        end = at + len(held.stream)
        numbers = end - len(held.data)
        runs.append((numbers, end))
        key = held.node.id[2].encode()
        first = payload.find(key, at, numbers)
        second = payload.find(key, first + 1, numbers)
        if (
            len(key) >= _SHORTEST_KEY
            and key.isdigit()
            and 0 <= first < second
            and payload.find(key, second + 1, numbers) < 0
        ):
            keys.append((first, second, len(key)))
            holes += [(first, first + len(key)), (second, second + len(key))]
    fixed, start = [], 0
    for a, b in [*sorted((*holes, *runs)), (len(payload), len(payload))]:
        if a < start:
            return None
        fixed.append((start, a, payload[start:a]))
        start = b
    return _StreamShape(tuple(fixed), tuple(keys), tuple(runs))


# the bytes of a storage, by its key
Storages = Callable[[str], "bytes | memoryview"]
# what makes a storage of a stream in bytes: torch's functions, Megatron's with an allow-list
_NESTED = (
    ("torch.storage", "_load_from_bytes"),
    ("megatron.core.safe_globals", "safe_load_from_bytes"),
)
# values that are never a setting
_STATE = frozenset({*SCALING, *INVERSES, *BUFFERS})
_SETTINGS = (type(None), bool, int, float, str, StateForm, Parameters)
# the ten items of the list that 0.1 and 0.2 store
_LIST = (
    "scale_fwd",
    "amax_history_fwd",
    "scale_bwd",
    "amax_history_bwd",
    "global_fp8_buffer",
    "update_amax_and_scale_fwd",
    "global_fp8_buffer_pos_fwd",
    "global_fp8_buffer_pos_bwd",
    "autocast_id_fwd",
    "autocast_id_bwd",
)
_ZIP = b"PK\x03\x04"


def decode(payload: bytes, name: str) -> StateRecord:
    """The record in the bytes of a uint8 tensor, of the archive that an `io.BytesIO` holds, or of
    an object that was packed (`objects`).

    `name` names it in messages.

    CheckpointError: M950 for other than known extra states, M93x for a stream that is
    broken or hostile, M94x for such an archive.
    """
    return examine(payload, name)[0]


def examine(payload: bytes, name: str) -> tuple[StateRecord, list[StoredState]]:
    """The record, and the storages whose streams stand in the payload."""
    if not payload:
        return StateRecord("empty", "module", "2.4 and later", {}), []
    if payload[:4] == _ZIP:
        return _archive(payload, name), []
    reader = _StateReader(name, None)
    if payload.startswith(MARK):
        return _record(
            reader, read_pickle(payload[len(MARK) :], EXTRA_STATE, name=name), ""
        ), reader.held
    return _record(reader, read_pickle(payload, EXTRA_STATE, name=name), "pickle"), reader.held


def decode_nodes(
    node: Any, name: str, storages: Storages | None = None, *, form: str = ""
) -> StateRecord:
    """The record that inert nodes spell: the list of 0.1, the dict of 0.3, or what a stream was
    read as (`form` says so).

    `storages` has the bytes of the storages that tensors refer to by persistent ids.
    """
    return _record(_StateReader(name, storages), node, form)


def _record(reader: _StateReader, node: Any, form: str) -> StateRecord:
    try:
        states, form = reader.states(node, form)
    except (ForeignError, ContradictionError) as no:
        fail(
            "M950",
            f"{reader.name}: {no}",
            help=HOW_TO_ADD if isinstance(no, _UnknownClassError) else None,
        )
    api = "module" if not states or "" in states else "ops"
    return StateRecord(form, api, releases(form, api, states), states)


def _archive(payload: bytes, name: str) -> StateRecord:
    from ..source import zip_archive

    blob = BytesBlob(name, payload)
    archive = zip_archive.read_archive(blob)
    node = read_pickle(
        zip_archive.read_record(blob, archive.records["data.pkl"], EXTRA_STATE.size),
        EXTRA_STATE,
        name=name,
        persistent=True,
    )
    records = {
        key[5:]: record for key, record in archive.records.items() if key.startswith("data/")
    }
    used: set[str] = set()

    def bytes_of(key: str) -> bytes:
        if key not in records:
            raise ContradictionError(f"storage {printable(key)} is not in the archive")
        used.add(key)
        return zip_archive.read_record(blob, records[key], EXTRA_STATE.size)

    record = decode_nodes(node, name, bytes_of, form="archive")
    if unused := sorted(records.keys() - used):
        fail("M950", f"{name}: storage {printable(unused[0])} of the archive belongs to no tensor")
    return record


class _UnknownClassError(ForeignError):
    """A class that could be a recipe."""


class _StateReader:
    """One state being decoded. Recursion is bounded by the depth that the machine allows."""

    __slots__ = ("_done", "_storages", "held", "name")

    def __init__(self, name: str, storages: Storages | None) -> None:
        self.name, self._storages = name, storages
        self._done: dict[int, Any] = {}
        self.held: list[StoredState] = []

    def states(self, node: Any, form: str) -> tuple[Mapping[str, ScalingState | None], str]:
        """The states by mode, and the form."""
        if node is None:
            return {}, {"pickle": "none", "": "nothing"}.get(form, form)
        if type(node) is list:
            if form:
                raise ForeignError("a list; only the first releases stored one, and as an object")
            if len(node) != len(_LIST):
                raise ForeignError(f"a list of {len(node)} items; 0.1 and 0.2 stored {len(_LIST)}")
            return {"": self.state(dict(zip(_LIST, node, strict=True)), listed=True)}, "list"
        pairs = self.pairs(node, "an extra state")
        form = form or "dict"
        if not pairs:
            return {}, form
        for modes in (MODES, OLD_MODES):
            if pairs.keys() <= {*modes}:
                return {mode: self.mode(part) for mode, part in pairs.items()}, form
        return {"": self.state(pairs)}, form

    def mode(self, node: Any) -> ScalingState | None:
        if node is None:
            return None
        pairs = self.pairs(node, "the state of a mode")
        return self.state(pairs) if pairs else None

    def state(self, pairs: Mapping[str, Any], listed: bool = False) -> ScalingState:
        tensors: dict[str, StateTensor] = {}
        extras: dict[str, Any] = {}
        recipe = None
        buffers = []
        for key, node in pairs.items():
            if key in SCALING or key in INVERSES:
                tensors[key] = self.scales(key, node)
            elif key in BUFFERS:
                # what cannot be understood may hide behind any key
                self.value(node)
                buffers.append(key)
            elif key == RECIPE:
                recipe = self.value(node)
                if not isinstance(recipe, Recipe):
                    raise ForeignError(f"a recipe that is {kind_of(node)}")
            elif listed:
                extras[key] = self.value(node)
            elif key == EXTRAS:
                extras = {k: self.value(v) for k, v in self.pairs(node, EXTRAS).items()}
            else:
                known = ", ".join(sorted(KEYS))
                raise ForeignError(
                    f"the key {printable(key)}, which no release of Transformer Engine writes; "
                    f"known are {known}"
                )
        for side in ("fwd", "bwd"):
            self.match(tensors, side)
        return ScalingState(recipe, tensors, extras, tuple(buffers))

    def scales(self, key: str, node: Any) -> StateTensor:
        found = self.value(node)
        rank = 2 if key.startswith("amax") else 1
        if not isinstance(found, StateTensor):
            raise ForeignError(f"{key} is {kind_of(node)}, not a tensor")
        if found.dtype != "float32" or len(found.shape) != rank or 0 in found.shape:
            raise ForeignError(
                f"{key} is {found.dtype}{list(found.shape)}; a float32 tensor with {rank} axes "
                "belongs there"
            )
        return found

    def match(self, tensors: Mapping[str, StateTensor], side: str) -> None:
        """Scales, their inverses and the histories of one direction have as many slots."""
        slots = {name: t.shape[-1] for name, t in tensors.items() if name.endswith(side)}
        if len(set(slots.values())) > 1:
            raise ForeignError(
                "tensors that do not fit together: "
                + ", ".join(f"{name} has {n} slots" for name, n in slots.items())
            )

    def pairs(self, node: Any, what: str) -> dict[str, Any]:
        """A dict or an OrderedDict with text keys."""
        if type(node) is Call and is_global(node.function, ("collections", "OrderedDict")):
            if node.arguments or node.items or node.state is not ABSENT or node.how != "reduce":
                raise ForeignError("an OrderedDict with more than pairs")
            found = node.pairs or []
        elif type(node) is Dict:
            found = node.pairs
        else:
            raise self.foreign(node, f"{what} that is {kind_of(node)}")
        if any(type(key) is not str for key, _ in found):
            raise ForeignError(f"{what} with a key that is not text")
        return dict(found)

    def foreign(self, node: Any, otherwise: str) -> ForeignError:
        """What is wrong with a node that is not what belongs there."""
        function = node.function if type(node) is Call else node
        if type(function) is Global and (function.module, function.name) not in RECIPES:
            return _UnknownClassError(
                f"{printable(str(function))}, which is not a recipe or value that is known here; "
                "nothing was executed"
            )
        return ForeignError(otherwise)

    def value(self, node: Any) -> Any:
        """What a node means; ForeignError for what no state holds. One object for one node."""
        kind = type(node)
        if kind in JSON_SCALARS:
            return node
        if id(node) in self._done:
            return self._done[id(node)]
        if kind is Call:
            found = self.call(node)
        elif kind is list:
            found = [self.value(item) for item in node]
        elif kind is tuple:
            found = tuple(self.value(item) for item in node)
        elif kind is Dict:
            found = {k: self.value(v) for k, v in self.pairs(node, "a dict").items()}
        else:
            raise self.foreign(node, f"{kind_of(node)}, which no extra state holds")
        self._done[id(node)] = found
        return found

    def call(self, call: Call) -> Any:
        function = (call.function.module, call.function.name)
        if function in RECIPES:
            return Recipe(*function, self.fields(call))
        if function in PARAMETERS:
            return Parameters(*function, self.fields(call))
        if function == FORMAT or function == ("builtins", "getattr"):
            return self.format(call)
        if function == ("collections", "OrderedDict"):
            return {k: self.value(v) for k, v in self.pairs(call, "an OrderedDict").items()}
        if function == ("collections", "deque"):
            if call.how != "reduce" or call.pairs or call.state is not ABSENT:
                raise ForeignError("a deque with more than items")
            return [self.value(item) for item in call.items or ()]
        decoder = DECODERS.get((*function, call.how, len(call.arguments)))
        if decoder is not None and decoder.make is torch_objects.tensor:
            return self.tensor(call)
        raise self.foreign(call, kind_of(call))

    def fields(self, call: Call) -> dict[str, Any]:
        """The fields of an object that was made without arguments."""
        if call.how != "newobj" or call.arguments or call.items or call.pairs:
            raise ForeignError(
                f"{printable(str(call.function))}, made in another way than its releases make it"
            )
        if call.state is ABSENT:
            return {}
        out: dict[str, Any] = {}
        known = RECIPES.get((call.function.module, call.function.name))
        for key, node in self.pairs(call.state, "fields that are").items():
            if type(node) is Global:
                if known is None or FUNCTIONS.get(key) != known.sort:
                    raise self.foreign(
                        node, f"{printable(str(node))} as the field {printable(key)}"
                    )
                out[key] = Function(node.module, node.name)
            elif key.startswith("__") or key in _STATE:
                raise ForeignError(f"a recipe with the field {printable(key)}")
            else:
                out[key] = self.value(node)
                # settings are single values; whatever could hold numbers of a run is none
                if not isinstance(out[key], _SETTINGS) or type(out[key]) is tuple:
                    raise ForeignError(f"a recipe whose field {printable(key)} is {kind_of(node)}")
        return out

    def format(self, call: Call) -> StateForm:
        """`StateForm(_FormatHelper(forward, backward))`, or as `getattr(Format, name)`."""
        arguments = call.arguments
        if call.how == "reduce" and plain(call):
            if (
                call.function.name == "getattr"
                and len(arguments) == 2
                and is_global(arguments[0], FORMAT)
            ):
                if type(arguments[1]) is str and arguments[1] in FORMATS:
                    return StateForm(*FORMATS[arguments[1]])
            elif call.function.name == "Format" and len(arguments) == 1:
                helper = arguments[0]
                if (
                    type(helper) is Call
                    and is_global(helper.function, FORMAT_HELPER)
                    and len(helper.arguments) == 2
                    and plain(helper)
                ):
                    numbers = helper.arguments
                    if all(type(n) in (int, float) for n in numbers):
                        return StateForm(*numbers)
        raise self.foreign(call, "a Format that is not a pair of numbers")

    def tensor(self, call: Call) -> StateTensor:
        """A row-major tensor on a storage in a string of bytes, or in the stream's container."""
        storage, *rest = call.arguments
        held: bytes | memoryview
        if type(storage) is Call:
            if (
                not is_global(storage.function, *_NESTED)
                or storage.how != "reduce"
                or len(storage.arguments) != 1
                or not plain(storage)
            ):
                raise self.foreign(storage, f"a tensor on {kind_of(storage)}")
            self.held.append(stored(encoded(storage.arguments[0]), self.name))
            node, held = self.held[-1][:2]
        elif type(storage) is Persistent and self._storages is not None:
            node = storage
            identity = storage.id
            key = identity[2] if type(identity) is tuple and len(identity) > 2 else None
            if type(key) is not str:
                raise ContradictionError("a storage without a key")
            held = self._storages(key)
        else:
            raise ForeignError(f"a tensor on {kind_of(storage)}")
        decoding = Decoding(self.name)
        record = torch_objects.tensor(Call("reduce", call.function, (node, *rest)), None, decoding)
        if not plain(call):
            raise ForeignError("a tensor that was changed after it was rebuilt")
        if record.storage.nbytes != len(held):
            raise ContradictionError(
                f"a storage of {record.storage.nbytes:,} bytes of which {len(held):,} are there"
            )
        if not record.contiguous or record.conjugate or record.negative:
            raise ForeignError("a tensor that is not stored row by row")
        size = ITEMSIZE[record.dtype]
        start = record.offset * size
        end = start + prod(record.shape) * size
        return StateTensor(record.dtype, record.shape, memoryview(held)[start:end])


_NONE = {
    "archive": "0.12 to 1.13",
    "none": "0.6 to 0.11 and 2.0 to 2.3",
    "nothing": "0.1 to 0.5",
    "pickle": "2.0 to 2.17",
}
# from this release on stateless recipes are not stored
_SILENT = (2, 18)


def releases(form: str, api: str, states: Mapping[str, ScalingState | None]) -> str:
    """The range of releases, in words. A range that nothing narrows ends "and later"."""
    held = [s for s in states.values() if s is not None]
    if form == "list":
        return "0.1 to 0.2"
    if form == "dict":
        return "0.3 to 0.5"
    if not held:
        return "1.13" if OLD_MODES[0] in states else _NONE.get(form, "")
    recipes = [s.recipe for s in held if s.recipe is not None]
    if api == "ops" and not recipes:
        return "1.13" if not states.keys().isdisjoint(OLD_MODES) else "2.0 to 2.2"
    if form == "archive":
        return "0.12 to 1.5" if any(s.buffers for s in held) else "1.6 to 1.13"
    if recipes:
        return _by_recipes(recipes, (2, 3) if api == "ops" else (2, 0))
    if any(name in s.tensors for s in held for name in INVERSES):
        return "0.8 to 0.11"
    return "0.6 to 0.7" if any(name in s.buffers for s in held for name in BUFFERS) else "unknown"


def _by_recipes(recipes: Iterable[Recipe], first: tuple[int, int]) -> str:
    last: tuple[int, int] | None = None
    for recipe in recipes:
        first = max(first, RECIPES[recipe.module, recipe.name].since)
        if recipe.sort == STATELESS:
            last = _SILENT
        for field, (since, until) in FIELDS.items():
            if field in recipe.fields:
                first, last = max(first, since), min(filter(None, (last, until)), default=None)
            elif until is not None and recipe.name == "DelayedScaling" and field == "interval":
                first = max(first, until)
    begin = f"{first[0]}.{first[1]}"
    if last is None:
        return f"{begin} and later"
    end = f"{last[0]}.{last[1] - 1}"
    return begin if first >= (last[0], last[1] - 1) else f"{begin} to {end}"
