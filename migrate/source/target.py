"""What a format promises about its output before a byte is read: every file, every header, every
offset, and what stands beside the tensors.

In trees of .pt files every tensor is written row-major in a storage of its own, and tensors that
were one are one again. What shared a part of its bytes with another one is written apart, which
reads the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import Report, fail, printable
from ..core.spec import PACKED, Spec
from .pickle.jsonform import Ref, to_json
from .pickle.nodes import JSON_SCALARS
from .pickle.tree import (
    ITEMSIZE,
    Carried,
    Composite,
    DictNode,
    ListNode,
    Storage,
    TensorRecord,
    joined,
    to_nodes,
)
from .tree import CheckpointTree, FileTree, kept_by_part, tree_leaves

if TYPE_CHECKING:
    from .component_boxes import ComponentCut


class Placed(NamedTuple):
    """A stretch of one output tensor, often all of it: `nbytes` of its packed row-major bytes, from
    byte `start` on, at `offset` from the start of the file.
    """

    key: str
    offset: int
    nbytes: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One weight file: `header` stands at offset 0, the tensors follow in offset order.

    Without a `seal` they cover the rest without a hole. With one, something may follow each of them
    that depends on what was written before: `seal(crcs)`, given the CRC-32 of the first tensors, is
    what stands behind the last of these, up to the next one or to the end of the file. A seal whose
    method `needs` says, given how many tensors, the first whose CRC-32 that depends on can be cut.

    A piece of a file of `of` bytes, which several processes write, has the bytes from `begin` up to
    `size`, and of `header` and tensors what lies there.
    """

    name: str
    header: bytes
    tensors: tuple[Placed, ...]
    size: int
    seal: Callable[[Sequence[int]], bytes] | None = None
    begin: int = 0
    of: int | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that are written."""
        return self.size - self.begin

    @property
    def label(self) -> str:
        """What tells it from the other pieces of the file, and from the file as a whole, which
        begins with other bytes where a piece is not sealed yet.
        """
        unlike = self.begin or (self.of is not None and self.seal is not None)
        return f"{self.name}@{self.begin}" if unlike else self.name


@dataclass(frozen=True, slots=True)
class Target:
    """The whole output; `folder`: not one file. `small` are small files written as they are.

    A tensor that has to be written again has a key of its own in the files for each further time;
    `copies` maps it to the key of the tensor. Data files of the source that are copied as they are
    have their own names as keys; `whole` maps these to their numbers there. `cuts` has the keys of
    components of objects that are written in parts. `notes` say what the
    format has no place for, and `lost` names what of it does not come back. `beside` is where in
    the folder side files lie, "" or a path that ends in a slash.
    """

    files: tuple[OutputFile, ...]
    folder: bool
    small: Mapping[str, bytes] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    whole: Mapping[str, int] = field(default_factory=dict)
    cuts: Mapping[str, ComponentCut] = field(default_factory=dict)
    beside: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class TargetTree:
    """What an output holds beside rules' tensors, for the formats that can hold it.

    `parts` are its trees, by rank, and `names` has the key of each tensor in them, by the record's
    identity. `passed_through` are the specs of tensors outside of the dicts that rules work on.
    `first` has for each key the first key that shares its bytes: often itself. `carries`: there are
    values outside the allow-list among it.
    """

    parts: tuple[FileTree, ...]
    names: Mapping[int, str]
    passed_through: Mapping[str, Spec]
    first: Mapping[str, str]
    carries: bool = False


CARRIED = "/"
# of tensors that have no bytes yet
NOWHERE = Storage("", None, "cpu", 0, 1)
# Paths of values, in characters: of one, and of all. Many values can share a long key.
LONGEST, MOST_TEXT = 4000, 50_000_000


def outside_prefix(tensors: Mapping[str, Any]) -> str:
    """What keys of tensors that pass through begin with: slashes, more than any other key has."""
    prefix = CARRIED
    while any(key.startswith(prefix) for key in tensors):
        prefix += CARRIED
    return prefix


def items_of(part: FileTree) -> Iterator[tuple[str, Any]]:
    """(path, value) of other values than tensors, as JSON, without the attributes of the dict that
    rules work on; no path twice. Values that are kept of a part are one each.
    """
    table = part.table
    if (
        table is not None
        and table is part.root
        and all(type(value) is TensorRecord for _, value in table.pairs)
    ):
        return
    # what stands in many places is spelled once
    spellings: dict[int, Any] = {}
    room = MOST_TEXT
    # keys have dots, and other values no names, so one path can spell several places
    counts: dict[str, int] = {}
    entries = (entry for _, entry in kept_by_part(part.root) if type(entry) is DictNode)
    whole = {id(value) for entry in entries for _, value in entry.pairs}
    for number, (words, value) in enumerate(tree_leaves(part.root, table, whole=whole)):
        kind = type(value)
        if (
            kind is TensorRecord
            or kind is Composite
            or ".state" in words
            or (value is table and words == (part.at or ()))
        ):
            continue
        if kind not in JSON_SCALARS and id(value) not in spellings:
            spellings[id(value)] = to_json(node_of(value))
        # nearly all are short
        short = sum(map(len, words)) + len(words) <= LONGEST
        path = (".".join(words) if short else joined(words, LONGEST)) or "."
        if len(path) > LONGEST:
            path = f"{path[:LONGEST]}…{number}"
        if path in counts:
            base = path
            while path in counts:
                counts[base] += 1
                path = f"{base}#{counts[base]}"
        counts[path] = 1
        room -= len(path)
        if room < 0:
            fail(
                "M914",
                f"the paths of its values have more than {MOST_TEXT:,} characters",
                help="do not trust where this file comes from",
            )
        yield path, value if kind in JSON_SCALARS else spellings[id(value)]


class ValuesByPath(Mapping[str, Any]):
    """The values of trees by path, and by rank where there are several trees. They are listed when
    one is asked for: there may be as many as tensors.
    """

    def __init__(self, parts: Sequence[FileTree]) -> None:
        self._parts = tuple(parts)

    @cached_property
    def _listed(self) -> dict[str, Any]:
        several = len(self._parts) > 1
        return {
            f"{path}@{rank}" if several else path: value
            for rank, part in enumerate(self._parts)
            for path, value in items_of(part)
        }

    def __getitem__(self, path: str) -> Any:
        return self._listed[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)

    def __bool__(self) -> bool:
        return any(True for part in self._parts for _ in items_of(part))

    def __repr__(self) -> str:
        return repr(self._listed)


def node_of(value: Any, tree: CheckpointTree | None = None) -> Any:
    """The nodes of a value; tensors become their keys in the `tree`, nothing without one."""
    if type(value) in (DictNode, ListNode, Carried):
        return to_nodes(
            value, lambda record: None if tree is None else ("a tensor", tree.names.get(id(record)))
        )
    return getattr(value, "node", value)


def torch_form(spec: Spec) -> tuple[str, tuple[int, ...]]:
    """dtype and shape as torch has them."""
    if spec.dtype == "float4_e2m1fn":
        return PACKED, (*spec.shape[:-1], spec.shape[-1] // 2)
    return spec.dtype, spec.shape


def output_record(spec: Spec, like: TensorRecord | None = None) -> TensorRecord:
    """A tensor of an output as a leaf of its tree, with the flags of another one."""
    dtype, shape = torch_form(spec)
    if like is None:
        return TensorRecord(dtype, NOWHERE, 0, shape, (), False, None)
    return TensorRecord(
        dtype,
        NOWHERE,
        0,
        shape,
        (),
        like.requires_grad,
        None,
        like.parameter,
        subclass=like.subclass,
        state=like.state,
    )


def check_holds(specs: Mapping[str, Spec]) -> None:
    """M916 naming the tensors that torch has no dtype for."""
    report = Report()
    for key, spec in specs.items():
        if torch_form(spec)[0] not in ITEMSIZE:
            report.add(
                "M916",
                f"torch cannot hold {printable(key)}: it has no {spec.dtype}",
                help="dequantize or cast it",
            )
        elif spec.dtype == "float4_e2m1fn" and (not spec.shape or spec.shape[-1] % 2):
            report.add(
                "M916", f"torch cannot hold {printable(key)}: {spec} has no rows of whole pairs"
            )
        if len(report.diagnostics) >= 20:
            break
    report.check()


def plain_part(specs: Mapping[str, Spec]) -> tuple[FileTree, dict[int, str]]:
    """A dict of tensors by these keys, and the keys by identity."""
    records = [(key, output_record(spec)) for key, spec in specs.items()]
    return FileTree(DictNode("dict", tuple(records), None), ()), {
        id(made): key for key, made in records
    }


def nodes(root: Any, tensor: Callable[[TensorRecord], Any]) -> Any:
    """The inert nodes that mean the tree; `tensor` makes those of a tensor but for its attributes,
    which go with it.
    """
    return to_nodes(root, tensor)


def state_node(like: TensorRecord, made: dict[int, Any]) -> Any:
    """The attributes of a tensor as nodes, None without; many tensors can share them, so what was
    `made` of them is kept there.
    """
    return None if like.state is None else to_nodes(like.state, lambda record: None, made)


def tensor_ref(like: TensorRecord, key: str, tied: str | None, made: dict[int, Any]) -> Ref:
    """A tensor that lies elsewhere; `made` as for `state_node`."""
    return Ref(key, like.requires_grad, like.parameter, like.subclass, state_node(like, made), tied)
