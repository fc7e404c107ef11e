"""The archives in the data files of torch.distributed.checkpoint: one for each chunk of a tensor
and one for each other value.

Each of them is what torch.save writes, and is read where it stands. The general reader takes a
third of a millisecond for one, and there may be hundreds of thousands. But torch writes the
archives of equal chunks in equal bytes, the elements apart: what differs are the CRC-32 of the
elements and, since torch 2.1, the archive's own identity, a line of 40 digits with its CRC-32. So
the general reader reads the first archive of a form, and another one is recognised by its bytes:
the head up to the elements is equal, and so is the tail behind them but for these fields, which
agree with each other. Whatever differs is read by the general reader again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from math import prod
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import CheckpointError, Report, fail, listed, plural, printable
from ..core.spec import BITS, PACKED, spec
from ..source import zip_archive
from ..source.blobs import ChunkedTensor, FileBlob, Stored, StoredTensor
from ..source.pickle.dcp_metadata import BytesEntry, TensorEntry
from ..source.pickle.dcp_stream import SavedChunk, SavedCopy, SavedPart
from ..source.pickle.machine import read_pickle
from ..source.pickle.nodes import ARCHIVE
from ..source.pickle.policy import Decoded, Outside, decode
from ..source.pickle.tree import ITEMSIZE, Composite, LocalShard, Opaque, TensorRecord
from ..source.target import NOWHERE
from ..source.tree import TensorForm, place_tensor, tensor_form, tensor_records
from ..source.unread import StreamPlace
from ..source.zip_archive import DESCRIPTOR_SIGN, END, ENTRY, FULL, Archive, ArchiveRecord, crc32

if TYPE_CHECKING:
    from ..source.torn_tensors import TornTensor
    from ._dcpobjects import Joiner
    from ._dcpzstd import SpilledBlob

# archives that are no larger are read at once
_SMALL = 1 << 13
# bytes around the elements of a chunk, and of a value with all that is around it, when decompressed
_AROUND, _MOST_OF_A_VALUE = 1 << 20, ARCHIVE.size + (64 << 20)
# stands for the name of the file that holds what was decompressed
SPILLED = "(decompressed)"
# forms of chunks that are equal in dtype, shape and length; more are no regular writer's
_MOST_FORMS = 8
_IDENTITY = ".data/serialization_id"
_DATA = "data/0"
_CRC = Struct("<I")
# problems, and archives of one file that are none, after which no more are read
_ENOUGH, _ENOUGH_ALIKE = 20, 200
_PLAIN = (frozenset(ITEMSIZE) & frozenset(BITS)) | {PACKED}


class ArchiveForm(NamedTuple):
    """What the archives of many chunks have in common; offsets count from the archive's begin, in
    bytes.

    The elements are the `size` bytes behind `head`, the tensor's first one is `first` bytes after
    it. `fixed` are stretches of the tail with what stands there, `sums` where the CRC-32 of the
    elements stands in it, `identity` where the identity does (None without), `identity_sums` where
    its CRC-32 does.
    """

    stored: TensorForm
    record: TensorRecord
    head: bytes
    size: int
    first: int
    tail: int
    fixed: tuple[tuple[int, int, bytes], ...]
    sums: tuple[int, ...]
    identity: tuple[int, int] | None
    identity_sums: tuple[int, ...]


class SavedValue(NamedTuple):
    """What one archive holds: the decoded value, and where its stream and storages lie."""

    value: Any
    outside: tuple[Outside, ...]
    written: StreamPlace


class TakenObject(NamedTuple):
    """A chunk that is taken to hold an object like that of another chunk of its tensor, and the
    object with the places that its components have then.
    """

    key: str
    part: SavedPart
    value: Composite


class SavedTensor(NamedTuple):
    """One tensor: what stands for it in the tree, and where its elements lie.

    `stored` is None where no output can hold it; `archives` are those of its chunks then.
    """

    leaf: Any
    stored: StoredTensor | None
    archives: tuple[SavedValue, ...] = ()


class ChunkReader:
    """Reads the archives of one checkpoint. `blobs`: a data file's name -> its number and itself.

    `placed` are the tensors inside of values and objects, by the identity of their records. What is
    wrong is added to `report`, each message under the name that `label` gives a file; `summarize`
    comes last. `lazily`, by key: of the chunks that are equal in dtype, shape and length the first
    is read, the others are taken to be of its form until `confirm` looks at them; of objects, the
    first such chunk of each tensor, and what all chunks of the tensor share is compared by
    `confirm`, too. `extensions` as `formats.open`.
    """

    def __init__(
        self,
        blobs: Mapping[str, tuple[int, FileBlob]],
        label: Callable[[str], str],
        report: Report,
        lazily: Callable[[str], bool] | None = None,
        extensions: Any = None,
    ) -> None:
        # by number of the blob and place of the first element: form, begin and length
        self._assumed: dict[tuple[int, int], tuple[ArchiveForm, int, int]] = {}
        # by number of the blob and place of a component, and which of them were looked at
        self._taken: dict[tuple[int, int], TakenObject] = {}
        self._confirmed: set[int] = set()
        self._lazily, self._extensions = lazily, extensions
        self.placed: dict[int, StoredTensor] = {}
        # what the shards of a tensor have alike, by the key of its component
        self.shared: dict[str, bytes] = {}
        # tensors whose shards make none
        self.torn: list[TornTensor] = []
        # tensors with one scale, by whether it is a bfloat16 and no power of two
        self.rounded: list[str] = []
        self.precise: list[str] = []
        self._joiner: Joiner | None = None
        self.unsummed = 0
        self._label, self._report = label, report
        self._blobs: dict[str, tuple[int, FileBlob | SpilledBlob]] = dict(blobs)
        # what was compressed, once there is any
        self.spilled: SpilledBlob | None = None
        self._forms: dict[tuple[str, tuple[int, ...], int], list[ArchiveForm]] = {}
        # by file: the place in the report of its first malformed archive, and how many more it has
        self._malformed: dict[str, tuple[int, int]] = {}
        # blob, offset, bytes and CRC-32 of each record, one after the other
        self._sums = array("Q")

    def sums(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(blob, offset) -> length and CRC-32 of all records of elements."""
        rows = iter(self._sums)
        return {
            (blob, offset): (size, crc)
            for blob, offset, size, crc in zip(rows, rows, rows, rows, strict=True)
        }

    @property
    def enough(self) -> bool:
        """Whether so much is wrong that nothing more needs to be read."""
        return len(self._report.diagnostics) >= _ENOUGH or any(
            more >= _ENOUGH_ALIKE for _, more in self._malformed.values()
        )

    def summarize(self) -> None:
        """Says of each file how many more of its archives are malformed."""
        found = self._report.diagnostics
        for at, more in self._malformed.values():
            if more:
                others = "one more archive" if more == 1 else f"{more:,} more archives"
                what = f"{found[at].message}; {others} of this file {'is' if more == 1 else 'are'}"
                found[at] = replace(found[at], message=f"{what} malformed")

    def value(self, key: str, entry: BytesEntry) -> SavedValue | None:
        """The value of an entry without a tensor; None, and a problem, if it cannot be read."""
        part = entry.part
        try:
            if part.transforms:
                part = self._unpacked(key, part, _MOST_OF_A_VALUE)
            archive, decoded, number = self._general(key, part)
        except CheckpointError as error:
            self._refuse(part, error)
            return None
        return self._kept(archive, decoded, number)

    def tensor(self, key: str, entry: TensorEntry) -> SavedTensor | None:
        """The tensor of an entry; None, and a problem, if it is not what `.metadata` says."""
        chunks: list[Stored] = []
        starts: list[tuple[int, ...]] = []
        first: tuple[TensorRecord, Stored] | None = None
        # by the number of the chunk
        others: dict[int, SavedValue] = {}
        plain: dict[int, Stored] = {}
        # by sizes and length: where the first such archive that holds an object begins
        models: dict[tuple[tuple[int, ...], int], tuple[int, SavedValue]] = {}
        taken: set[int] = set()
        for number, (chunk, part) in enumerate(zip(entry.chunks, entry.parts, strict=True)):
            form = chunk.sizes, part.length
            if form in models and not part.transforms:
                others[number] = self._take(key, part, *models[form])
                taken.add(number)
                continue
            try:
                found = self._chunk(key, entry, chunk, part)
            except CheckpointError as error:
                self._refuse(part, error)
                return None
            if found is None:
                return None
            if isinstance(found, SavedValue):
                others[number] = found
                if self._takes(key) and not part.transforms and self._is_model(found):
                    models[form] = part.offset, found
                continue
            first = first or found
            plain[number] = found[1]
            if 0 not in chunk.sizes:
                chunks.append(found[1])
                starts.append(chunk.offsets)
        if others:
            return self._unusual(key, entry, others, plain, taken)
        if first is None:
            self._report.add("M938", f"{printable(key)}: has no chunk")
            return None
        record, stored = first
        leaf = tuple.__new__(
            TensorRecord,
            (
                entry.dtype,
                NOWHERE,
                0,
                entry.shape,
                record.strides,
                entry.requires_grad,
                None,
                *record[7:],
            ),
        )
        if not chunks:
            # nothing but empty chunks: where the first of them is
            whole = tensor_form(entry.dtype, entry.shape, record.strides)
            return SavedTensor(leaf, Stored(whole.spec, stored.blob, stored.offset))
        if len(chunks) == 1:
            return SavedTensor(leaf, chunks[0])
        whole = tensor_form(entry.dtype, entry.shape, record.strides)
        if entry.dtype == PACKED:
            starts = [(*start[:-1], 2 * start[-1]) for start in starts]
        order = sorted(range(len(chunks)), key=starts.__getitem__)
        return SavedTensor(
            leaf,
            ChunkedTensor(
                whole.spec, tuple(chunks[n] for n in order), tuple(starts[n] for n in order)
            ),
        )

    def compare(self, copy: SavedCopy) -> None:
        """A problem unless two ranks wrote the same."""
        sums: list[dict[str, tuple[int, int | None]]] = []
        for part in (copy.part, copy.other):
            try:
                if part.transforms:
                    part = self._unpacked(copy.key, part, _MOST_OF_A_VALUE)
                archive, _, _ = self._general(copy.key, part)
            except CheckpointError as error:
                self._refuse(part, error)
                return
            records = archive.records.items()
            sums.append(
                {
                    name: (record.size, record.crc)
                    for name, record in records
                    if name == "data.pkl" or name.startswith("data/")
                }
            )
        what = printable(copy.key)
        if copy.offsets:
            what += f": the chunk at {list(copy.offsets)}"
        files = f"{self._label(copy.part.file)} and {self._label(copy.other.file)}"
        if sums[0] != sums[1]:
            self._report.add(
                "M938",
                f"{what}: {files} hold different values, and nothing says which is meant",
                help="save the checkpoint with collectives, or under a key for each rank",
            )
        elif any(crc is None and size for size, crc in sums[0].values()):
            self._report.add(
                "M938",
                f"{what}: {files} both hold it without checksums, so they cannot be compared",
                help="save the checkpoint with collectives",
            )

    def _refuse(self, part: SavedPart, error: CheckpointError) -> None:
        """Adds what is wrong with an archive. Of malformed ones only the first of each file: of a
        foreign file all are.
        """
        found = self._report.diagnostics
        if [one.code for one in error.diagnostics] == ["M940"]:
            at, more = self._malformed.get(part.file, (len(found), -1))
            self._malformed[part.file] = at, more + 1
            if more >= 0:
                return
        found += error.diagnostics

    def _unusual(
        self,
        key: str,
        entry: TensorEntry,
        others: Mapping[int, SavedValue],
        plain: Mapping[int, Stored],
        taken: Container[int],
    ) -> SavedTensor | None:
        """A tensor whose archives hold an object made of tensors, or what no output can hold."""
        first, *_ = others.values()
        if len(entry.chunks) > 1:
            if any(type(other.value) is Composite for other in others.values()):
                return self._joined(key, entry, others, plain, taken)
            if type(first.value) is TensorRecord and first.value.state is not None:
                self._report.add(
                    "M938",
                    f"{printable(key)}: its {len(entry.chunks)} chunks are tensors with "
                    "attributes, and such chunks cannot be joined",
                    help="save it from one rank, or save full_tensor() of it",
                )
                return None
        if type(first.value) is Composite:
            for name, record in first.value.components:
                if name == "_scale_inv" and isinstance(at := self.placed.get(id(record)), Stored):
                    self._look_at_scale(key, self._read(at))
        return SavedTensor(first.value, None, tuple(others.values()))

    def _joined(
        self,
        key: str,
        entry: TensorEntry,
        others: Mapping[int, SavedValue],
        plain: Mapping[int, Stored],
        taken: Container[int],
    ) -> SavedTensor | None:
        """A tensor of which each rank wrote its shard as an object."""
        from ._dcpobjects import Joiner, Shard, UnjoinableError

        if self._joiner is None:
            self._joiner = Joiner(self.placed, self._read)
        shards = []
        for number, (chunk, part) in enumerate(zip(entry.chunks, entry.parts, strict=True)):
            value = others[number].value if number in others else None
            value = value if type(value) is Composite else None
            at = plain.get(number)
            shards.append(Shard(value, chunk.offsets, chunk.sizes, part.file, at, number in taken))
        try:
            made = self._joiner.join(entry.shape, shards)
        except UnjoinableError as error:
            torn = self._joiner.torn(key, entry.shape, shards, str(error))
            if torn is None:
                self._report.add(
                    "M946",
                    f"{printable(key)}: its {len(entry.chunks)} chunks are quantized each for "
                    f"itself and make no whole tensor without loss: {error}",
                    help="save full_tensor() of it, or save on so many ranks that shards end on "
                    "borders of blocks",
                )
                return None
            made = torn
            self.torn += [made.torn] if made.torn is not None else []
        if "_scale_inv" in made.shared:
            self._look_at_scale(key, made.shared["_scale_inv"])
        self.placed.update(made.placed)
        self.shared.update({f"{key}.{name}": data for name, data in made.shared.items()})
        return SavedTensor(made.leaf, None, tuple(others.values()))

    def _look_at_scale(self, key: str, scale: bytes) -> None:
        """Remembers whether the one scale of a tensor has no more digits than a bfloat16 has."""
        if len(scale) == 2 or scale[2] & 0x7F or scale[1] or scale[0]:
            # a power of two says nothing
            (self.rounded if len(scale) == 2 or not any(scale[:2]) else self.precise).append(key)

    def _read(self, at: Stored) -> bytes:
        """The bytes of a small tensor that lies row by row."""
        blob = dict(self._blobs.values())[at.blob]
        return bytes(blob.read(at.offset, at.spec.nbytes))

    def _chunk(
        self, key: str, entry: TensorEntry, chunk: SavedChunk, part: SavedPart
    ) -> tuple[TensorRecord, Stored] | SavedValue | None:
        """The record of a chunk and where it lies. Anything but a plain tensor is the value that
        it is.
        """
        dtype = entry.dtype
        if part.transforms:
            part = self._unpacked(key, part, prod(chunk.sizes) * ITEMSIZE[dtype] + _AROUND)
        number, blob = self._blobs[part.file]
        known = self._forms.get((dtype, chunk.sizes, part.length))
        if known is not None and self._takes(key):
            form, stored = known[0], _stored(known[0], number, part.offset)
            self._assumed[number, stored.offset] = form, part.offset, part.length
            return form.record, stored
        if known is not None:
            for form in known:
                said = recognise(form, blob, part.offset, part.length)
                if said >= 0:
                    return form.record, self._place(form, number, part.offset, said or None)
        archive, decoded, number = self._general(key, part)
        record = decoded.tree
        if type(record) is not TensorRecord:
            return self._odd(key, chunk, part, archive, decoded, number)
        if (record.dtype, record.shape) != (dtype, chunk.sizes):
            self._contradicts(
                key,
                chunk,
                part,
                f"{record.dtype} of shape {list(record.shape)}, and .metadata says {dtype} of "
                f"shape {list(chunk.sizes)}",
            )
            return None
        if (
            record.dtype not in _PLAIN
            or record.conjugate
            or record.negative
            or (record.state is not None and len(entry.chunks) > 1)
            or decoded.outside
            or (dtype == PACKED and record.shape[-1:] != (1,) and record.strides[-1:] != (1,))
        ):
            return self._kept(archive, decoded, number)
        form = learn_form(blob, part.offset, part.length, archive, record)
        if form.fixed and (known is None or len(known) < _MOST_FORMS):
            self._forms.setdefault((dtype, chunk.sizes, part.length), []).append(form)
        crc = archive.records[f"data/{record.storage.key}"].crc
        return record, self._place(form, number, part.offset, crc)

    def _takes(self, key: str) -> bool:
        """Whether chunks of the tensor are taken to be what others are."""
        return self._lazily is not None and self._lazily(key)

    def _place(self, form: ArchiveForm, number: int, start: int, crc: int | None) -> Stored:
        at = start + len(form.head)
        if form.size:
            if crc is None:
                self.unsummed += 1
            else:
                self._sums.extend((number, at, form.size, crc))
        return _stored(form, number, start)

    def confirm(self, places: Iterable[Stored]) -> bool:
        """Whether the chunks at these places are of the forms that they were taken to be of."""
        numbered = dict(self._blobs.values())
        for at in places:
            taken = self._assumed.pop((at.blob, at.offset), None)
            if taken is not None:
                form, begin, length = taken
                said = recognise(form, numbered[at.blob], begin, length)
                if said < 0:
                    return False
                self._place(form, at.blob, begin, said or None)
            held = self._taken.pop((at.blob, at.offset), None)
            if held is not None and not self._is_as_taken(held):
                return False
        return True

    def _is_model(self, saved: SavedValue) -> bool:
        """Whether other chunks can be taken to hold such an object."""
        return (
            type(saved.value) is Composite
            and not saved.outside
            and all(
                isinstance(self.placed.get(id(record)), Stored)
                for _, record in saved.value.components
            )
        )

    def _take(self, key: str, part: SavedPart, begin: int, model: SavedValue) -> SavedValue:
        """The object of a chunk as it is if its archive is made like the model's at `begin`."""
        number, _ = self._blobs[part.file]
        by = part.offset - begin
        # a record of its own for each component, because places go by identity
        records = tuple((name, record._replace()) for name, record in model.value.components)
        value = replace(model.value, components=records)
        held = TakenObject(key, part, value)
        for (_, was), (_, record) in zip(model.value.components, records, strict=True):
            at = self.placed[id(was)]
            if isinstance(at, Stored):
                moved = _moved(at, number, by)
                self.placed[id(record)] = moved
                self._taken[number, moved.offset] = held
        said = model.written
        places = {
            name: place._replace(offset=place.offset + by, crc=None)
            for name, place in said.places.items()
        }
        stream = said.stream[0] + by, said.stream[1]
        return SavedValue(value, (), StreamPlace(number, stream, places, said.hidden))

    def _is_as_taken(self, held: TakenObject) -> bool:
        """Whether a chunk holds the object that it was taken to hold, and has what the tensor's
        chunks share.
        """
        from ._dcpobjects import is_like

        if id(held) in self._confirmed:
            return True
        try:
            archive, decoded, number = self._general(held.key, held.part)
        except CheckpointError:
            return False
        value = decoded.tree
        if type(value) is not Composite or decoded.outside or not is_like(value, held.value):
            return False
        self._kept(archive, decoded, number)
        for (name, record), (_, due) in zip(value.components, held.value.components, strict=True):
            # the object goes, and another record may take its identity
            at = self.placed.pop(id(record), None)
            if not isinstance(at, Stored) or at != self.placed[id(due)]:
                return False
            shared = self.shared.get(f"{held.key}.{name}")
            if shared is not None and self._read(at) != shared:
                return False
        self._confirmed.add(id(held))
        return True

    def _odd(
        self,
        key: str,
        chunk: SavedChunk,
        part: SavedPart,
        archive: Archive,
        decoded: Decoded,
        number: int,
    ) -> SavedValue | None:
        value = decoded.tree
        if type(value) is Composite:
            if value.encoding.shape != chunk.sizes:
                self._contradicts(
                    key,
                    chunk,
                    part,
                    f"an object of shape {list(value.encoding.shape)}, and .metadata says "
                    f"{list(chunk.sizes)}",
                )
                return None
            return self._kept(archive, decoded, number)
        if type(value) in (Opaque, LocalShard) or decoded.outside:
            return self._kept(archive, decoded, number)
        count = sum(1 for _ in tensor_records([value]))
        self._contradicts(
            key,
            chunk,
            part,
            f"a value with {plural(count, 'tensor')}, and a chunk is one tensor by itself",
        )
        return None

    def _contradicts(self, key: str, chunk: SavedChunk, part: SavedPart, what: str) -> None:
        self._report.add(
            "M938",
            f"{self._label(part.file)}: {printable(key)}: the archive at byte {part.offset} for "
            f"the chunk at {list(chunk.offsets)} holds {what}",
        )

    def _unpacked(self, key: str, part: SavedPart, most: int) -> SavedPart:
        """A compressed archive where it is decompressed; M914 for more than `most` bytes."""
        from ._dcpzstd import SpilledBlob, decompressor, is_known, undone_by, unpack

        _, blob = self._blobs[part.file]
        label = f"{self._label(part.file)}: {printable(key)}"
        known = is_known(part.transforms)
        undo = decompressor() if known else undone_by(self._extensions, part.transforms)
        if undo is None and not known:
            through = listed(list(part.transforms), 4)
            fail(
                "M938",
                f"{label}: was written through {through}, which cannot be read",
                help="give `MigratingReader` the registry of your extensions as `extensions`; or "
                "load it with torch's `FileSystemReader`, which takes it as "
                "`_extension_registry`, and save it again without them",
            )
        if self.spilled is None:
            self.spilled = SpilledBlob(SPILLED)
            self._blobs[SPILLED] = (len(self._blobs), self.spilled)
        at, size = unpack(blob, part.offset, part.length, self.spilled, undo, most, label)
        return SavedPart(SPILLED, at, size, ())

    def _general(self, key: str, part: SavedPart) -> tuple[Archive, Decoded, int]:
        """What an archive holds, by the readers for all archives. CheckpointError as of a file."""
        number, blob = self._blobs[part.file]
        label = self._label(part.file) + (f": {printable(key)}" if key else "")
        archive = zip_archive.read_archive(blob, start=part.offset, size=part.length, label=label)
        stream = zip_archive.read_record(blob, archive.records["data.pkl"], ARCHIVE.size, label)
        nodes = read_pickle(stream, ARCHIVE, name=f"{label}: data.pkl", persistent=True)
        sizes = {n[5:]: r.size for n, r in archive.records.items() if n.startswith("data/")}
        return archive, decode(nodes, label, sizes), number

    def _kept(self, archive: Archive, decoded: Decoded, number: int) -> SavedValue:
        """The value of an archive; its tensors are in `placed` from now on."""
        places = {n[5:]: r for n, r in archive.records.items() if n.startswith("data/")}
        for place in places.values():
            if place.crc is not None and place.size:
                self._sums.extend((number, place.offset, place.size, place.crc))
            elif place.size:
                self.unsummed += 1
        for record in tensor_records([decoded.tree]):
            if record.dtype in _PLAIN:
                form = tensor_form(record.dtype, record.shape, record.strides)
                place = places[record.storage.key]
                # each archive has a `data/0` of its own
                self.placed[id(record)] = place_tensor(
                    record, form, place._replace(name=str(place.offset)), number
                )
        stream = archive.records["data.pkl"]
        written = StreamPlace(number, (stream.offset, stream.size), places, decoded.hidden)
        return SavedValue(decoded.tree, decoded.outside, written)

    def carried(self, saved: SavedValue, unfit: Mapping[int, str]) -> Any:
        """The value with what is outside the allow-list, or `unfit` by identity, as values that are
        carried; None if that cannot be.
        """
        from ..source.carrying import carry

        written = saved.written
        kept = carry(saved.value, unfit, {key: at.size for key, at in written.places.items()})
        for record in () if kept is None else tensor_records([kept]):
            if id(record) not in self.placed:
                at = written.places[record.storage.key]
                self.placed[id(record)] = Stored(
                    spec("uint8", record.shape), written.number, at.offset
                )
        return kept


def _moved(at: Stored, number: int, by: int) -> Stored:
    """The same place in an archive that begins `by` bytes later in the blob `number`."""
    storage = at.storage
    if storage is not None:
        # storages are told apart by where they begin
        storage = number, str(int(storage[1]) + by)
    return at._replace(blob=number, offset=at.offset + by, storage=storage)


def _stored(form: ArchiveForm, number: int, start: int) -> Stored:
    """Where the elements of an archive of this form lie that begins at `start`."""
    spec, strides, _, _ = form.stored
    # all fields at once: the named tuple's own function takes three times as long
    fields = (spec, number, start + len(form.head) + form.first, strides, None)
    return tuple.__new__(Stored, fields)


def learn_form(
    blob: FileBlob | SpilledBlob, start: int, length: int, archive: Archive, record: TensorRecord
) -> ArchiveForm:
    """What other archives have in common with this one, which was read and holds one tensor.

    Without `fixed` where too little is known of how it was written to recognise another one.
    """
    data = archive.records[f"data/{record.storage.key}"]
    head = blob.read(start, data.offset - start)
    behind = data.offset + data.size - start
    tail = blob.read(start + behind, length - behind)
    form = tensor_form(record.dtype, record.shape, record.strides)
    made = ArchiveForm(
        form,
        record,
        head,
        data.size,
        record.offset * form.itemsize,
        len(tail),
        (),
        (),
        None,
        (),
    )
    identity = archive.records.get(_IDENTITY)
    entries = _checksums(tail, behind)
    sums, identity_sums = (
        _sums_of(one, archive.root, tail, start + behind, entries)
        for one in (data if data.size else None, identity)
    )
    if sums is None or identity_sums is None:
        return made
    open_ = [(at, at + 4) for at in (*sums, *identity_sums)]
    line = None
    if identity is not None:
        line = (at := identity.offset - start - behind, at + identity.size)
        open_.append(line)
    fixed, before = [], 0
    for begin, end in (*sorted(open_), (len(tail), len(tail))):
        fixed.append((before, begin, tail[before:begin]))
        before = end
    return made._replace(fixed=tuple(fixed), sums=sums, identity=line, identity_sums=identity_sums)


def _checksums(tail: bytes, begin: int) -> dict[bytes, int]:
    """Where in the tail the CRC-32 of each record stands in the directory, by the record's name.
    `begin` is the tail's offset in the archive, which the general reader has read.
    """
    *_, count, _, at, _ = END.unpack(tail[-END.size :])
    found: dict[bytes, int] = {}
    # beyond 4 GiB the directory's place stands elsewhere
    if at == FULL or at < begin:
        return found
    at -= begin
    for _ in range(count):
        *_, name, extra, _, _, _, _, _ = ENTRY.unpack_from(tail, at)
        found[tail[at + ENTRY.size : at + ENTRY.size + name]] = at + 16
        at += ENTRY.size + name + extra
    return found


def _sums_of(
    record: ArchiveRecord | None, root: str, tail: bytes, begin: int, entries: Mapping[bytes, int]
) -> tuple[int, ...] | None:
    """Where the CRC-32 of a record stands in the tail, whose first byte is at `begin` of the blob:
    behind the record and in the directory. Nothing for no record, None if that is not known.
    """
    if record is None:
        return ()
    behind = record.offset + record.size - begin
    entry = entries.get(f"{root}/{record.name}".encode())
    if entry is None or behind < 0 or tail[behind : behind + 4] != DESCRIPTOR_SIGN:
        return None
    return behind + 4, entry


def recognise(form: ArchiveForm, blob: FileBlob | SpilledBlob, start: int, length: int) -> int:
    """The CRC-32 of the elements in the archive at `start` if it is of this form, 0 where none was
    recorded; -1 if it is of another one.
    """
    head = len(form.head)
    if length <= _SMALL:
        whole = blob.read(start, length)
        first, tail = whole[:head], whole[length - form.tail :]
    else:
        first, tail = blob.read(start, head), blob.read(start + length - form.tail, form.tail)
    if first != form.head:
        return -1
    for begin, end, fixed in form.fixed:
        if tail[begin:end] != fixed:
            return -1
    if form.identity is not None:
        begin, end = form.identity
        said = _CRC.pack(crc32(tail[begin:end]))
        for at in form.identity_sums:
            if tail[at : at + 4] != said:
                return -1
    if not form.sums:
        return 0
    at, other = form.sums
    if tail[at : at + 4] != tail[other : other + 4]:
        return -1
    found: int = _CRC.unpack_from(tail, at)[0]
    return found
