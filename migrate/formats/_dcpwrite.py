"""What a checkpoint of torch.distributed.checkpoint will be, to the byte, before a tensor is read.

A data file is a chain of archives of torch.save: one for each value beside tensors, and one for
each chunk of a tensor. Of the archives all but checksums is known beforehand, so the first of them
is a file's header up to its data, and what lies between two chunks is sealed: the end of one
archive and the begin of the next. Alike chunks have alike archives, which are made once.

`.metadata` says which box of which tensor lies where, and `planner_data` in it the path of every
entry in nested dicts and lists.

How tensors are cut is decided here and by nothing that runs: as N ranks of FSDP2 hold them, each
`Shard(0)`, that is in runs of ceil(rows / N) rows of which the last is shorter, and ranks beyond
have none (`torch.chunk`); or else in runs of rows of at most `CHUNK` bytes. A chunk is one stretch
of the tensor's bytes in either case.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import fail, listed, option, plural, printable
from ..core.spec import Spec, spec
from ..core.view import TooManyPieces, stored
from ..source.jsontext import collector_paused
from ..source.paths import HISTORY, METADATA
from ..source.pickle.dcp_emit import VERSION, emit_metadata
from ..source.pickle.dcp_metadata import (
    BytesEntry,
    Metadata,
    SavedChunk,
    SavedPart,
    TensorEntry,
)
from ..source.pickle.emit import Rebuilder, emit
from ..source.pickle.policy import WRITTEN
from ..source.pickle.tree import Composite, TensorRecord
from ..source.shards import by_rank
from ..source.target import (
    OutputFile,
    Placed,
    Target,
    TargetTree,
    check_holds,
    torch_form,
)
from ..source.torn_tensors import REQUANTIZE
from ..source.tree import FileTree, tensor_records
from ._dcpentries import Entries, SavedEntry
from ._torchwrite import archive, file, plain

if TYPE_CHECKING:
    from ..source.component_boxes import Box, ComponentCut

# bytes of a chunk where no number of chunks is given
CHUNK = 512 << 20


def describe(
    specs: Mapping[str, Spec],
    *,
    folder: bool,
    max_shard_size: int,
    stamp: str | None,
    tree: TargetTree | None,
    chunks: int | None = None,
    anew: Callable[[str], bool] | None = None,
) -> Target:
    """The whole output: every data file, `.metadata`, and the stamp beside it.

    With `chunks` each tensor is cut as that many ranks of FSDP2 would hold it, and the chunks of
    rank r lie in `__{r}_0.distcp`; without it chunks have at most `CHUNK` bytes and all are rank
    0's. A file has at most `max_shard_size` bytes of tensors, or a single chunk; what does not fit
    goes on in `__{r}_1.distcp`. `anew` says which quantized tensors may be encoded anew where they
    cannot be cut without loss. Notes say what this format has no place for.

    M916 naming tensors that torch cannot hold, keys that would be one in a flat dict, keys that
    stand for ranks, and for anything but a dict, or but a folder.
    """
    if not folder:
        fail(
            "M916",
            "a distributed checkpoint is a folder, not one file",
            help="give the output a name without a suffix",
        )
    other = f", or write another format: {option('output_format', 'safetensors')}"
    require_one_rank(specs, other)
    with collector_paused():
        if tree is None:
            tree = plain(specs, by_rank(specs) if "@" in "".join(specs) else [])
        every = {**specs, **tree.passed_through}
        check_holds(every)
        entries = Entries(tree.parts[0].root)
        entries.check()
        writer = EntryWriter(every, tree, max_shard_size, chunks, anew)
        for entry in entries.saved:
            writer.add(entry)
        small = {METADATA: emit_metadata(writer.metadata())}
        if stamp is not None:
            small[HISTORY] = stamp.encode()
        notes = [f"a distributed checkpoint has no place for {one}" for one in entries.losses()]
        if entries.whole:
            inside = "values that contain tensors are written as one entry each:"
            notes.append(f"{inside} {listed(entries.whole, 4)}")
        if writer.copies:
            several = listed(list(dict.fromkeys(writer.copies.values())), 4)
            notes.append(f"tensors that stand in several places are written for each: {several}")
        # the notes say what that is
        lost = ["what has no place in a distributed checkpoint"] * bool(entries.losses())
        return Target(
            writer.files(),
            True,
            small,
            writer.copies,
            tuple(notes),
            tuple(lost),
            cuts=writer.cuts,
        )


def require_one_rank(
    specs: Mapping[str, Spec], other: str = "", join: str = "join them by rules"
) -> None:
    """M916 for keys of ranks: what they are parts of, and along which dimension, nothing says.
    `join` says how they are joined, `other` what else can be done.
    """
    if "@" not in "".join(specs) or len(by_rank(specs)) == 1:
        return
    ranked = [key for key in specs if "@" in key]
    fail(
        "M916",
        f"a distributed checkpoint holds whole tensors, and these are the parts that ranks have: "
        f"{listed(ranked, 4)}",
        help=f"{join}{other}",
    )


class _Cut(NamedTuple):
    """The rows of a tensor that a rank has."""

    rank: int
    first: int
    rows: int


def cut_rows(rows: int, row_bytes: int, limit: int, chunks: int | None) -> Iterator[_Cut]:
    """How a tensor of so many `rows` is cut: for `chunks` ranks, or in runs of at most `limit`
    bytes, and never within a row.
    """
    step = -(-rows // chunks) if chunks is not None else max(1, limit // max(row_bytes, 1))
    for number, first in enumerate(range(0, rows, step)):
        yield _Cut(number if chunks is not None else 0, first, min(step, rows - first))


class EntryPiece(NamedTuple):
    """A tensor as a part of an entry: its places along leading axes that the tensor has not, and
    which half of its rows it is, where it is one.
    """

    record: TensorRecord
    numbers: tuple[int, ...] = ()
    half: int | None = None


@dataclass(slots=True)
class _Shard:
    """A data file being composed."""

    name: str
    archives: list[OutputFile] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    size: int = 0
    # bytes of tensors
    filled: int = 0


class EntryWriter:
    """Deals entries to data files."""

    def __init__(
        self,
        specs: Mapping[str, Spec],
        tree: TargetTree,
        limit: int,
        chunks: int | None = None,
        anew: Callable[[str], bool] | None = None,
    ) -> None:
        self._anew = anew
        self._specs, self._tree, self._limit, self._chunks = dict(specs), tree, limit, chunks
        # the key of each tensor that is written again -> its own
        self.copies: dict[str, str] = {}
        self._written: set[str] = set()
        # what is written half by half
        self._halved: dict[int, str] = {}
        self._ranks: dict[int, list[_Shard]] = {}
        self._forms: dict[Spec, OutputFile] = {}
        # of values without tensors that are several entries
        self._alike: dict[int, OutputFile] = {}
        # the archives of values come first in their file, as torch writes them
        self._values: list[tuple[str, OutputFile]] = []
        self._tensors: dict[str, TensorEntry] = {}
        self._planner: dict[str, tuple[str | int, ...]] | None = None
        self._pending: list[tuple[str, Callable[[], TensorEntry]]] = []
        # components of objects that are cut, by their keys, and what cannot be
        self.cuts: dict[str, ComponentCut] = {}
        self._uncut: list[str] = []
        self._shapes: dict[Any, tuple[int, ...]] = {}

    def add(self, entry: SavedEntry) -> None:
        """An entry with its path in nested dicts."""
        key, path, value = entry
        self._planner = self._planner or {}
        self._planner[key] = path
        if type(value) is Composite:
            self._pending.append((key, partial(self._object, key, value)))
        elif type(value) is TensorRecord:
            self.add_tensor(key, [EntryPiece(value)])
        else:
            self.add_value(key, value)

    def add_value(self, key: str, value: Any) -> None:
        """An entry for anything but a tensor, with all tensors in it."""
        made = self._alike.get(id(value))
        if made is None:
            made = self._whole(value)
            if not made.tensors:
                self._alike[id(value)] = made
        self._values.append((key, made))

    def add_tensor(self, key: str, pieces: Sequence[EntryPiece]) -> None:
        """An entry that consists of these pieces."""
        self._pending.append((key, partial(self._tensor, pieces)))

    def metadata(self) -> Metadata:
        """What describes all files; to be asked for before `files`."""
        values = {key: BytesEntry(self._place(0, made, made.tensors)) for key, made in self._values}
        for key, make in self._pending:
            self._tensors[key] = make()
        if self._uncut:
            fail(
                "M946",
                f"{plural(len(self._uncut), 'quantized tensor')} cannot be cut for {self._chunks} "
                "ranks without loss",
                notes=tuple(self._uncut[:8]),
                help=f"give {option('chunks')} a number of ranks that cuts on borders of blocks, "
                "or leave it out; "
                f"{option('params', f'{REQUANTIZE}=PATTERN')} encodes the parts anew, which loses "
                f"something ({option('allow', 'lossy')})",
            )
        names = tuple(shard.name for shards in self._ranks.values() for shard in shards)
        return Metadata(self._tensors, values, self._planner, names, VERSION, False)

    def files(self) -> tuple[OutputFile, ...]:
        return tuple(
            _chained(shard) for _, shards in sorted(self._ranks.items()) for shard in shards
        )

    def _whole(self, value: Any) -> OutputFile:
        """The archive of a value with all tensors in it."""
        records = list(tensor_records([value]))
        own = {self._tree.names[id(record)]: "" for record in records}
        own = {key: self._place_key(key) for key in own}
        names = {id(record): own[self._tree.names[id(record)]] for record in records}
        ties = ((key, self._tree.first.get(key, key)) for key in own)
        first = {own[key]: own[tied] for key, tied in ties if tied in own}
        tree = TargetTree((), names, {}, first, self._tree.carries)
        return file("a value", FileTree(value, None), self._specs, tree, None)

    def _place_key(self, key: str) -> str:
        """What the tensor `key` is called in the files, each time otherwise."""
        name, number = key, 1
        while name in self._written or (number > 1 and name in self._specs):
            number += 1
            name = f"{key}#{number}"
        self._written.add(name)
        if number > 1:
            self.copies[name] = key
            self._specs[name] = self._specs[key]
        return name

    def _object(self, key: str, value: Composite) -> TensorEntry:
        """A tensor that is an object lies in one piece, the object, or in one for each rank."""
        shape = value.encoding.shape
        if self._chunks is not None and shape:
            cuts = list(cut_rows(shape[0], 0, 0, self._chunks))
            if len(cuts) > 1:
                return self._objects(key, value, cuts)
        made = self._whole(value)
        chunk = SavedChunk((0,) * len(shape), shape)
        part = self._place(0, made, made.tensors)
        return TensorEntry(
            value.encoding.dtype, shape, value.requires_grad, None, (chunk,), (part,)
        )

    def _objects(self, key: str, value: Composite, cuts: Sequence[_Cut]) -> TensorEntry:
        """An object of its own for each rank, with padding of its own."""
        # most checkpoints have no such objects
        from ..source.component_boxes import uncut
        from ..source.pickle.resized_objects import resized

        shape, names = value.encoding.shape, [name for name, _ in value.components]
        chunks, parts = [], []
        boxes = [(rank, ((n, *(0,) * (len(shape) - 1)), (m, *shape[1:]))) for rank, n, m in cuts]
        anew: dict[str, str] | None = None
        if self._anew is not None and any(uncut(value.encoding, names, box) for _, box in boxes):
            wholes = {name: self._tree.names[id(one)] for name, one in value.components}
            stems = {own[: -len(name) - 1] for name, own in wholes.items()}
            if any(map(self._anew, {key, *stems})):
                anew = {name: own for name, own in wholes.items() if "." not in name}
        for rank, box in boxes:
            why = None if anew is not None else uncut(value.encoding, names, box)
            try:
                keys = {} if why else self._cut_components(value, box, anew)
            except (ValueError, TooManyPieces) as error:
                why = str(error)
            if why:
                self._uncut.append(f"{printable(key)}: {why}")
                break
            shapes = {name: torch_form(self._specs[own])[1] for name, own in keys.items()}
            chunk = resized(value, box[1], shapes)
            own = {id(record): keys[name] for name, record in chunk.components}
            tree = TargetTree((), own, {}, {})
            made = file("a chunk", FileTree(chunk, None), self._specs, tree, None)
            chunks.append(SavedChunk(*box))
            parts.append(self._place(rank, made, made.tensors))
        return TensorEntry(
            value.encoding.dtype, shape, value.requires_grad, None, tuple(chunks), tuple(parts)
        )

    def _cut_components(
        self, value: Composite, box: Box, anew: Mapping[str, str] | None
    ) -> dict[str, str]:
        """The keys of the components of a box. ValueError if one does not lie as in its class."""
        from ..source.component_boxes import ComponentCut, is_shared, shape_anew

        keys = {}
        for name, record in value.components:
            whole = self._tree.names[id(record)]
            if is_shared(value.encoding, name) and (anew is None or name not in anew):
                keys[name] = self._place_key(whole)
                continue
            one = ComponentCut(whole, value.encoding, name, box, anew)
            spec = self._specs[whole]
            encoding = value.encoding
            form = encoding.format, str(encoding.options), name, spec, encoding.shape, box
            cut_shape = self._shapes.get(form)
            if anew is not None:
                cut_shape = shape_anew(encoding, name, spec, box)
            elif cut_shape is None:
                view = one.view_of(stored(0, spec.shape), spec.dtype)
                cut_shape = self._shapes[form] = view.shape
            keys[name] = own = f"{whole}#{box[0][0]}"
            while own in self._specs:
                keys[name] = own = f"{own}#"
            self._specs[own] = Spec(spec.dtype, cut_shape)
            self.cuts[own] = one
        return keys

    def _tensor(self, pieces: Sequence[EntryPiece]) -> TensorEntry:
        chunks: list[SavedChunk] = []
        parts: list[SavedPart] = []
        sizes: list[int] = []
        for piece in pieces:
            key = self._halved.get(id(piece.record)) if piece.half is not None else None
            if key is None:
                key = self._place_key(self._tree.names[id(piece.record)])
                if piece.half is not None:
                    self._halved[id(piece.record)] = key
            dtype, shape = torch_form(self._specs[key])
            if piece.half is not None:
                shape = (shape[0] // 2, *shape[1:])
            self._cut(key, piece, shape, chunks, parts)
            whole = (*(number + 1 for number in piece.numbers), *shape)
            sizes = list(map(max, sizes or whole, whole))
        grad = any(piece.record.requires_grad for piece in pieces)
        return TensorEntry(dtype, tuple(sizes), grad, None, tuple(chunks), tuple(parts))

    def _cut(
        self,
        key: str,
        piece: EntryPiece,
        shape: tuple[int, ...],
        chunks: list[SavedChunk],
        parts: list[SavedPart],
    ) -> None:
        """Adds the chunks of a piece of this shape, and where they lie."""
        whole, numbers = self._specs[key], piece.numbers
        nbytes = whole.nbytes if piece.half is None else whole.nbytes // 2
        if not shape or not nbytes:
            cuts: Iterator[_Cut] = iter((_Cut(0, 0, shape[0] if shape else 0),))
        else:
            # where files are short, so are chunks
            limit = min(CHUNK, self._limit)
            cuts = cut_rows(shape[0], nbytes // shape[0], limit, self._chunks)
        ones, inner, zeros = (1,) * len(numbers), shape[1:], (0,) * (len(shape) - 1)
        row = nbytes // shape[0] if nbytes and shape else 0
        base = nbytes * (piece.half or 0)
        for rank, first, rows in cuts:
            own = whole if not shape or rows == torch_form(whole)[1][0] else _rows_of(whole, rows)
            if ones:
                own = spec(own.dtype, (*ones, *own.shape))
            made = self._forms.get(own)
            if made is None:
                made = self._forms[own] = _archive(own)
            (at,) = made.tensors
            box = ((first, *zeros), (rows, *inner)) if shape else ((), ())
            chunks.append(SavedChunk((*numbers, *box[0]), (*ones, *box[1])))
            placed = at._replace(key=key, start=base + first * row)
            parts.append(self._place(rank, made, (placed,)))

    def _place(self, rank: int, made: OutputFile, placed: Sequence[Placed]) -> SavedPart:
        """Appends an archive to the files of a rank."""
        shards = self._ranks.setdefault(rank, [])
        length = sum(one.nbytes for one in placed)
        if not shards or (shards[-1].filled and shards[-1].filled + length > self._limit):
            shards.append(_Shard(f"__{rank}_{len(shards)}.distcp"))
        shard = shards[-1]
        part = SavedPart(shard.name, shard.size, made.size, ())
        shard.archives.append(made)
        shard.placed += [one._replace(offset=shard.size + one.offset) for one in placed]
        shard.size += made.size
        shard.filled += length
        return part


def _rows_of(whole: Spec, rows: int) -> Spec:
    """So many rows of a tensor, rows as torch counts them."""
    if len(whole.shape) == 1:
        _, shape = torch_form(whole)
        return spec(whole.dtype, (rows * (whole.shape[0] // shape[0]),))
    return spec(whole.dtype, (rows, *whole.shape[1:]))


def _archive(whole: Spec) -> OutputFile:
    """The archive of a plain tensor."""
    dtype, shape = torch_form(whole)
    node = Rebuilder().tensor("0", dtype, shape, whole.nbytes)
    stream = emit(node, name="a chunk", names=WRITTEN)
    return archive("a chunk", stream, [("", whole.nbytes)])


def _chained(shard: _Shard) -> OutputFile:
    """The file that these archives make, one behind the other."""
    chain = _Chain(shard.archives)
    return OutputFile(
        shard.name,
        chain.between(0),
        tuple(shard.placed),
        shard.size,
        chain if shard.placed else None,
    )


class _Chain:
    """What follows each stretch of a file: the end of its archive, and what stands in front of the
    next stretch.
    """

    __slots__ = ("_archives", "_begins")

    def __init__(self, archives: Sequence[OutputFile]) -> None:
        self._archives = archives
        # how many stretches lie in front of each archive
        self._begins: list[int] = []
        count = 0
        for made in archives:
            self._begins.append(count)
            count += len(made.tensors)

    def needs(self, count: int) -> int:
        """The first stretch whose CRC-32 stands in what follows the first `count`."""
        return self._begins[bisect_right(self._begins, count - 1) - 1]

    def __call__(self, crcs: Sequence[int]) -> bytes:
        count = len(crcs)
        if not count:
            return b""
        number = bisect_right(self._begins, count - 1) - 1
        made, begin = self._archives[number], self._begins[number]
        behind = made.seal(crcs[begin:count]) if made.seal is not None else b""
        if count < begin + len(made.tensors):
            return behind
        return behind + self.between(number + 1)

    def between(self, number: int) -> bytes:
        """What lies in front of the next stretch, from the begin of an archive on."""
        found = []
        for at in range(number, len(self._archives)):
            found.append(self._archives[at].header)
            if self._archives[at].tensors:
                break
        return b"".join(found)
