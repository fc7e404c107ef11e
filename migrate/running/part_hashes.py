"""Hashes of tensors, taken of their bytes as these pass through a run, and the file that keeps them
beside an output.

    migrate.parts       a line of JSON, then 8 bytes for each tensor that the line names

The way back from decoded numbers makes codes and scales again, and only the bytes of the source
can tell whether it made the same. A run that decodes reads them anyway: what reads a box of them
hands it on, in any order and from any thread. What did not pass by (what an earlier run had
written, what was read in pieces of rows) is read at the end.

The hash of a tensor is the xxh3-64 of the xxh3-64s of its packed bytes in pieces of 64 KiB. So the
ranges that threads read need not come in order, and nothing but the digests is kept of them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.errors import MigrateError
from ..core.spec import BITS
from ..core.types import FORMAT_VERSION
from ..core.view import linear
from ..planning import restoring
from ..planning.graph import computations
from ..planning.restoring import HashedParts, PartsFile
from ..planning.stored import stored_tensor, untouched_key
from ..planning.unchanged import are_folded_keys, fold_keys, standing_entries, unfold_keys
from ..source.paths import PARTS
from ..source.places import open_folder

if TYPE_CHECKING:
    import numpy as np

    from ..core.spec import Spec
    from ..ops.base import Box
    from ..planning.compose import Composition
    from ..planning.graph import Computation, Tensor
    from ..source.index import Source
    from .stamp import Stamp

PIECE, WIDTH = 1 << 16, 8
HASH = "xxh3_64/65536"
# stands for one that is not known yet
NO_HASH = "0" * 2 * WIDTH
# of a file; ten million tensors
MOST = 128_000_000


class TensorHash:
    """The hash of one tensor, from ranges of its packed bytes in any order."""

    __slots__ = ("_digests", "_done", "_left", "_lock", "_open", "nbytes", "passed", "value")

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self._left = nbytes, -(-nbytes // PIECE)
        self._digests, self._done = bytearray(), bytearray()
        # piece -> the byte up to which it is hashed, and what of it is
        self._open: dict[int, tuple[int, Any]] = {}
        self._lock = threading.Lock()
        # (piece, digest) of what passed, where another process wants to know
        self.passed: list[tuple[int, bytes]] | None = None
        # 8 bytes, once all of the tensor has passed
        self.value: bytes | None = None
        if not nbytes:
            self._close()

    def _close(self) -> None:
        import xxhash

        self.value = xxhash.xxh3_64_digest(bytes(self._digests))
        self._digests, self._done, self._open = bytearray(), bytearray(), {}

    def feed(self, start: int, data: memoryview) -> None:
        """Takes the bytes from `start` on. What of a piece comes before what precedes it is left
        for `missing`.
        """
        import xxhash

        at, end = start, start + len(data)
        while at < end and self.value is None:
            number = at // PIECE
            first = number * PIECE
            last = min(first + PIECE, self.nbytes)
            stop = min(end, last)
            part = data[at - start : stop - start]
            if at == first and stop == last:
                digest = xxhash.xxh3_64_digest(part)
                with self._lock:
                    self._enter(number, digest)
            else:
                with self._lock:
                    there, state = self._open.get(number, (first, None))
                    if at <= there < stop and self.value is None:
                        state = state or xxhash.xxh3_64()
                        state.update(part[there - at :])
                        self._open[number] = stop, state
                        if stop == last:
                            self._enter(number, state.digest())
            at = stop

    def enter(self, number: int, digest: bytes) -> None:
        """Takes the hash of one piece, which another process made."""
        with self._lock:
            self._enter(number, digest)

    def _enter(self, number: int, digest: bytes) -> None:
        if self.value is not None:
            return
        if not self._done:
            self._digests, self._done = bytearray(WIDTH * self._left), bytearray(self._left)
        if self._done[number]:
            return
        if self.passed is not None:
            self.passed.append((number, digest))
        self._digests[WIDTH * number : WIDTH * (number + 1)] = digest
        self._done[number] = 1
        self._left -= 1
        if not self._left:
            self._close()

    def missing(self) -> Iterator[tuple[int, int]]:
        """The ranges that did not pass, of whole pieces, in order."""
        if self.value is not None:
            return
        if not self._done:
            yield 0, self.nbytes
            return
        at = self._done.find(0)
        while at >= 0:
            stop = self._done.find(1, at)
            stop = len(self._done) if stop < 0 else stop
            yield at * PIECE, min(stop * PIECE, self.nbytes)
            at = self._done.find(0, stop)


class PartHashes:
    """The hashes of some tensors of a run, by key, entered by those who read or write them."""

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        self._by_key = {key: TensorHash(spec.nbytes) for key, spec in specs.items()}
        self._keys = {found: key for key, found in self._by_key.items()}
        # the tensor is kept beside its hash: an id means nothing after its object is gone
        self._watched: dict[int, tuple[Tensor, TensorHash]] = {}
        # those of which something passed since the last `drain`, where that is wanted
        self._touched: set[TensorHash] | None = None

    def watch_outputs(self, outputs: Mapping[str, Tensor]) -> None:
        """These are written, and are the tensors of the same keys."""
        self._watched.update(
            (id(tensor), (tensor, found))
            for key, tensor in outputs.items()
            if (found := self._by_key.get(key)) is not None
        )

    def watch_inputs(self, outputs: Iterable[Tensor], source: Source) -> None:
        """What computes these reads tensors of the source: those by these keys."""
        stored = source.index.tensors
        for call in computations(outputs):
            for tensor in call.inputs:
                # of elements below a byte no byte passes as it is
                if id(tensor) in self._watched or BITS[tensor.spec.dtype] < 8:
                    continue
                found = self._by_key.get(untouched_key(tensor, stored) or "")
                if found is not None:
                    self._watched[id(tensor)] = tensor, found

    def read(self, call: Computation, boxes: Iterable[Box], arrays: Iterable[Any]) -> None:
        """Takes the boxes of its inputs that a call computes with, as raw elements."""
        for tensor, box, array in zip(call.inputs, boxes, arrays, strict=True):
            watched = self._watched.get(id(tensor))
            if watched is not None and array is not None and array.size:
                self._take(watched[1], tensor.spec, box, array)

    def _take(self, into: TensorHash, spec: Spec, box: Box, array: np.ndarray[Any, Any]) -> None:
        span = linear(spec.shape, box)
        if span is not None:
            if self._touched is not None and into not in self._touched:
                self._touched.add(into)
                into.passed = []
            into.feed(span[0] * BITS[spec.dtype] // 8, array.reshape(-1).view("u1").data)

    def write(self, tensor: Any, start: int, data: memoryview) -> None:
        """Takes bytes of an output, from byte `start` of the tensor on."""
        if (watched := self._watched.get(id(tensor))) is not None:
            watched[1].feed(start, data)

    def drain(self) -> list[tuple[str, int, str]]:
        """What was read since the last call, for `enter` in the process that this one helps: the
        key, the piece, and its hash. The first call has nothing to say.
        """
        touched, self._touched = self._touched or set(), set()
        return [
            (self._keys[found], number, digest.hex())
            for found in touched
            for number, digest in found.passed or ()
        ]

    def enter(self, pieces: Iterable[tuple[str, int, str]]) -> None:
        """Takes the pieces that a helping process read."""
        for key, number, digest in pieces:
            self._by_key[key].enter(number, bytes.fromhex(digest))

    def account(self) -> dict[str, str]:
        """The hashes that are known, as `add` takes them in another process."""
        return {key: h.value.hex() for key, h in self._by_key.items() if h.value is not None}

    def add(self, account: Mapping[str, str]) -> None:
        """Enters what another process found."""
        for key, value in account.items():
            if key in self._by_key:
                self._by_key[key].value = bytes.fromhex(value)

    def unfinished(self) -> dict[str, TensorHash]:
        """The hashes of tensors that have not passed whole."""
        return {key: found for key, found in self._by_key.items() if found.value is None}

    def complete(self, source: Source) -> None:
        """Reads from the source what of its tensors did not pass by."""
        from .checks import read_ranges

        for key, found in self.unfinished().items():
            tensor = stored_tensor(key, source.index.tensors[key])
            for start, data in read_ranges(tensor, source, list(found.missing())):
                found.feed(start, data)

    def values(self) -> dict[str, bytes]:
        """The hash of each tensor, all of which have passed."""
        return {key: found.value or b"" for key, found in self._by_key.items()}


def combine_hashes(hashes: Iterable[bytes]) -> str:
    """One hash for the tensors that these are of, in order, as 16 hex digits."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(b"".join(hashes))


def head_of(parts: PartsFile) -> bytes:
    """The first line of the file: all but the hashes."""
    runs = [
        {"source": run.source, "tensors": len(run.keys), "keys": fold_keys(run.keys)}
        for run in parts.runs
    ]
    document = {
        "format_version": FORMAT_VERSION,
        "kind": "parts",
        "hash": HASH,
        "output": parts.output,
        "runs": runs,
    }
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def size_of_file(parts: PartsFile) -> int:
    """The length of the file in bytes, which does not depend on the hashes."""
    return len(head_of(parts)) + WIDTH * sum(len(run.keys) for run in parts.runs)


def file_of(parts: PartsFile) -> bytes:
    """The bytes of the file."""
    return head_of(parts) + b"".join(h for run in parts.runs for h in run.hashes or ())


def read_parts(path: str, index_hash: str) -> tuple[PartsFile | None, str]:
    """The hashes that a checkpoint's folder keeps, and "" or why they are not used: they cannot be
    read, or were made for other contents.
    """
    try:
        folder = open_folder(path)
        try:
            if PARTS not in folder.names():
                return None, ""
            blob = folder.open(PARTS)
            try:
                raw = blob.read(0, blob.size) if blob.size <= MOST else b""
            finally:
                blob.close()
        finally:
            folder.close()
        found = _parsed(raw)
    except (MigrateError, ValueError, KeyError, TypeError, RecursionError):
        return None, f"{PARTS} cannot be read and is ignored"
    if found.output != index_hash:
        return None, f"{PARTS} was made for other contents (the index hash differs) and is ignored"
    return found, ""


def _parsed(raw: bytes) -> PartsFile:
    line, _, rest = raw.partition(b"\n")
    head = json.loads(line)
    if head["kind"] != "parts" or head["hash"] != HASH:
        raise ValueError("of another kind")
    if head["format_version"].split(".")[0] != FORMAT_VERSION.split(".")[0]:
        raise ValueError("of another version")
    runs, at = [], 0
    for run in head["runs"]:
        count = run["tensors"]
        stop = at + WIDTH * count
        if type(count) is not int or not 0 <= at <= stop <= len(rest):
            raise ValueError("of another length")
        if not are_folded_keys(run["keys"]) or not isinstance(run["source"], str):
            raise ValueError("not as it is written")
        keys = tuple(sorted(unfold_keys(run["keys"], count)))
        if len(keys) != count:
            raise ValueError("of other tensors")
        hashes = tuple(rest[n : n + WIDTH] for n in range(at, stop, WIDTH))
        runs.append(HashedParts(run["source"], keys, hashes))
        at = stop
    if at != len(rest) or not isinstance(head["output"], str):
        raise ValueError("of another length")
    return PartsFile(head["output"], tuple(runs))


def with_hash(
    entries: Sequence[Mapping[str, Any]], kept: PartsFile | None, together: str
) -> list[Mapping[str, Any]]:
    """The entries of a stamp whose last one keeps one hash of what was decoded."""
    folded = fold_keys(kept.runs[-1].keys) if kept is not None else []
    return [*entries[:-1], {**entries[-1], "parts": {"hash": together, "keys": folded}}]


def parts_of(
    source: Source,
    composition: Composition,
    index_hash: str,
    output_hash: str,
    applied: Sequence[Mapping[str, Any]],
) -> PartsFile | None:
    """What an output keeps of tensors that the ways back from it have to make again: those of runs
    that stand, `applied` being the entries of its stamp. None where nothing is decoded.
    """
    standing = {entry["source"] for entry in standing_entries(applied)}
    runs: list[HashedParts] = []
    if source.history is not None and (found := read_parts(source.path, index_hash)[0]):
        runs += [run for run in found.runs if run.source in standing and run.source != index_hash]
    if (
        index_hash in standing
        and composition.back is not None
        and restoring.decodes(composition.graph.outputs.values())
    ):
        keys = restoring.made_again(composition, source.index.tensors)
        runs += [HashedParts(index_hash, tuple(keys))] if keys else []
    return PartsFile(output_hash, tuple(runs)) if runs else None


def expected_parts(
    source: Source,
    composition: Composition,
    index_hash: str,
    sources: Collection[str | None],
    stamp: Stamp,
) -> restoring.Expected | None:
    """What the tensors that a way back makes are compared with; None where there is nothing to
    compare. `sources` are the index hashes of the checkpoints that it may return to: its own
    output's, and that of the source, from which tensors may have been dropped.
    """
    if not any(step.backwards for step, _ in composition.steps):
        return None
    found = read_parts(source.path, index_hash)[0] if source.history is not None else None
    outputs = composition.graph.outputs
    for run in reversed(() if found is None else found.runs):
        if run.source in sources and run.hashes is not None:
            hashes = dict(zip(run.keys, run.hashes, strict=True))
            made = tuple(key for key in run.keys if key in outputs)
            return restoring.Expected(made, {key: hashes[key] for key in made}) if made else None
    for entry in reversed(stamp.applied):
        if entry["source"] in sources and "parts" in entry:
            known = sorted(unfold_keys(entry["parts"]["keys"], len(outputs)))
            return restoring.Expected(tuple(known), together=entry["parts"]["hash"])
    keys = restoring.rounded(outputs)
    return restoring.Expected(keys) if keys else None
