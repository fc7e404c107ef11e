"""Of which parts an output file in a bucket is made: ranges that the store copies from the source,
and what is gathered here and uploaded.

A part has at least 5 MiB, unless it is the last. So what is shorter than that, a header or a tensor
between two copies, takes the beginning of the copy behind it along.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ..source.stores.s3_uploads import LEAST, MOST_PARTS, S3Output
from .share import Extent, shared_extents

if TYPE_CHECKING:
    from ..planning.graph import Tensor
    from ..source.index import Source
    from ..source.target import OutputFile, Target
    from .geometry import ByteLayouts
    from .restored import RestoredParts

# bytes of a part that is uploaded, and of one that is copied
UPLOADED, COPIED = 16 << 20, 512 << 20
# the same of an upload where memory holds fewer than so many parts of that size
SHORTER, ENOUGH = 8 << 20, 8
# parts, and one in so many of those that were made, after which they are taken down anew
NOTED, NOTED_SHARE = 32, 32


class UploadPart(NamedTuple):
    """Bytes `start` to `stop` of an output file: those from `origin` of the source's blob on, or,
    with -1 as the number of the blob, bytes that are uploaded.
    """

    start: int
    stop: int
    blob: int = -1
    origin: int = 0

    @property
    def size(self) -> int:
        return self.stop - self.start


def is_due(new: int, made: int) -> bool:
    """Whether parts are taken down, after so many new ones. What is written then has all of them,
    so it is seldomer the more there are.
    """
    return new >= max(NOTED, made // NOTED_SHARE)


def held_parts(max_memory: int, threads: int, nbytes: int) -> int:
    """How many parts of a size are sent at once: each thread fills another one meanwhile."""
    return max_memory * 3 // 8 // nbytes - threads


def part_size(max_memory: int, threads: int) -> int:
    """Bytes of a part that is uploaded. A store takes few long parts more slowly than more that are
    shorter: while it finishes one, it has to have others to work on.
    """
    return UPLOADED if held_parts(max_memory, threads, UPLOADED) >= ENOUGH else SHORTER


def cut_parts(
    size: int,
    extents: Iterable[Extent] = (),
    edges: Sequence[int] = (),
    uploaded: int = UPLOADED,
) -> list[UploadPart]:
    """The parts of a file, in order and without a hole, with edges where several processes meet.
    Without `extents` and `edges` all have one size.
    """
    if not edges:
        return _cut(size, extents, uploaded)
    found, copies = list[UploadPart](), list(extents)
    for start, stop in pairwise([0, *edges, size]):
        within = [
            Extent(low - start, high - low, one.blob, one.origin + low - one.at)
            for one in copies
            if (low := max(one.at, start)) < (high := min(one.at + one.nbytes, stop))
        ]
        own = _cut(stop - start, within, uploaded, most=MOST_PARTS // (len(edges) + 1))
        if stop < size and own[-1].size < LEAST:
            # taken from the one before, which has no less than that
            last, before = own.pop(), own.pop()
            kept = max(0, last.stop - LEAST - before.start)
            if kept < LEAST:
                kept = 0
            middle = before.start + kept
            own += [before._replace(stop=middle)] * bool(kept) + [UploadPart(middle, last.stop)]
        found += [
            UploadPart(part.start + start, part.stop + start, part.blob, part.origin)
            for part in own
        ]
    return found


def _cut(
    size: int,
    extents: Iterable[Extent],
    uploaded: int = UPLOADED,
    copied: int = COPIED,
    most: int = MOST_PARTS,
) -> list[UploadPart]:
    least = max(LEAST, -(-size // max(1, most // 4)))
    found: list[UploadPart] = []
    # all before this byte has its part
    done = 0
    for extent in extents:
        end = extent.at + extent.nbytes
        start = max(extent.at, done)
        if start > done:
            start = max(start, done + LEAST)
        if end - start < least:
            continue
        if start > done:
            found.append(UploadPart(done, start))
        found.append(UploadPart(start, end, extent.blob, extent.origin + start - extent.at))
        done = end
    if done < size or not found:
        found.append(UploadPart(done, size))
    room = max(uploaded, -(-size // (most - len(found))))
    if len(found) == 1 and found[0].blob < 0:
        edges = [*range(0, size, room), size] if size else [0, 0]
        return [UploadPart(a, b) for a, b in pairwise(edges)]
    return [cut for part in found for cut in _even(part, room if part.blob < 0 else copied)]


def _even(part: UploadPart, room: int) -> Iterator[UploadPart]:
    """A part in pieces of equal size, none longer than `room`."""
    count = -(-part.size // room)
    edges = [part.start + part.size * i // count for i in range(count + 1)]
    for start, stop in pairwise(edges):
        yield UploadPart(start, stop, part.blob, part.origin + start - part.start)


@dataclass(frozen=True)
class PartPlan:
    """The parts of each file. `why`: what stands against copies by the store, if anything."""

    files: Mapping[str, Sequence[UploadPart]]
    why: str | None

    @property
    def copied(self) -> int:
        """Bytes that the store copies."""
        return sum(p.size for parts in self.files.values() for p in parts if p.blob >= 0)

    @property
    def sources(self) -> list[int]:
        """The numbers of the blobs that the store copies from."""
        found = {p.blob for parts in self.files.values() for p in parts if p.blob >= 0}
        return sorted(found)

    @property
    def passed(self) -> int:
        """Bytes of weight files that pass through this machine."""
        return sum(p.size for parts in self.files.values() for p in parts if p.blob < 0)

    @property
    def digest(self) -> str:
        """Of all parts."""
        found = sha256()
        for name in sorted(self.files):
            found.update(repr((name, [tuple(part) for part in self.files[name]])).encode())
        return found.hexdigest()

    def described(self, small: int) -> dict[str, Any]:
        """As plans and answers say it; `small` is the number of small files.

        A weight file takes a request to begin it, one for each part, one to list a thousand of
        these, one to ask for its name and one to complete it; a small file two, the journal four
        and two whenever parts are taken down, and the name of the output five.
        """
        requests, new = 9 + 2 * small, 0
        for made in range(1, 1 + sum(map(len, self.files.values()))):
            new += 1
            if is_due(new, made):
                requests, new = requests + 2, 0
        for parts in self.files.values():
            requests += 3 + len(parts) + -(-len(parts) // 1000)
        return {
            "copied": self.copied,
            "passed": self.passed,
            "parts": sum(map(len, self.files.values())),
            "requests": requests,
            "why": self.why,
        }


def plan_parts(
    target: Target,
    outputs: Mapping[str, Tensor],
    source: Source,
    layouts: ByteLayouts,
    output: S3Output,
    *,
    copy: str = "auto",
    parts: RestoredParts | None = None,
    recorded: bool = False,
    read_back: bool = False,
    edges: Mapping[str, Sequence[int]] = {},
    uploaded: int = UPLOADED,
) -> PartPlan:
    """The parts of all files of a target in a bucket. `copy`: "never" has none copied. `recorded`:
    the source records checksums of what the run copies. `read_back`: what is copied is read before
    the output shows, so of the file that appears last nothing is. `edges`: where files are divided
    among processes. `uploaded`: bytes of a part that is uploaded.
    """

    def cut(file: OutputFile, extents: Sequence[Extent] = ()) -> list[UploadPart]:
        return cut_parts(file.size, extents, edges.get(file.name, ()), uploaded)

    why = _refused(target, source, output, copy, parts, recorded)
    if why is not None:
        return PartPlan({file.name: cut(file) for file in target.files}, why)
    found, copyable = {}, [_range_source(blob) is not None for blob in source.blobs]
    last = target.files[-1].name if read_back and target.files else None
    for file in target.files:
        extents: list[Extent] = []
        if file.seal is None and file.name != last:
            extents = [
                extent
                for extent in shared_extents(file, outputs, source, layouts)
                if copyable[extent.blob]
            ]
        found[file.name] = cut(file, extents)
    plan = PartPlan(found, None)
    if plan.copied:
        return plan
    if any(file.seal is not None for file in target.files):
        return PartPlan(found, "the files hold checksums of what they hold")
    if last is not None and len(found) == 1:
        return PartPlan(found, "a single file would show before it is read back")
    return PartPlan(found, "nothing of 5 MiB or more moves in one stretch")


def _range_source(blob: Any) -> tuple[str, str, str, str] | None:
    """Where a store that copies finds a blob; None for what it cannot copy ranges of."""
    return getattr(blob, "copied_from", None) if blob.size > LEAST else None


def _refused(
    target: Target,
    source: Source,
    output: S3Output,
    copy: str,
    parts: RestoredParts | None,
    recorded: bool,
) -> str | None:
    """Why nothing can be copied."""
    if copy == "never":
        return "copies were not wanted"
    if (why := output.equal_parts()) is not None:
        return why
    places = [getattr(blob, "copied_from", None) for blob in source.blobs]
    known = [place for place in places if place is not None]
    if not known:
        return "the source is not in S3"
    if any(place[0] != output.endpoint for place in known):
        return "source and output have different endpoints"
    here = output.region()
    for bucket in {place[1] for place in known} - {output.bucket}:
        there = output.region(bucket)
        if None not in (here, there) and here != there:
            return f"the source is in {there}, and the output in {here}"
    if parts is not None and parts.written_specs:
        return "what is written is compared with hashes that were kept"
    if recorded:
        return "the source records checksums, which are compared"
    return None
