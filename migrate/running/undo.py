"""What a way back does not bring back, kept in a folder of its own: with it a downgrade is exact to
the bit.

    UNDO/
        model*.safetensors       the source's tensors that are dropped, rounded or encoded again
        migrate.parts            a hash of each (`part_hashes`)
        migrate.undo.json        which run it belongs to

An ordinary checkpoint, written like any other and complete on the disk before the output appears.
The output keeps the same hashes, so a folder of another run is recognised even where all names,
shapes and rules are the same. An `@` in a key, which elsewhere stands before a rank, is written
`%40`, and `%` is `%25`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import formats
from ..core.errors import MigrateError, RunError, fail, listed, option, printable
from ..core.types import FORMAT_VERSION
from ..planning import restoring
from ..planning.compose import prove_downgrade
from ..planning.pipeline import Views
from ..planning.stored import initial, stored_tensor
from ..planning.unchanged import are_folded_keys, fold_keys, unfold_keys
from ..source.blobs import ChunkedTensor, Stored
from ..source.index import Index, specs_hash
from ..source.places import is_folder, open_folder
from .checks import read_content, read_ranges
from .part_hashes import PartHashes, combine_hashes, read_parts
from .publish import check_place, partial_folder
from .restored import RestoredParts
from .tiles import TargetRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..planning.compose import Composition
    from ..planning.pathstate import PathState
    from ..planning.plan import Plan
    from ..source.blobs import Blob, Identity, StoredTensor
    from ..source.index import Source
    from .resources import RunOptions
    from .stamp import Stamp

NAME = "migrate.undo.json"
_MOST = 64 << 20


def find_lost(composition: Composition, source: Source) -> restoring.Lost:
    """What the way back does not bring back bit for bit, and what it makes that was not there. M405
    where it cannot be walked.
    """
    if composition.back is None:
        fail(
            "M405",
            f"{option('undo', 'DIR')}: the way back cannot be walked, even with what is lost on it",
            notes=tuple(composition.inexact[:4]),
            help=f"without {option('undo')} the checkpoint is migrated, and does not come back",
        )
    tensors = source.index.tensors
    lost = tuple(restoring.not_returned(composition, tensors))
    extra = tuple(sorted(composition.back.keys() - tensors.keys()))
    if extra and not lost:
        fail(
            "M405",
            f"{option('undo', 'DIR')}: nothing is lost, and the way back makes tensors that were "
            "not there",
            notes=(listed(list(extra), 4),),
            help=f"leave {option('undo')} out",
        )
    return restoring.Lost(lost, extra)


def _spelled(key: str) -> str:
    return key.replace("%", "%25").replace("@", "%40")


def _read(name: str) -> str:
    return name.replace("%40", "@").replace("%25", "%")


class UndoRun:
    """The run that writes the folder, beside the one that writes the output.

    Call sequence: `prepare` writes all of it, `appear` lets it appear, `end` lets go of it. With
    `resume` a folder that an earlier life of the run left whole is taken as it is.
    """

    def __init__(self, planned: Plan, source: Source, place: str, options: RunOptions) -> None:
        stored, self._planned, self._source = source.index.tensors, planned, source
        self.place = os.path.abspath(place)
        self._tensors = {_spelled(key): stored_tensor(key, stored[key]) for key in planned.lost}
        self._hashes: dict[str, bytes] = {}
        self._run: TargetRun | None = None
        if options.resume and os.path.lexists(place):
            return
        specs = {key: tensor.spec for key, tensor in self._tensors.items()}
        target = formats.get("safetensors").describe(
            specs,
            folder=True,
            max_shard_size=planned.document["options"]["max_shard_size"],
            metadata={},
            stamp=None,
        )
        own = restoring.HashedParts(planned.document["source"]["index_hash"], tuple(sorted(specs)))
        file = restoring.PartsFile(specs_hash(specs), (own,))
        self._parts = RestoredParts(source, target, file, written_specs=specs)
        self._run = TargetRun(
            self._tensors,
            source,
            target,
            place,
            digest=planned.digest,
            side_files=((NAME, _document(planned)),),
            options=replace(options, progress=None, fsync=True),
            parts=self._parts,
        )

    def prepare(self) -> None:
        """Writes all of the folder, under the name of a partial one."""
        if self._run is None:
            self._hashes = self._earlier()
            return
        try:
            self._run.examine(self._run.target.files)
            partial = self._run.enter()
            self._run.allocate()
            self._run.write(self._run.target.files)
            self._hashes = self._parts.written(partial)
        except BaseException as error:  # noqa: BLE001 - raised again
            self._run.fail(error)

    def appear(self) -> None:
        """Publishes it, synced."""
        if self._run is not None:
            self._run.publish()

    def end(self, error: BaseException | None) -> None:
        """Lets go of it. What was written is kept for a later run, unless what was asked is wrong,
        or the checkpoint.
        """
        if self._run is None:
            return
        partial = self._run.partial
        wrong = isinstance(error, MigrateError) and not isinstance(error, RunError)
        if partial is not None and wrong:
            partial.discard()
        self._run.close()

    def hashes(self) -> Mapping[str, bytes]:
        """The hash of each tensor in it, by the source's key."""
        return {_read(key): found for key, found in self._hashes.items()}

    def _earlier(self) -> dict[str, bytes]:
        """The hashes of the folder that is there; M904 unless it is of this run and source."""
        found = open_undo(self.place)
        found.close()
        same = found.digest == self._planned.digest and {*found.hashes} == {*self._planned.lost}
        if same:
            now = PartHashes({key: tensor.spec for key, tensor in self._tensors.items()})
            for key, left in now.unfinished().items():
                ranges = list(left.missing())
                for start, data in read_ranges(self._tensors[key], self._source, ranges):
                    left.feed(start, data)
            same = {_read(key): value for key, value in now.values().items()} == found.hashes
        if not same:
            fail(
                "M904",
                f"{printable(self.place, 300)} already exists, and is not of the run that is "
                "resumed",
                help="choose another path, or move it away",
            )
        return {_spelled(key): value for key, value in found.hashes.items()}


def _document(made: Plan) -> bytes:
    document = {
        "format_version": FORMAT_VERSION,
        "kind": "undo",
        "plan": made.digest,
        "source": made.document["source"]["index_hash"],
        "output": made.parts.output if made.parts is not None else "",
        "tensors": len(made.lost),
        "extra": fold_keys(made.extra),
    }
    return (json.dumps(document, indent=1) + "\n").encode()


def check_undo_place(place: str, out: Path | None, source: str, resume: bool) -> None:
    """QuestionError M904 where something is there, unless a run is resumed; or where the folder,
    the output, if it is on this machine, and the source lie in each other.
    """
    one, other = Path(os.path.realpath(place)), Path(os.path.realpath(out or place))
    folders = {other, partial_folder(other)}
    if out is not None and (one in folders or folders & {*one.parents} or one in other.parents):
        fail(
            "M904",
            f"{printable(place, 300)} and the output {printable(str(out), 300)} overlap",
            help="choose a place outside the output",
        )
    if not (resume and os.path.isdir(place)):
        check_place(Path(place), source)


class UndoFolder:
    """A folder that an earlier run left, opened: `hashes` has the hash of each of its tensors."""

    def __init__(
        self, path: str, source: Source, document: Mapping[str, Any], hashes: Mapping[str, bytes]
    ) -> None:
        self.path, self.source, self.hashes = path, source, hashes
        self.digest, self.origin = document["plan"], document["source"]
        self.output, self._extra = document["output"], document["extra"]
        self._prefix = "undo:"

    def name(self, key: str) -> str:
        """What its tensor is called among those of the checkpoint that is taken back."""
        return self._prefix + key

    def extra(self, most: int) -> set[str]:
        """Keys that the way back makes and that were not there; of more than `most` the first."""
        return unfold_keys(self._extra, most)

    def beside(self, source: Source) -> Source:
        """The checkpoint with the tensors of the folder among its own; closed with neither."""
        while any(key.startswith(self._prefix) for key in source.index.tensors):
            self._prefix = ":" + self._prefix
        return _Both(source, self)

    def close(self) -> None:
        self.source.close()


class _Both:
    """A checkpoint and an undo folder as one source."""

    def __init__(self, source: Source, undo: UndoFolder) -> None:
        self._source, self._undo = source, undo.source
        self.path, self.format, self.history = source.path, source.format, source.history
        self.blobs: Sequence[Blob] = (*source.blobs, *undo.source.blobs)
        first = len(source.blobs)
        added = {
            undo.name(_read(key)): _moved(stored, first)
            for key, stored in undo.source.index.tensors.items()
        }
        self.index: Index = replace(source.index, tensors={**source.index.tensors, **added})

    def side_file(self, path: str) -> bytes:
        return self._source.side_file(path)

    def identities(self) -> Mapping[str, Identity] | None:
        """Those of both: None where the checkpoint is in memory."""
        found, more = self._source.identities(), self._undo.identities()
        if found is None:
            return None
        return {**found, **{f"{NAME}: {name}": one for name, one in (more or {}).items()}}

    def check_unchanged(self) -> None:
        self._source.check_unchanged()
        self._undo.check_unchanged()

    def close(self) -> None:
        self._undo.close()
        self._source.close()


def _moved(stored: StoredTensor, first: int) -> StoredTensor:
    """The tensor where the blobs of another source stand before its own."""
    if isinstance(stored, ChunkedTensor):
        chunks = tuple(one._replace(blob=one.blob + first) for one in stored.chunks)
        return stored._replace(chunks=chunks)
    return Stored(stored.spec, stored.blob + first, stored.offset, stored.strides)


def open_undo(path: str) -> UndoFolder:
    """The folder that a run with `--undo` left. M927 if it is another one, M928 if damaged."""
    if is_folder(path) and not os.path.lexists(os.path.join(path, NAME)):
        _refuse(path, f"it holds no {NAME}")
    source = formats.open(path, False, None)
    try:
        document = _load(path)
        index = source.index
        kept, why = read_parts(path, index.hash())
        if kept is None or len(kept.runs) != 1 or kept.runs[0].hashes is None:
            fail(
                "M928",
                f"the undo folder {printable(path, 300)} does not hold what it was made with: "
                + (why or "it has no migrate.parts"),
                notes=_unlike(path, document, index),
                help="a tensor is missing or has another dtype or shape; restore it from a copy, "
                "or downgrade without it",
            )
        run = kept.runs[0]
        hashes = dict(zip(map(_read, run.keys), run.hashes or (), strict=True))
        if {*run.keys} != {*index.tensors}:
            fail(
                "M928",
                f"the undo folder {printable(path, 300)} does not hold what it was made with",
                notes=(f"of {listed(sorted({*run.keys} ^ {*index.tensors}), 4)}",),
                help="restore it from a copy, or downgrade without it",
            )
        return UndoFolder(path, source, document, hashes)
    except BaseException:
        source.close()
        raise


def _unlike(path: str, document: Mapping[str, Any], index: Index) -> tuple[str, ...]:
    count, there = document["tensors"], len(index.tensors)
    return (f"it was made with {count} tensors, and holds {there}",) if count != there else ()


def _load(path: str) -> dict[str, Any]:
    """The document that says which run the folder belongs to."""
    try:
        folder = open_folder(path)
        try:
            blob = folder.open(NAME)
            try:
                found = json.loads(blob.read(0, blob.size)) if blob.size <= _MOST else None
            finally:
                blob.close()
        finally:
            folder.close()
    except (MigrateError, ValueError, RecursionError):
        found = None
    words = ("plan", "source", "output")
    if (
        not isinstance(found, dict)
        or found.get("kind") != "undo"
        or not all(isinstance(found.get(word), str) for word in words)
        or type(found.get("tensors")) is not int
        or not are_folded_keys(found.get("extra"))
    ):
        _refuse(path, f"its {NAME} cannot be read")
    return found


def _refuse(path: str, why: str) -> NoReturn:
    fail(
        "M927",
        f"{printable(path, 300)} is not the undo folder of this checkpoint: {why}",
        help=f"name the folder that `apply {option('undo', 'DIR')}` wrote with this checkpoint, or "
        "downgrade without it",
    )


def take_back(
    composition: Composition,
    source: Source,
    undo: UndoFolder,
    stamp: Stamp,
    path_state: PathState | None = None,
) -> Source:
    """Puts the folder's tensors among the outputs of a way back, proves anew what the way there
    makes of them, and gives the source that holds them too. M927 unless the folder belongs to the
    run that is undone, and with it all comes back.
    """
    index_hash = source.index.hash()
    if undo.output != index_hash:
        _refuse(undo.path, "it was made for another output (the index hash differs)")
    _require_own(undo, source, index_hash, stamp)
    both, outputs = undo.beside(source), dict(composition.graph.outputs)
    tensors = initial(both.index.tensors, Views())
    for key in undo.extra(len(outputs)):
        outputs.pop(key, None)
    outputs.update((key, tensors[undo.name(key)]) for key in undo.hashes)
    left = [key for key in restoring.rounded(outputs) if key not in undo.hashes]
    if left or specs_hash({key: t.spec for key, t in outputs.items()}) != undo.origin:
        what = f"{listed(left, 4)} would be rounded" if left else "names, dtypes or shapes differ"
        _refuse(undo.path, f"what this way back leads to is not what it was made of: {what}")
    composition.graph.outputs = outputs
    composition.losses = []
    kept = {name: both.index.tensors[name] for name in map(undo.name, undo.hashes)}
    if composition.context is not None:
        read = partial(read_content, source=both)
        composition.context = composition.context._replace(payload=read, part=read)
    composition.inexact = prove_downgrade(source.index.tensors, composition, path_state, kept)
    composition.inexact += path_state.inexact if path_state is not None else []
    return both


def _require_own(undo: UndoFolder, source: Source, index_hash: str, stamp: Stamp) -> None:
    """M927 unless the output keeps the folder's hashes."""
    found, _ = read_parts(source.path, index_hash)
    for run in () if found is None else found.runs:
        if run.source == undo.origin:
            known = dict(zip(run.keys, run.hashes or (), strict=True))
            wrong = [key for key, value in undo.hashes.items() if known.get(key) != value]
            if wrong:
                _refuse(
                    undo.path, f"it is of another run, which read other bytes of {listed(wrong, 4)}"
                )
            return
    for entry in stamp.applied:
        if entry["source"] == undo.origin and "parts" in entry:
            together = combine_hashes(undo.hashes[key] for key in sorted(undo.hashes))
            if together != entry["parts"]["hash"]:
                _refuse(undo.path, "it is of another run, which read other bytes")
            return
    _refuse(undo.path, "the checkpoint keeps no hashes to know it by")
