"""What an inert pickle means once its names are understood: plain values, containers that remember
their kind, and leaves.

None, bool, int, float, complex, str, bytes and bytearray stand for themselves. Every other value
keeps the node that it was read from, so that what was not changed is written again exactly as it
was. Containers compare by identity: what the stream held once and used twice is one object, and
comparing what an attacker built by value could take for ever. Tensors and their storages are named
tuples, because there are a hundred thousand of them.

A tensor that a library pickles as an object is spread over plain tensors; an `Encoding` says how,
and what their numbers are. Transformer Engine says the dtype of its bytes by an integer of a C++
enum, and the integers changed: 7 was E5M2 and is E4M3. Which of them is meant follows from how the
object was made where the call distinguishes releases, or from another object of the same file,
because one process wrote all of it. Where nothing decides, both readings are kept and the user has
to say which is meant: a wrong one gives numbers that look sound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from ...core.errors import fail, listed, option, printable
from .nodes import ABSENT, COMPOSITES, JSON_SCALARS, Call, Dict, Global, Persistent, Set

# the dtypes of quantized tensors in each numbering, named by its first release
NUMBERINGS: dict[str, dict[int, str]] = {
    "0.8": {6: "float8_e4m3fn", 7: "float8_e5m2"},
    "2.4": {7: "float8_e4m3fn", 8: "float8_e5m2", 10: "float4_e2m1fn"},
}
OLD, NEW = tuple(NUMBERINGS)
PARAMETER = "te_dtype_numbering"


@dataclass(frozen=True, slots=True)
class Encoding:
    """What a quantized tensor is made of.

    `format` is a word such as "te-mxfp8"; `name` is the class. `shape` and `dtype` (torch's name)
    are those of the tensor it stands for. `roles` has the component of each role, by the ending of
    its key: `{"data": "_rowwise_data", "scale": "_rowwise_scale_inv"}`. `number` is the dtype of
    one stored number, None while `readings` (numbering -> dtype) are more than one; `code` is the
    integer in the file. `block` is how many elements of rows and columns share a scale, None for
    all of them. `members` > 0: so many tensors of `shape[1:]` in one. `options` are the other
    scalars that the object was saved with.
    """

    format: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    roles: Mapping[str, str]
    number: str | None = None
    code: int | None = None
    readings: Mapping[str, str] | None = None
    block: tuple[int, int] | None = None
    members: int = 0
    options: Mapping[str, Any] | None = None

    def read_as(self, numbering: str) -> Encoding:
        """The encoding with its integer read by a numbering, where that is open and possible."""
        if self.number is not None or not self.readings or numbering not in self.readings:
            return self
        return replace(
            self, number=self.readings[numbering], readings={numbering: self.readings[numbering]}
        )

    def described(self) -> dict[str, Any]:
        """A JSON value for people: what the object is, and which tensors it is made of. `readings`
        only where they are several.
        """
        return {
            "object": self.name,
            "format": self.format,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "number": self.number,
            "readings": dict(self.readings or {}) if self.number is None else {},
            "block": None if self.block is None else list(self.block),
            "members": self.members,
            "roles": dict(self.roles),
            "options": {
                name: value for name, value in (self.options or {}).items() if value is not None
            },
        }


def readings(code: int, numberings: tuple[str, ...]) -> dict[str, str]:
    """What an integer can mean in these numberings: only the dtypes that quantized tensors have."""
    return {name: NUMBERINGS[name][code] for name in numberings if code in NUMBERINGS[name]}


def settled(encodings: Mapping[str, Encoding]) -> dict[str, Encoding]:
    """The encodings of one file, with integers read where its other objects leave no doubt.

    One process writes a file, so all its objects have one numbering. Where the objects contradict
    each other nothing is concluded.
    """
    common = set(NUMBERINGS)
    for encoding in encodings.values():
        if encoding.readings:
            common &= set(encoding.readings)
    if len(common) != 1:
        return dict(encodings)
    (numbering,) = common
    return {key: encoding.read_as(numbering) for key, encoding in encodings.items()}


def numbering(said: Any) -> str:
    """What a person says of the integers, as one of `NUMBERINGS`. M955 for anything else."""
    if str(said) not in NUMBERINGS:
        fail(
            "M955", f"`{PARAMETER}` is {printable(str(said))}; there are {listed(list(NUMBERINGS))}"
        )
    return str(said)


def answered(encodings: Mapping[str, Encoding], numbering: str | None) -> dict[str, Encoding]:
    """The encodings of one file, settled, and what that leaves open read as a person says by
    `numbering`, None if not given.

    M955 for a numbering that the objects of the file leave no room for.
    """
    found = settled(encodings)
    if numbering is None:
        return found
    open_ = [key for key, encoding in found.items() if encoding.readings]
    other = [key for key in open_ if numbering not in (found[key].readings or {})]
    if other and len(other) == len(open_):
        (is_,) = found[other[0]].readings or {}
        fail(
            "M955",
            f"`{PARAMETER}` is {numbering}, and the integers in the file are those of {is_}: "
            f"{listed(other, 4)}",
            help="leave it out: the file leaves no doubt",
        )
    return {key: encoding.read_as(numbering) for key, encoding in found.items()}


def ask(encodings: Mapping[str, Encoding]) -> None:
    """M955 naming the keys whose integer has two readings, and how a person says which is meant."""
    open_ = [
        key for key, encoding in encodings.items() if encoding.number is None and encoding.readings
    ]
    if open_:
        one = encodings[open_[0]]
        ways = ", ".join(
            f"{dtype} in {release} and later" for release, dtype in (one.readings or {}).items()
        )
        fail(
            "M955",
            f"of {len(open_)} quantized tensors of Transformer Engine the dtype is {one.code}, "
            f"which is {ways}: {listed(open_, 4)}",
            help=f"say which release wrote them: {option('params', f'{PARAMETER}=0.8')} for one "
            "up to 2.3, "
            f"{option('params', f'{PARAMETER}=2.4')} for 2.4 or later",
        )


# What a dtype of torch takes in a storage, in bytes an element. Names are torch's own:
# `float4_e2m1fn_x2` is one byte with two numbers, which `core.spec` calls two elements of
# `float4_e2m1fn`.
ITEMSIZE: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8,
    "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1, "qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1,
    "bits8": 1, "bits16": 2, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
}  # fmt: skip

# plain values, which hold nothing else
SCALARS = JSON_SCALARS | {complex, bytes, bytearray}

# No checkpoint has more places, and a few bytes that refer to each other could name far more.
MOST_PLACES = 5_000_000


class Storage(NamedTuple):
    """One run of bytes that tensors view: its `key` (a decimal number), `numel` elements of
    `itemsize` bytes.

    `dtype` is None for an untyped storage, whose elements are bytes. `location` is the device tag
    of the saving process: text, nothing else.
    """

    key: str
    dtype: str | None
    location: str
    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


class TensorRecord(NamedTuple):
    """One tensor: a strided view of `storage`, proven to lie inside it. `offset` and `strides`
    count elements of `dtype`.

    `dtype` is torch's name. `subclass` is None for torch.Tensor and Parameter, "Buffer" for
    nn.Buffer; `state` are the Python attributes that were saved with it, None without. `conjugate`
    and `negative` are torch's lazy bits: the stored numbers are the conjugates or negatives of the
    tensor's.
    """

    dtype: str
    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    node: Any
    parameter: bool = False
    conjugate: bool = False
    negative: bool = False
    subclass: str | None = None
    state: Any = None

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie row-major without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LocalShard:
    """The part of a DTensor that one rank held: `local` of a tensor of `shape`.

    `placements` has one text a mesh dimension, as torch prints them: "S(0)", "R", "P(sum)". `mesh`
    is the shape of the device mesh, None where the file does not say it in a way that is known;
    `state` holds the specification as it was decoded.
    """

    local: TensorRecord
    dtype: str
    shape: tuple[int, ...]
    placements: tuple[str, ...]
    mesh: tuple[int, ...] | None
    requires_grad: bool
    state: Any
    node: Any
    parameter: bool = False

    @property
    def whole(self) -> bool:
        """Whether `local` is all of the tensor."""
        alone = self.mesh is not None and set(self.mesh) <= {1}
        kinds = {p[0] for p in self.placements}
        return self.local.shape == self.shape and (
            kinds <= {"R"} or (alone and kinds <= {"R", "S"})
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Composite:
    """A tensor that is an object made of plain ones: `components` by the attribute that each of
    them is, in the class's own order.

    `sources` are the nodes in `node` that the components were read from; what else stands there is
    written again as it was. An empty attribute's name stands for the object itself. `flat`: its
    components are written with one dimension, and members that are views of them are left out,
    because the class makes them again.
    """

    encoding: Encoding
    components: tuple[tuple[str, TensorRecord], ...]
    sources: tuple[Any, ...]
    requires_grad: bool
    node: Any
    flat: bool = False

    def keys(self, key: str) -> list[tuple[str, TensorRecord]]:
        """The components by the keys that rules see, where the object is called `key`."""
        return [
            (f"{key}.{attribute}" if attribute else key, record)
            for attribute, record in self.components
        ]


# objects that are their fields, by the kind of their nodes
OBJECTS = {
    "Namespace": ("argparse", "Namespace"),
    "PipelineParallelLayerLayout": (
        "megatron.core.transformer.pipeline_parallel_layer_layout",
        "PipelineParallelLayerLayout",
    ),
}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DictNode:
    """A mapping in its own order; `kind` is "dict", "OrderedDict", "Counter" or "defaultdict", or
    one of `OBJECTS`, whose pairs are its fields.

    `attributes` is the decoded state, such as the `_metadata` of a state dict, or None.
    """

    kind: str
    pairs: tuple[tuple[Any, Any], ...]
    node: Any
    attributes: Any = None

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a text key."""
        return next(
            (value for found, value in self.pairs if type(found) is str and found == key), default
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ListNode:
    """A sequence or set; `kind` is "list", "tuple", "set", "frozenset", "deque", "Size", "slice" or
    "range".

    Of the last two, the items are start, stop and step.
    """

    kind: str
    items: tuple[Any, ...]
    node: Any


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Constant:
    """A name or a tag that is a value: `text` without its module ("float32", "cuda:3").

    `kind` is "dtype", "device", "layout", "qscheme", "numpy.dtype" or "enum" (`text` is then the
    class and its member).
    """

    kind: str
    text: str
    node: Any


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Array:
    """A numpy array or (`scalar`) number: `dtype` in numpy's array-interface notation ("<f4").

    `data` are its raw bytes, row-major unless `fortran`.
    """

    dtype: str
    shape: tuple[int, ...]
    fortran: bool
    scalar: bool
    data: bytes
    node: Any


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Buffer:
    """An io.BytesIO: its bytes, not looked into, and where it was read to."""

    data: bytes
    position: int
    node: Any


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Described:
    """An object of which only the fields matter, as the parts of a DTensor's specification: `name`
    of its class, `items` or `fields`.
    """

    name: str
    items: tuple[Any, ...]
    fields: Any
    node: Any


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Opaque:
    """Something outside the allow-list: its `name` in the stream, the `reason`, the node."""

    name: str
    reason: str
    node: Any


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Carried:
    """What is outside the allow-list and is written again from its node: `storages` are the bytes
    of those that the node refers to, by their keys in it.
    """

    name: str
    reason: str
    node: Any
    storages: tuple[tuple[str, TensorRecord], ...]


class CarriedStorage(NamedTuple):
    """A storage in a carried value, whose bytes lie elsewhere: where a tensor of bytes is written
    as `at`, what the class, the location and the size of the storage are.
    """

    at: Any
    cls: Any
    location: str
    numel: int


def segment(key: Any) -> str:
    """A key as a part of a printed path; never a composite's contents."""
    kind = type(key)
    if kind is str:
        return key  # type: ignore[no-any-return]
    return str(key) if kind in (int, float, bool) or key is None else f"<{kind.__name__}>"


def joined(path: tuple[Any, ...], most: int) -> str:
    """A path with dots between its keys, cut soon after `most` characters: there can be as many
    paths as values, each with long keys.
    """
    # nearly all are of text and short
    if all(type(key) is str for key in path) and sum(map(len, path)) + len(path) <= most:
        return ".".join(path)
    parts, length = [], 0
    for key in path:
        parts.append(segment(key)[: most + 1])
        length += len(parts[-1]) + 1
        if length > most:
            break
    return ".".join(parts)


# the path of what holds all others
TOP = "the top"


def dotted(path: tuple[Any, ...]) -> str:
    """A path for messages, printable and cut."""
    return printable(joined(path, 200)) if path else TOP


def inside(value: Any) -> list[tuple[Any, Any]]:
    """(path segment, value) of what `value` holds; nothing for leaves and empty containers.
    Attributes stand under "." + their name.
    """
    kind = type(value)
    if kind is DictNode:
        found = list(value.pairs)
        if value.attributes is not None:
            found.append((".state", value.attributes))
        return found
    if kind is ListNode:
        return list(enumerate(value.items))
    if kind is TensorRecord and value.state is not None:
        return [(".state", value.state)]
    if kind is Composite:
        return list(value.components)
    if kind is Carried:
        return [(f"storage {number}", held) for number, (_, held) in enumerate(value.storages)]
    if kind is LocalShard:
        return [(".local", value.local), (".spec", value.state)]
    if kind is Described:
        return (
            [*enumerate(value.items), (".fields", value.fields)]
            if value.fields is not None
            else list(enumerate(value.items))
        )
    return []


def inside_of(value: Any, kinds: frozenset[type]) -> list[tuple[Any, Any]]:
    """(path segment, value) of what `inside` has of these kinds; most containers have none."""
    kind = type(value)
    if kind is DictNode and value.attributes is None:
        return [pair for pair in value.pairs if type(pair[1]) in kinds]
    if kind is ListNode and kinds.isdisjoint(map(type, value.items)):
        return []
    return [pair for pair in inside(value) if type(pair[1]) in kinds]


def holders(
    root: Any, wanted: frozenset[type], found: set[int] | None = None, met: set[int] | None = None
) -> set[int]:
    """The identities of values that have one of a `wanted` type below them, keys included; nothing
    below a wanted one is looked at.

    Each is looked at once, also over several calls with the same two sets.
    """
    found, met = set() if found is None else found, set() if met is None else met
    stack: list[tuple[Any, list[Any] | None]] = [(root, None)]
    while stack:
        node, below = stack.pop()
        if below is not None:
            if any(type(child) in wanted or id(child) in found for child in below):
                found.add(id(node))
        elif id(node) not in met:
            met.add(id(node))
            if type(node) is ListNode:
                below = (
                    []
                    if SCALARS.issuperset(map(type, node.items))
                    else [child for child in node.items if type(child) not in SCALARS]
                )
            else:
                below = [child for _, child in inside(node) if type(child) not in SCALARS]
            if type(node) is DictNode:
                below += [key for key, _ in node.pairs if type(key) not in SCALARS]
            if below:
                stack.append((node, below))
                stack += [(child, None) for child in below if type(child) not in wanted]
    return found


def walk(tree: Any, name: str, most: int = MOST_PLACES) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each (path, value) from the top down, in order; what is shared appears in each of its places.

    The path of a value below a tensor or beside the pairs of a dict has a segment that starts with
    a dot. CheckpointError M914 past `most` places, because sharing multiplies.
    """
    stack: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    seen = 0
    while stack:
        path, value = stack.pop()
        seen += 1
        if seen > most:
            fail(
                "M914",
                f"{printable(name, 400)}: its containers share each other so often that they hold "
                f"more than {most:,} values",
                help="no program saves such a checkpoint; do not trust its origin",
            )
        yield path, value
        held = inside(value)
        if held:
            held.reverse()
            stack += [((*path, part), child) for part, child in held]


def to_nodes(tree: Any, tensor: Callable[[Any], Any], made: dict[int, Any] | None = None) -> Any:
    """The inert nodes that mean `tree`, ready to be emitted: containers anew, each tensor as
    `tensor` writes it, other leaves as they were.

    `tensor` is asked for every TensorRecord, and for every Storage that is a value by itself. What
    is one object in the tree is one node, also over several calls with one dict of what was `made`.
    A container made by the caller may have None for its node. A LocalShard keeps the storage keys
    that it was read with.
    """
    made = {} if made is None else made
    stack: list[tuple[Any, bool]] = [(tree, False)]
    while stack:
        value, ready = stack.pop()
        if id(value) in made:
            continue
        kind = type(value)
        if kind is TensorRecord or kind is Storage:
            made[id(value)] = tensor(value)
        elif kind is DictNode or kind is ListNode or kind is Composite or kind is Carried:
            if ready:
                made[id(value)] = _WRITE[kind](value, made)
            else:
                stack.append((value, True))
                stack += [(c, False) for c in _held(value) if type(c) not in SCALARS]
        else:
            made[id(value)] = value.node if isinstance(value, _LEAVES) else value
    return made.get(id(tree), tree)


_LEAVES = (LocalShard, Constant, Array, Buffer, Described, Opaque)


def _held(value: DictNode | ListNode | Composite | Carried) -> list[Any]:
    if isinstance(value, Carried):
        return [record for _, record in value.storages]
    if isinstance(value, Composite):
        return [record for _, record in value.components]
    if isinstance(value, ListNode):
        return list(value.items)
    return [part for pair in value.pairs for part in pair] + [value.attributes]


def _mapping(value: DictNode, made: dict[int, Any]) -> Any:
    # scalars are what they are
    node = made.get
    pairs = [(node(id(key), key), node(id(held), held)) for key, held in value.pairs]
    if value.kind in ("dict", "Counter"):
        plain = Dict(pairs)
        if value.kind == "dict":
            return plain
        return Call("reduce", _function(value.node, "Counter"), (plain,))
    if value.kind in OBJECTS:
        made_of = Call("newobj", Global(*OBJECTS[value.kind]), ())
        if pairs or value.node is None or value.node.state is not ABSENT:
            made_of.state = Dict(pairs)
        return made_of
    call = Call(
        "reduce",
        _function(value.node, value.kind),
        value.node.arguments if value.kind == "defaultdict" else (),
    )
    call.pairs = pairs or None
    if value.attributes is not None:
        call.state = node(id(value.attributes), value.attributes)
    return call


def _sequence(value: ListNode, made: dict[int, Any]) -> Any:
    items = [made.get(id(item), item) for item in value.items]
    if value.kind == "list":
        return items
    if value.kind == "tuple":
        return tuple(items)
    if isinstance(value.node, Set):
        return Set(value.node.frozen, items)
    if value.kind in ("set", "frozenset"):
        return Call("reduce", value.node.function, (items,) if value.node.arguments else ())
    if value.kind == "deque":
        call = Call("reduce", value.node.function, value.node.arguments)
        call.items = items or None
        return call
    # the others take what they hold as arguments, and hold nothing that could have changed
    return value.node


def _object(value: Composite, made: dict[int, Any]) -> Any:
    """The call that makes the object again, from what its components have become."""
    copies: dict[int, Any] = {}
    for source, (_, record) in zip(value.sources, value.components, strict=True):
        node = made[id(record)]
        copies[id(source)] = _one_dimension(node) if value.flat and type(node) is Call else node

    def copy(node: Any) -> Any:
        kind = type(node)
        if kind not in _COPIED:
            return node
        if id(node) in copies:
            return copies[id(node)]
        if kind is tuple:
            new: Any = tuple(copy(part) for part in node)
        elif kind is list:
            new = [copy(part) for part in node]
        elif kind is Dict:
            new = Dict(
                [
                    (key, None if value.flat and key == MEMBERS else copy(part))
                    for key, part in node.pairs
                ]
            )
        else:
            new = Call(node.how, node.function, copy(node.arguments))
            if node.state is not ABSENT:
                new.state = copy(node.state)
        copies[id(node)] = new
        return new

    return copy(value.node)


def _carried(value: Carried, made: dict[int, Any]) -> Any:
    """The node of a carried value, its storages where their bytes are now."""
    places = {key: made[id(record)] for key, record in value.storages}

    def copy(node: Any) -> Any:
        kind = type(node)
        if kind not in COMPOSITES:
            return node
        if id(node) not in made:
            made[id(node)] = renewed(node, kind)
        return made[id(node)]

    def renewed(node: Any, kind: type) -> Any:
        if kind is tuple:
            return tuple(map(copy, node))
        if kind is list:
            return list(map(copy, node))
        if kind is Dict:
            return Dict([(copy(key), copy(held)) for key, held in node.pairs])
        if kind is Set:
            return Set(node.frozen, list(map(copy, node.items)))
        if kind is Persistent:
            _, cls, key, location, numel = node.id[:5]
            at = places[key]
            if type(at) is not Call:
                # where the bytes lie nowhere, the value is only compared
                return CarriedStorage(at, cls, location if at is not None else "", numel)
            return Persistent(("storage", cls, at.arguments[0].id[2], "cpu", numel))
        new = Call(node.how, node.function, tuple(map(copy, node.arguments)))
        if node.items is not None:
            new.items = list(map(copy, node.items))
        if node.pairs is not None:
            new.pairs = [(copy(key), copy(held)) for key, held in node.pairs]
        if node.state is not ABSENT:
            new.state = copy(node.state)
        return new

    return copy(value.node)


_COPIED = frozenset({tuple, list, Dict, Call})
# the attribute of a grouped tensor that holds views of its own components
MEMBERS = "quantized_tensors"
_WRITE: dict[type, Callable[[Any, dict[int, Any]], Any]] = {
    DictNode: _mapping,
    ListNode: _sequence,
    Composite: _object,
    Carried: _carried,
}


def _one_dimension(call: Call) -> Call:
    """A call that rebuilds a row-major tensor, as a row of the same elements."""
    storage, offset, shape, _, *rest = call.arguments
    return Call(call.how, call.function, (storage, offset, (prod(shape),), (1,), *rest))


def _function(node: Any, name: str) -> Any:
    return Global("collections", name) if node is None else node.function
