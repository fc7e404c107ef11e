"""A checkpoint as torch.distributed.checkpoint would have it on disk, without the disk: the entries
that it would consist of, and the stream of each entry that is not a tensor.

This stands for the format where a checkpoint is planned to be loaded, not written. Streams are made
here, from decoded values, so a planner that unpickles them executes nothing that came from the
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.spec import Spec
from ..source.pickle.tree import Composite, TensorRecord
from ..source.shards import by_rank
from ..source.target import Target, TargetTree, check_holds
from ..source.tree import FileTree
from ..source.zip_archive import crc32
from ._dcpentries import Entries
from ._dcpwrite import require_one_rank
from ._torchwrite import file, plain


class DescribedEntries:
    """Keeps the entries of what it is asked to describe, by flat key and in order.

    `tensors` maps an entry to the key of its tensor, `objects` to a tensor that is saved as an
    object, `values` to any other value. `paths` is where each stands in the nested dict. `parts`
    has the keys of an object's components by their names.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, str] = {}
        self.objects: dict[str, Composite] = {}
        self.parts: dict[str, dict[str, str]] = {}
        self.values: dict[str, Any] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self._specs: Mapping[str, Spec] = {}
        self._tree = TargetTree((), {}, {}, {})

    def describe(self, specs: Mapping[str, Spec], **asked: Any) -> Target:
        """A target without files; M916 for what torch.distributed.checkpoint cannot hold."""
        require_one_rank(specs)
        tree: TargetTree | None = asked["tree"]
        if tree is None:
            tree = plain(specs, by_rank(specs) if "@" in "".join(specs) else [])
        self._tree, self._specs = tree, {**specs, **tree.passed_through}
        check_holds(self._specs)
        entries = Entries(tree.parts[0].root)
        entries.check()
        # permissions that are missing are asked for by planning again
        for kept in (self.tensors, self.objects, self.parts, self.values, self.paths):
            kept.clear()
        for key, path, value in entries.saved:
            self.paths[key] = path
            if type(value) is TensorRecord:
                self.tensors[key] = tree.names[id(value)]
            elif type(value) is Composite:
                self.objects[key] = value
                self.parts[key] = {
                    name: tree.names[id(record)] for name, record in value.components
                }
            else:
                self.values[key] = value
        notes = (f"no entry of a state dict holds {one}" for one in entries.losses())
        return Target((), True, notes=tuple(notes))

    def write_stream(self, key: str, fill: Callable[[str, memoryview], None]) -> bytearray:
        """What torch.save would have written of the value `key`; `fill` puts the bytes of a tensor,
        by its own key, into a buffer.
        """
        made = file("a value", FileTree(self.values[key], None), self._specs, self._tree, None)
        out = bytearray(made.size)
        out[: len(made.header)] = made.header
        crcs: list[int] = []
        for placed in made.tensors:
            end = placed.offset + placed.nbytes
            place = memoryview(out)[placed.offset : end]
            fill(placed.key, place)
            crcs.append(crc32(place))
            if made.seal is not None:
                behind = made.seal(crcs)
                out[end : end + len(behind)] = behind
        return out
