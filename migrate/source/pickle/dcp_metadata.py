"""The `.metadata` of torch.distributed.checkpoint: the chunks of tensors, and where they lie.

torch reads this file with the full unpickler. Here only the classes that torch 2.0 to 2.15 and
Megatron write are known, and each is read by its fields: nothing else may stand in the file,
because it describes everything else and cannot be read in part.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from ...core.errors import fail, printable
from ...core.spec import PACKED, Spec
from ..blobs import Stored
from ..index import Index
from ..jsontext import collector_paused
from ..paths import plain_name
from . import machine
from .dcp_ranks import merge_contents
from .dcp_stream import MetadataContents, SavedCopy, read_stream
from .dcp_stream import SavedChunk as SavedChunk
from .dcp_stream import SavedPart as SavedPart
from .dcp_values import MEMORY_FORMATS
from .decoding import (
    LARGEST,
    MOST_DIMENSIONS,
    ContradictionError,
    StreamProblems,
    dtype_of,
    is_global,
    member_of,
    plain,
)
from .nodes import ABSENT, METADATA, Call, Dict, Global, Set, kind_of
from .policy import MOST_NAMES, MOST_PATHS, Outside, refusal

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
# the shape of a tensor that was cut up and flattened before it was saved
_ORIGINAL = "nd_reformulated_orig_global_shape"
_ROOTS = ((_METADATA, "Metadata"), (_MEGATRON, "MCoreMetadata"))
_PROPERTIES = ((_METADATA, "TensorProperties"), (_SHARDED, "TensorProperties"))
_MEMORY_FORMATS = ((_METADATA, "_MEM_FORMAT_ENCODING"), (_SHARDED, "MEM_FORMAT_ENCODING"))
_PATHS = tuple(
    (m, n)
    for m in ("pathlib", "pathlib._local")
    for n in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
)
_ENUMS = (*_MEMORY_FORMATS, (_PLANNER, "WriteItemType"))
_SIZE = (("torch", "Size"),)
_LAYOUT = (("torch.serialization", "_get_layout"),)
_TENSOR, _CHUNK, _BYTES = (
    ((_METADATA, f"{word}StorageMetadata"),) for word in ("Tensor", "Chunk", "Bytes")
)
_INDEX = ((_METADATA, "MetadataIndex"),)
_INFO = (("torch.distributed.checkpoint.filesystem", "_StorageInfo"),)
_FIELDS = frozenset((
    "state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version",
    "mcore_data", "all_local_plans",
))  # fmt: skip
_TENSOR_FIELDS = frozenset({"properties", "size", "chunks"})
_CHUNK_FIELDS = frozenset({"offsets", "sizes"})
_INDEX_FIELDS = frozenset({"fqn", "offset", "index"})
_INFO_FIELDS = frozenset({"relative_path", "offset", "length", "transform_descriptors"})


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a DCP folder holds. The chunks of a tensor cover it, every entry of storage is used.

    `tensors` and `bytes` by flat key in the order of the file; `planner` are the paths in the
    nested dict that the keys came from (text for a dict key, a number for a place in a list), None
    where the writer kept no such paths. `files` are the names of the data files.
    """

    tensors: dict[str, TensorEntry]
    bytes: dict[str, BytesEntry]
    planner: dict[str, tuple[str | int, ...]] | None
    files: tuple[str, ...]
    version: str | None
    megatron: bool
    # what several ranks wrote, where each has a file of its own
    copies: tuple[SavedCopy, ...] = ()
    # tensors that Megatron saved in another shape than they have
    reformed: tuple[str, ...] = ()
    # of the run of `dcp.save` that wrote it
    save_id: str | None = None

    def index(self) -> Index:
        """The same as any checkpoint's index: `offset` is where the torch.save archive of a
        tensor's first chunk begins in its data file, not its first element, which only that archive
        tells. Values that are no tensors stand as their places."""
        numbers = {file: number for number, file in enumerate(self.files)}
        tensors = {}
        for key, entry in self.tensors.items():
            first = entry.parts[0] if entry.parts else None
            tensors[key] = Stored(
                _spec(entry),
                numbers[first.file] if first else 0,
                first.offset if first else 0,
                entry.strides,
            )
        return Index(
            tensors, self.files, items={key: entry.part for key, entry in self.bytes.items()}
        )


def _spec(entry: TensorEntry) -> Spec:
    # torch counts pairs of these
    if entry.dtype == PACKED:
        return Spec(
            "float4_e2m1fn", (*entry.shape[:-1], 2 * entry.shape[-1]) if entry.shape else (2,)
        )
    return Spec(entry.dtype, entry.shape)


def read_metadata(data: bytes, name: str, sizes: dict[str, int] | None = None) -> Metadata:
    """The contents of a `.metadata` file, checked. `sizes` are the bytes of each data file by name,
    where they are known.

    Raises CheckpointError with everything that is wrong: M930 to M932 for the pickle, M935 for
    names outside the allow-list, M938 for what contradicts itself, M907 for names of data files
    that are no plain names.
    """
    with collector_paused():
        contents = _read_contents(data, name)
        # nothing else is asked of them, and they may be many
        del data
        problems = StreamProblems(name)
        found = _compare(contents, (), problems, sizes)
    problems.check()
    return found


def read_metadata_of_ranks(
    files: Mapping[str, bytes], name: str, sizes: dict[str, int] | None = None
) -> Metadata:
    """The contents of all `__{rank}.metadata` files of a folder, by name, together; errors as of
    `read_metadata`. `name` is the folder's.
    """
    with collector_paused():
        contents = {file: _read_contents(data, f"{name}{file}") for file, data in files.items()}
        problems = StreamProblems(name)
        merged, copies = merge_contents(contents, problems)
        found = _compare(merged, copies, problems, sizes)
    problems.check()
    return found


def _read_contents(data: bytes, name: str) -> MetadataContents:
    """What one file says; raises everything that is wrong in it."""
    # most are spelled as torch spells them; the machine takes the others, and says why not
    found = read_stream(data) if len(data) <= METADATA.size else None
    if found is not None:
        return found
    reader = _MetadataReader(name)
    root = machine.read_pickle(data, METADATA, name=reader.problems.name)
    found = reader.metadata(root)
    others = []
    if reader.outside:
        names = tuple(
            Outside(n, why, count, tuple(paths))
            for n, (why, count, paths) in reader.outside.items()
        )
        others.append(
            refusal(
                names,
                name,
                help="a .metadata file cannot be read in part; fetch the checkpoint again",
            )
        )
    reader.problems.check(*others)
    if found is None:
        fail("M938", f"{reader.problems.name}: not the metadata of a checkpoint")
    return found


def _compare(
    contents: MetadataContents,
    copies: tuple[SavedCopy, ...],
    problems: StreamProblems,
    sizes: dict[str, int] | None,
) -> Metadata:
    """The contents with their places; problems for what contradicts each other."""
    tensors, others, storage, planner, version, megatron, reformed, save_id = contents
    check = MetadataCheck(problems)
    places = [(key, part) for (key, _), part in storage.items()]
    places += [(copy.key, copy.other) for copy in copies]
    check.extents(places, sizes)
    files = tuple(dict.fromkeys(part.file for _, part in places))
    del places
    if planner is not None:
        check.planner(planner, {*tensors, *others})
    placed = check.place(tensors, others, storage)
    return Metadata(*placed, planner, files, version, megatron, copies, reformed, save_id)


class _MetadataReader:
    """One file being read: its problems, and the names outside with their places."""

    __slots__ = ("_classes", "_properties", "outside", "problems")

    def __init__(self, name: str) -> None:
        self.problems = StreamProblems(name)
        self.outside: dict[str, tuple[str, int, list[str]]] = {}
        self._classes: dict[Global, tuple[tuple[str, str], ...]] = {}
        self._properties: dict[int, tuple[str, bool, tuple[int, ...] | None]] = {}

    def problem(self, where: str, message: str) -> None:
        self.problems.add("M938", f"{printable(where)}: {message}")

    def metadata(self, root: Any) -> MetadataContents | None:
        fields = self._object(root, _ROOTS, _FIELDS, "the root")
        if fields is None:
            return None
        tensors, others = self._entries(fields.get("state_dict_metadata"))
        storage = self._storage(fields.get("storage_data"))
        planner = self._planner(fields.get("planner_data"))
        version = fields.get("version")
        if version is not None and type(version) is not str:
            self.problem("version", f"{kind_of(version)} instead of text")
            self._known_names(version, "version")
        for field in ("storage_meta", "mcore_data", "all_local_plans"):
            self._known_names(fields.get(field), field)
        if self.problems.count or self.outside:
            return None
        megatron = root.function.module == _MEGATRON
        reformed = self._reformed(fields.get("mcore_data"), tensors) if megatron else ()
        meta = fields.get("storage_meta")
        said = meta.state if type(meta) is Call else None
        run = said.get("save_id") if type(said) is Dict else None
        save_id = run if type(run) is str else None
        return MetadataContents(
            tensors, others, storage, planner, version, megatron, reformed, save_id
        )

    def _reformed(self, node: Any, tensors: Mapping[str, Any]) -> tuple[str, ...]:
        """The tensors whose own shape, as Megatron notes it, is not the one that was saved."""
        found = []
        for key, one in node.pairs if type(node) is Dict else ():
            shape = one.get(_ORIGINAL) if type(one) is Dict else None
            if type(key) is str and key in tensors and shape is not None:
                try:
                    same = self._size(shape) == tensors[key][1]
                except ContradictionError:
                    same = False
                if not same:
                    found.append(key)
        return tuple(found)

    def _object(
        self, node: Any, names: tuple[tuple[str, str], ...], fields: frozenset[str], where: str
    ) -> dict[str, Any] | None:
        """The fields of an object of one of these classes that was made by NEWOBJ and BUILD; None,
        and a problem, for anything else.
        """
        if type(node) is not Call:
            self.problem(where, f"{kind_of(node)} where {names[0][1]} belongs")
            return None
        if node.how != "newobj" or node.arguments or not self._is(node, names):
            self._foreign(node, where)
            return None
        state = node.state
        if state is ABSENT and not fields:
            return {}
        if type(state) is not Dict or node.items or node.pairs:
            self.problem(where, f"{names[0][1]} without a dict of fields")
            return None
        # the machine has hashed these keys in a bounded form
        found = dict(state.pairs)
        if not found.keys() <= fields:
            odd = next(key for key in found if key not in fields)
            self.problem(
                where,
                f"{names[0][1]} has a field that is not known: "
                f"{printable(odd) if type(odd) is str else kind_of(odd)}",
            )
            self._known_names(state, where)
            return None
        return found

    def _is(self, call: Call, names: tuple[tuple[str, str], ...]) -> bool:
        """Whether `call` is of one of `names`; each is one object in a stream and compared once."""
        function = call.function
        if self._classes.get(function) is names:
            return True
        if not is_global(function, *names):
            return False
        self._classes[function] = names
        return True

    def _size(self, node: Any) -> tuple[int, ...]:
        """A torch.Size or a tuple of non-negative 64-bit integers, at most 64 of them."""
        if (
            type(node) is Call
            and self._is(node, _SIZE)
            and node.how == "reduce"
            and len(node.arguments) == 1
            and plain(node)
        ):
            node = node.arguments[0]
        if type(node) is list:
            node = tuple(node)
        if type(node) is not tuple or len(node) > MOST_DIMENSIONS:
            raise ContradictionError(
                f"{kind_of(node)} where a torch.Size of at most {MOST_DIMENSIONS} numbers belongs"
            )
        for number in node:
            if type(number) is not int or not 0 <= number <= LARGEST:
                raise ContradictionError(
                    "a size or an offset that is not a number, negative, or too large"
                )
        return node

    def _entries(self, node: Any) -> tuple[dict[str, Any], list[str]]:
        """state_dict_metadata: (dtype, shape, requires_grad, strides, chunks), and other keys."""
        tensors: dict[str, Any] = {}
        others: list[str] = []
        if type(node) is not Dict:
            self.problem("state_dict_metadata", f"{kind_of(node)} instead of a dict")
            return tensors, others
        for key, value in node.pairs:
            if type(key) is not str:
                self.problem("state_dict_metadata", f"a key that is {kind_of(key)} instead of text")
            elif type(value) is Call and value.function.name == "BytesStorageMetadata":
                if self._object(value, _BYTES, frozenset(), key) is not None:
                    others.append(key)
            else:
                try:
                    found = self._tensor(key, value)
                except ContradictionError as no:
                    self.problem(key, str(no))
                    self._known_names(value, key)
                else:
                    if found is not None:
                        tensors[key] = found
        return tensors, others

    def _tensor(self, key: str, node: Any) -> Any:
        fields = self._object(node, _TENSOR, _TENSOR_FIELDS, key)
        if fields is None:
            return None
        properties = self._tensor_properties(key, fields.get("properties"))
        shape = self._size(fields.get("size"))
        held = fields.get("chunks")
        if type(held) is not list:
            raise ContradictionError(f"its chunks are {kind_of(held)} instead of a list")
        if properties is None:
            return None
        dtype, requires_grad, strides = properties
        if strides is not None and len(strides) != len(shape):
            raise ContradictionError(f"{len(strides)} strides for {len(shape)} dimensions")
        chunks = []
        for chunk in held:
            parts = self._object(chunk, _CHUNK, _CHUNK_FIELDS, key)
            if parts is None:
                return None
            chunks.append(
                SavedChunk(self._size(parts.get("offsets")), self._size(parts.get("sizes")))
            )
        return dtype, shape, requires_grad, strides, chunks

    def _tensor_properties(
        self, key: str, node: Any
    ) -> tuple[str, bool, tuple[int, ...] | None] | None:
        """(dtype, requires_grad, strides) of TensorProperties: five fields, and since torch 2.15
        the strides.
        """
        if id(node) in self._properties:
            return self._properties[id(node)]
        if (
            type(node) is not Call
            or node.how != "newobj"
            or node.arguments
            or not self._is(node, _PROPERTIES)
        ):
            self._foreign(node, key)
            return None
        state = node.state
        if type(state) is not tuple or len(state) not in (5, 6):
            raise ContradictionError("TensorProperties without its five or six fields")
        layout, memory_format = state[1], state[3]
        said = []
        for part, names in ((layout, _LAYOUT), (memory_format, _MEMORY_FORMATS)):
            made = member_of(part)
            if made is None or not is_global(made[0], *names):
                self._foreign(part, key)
                return None
            said.append(made[1])
        if type(said[0]) is not str or said[0] != "torch.strided":
            raise ContradictionError("a layout other than torch.strided")
        if said[1] not in MEMORY_FORMATS and (type(said[1]) is not int or not 0 <= said[1] <= 2):
            raise ContradictionError("an unknown memory format")
        if type(state[2]) is not bool or type(state[4]) is not bool:
            raise ContradictionError(
                "TensorProperties whose requires_grad or pin_memory is not a bool"
            )
        strides = state[5] if len(state) == 6 else None
        found = (dtype_of(state[0]), state[2], None if strides is None else self._size(strides))
        self._properties[id(node)] = found
        return found

    def _storage(self, node: Any) -> dict[tuple[str, tuple[int, ...] | None], SavedPart]:
        """storage_data: (key, offsets of the chunk, None for other values) -> where it lies."""
        found: dict[tuple[str, tuple[int, ...] | None], SavedPart] = {}
        if type(node) is not Dict:
            self.problem("storage_data", f"{kind_of(node)} instead of a dict")
            return found
        for index, info in node.pairs:
            named = self._object(index, _INDEX, _INDEX_FIELDS, "storage_data")
            if named is None:
                continue
            key, offset = named.get("fqn"), named.get("offset")
            if type(key) is not str:
                self.problem("storage_data", f"an entry whose key is {kind_of(key)}")
                continue
            place = self._object(info, _INFO, _INFO_FIELDS, key)
            if place is None:
                continue
            try:
                where = (key, None if offset is None else self._size(offset))
                part = _part(place)
            except ContradictionError as no:
                self.problem(key, str(no))
                self._known_names((index, info), key)
                continue
            if where in found:
                self.problem(key, "storage_data has two entries for the same chunk")
            found[where] = part
        return found

    def _planner(self, node: Any) -> dict[str, tuple[str | int, ...]] | None:
        """planner_data: key -> path. None where there is none."""
        if node is None:
            return None
        if type(node) is not Dict:
            self._known_names(node, "planner_data")
            self.problem("planner_data", f"{kind_of(node)} instead of a dict")
            return None
        found = {}
        for key, path in node.pairs:
            if type(key) is not str:
                self.problem("planner_data", f"a key that is {kind_of(key)} instead of text")
                continue
            if (
                type(path) not in (tuple, list)
                or not path
                or any(type(part) not in (str, int) for part in path)
            ):
                self._known_names(path, key)
                self.problem(key, "planner_data has no path of names and numbers for it")
                continue
            found[key] = tuple(path)
        return found

    def _foreign(self, node: Any, where: str) -> None:
        """Notes the names that an unexpected value holds; a problem if it holds none."""
        if type(node) is Call and (node.function.module, node.function.name) in _KNOWN:
            self.problem(
                where,
                f"{printable(str(node.function))} where something else belongs, or made in "
                "another way than torch makes it",
            )
        before = len(self.outside)
        self._known_names(node, where)
        if len(self.outside) == before and type(node) is not Call:
            self.problem(where, f"{kind_of(node)} where it does not belong")

    def _known_names(self, node: Any, where: str) -> None:
        """Notes each name in `node` that no writer of such files uses."""
        stack, seen = [node], set()
        while stack:
            value = stack.pop()
            kind = type(value)
            if kind is Global:
                if (value.module, value.name) not in _KNOWN and not (
                    value.module == "torch" and _is_dtype(value)
                ):
                    self._outside(str(value), where)
                continue
            if kind not in (Call, Dict, Set, list, tuple) or id(value) in seen:
                continue
            seen.add(id(value))
            if kind is Call:
                member = member_of(value)
                if member is not None and is_global(member[0], *_ENUMS):
                    stack.append(member[1])
                    continue
                stack += [
                    value.function,
                    value.arguments,
                    *(value.items or ()),
                    *(part for pair in value.pairs or () for part in pair),
                ]
                if value.state is not ABSENT:
                    stack.append(value.state)
            elif kind is Dict:
                stack += [part for pair in value.pairs for part in pair]
            else:
                stack += value.items if kind is Set else value

    def _outside(self, name: str, where: str) -> None:
        if name not in self.outside and len(self.outside) >= MOST_NAMES:
            name = "others"
        why, count, paths = self.outside.get(name, ("not on the allow-list of .metadata", 0, []))
        if len(paths) < MOST_PATHS:
            paths.append(printable(where))
        self.outside[name] = (why, count + 1, paths)


def _part(fields: dict[str, Any]) -> SavedPart:
    file, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    transforms = fields.get("transform_descriptors")
    if type(file) is not str or type(offset) is not int or type(length) is not int:
        raise ContradictionError(
            "storage_data does not say in which file, from where and how many bytes"
        )
    if transforms is not None and (
        type(transforms) not in (list, tuple) or any(type(t) is not str for t in transforms)
    ):
        raise ContradictionError("transform_descriptors that are not a list of names")
    return SavedPart(file, offset, length, tuple(transforms or ()))


def _is_dtype(node: Global) -> bool:
    try:
        dtype_of(node)
    except ContradictionError:
        return False
    return True


# Names that may stand anywhere; Megatron leaves the plans of its ranks, which are not used.
_KNOWN = frozenset(
    {
        *_ROOTS, *_PROPERTIES, *_MEMORY_FORMATS, *_PATHS,
        *((_METADATA, n) for n in ("TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata")),
        *((_METADATA, n) for n in ("MetadataIndex", "StorageMeta")),
        *((_PLANNER, n) for n in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData",
        "BytesIOWriteData")),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        (_MEGATRON, "MCoreSavePlan"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
    }
)  # fmt: skip


# No tensor has more elements, no path more parts.
MOST_ELEMENTS, MOST_PARTS = 2**50, 64
# places of all lists together that no entry stands at
MOST_HOLES = 1024
# corners of all chunks of one tensor that are counted
MOST_CORNERS = 1 << 24


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: `chunks` cover `shape` exactly, and `parts` says where each of them lies.

    `strides` are those of the saved tensor, None before torch 2.15.
    """

    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    strides: tuple[int, ...] | None
    chunks: tuple[SavedChunk, ...]
    parts: tuple[SavedPart, ...]


@dataclass(frozen=True, slots=True)
class BytesEntry:
    """One value beside tensors: a torch.save stream that lies in `part`."""

    part: SavedPart


class MetadataCheck:
    """Collects what is wrong in one file."""

    __slots__ = ("problems",)

    def __init__(self, problems: StreamProblems) -> None:
        self.problems = problems

    def problem(self, where: str, message: str, code: str = "M938") -> None:
        self.problems.add(code, f"{printable(where)}: {message}")

    def place(
        self,
        tensors: dict[str, Any],
        others: Iterable[str],
        storage: dict[tuple[str, tuple[int, ...] | None], SavedPart],
    ) -> tuple[dict[str, TensorEntry], dict[str, BytesEntry]]:
        """The entries with their places: each chunk has one in storage, and each there a use.

        All three are emptied: there may be a million, and they are needed once.
        """
        placed: dict[str, TensorEntry] = {}
        for key in list(tensors):
            dtype, shape, requires_grad, strides, chunks = tensors.pop(key)
            wrong = uncovered(shape, chunks)
            if wrong:
                self.problem(key, wrong)
            parts = []
            for chunk in dict.fromkeys(chunks) if wrong else chunks:
                part = storage.pop((key, chunk.offsets), None)
                if part is None:
                    self.problem(
                        key, f"nothing says where its chunk at {_numbers(chunk.offsets)} lies"
                    )
                else:
                    parts.append(part)
            placed[key] = TensorEntry(
                dtype, shape, requires_grad, strides, tuple(chunks), tuple(parts)
            )
        values: dict[str, BytesEntry] = {}
        for key in others:
            part = storage.pop((key, None), None)
            if part is None:
                self.problem(key, "nothing says where its bytes lie")
            else:
                values[key] = BytesEntry(part)
        for key, offsets in storage:
            chunk_text = "" if offsets is None else f" the chunk at {_numbers(offsets)} of"
            self.problem(
                key,
                f"storage_data says where{chunk_text} this key lies, and no such entry exists",
            )
        return placed, values

    def extents(
        self, places: Iterable[tuple[str, SavedPart]], sizes: Mapping[str, int] | None
    ) -> None:
        """Data files have plain names; the intervals of one file lie in it and do not overlap."""
        files: dict[str, list[tuple[int, int, str]]] = {}
        for key, part in places:
            if part.offset < 0 or part.length < 0 or part.offset + part.length >= 2**63:
                self.problem(
                    key, f"lies at byte {_number(part.offset)} with {_number(part.length)} bytes"
                )
            else:
                files.setdefault(part.file, []).append((part.offset, part.length, key))
        for file, extents in files.items():
            if not plain_name(file, ".distcp") and not plain_name(file, ".safetensors"):
                self.problem(
                    extents[0][2],
                    f"lies in {printable(file)}, which is not a plain name of a data file",
                    "M907",
                )
                continue
            size = None if sizes is None else sizes.get(file)
            if sizes is not None and size is None:
                count = len(extents) - 1
                more = "; so does one more entry" if count == 1 else ""
                more = f"; so do {count:,} more entries" if count > 1 else more
                self.problem(extents[0][2], f"lies in {printable(file)}, which is missing{more}")
            end, last = 0, ""
            beyond = []
            for offset, length, key in sorted(extents):
                if offset < end and length:
                    self.problem(key, f"shares bytes of {printable(file)} with {printable(last)}")
                if size is not None and offset + length > size:
                    beyond.append((offset + length, key))
                if offset + length > end:
                    end, last = offset + length, key
            if beyond:
                # one of them for all: the file is cut short
                ends, key = beyond[0]
                count = len(beyond) - 1
                more = "; one more entry lies beyond its end" if count == 1 else ""
                more = f"; {count:,} more entries lie beyond its end" if count > 1 else more
                self.problem(
                    key, f"ends at byte {ends:,} of {printable(file)}, which has {size:,}{more}"
                )

    def planner(self, planner: Mapping[str, tuple[str | int, ...]], keys: Container[str]) -> None:
        """Every path leads to one place; lists are not much longer than there are entries for."""
        inner: dict[tuple[str | int, ...], type] = {}
        ends: dict[tuple[str | int, ...], str] = {}
        # what stood empty left holes in its list, and a few numbers could name endless ones
        lists: dict[tuple[str | int, ...], int] = {}
        holes = MOST_HOLES
        for key, path in planner.items():
            if key not in keys:
                self.problem(key, "planner_data has a path for a key that does not exist")
                continue
            if len(path) > MOST_PARTS:
                self.problem(
                    key,
                    f"planner_data has a path of {len(path):,} parts; at most {MOST_PARTS} are "
                    "allowed",
                )
                continue
            places = [(path[:at], n) for at, n in enumerate(path) if at and isinstance(n, int)]
            for around, place in places:
                length = lists.get(around, 0)
                lists[around] = max(length, place + 1)
                holes += 1 - max(0, place + 1 - length)
            if holes < 0 or any(place < 0 for _, place in places):
                many = f"the {len(planner):,} entries that there are"
                self.problem(key, f"planner_data puts it at a place of a list beyond {many}")
                return
            if path in ends:
                self.problem(key, f"planner_data gives it the path of {printable(ends[path])}")
            ends[path] = key
            for at in range(len(path)):
                if inner.setdefault(path[:at], type(path[at])) is not type(path[at]):
                    self.problem(key, "planner_data makes its parent a dict and a list at once")
                    break
        for path, key in ends.items():
            if path in inner:
                self.problem(key, "planner_data puts other keys below it")


def uncovered(shape: tuple[int, ...], chunks: Sequence[SavedChunk]) -> str:
    """What is wrong with the chunks of a tensor of this shape; "" when they cover it exactly."""
    if prod(shape) > MOST_ELEMENTS:
        return f"has a shape of {_number(prod(shape))} elements; at most 2^50 are read"
    if (
        len(chunks) == 1
        and chunks[0].sizes == shape
        and not any(chunks[0].offsets)
        and len(chunks[0].offsets) == len(shape)
    ):
        return ""
    if shape and _rows(shape, chunks):
        return ""
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            return (
                f"has {len(shape)} dimensions and a chunk of {len(chunk.offsets)} and "
                f"{len(chunk.sizes)}"
            )
        if any(
            offset + size > whole
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        ):
            return (
                f"a chunk at {_numbers(chunk.offsets)} of size {_numbers(chunk.sizes)} reaches "
                f"outside of {_numbers(shape)}"
            )
    # dimensions that every chunk covers do not matter
    cut = [d for d, whole in enumerate(shape) if any(chunk.sizes[d] != whole for chunk in chunks)]
    if len(cut) > 24 or len(chunks) << len(cut) > MOST_CORNERS:
        return (
            f"is cut along {len(cut)} dimensions into {len(chunks):,} chunks, which is more "
            "than is checked"
        )
    if 0 in shape:
        return "" if chunks else "has no chunk"
    corners: dict[tuple[int, ...], int] = {}
    for chunk in chunks:
        if 0 not in chunk.sizes:
            _count(corners, [(chunk.offsets[d], chunk.offsets[d] + chunk.sizes[d]) for d in cut], 1)
    _count(corners, [(0, shape[d]) for d in cut], -1)
    if not any(corners.values()):
        return ""
    held = sum(prod(chunk.sizes) for chunk in chunks)
    what = (
        "a hole"
        if held < prod(shape)
        else "an overlap"
        if held > prod(shape)
        else "an overlap and a hole"
    )
    return f"its chunks hold {held:,} of {prod(shape):,} elements: there is {what}"


def _rows(shape: tuple[int, ...], chunks: Sequence[SavedChunk]) -> bool:
    """Whether the chunks are whole rows, one after the other, as most are."""
    at, row, begins = 0, shape[1:], (0,) * (len(shape) - 1)
    for offsets, sizes in chunks:
        if sizes[1:] != row or offsets[:1] != (at,) or offsets[1:] != begins:
            return False
        at += sizes[0]
    return at == shape[0] and bool(chunks)


def _count(corners: dict[tuple[int, ...], int], box: list[tuple[int, int]], sign: int) -> None:
    for choice in product((0, 1), repeat=len(box)):
        corner = tuple(edges[side] for edges, side in zip(box, choice, strict=True))
        corners[corner] = corners.get(corner, 0) + (-sign if sum(choice) % 2 else sign)


def _numbers(numbers: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, numbers[:8]))}{', …' if len(numbers) > 8 else ''}]"


def _number(value: int) -> str:
    return f"{value:,}" if abs(value) < 10**30 else "a number of more than 30 digits"
