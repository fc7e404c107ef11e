"""What a run does for tensors that a way back has to make again: it hashes those of the source that
it decodes, for the output to remember, and those that it makes again, to tell which came back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..core.errors import fail, listed
from ..planning.restoring import Expected, HashedParts, PartsFile
from ..source.paths import PARTS
from .part_hashes import PartHashes, combine_hashes, file_of, size_of_file

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..ops.base import Box
    from ..planning.graph import Computation, Tensor
    from ..planning.plan import Plan
    from ..source.index import Source
    from ..source.target import Target
    from .gather import Batch
    from .publish import Partial

# tensors that a report names
MOST_NAMED = 20
# bytes read at a time of what is written already
_STAGE = 1 << 20


@dataclass(slots=True)
class RestoredParts:
    """The hashes of one run, which writes `outputs` from `source`.

    `file` is what the output keeps, the last of whose runs is this one; None: it keeps none. Its
    hashes are those of tensors that are read (`read_specs`), of tensors that are written
    (`written_specs`), or are `known` from elsewhere. `expected` is what written ones are compared
    with.
    """

    source: Source
    target: Target
    file: PartsFile | None = None
    read_specs: Mapping[str, Spec] = field(default_factory=dict)
    written_specs: Mapping[str, Spec] = field(default_factory=dict)
    known: Callable[[], Mapping[str, bytes]] | None = None
    expected: Expected | None = None
    outcome: dict[str, Any] | None = None
    _inputs: PartHashes = field(init=False)
    _outputs: PartHashes = field(init=False)

    def __post_init__(self) -> None:
        self._inputs = PartHashes(self.read_specs)
        self._outputs = PartHashes(self.written_specs)

    @property
    def names(self) -> Sequence[str]:
        """The small files that `finish` gives."""
        return () if self.file is None else (self.target.beside + PARTS,)

    @property
    def nbytes(self) -> int:
        """The bytes of these files."""
        return 0 if self.file is None else size_of_file(self.file)

    def watch(self, outputs: Mapping[str, Tensor]) -> None:
        """Takes down which tensors are read and written for these, in this process."""
        if self.written_specs:
            self._outputs.watch_outputs(outputs)
        if self.read_specs:
            self._inputs.watch_inputs(outputs.values(), self.source)

    def read(self, call: Computation, boxes: Sequence[Box], arrays: Sequence[Any]) -> None:
        """Sees the boxes that a call computes with. Any thread may call it."""
        self._inputs.read(call, boxes, arrays)

    def write(self, fill: Batch, data: memoryview) -> None:
        """Sees what is written of a file, in its order."""
        for content, start, stop, at, _ in fill.parts:
            self._outputs.write(content, start, data[at : at + stop - start])

    def drain(self) -> list[tuple[str, int, str]]:
        """What this process read since the last call, as `enter` takes it in the one it helps."""
        return self._inputs.drain()

    def enter(self, pieces: Sequence[tuple[str, int, str]]) -> None:
        """Enters what a helping process read."""
        self._inputs.enter(pieces)

    def account(self) -> dict[str, Any]:
        """What this process found, as `add` takes it in another one."""
        return {"read": self._inputs.account(), "written": self._outputs.account()}

    def add(self, account: Mapping[str, Any]) -> None:
        """Enters what another process found."""
        self._inputs.add(account["read"])
        self._outputs.add(account["written"])

    def hash_all(self) -> dict[str, bytes]:
        """The hash of each tensor that is read, whether it has passed or not."""
        self._inputs.complete(self.source)
        return self._inputs.values()

    def written(self, partial: Partial) -> dict[str, bytes]:
        """The hash of each tensor that is written, all of which lie in the files of `partial`."""
        self._reread(partial)
        return self._outputs.values()

    def finish(self, partial: Partial) -> Iterator[tuple[str, bytes]]:
        """The small files beside the output, once all is written. CheckpointError M928 where a
        tensor that is required to be another one was written.
        """
        found: dict[str, bytes] = {}
        if self.written_specs:
            found = self.written(partial)
        if self.expected is not None:
            self.outcome = self._compare(self.expected, found)
        if self.file is None:
            return
        if self.known is not None:
            found = dict(self.known())
        elif self.read_specs:
            found = self.hash_all()
        *earlier, own = self.file.runs
        if own.hashes is None:
            own = HashedParts(own.source, own.keys, tuple(found[key] for key in own.keys))
        yield self.target.beside + PARTS, file_of(replace(self.file, runs=(*earlier, own)))

    def _compare(self, expected: Expected, found: Mapping[str, bytes]) -> dict[str, Any]:
        count = len(expected.keys)
        if expected.hashes is None:
            if expected.together is None:
                return {"tensors": count, "equal": None, "different": [], "known": "nothing"}
            same = all(found.values()) and (
                combine_hashes(found[key] for key in expected.keys) == expected.together
            )
            return {
                "tensors": count,
                "equal": count if same else None,
                "different": [],
                "known": "together",
            }
        wrong = [key for key in expected.keys if found[key] != expected.hashes[key]]
        if broken := [key for key in wrong if key in expected.required]:
            fail(
                "M928",
                f"the undo folder does not hold what it was made with: {listed(broken, 4)}",
                notes=("the bytes of these tensors do not have the hashes that it records",),
                help="it was changed or is damaged; restore it from a copy, or downgrade without "
                "it",
            )
        return {
            "tensors": count,
            "equal": count - len(wrong),
            "different": wrong[:MOST_NAMED],
            "known": "each",
        }

    def _reread(self, partial: Partial) -> None:
        """Hashes of what is written what did not pass through this process."""
        left = self._outputs.unfinished()
        places = [
            (file.name, placed)
            for file in self.target.files
            for placed in file.tensors
            if placed.key in left
        ]
        for name, placed in places:
            found, end = left[placed.key], placed.start + placed.nbytes
            descriptor = partial.open(name)
            try:
                for first, last in list(found.missing()):
                    for start in range(max(first, placed.start), min(last, end), _STAGE):
                        stop = min(last, end, start + _STAGE)
                        at = placed.offset + start - placed.start
                        found.feed(start, memoryview(os.pread(descriptor, stop - start, at)))
            finally:
                os.close(descriptor)


def parts_of_run(
    made: Plan, source: Source, known: Callable[[], Mapping[str, bytes]] | None = None
) -> tuple[Target, RestoredParts | None]:
    """The target of a plan, with a hash in its stamp if it is one file that keeps one, and what its
    run has to hash; `known`: what is hashed elsewhere.
    """
    stored, target, file = source.index.tensors, made.target, made.parts
    own = () if file is None or file.runs[-1].hashes is not None else file.runs[-1].keys
    read = {key: stored[key].spec for key in own}
    if made.sealed is not None:
        # a file's header is written, and hashed, before its tensors are read
        first = RestoredParts(source, target, read_specs=read)
        target, file, read = made.sealed(combine_hashes(first.hash_all().values())), None, {}
    elif made.lost:
        read = {}
    expected, written = made.expected, {}
    if expected is not None and (expected.hashes or expected.together):
        outputs = made.written
        if all(key in outputs for key in expected.keys):
            written = {key: outputs[key].spec for key in expected.keys}
        else:
            # of tied tensors only one is written
            expected = Expected(expected.keys)
    if file is None and expected is None:
        return target, None
    return target, RestoredParts(
        source, target, file, read, written, known if made.lost else None, expected
    )
