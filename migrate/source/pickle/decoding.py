"""What the decoders of one stream share: its storages, its problems, and the two ways to say no.

A decoder never answers with a guess. `ForeignError` says that this is outside what is known here,
which the user may drop; `ContradictionError` says that the file cannot be true. Both are collected
by the walk, so that all come out at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...core.errors import Diagnostic, printable, raise_all
from .nodes import ABSENT, Call, Global, Persistent, kind_of
from .tree import ITEMSIZE, Opaque, Storage, TensorRecord, dotted, walk

LARGEST = 2**63 - 1
MOST_DIMENSIONS = 64
# What tensors may have in elements that share their bytes (by `expand`, or by overlapping strides):
# four times the storages, and a GiB that small masks may take in any case.
EXPANSION, FREE_EXPANSION = 4, 1 << 30

# what every stream that torch.save wrote before 1.6 begins with
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001

# A list in a stream costs its bytes once, however many objects refer to it.
MOST_SHARED = 2_000_000

TYPED = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ByteStorage": "uint8", "CharStorage": "int8", "ShortStorage": "int16", "IntStorage": "int32",
    "LongStorage": "int64",
    "BoolStorage": "bool", "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}  # fmt: skip
STORAGES: dict[tuple[str, str], str | None] = {
    **{("torch", name): dtype for name, dtype in TYPED.items()},
    **{
        (module, name): None
        for module in ("torch.storage", "torch")
        for name in ("UntypedStorage", "_UntypedStorage")
    },
}


_GETATTR = (("builtins", "getattr"), ("__builtin__", "getattr"))


class ForeignError(Exception):
    """This use of an allowed name is none that is known here; the text says what it is, as "a
    sparse tensor".
    """


class ContradictionError(Exception):
    """What the file says cannot be true, or is not what any writer writes."""


class NestedError(Exception):
    """This is made of `inner`, which is opaque, and so it is opaque for the same reason."""

    def __init__(self, inner: Opaque) -> None:
        super().__init__(inner.reason)
        self.inner = inner


class Geometry(NamedTuple):
    """`numel` elements, the last of which is `last` elements after the first."""

    numel: int
    last: int


class Decoding:
    """The state of reading one stream: storages by key, how much of them tensors view, problems.

    `here` is set by the walk and says where it stands, for messages. `records` are the bytes of
    each storage in the container, None where the container does not say so beforehand.
    """

    __slots__ = (
        "_classes",
        "_geometries",
        "here",
        "hooks",
        "kept",
        "problems",
        "records",
        "spent",
        "storages",
        "viewed",
    )

    def __init__(self, name: str, records: Any = None) -> None:
        self.records = records
        self.problems = StreamProblems(name)
        self.storages: dict[str, Storage] = {}
        self.here: Callable[[], str] = lambda: ""
        # nodes that decoders made, kept so that no other object gets their identity
        self.kept: list[Any] = []
        # the name of collections.OrderedDict in this stream
        self.hooks: Global | None = None
        # the bytes of all tensors, those that share them counted for each
        self.viewed = 0
        self.spent = 0
        self._geometries: dict[tuple[Any, ...], Geometry] = {}
        # of a storage's class, the dtype and its size
        self._classes: dict[Global, tuple[str | None, int]] = {}

    def problem(self, message: str, help: str | None = None) -> None:
        """Collects one contradiction at the place where the walk stands."""
        self.problems.add("M936", f"{self.here()}: {message}", help)

    def storage(self, node: Any) -> Storage:
        """The storage that a persistent id names; ForeignError for other ids, ContradictionError
        when it was described otherwise before.
        """
        if type(node) is not Persistent:
            raise ContradictionError(f"a tensor is made of {kind_of(node)} instead of a storage")
        identity = node.id
        if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
            identity, viewed = _five(identity)
            if viewed:
                # what it views is in the file, and belongs to it
                self.storage(Persistent(identity))
                raise ForeignError(
                    "a storage that is a view of another, as only early releases of torch saved it"
                )
        _, cls, key, location, numel = identity
        if (
            type(key) is not str
            or type(location) is not str
            or type(numel) is not int
            or type(cls) is not Global
        ):
            raise ContradictionError(
                "a storage whose class, key, location or size is of another type"
            )
        if cls not in self._classes:
            if (cls.module, cls.name) not in STORAGES:
                raise ForeignError(f"a storage of the class {printable(str(cls))}")
            named = STORAGES[cls.module, cls.name]
            self._classes[cls] = (named, 1 if named is None else ITEMSIZE[named])
        dtype, itemsize = self._classes[cls]
        known = self.storages.get(key)
        if known is not None:
            if known.dtype != dtype or known.numel != numel or known.location != location:
                other = _described(dtype, numel, location)
                known_as = _described(known.dtype, known.numel, known.location)
                raise ContradictionError(
                    f"storage {key} is described twice: as {known_as} and as {other}"
                )
            return known
        if not (key.isascii() and key.isdecimal()) or len(key) > 20:
            raise ContradictionError(
                f"its storage has a key that is not a decimal number: {printable(key)}"
            )
        if not 0 <= numel <= LARGEST:
            raise ContradictionError(f"storage {key} has {_number(numel)} elements")
        # without the named tuple's own function
        found = self.storages[key] = tuple.__new__(Storage, (key, dtype, location, numel, itemsize))
        if self.records is not None:
            size = self.records.get(key)
            if size is None:
                self.problem(
                    f"storage {key} is not in the file",
                    help="the file is not whole; fetch it again",
                )
            elif size != numel * itemsize:
                self.problem(
                    f"storage {key} has {size:,} bytes in the file, and {numel * itemsize:,} by "
                    "its description"
                )
        return found

    def geometry(self, shape: Any, strides: Any) -> Geometry:
        """What a view of this shape covers; ContradictionError unless both are tuples of as many
        non-negative 64-bit integers.
        """
        if type(shape) is not tuple or type(strides) is not tuple:
            raise ContradictionError("a shape or strides that are not a tuple")
        # before the pair is hashed, because hashing what an attacker nested could take for ever
        for number in shape:
            if type(number) is not int or not 0 <= number <= LARGEST:
                raise ContradictionError(f"a shape that holds {_number(number)}")
        for number in strides:
            if type(number) is not int or not 0 <= number <= LARGEST:
                raise ContradictionError(f"strides that hold {_number(number)}")
        found = self._geometries.get((shape, strides))
        if found is not None:
            return found
        if len(shape) != len(strides) or len(shape) > MOST_DIMENSIONS:
            raise ContradictionError(
                f"{len(shape)} dimensions with {len(strides)} strides; at most {MOST_DIMENSIONS} "
                "are allowed"
            )
        numel, last = 1, 0
        for size, stride in zip(shape, strides, strict=True):
            numel *= size
            last += (size - 1) * stride
        if numel > LARGEST:
            raise ContradictionError(f"a shape with more than 2^63 elements: {list(shape)}")
        found = Geometry(numel, last if numel else -1)
        self._geometries[shape, strides] = found
        return found

    def check_view(self, storage: Storage, dtype: str, offset: Any, geometry: Geometry) -> None:
        """ContradictionError unless the view lies inside its storage; adds up what tensors view."""
        if type(offset) is not int or not 0 <= offset <= LARGEST:
            raise ContradictionError(
                f"a tensor that begins at element {_number(offset)} of its storage"
            )
        itemsize = ITEMSIZE[dtype]
        # in elements of the tensor, whose dtype is not always that of the storage's class
        held = storage.numel * storage.itemsize // itemsize
        if geometry.numel and offset + geometry.last >= held:
            raise ContradictionError(
                f"a tensor that reaches to element {offset + geometry.last:,} of storage "
                f"{storage.key}, which has {held:,} of {dtype}"
            )
        self.viewed += geometry.numel * itemsize

    def spend(self, steps: int) -> None:
        """Counts what one value looks through that others may share with it; ContradictionError
        past what any model has.
        """
        self.spent += steps
        if self.spent > MOST_SHARED:
            raise ContradictionError(
                f"grouped tensors with more than {MOST_SHARED:,} members in all"
            )

    def check_expansion(self, tree: Any) -> None:
        """Adds a problem when the tensors of the tree repeat the bytes of their storages beyond
        what any model does.

        By strides, or by overlapping; what is one view counts once, for it is written once.
        """
        stored = sum(s.nbytes for s in self.storages.values())
        allowed = EXPANSION * stored + FREE_EXPANSION
        if self.viewed - stored <= allowed:
            return
        views: dict[tuple[Any, ...], tuple[int, str]] = {}
        for path, value in walk(tree, self.problems.name):
            if type(value) is TensorRecord:
                nbytes = self.geometry(value.shape, value.strides).numel * ITEMSIZE[value.dtype]
                view = (value.storage.key, value.dtype, value.offset, value.shape, value.strides)
                if view not in views:
                    views[view] = (nbytes, dotted(path))
        repeated = sum(nbytes for nbytes, _ in views.values()) - stored
        if repeated > allowed:
            self.problems.add(
                "M914",
                f"tensors repeat the bytes of their storages: they have {repeated:,} bytes more "
                "than are stored, "
                f"and {allowed:,} are allowed; the largest is {max(views.values())[1]}",
                help="save the checkpoint again without expanded tensors, or drop those keys "
                "where it is written",
            )


def _five(identity: Any) -> tuple[Any, bool]:
    """The fields of a storage's persistent id, and whether a sixth is there. Else ForeignError."""
    if type(identity) is not tuple or len(identity) not in (5, 6) or identity[0] != "storage":
        raise ForeignError("a persistent id that is not a storage")
    return identity[:5], identity[5:] not in ((), (None,))


def plain(call: Call) -> bool:
    """Whether nothing was done to the object after it was made."""
    return call.state is ABSENT and not call.items and not call.pairs


def is_global(node: Any, *names: tuple[str, str]) -> bool:
    """Whether `node` is one of these names."""
    return type(node) is Global and (node.module, node.name) in names


def member_of(node: Any) -> tuple[Global, Any] | None:
    """The class of an enum and the value of its member, as `Class(value)`; where CPython 3.11.0 to
    3.11.3 pickled it, as `getattr(Class, name)`, the name. None for anything else.
    """
    if type(node) is not Call or node.how != "reduce" or not plain(node):
        return None
    match node.arguments:
        case (value,):
            return node.function, value
        case (Global() as cls, str(name)) if is_global(node.function, *_GETATTR):
            return cls, name
    return None


def integers(node: Any) -> tuple[int, ...]:
    """The numbers of a tuple of integers or of a torch.Size; else ContradictionError."""
    if (
        type(node) is Call
        and is_global(node.function, ("torch", "Size"))
        and len(node.arguments) == 1
        and plain(node)
    ):
        node = node.arguments[0]
    if type(node) not in (tuple, list) or any(type(n) is not int for n in node):
        raise ContradictionError(f"{kind_of(node)} where a tuple of integers belongs")
    return tuple(node)


def dtype_of(node: Any) -> str:
    """The name of a torch dtype; ContradictionError when it is none."""
    if type(node) is Global and node.module == "torch" and node.name in ITEMSIZE:
        return node.name
    raise ContradictionError(f"{kind_of(node)} where a dtype of torch belongs")


def _number(value: Any) -> str:
    if type(value) is not int:
        return kind_of(value)
    return str(value) if abs(value) <= 10**30 else "a number of more than 30 digits"


def _described(dtype: str | None, numel: int, location: str) -> str:
    return f"{_number(numel)} of {dtype or 'bytes'} on {printable(location)}"


@dataclass(frozen=True, slots=True)
class Decoder:
    """How one (name, way, number of arguments) is read.

    `parts` gives the nodes that have to be decoded first (None: there are none, which is faster),
    `make` the value from the call and its decoded parts. `keyed`: the parts begin with the call's
    pairs, key and value in turn; `numbered`: they are numbered items. Both only serve messages.
    """

    make: Callable[[Call, Any, Decoding], Any]
    parts: Callable[[Call], list[Any]] | None = None
    keyed: bool = False
    numbered: bool = False


# (module, name, "reduce" or "newobj", number of arguments)
Table = dict[tuple[str, str, str, int], Decoder]


MOST = 20


class StreamProblems:
    """The problems of the stream `name` (printable): `count` in all, of which `MOST` are kept."""

    __slots__ = ("_kept", "count", "name")

    def __init__(self, name: str) -> None:
        self.name = printable(name, 400)
        self.count = 0
        self._kept: list[Diagnostic] = []

    def add(self, code: str, message: str, help: str | None = None) -> None:
        """Adds a problem; `message` goes on after the stream's name."""
        self.count += 1
        if len(self._kept) < MOST:
            self._kept.append(Diagnostic(code, f"{self.name}: {message}", help=help))

    def check(self, *others: Diagnostic) -> None:
        """Raises `others` and what was added, if any; the last line counts what was not kept."""
        found = [*others, *self._kept]
        if self.count > MOST:
            found.append(
                Diagnostic(
                    self._kept[-1].code,
                    f"{self.name}: {self.count - MOST:,} more contradictions like these",
                )
            )
        if found:
            raise_all(found)
