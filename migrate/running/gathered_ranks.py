"""What ranks have beside the model, where rules join their tensors and one tree is left of them,
and where that tree becomes ranks again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import replace
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..core.errors import fail, listed, option, plural
from ..core.templates import rank_of
from ..source.by_part import (
    PARTS,
    names_of,
    of_part,
    part_name,
    with_parts,
    without_optimizers,
    without_parts,
)
from ..source.pickle.nodes import JSON_SCALARS
from ..source.pickle.tree import DictNode, TensorRecord
from ..source.shards import Naming, naming
from ..source.target import ValuesByPath, outside_prefix, plain_part
from ..source.tree import CheckpointTree, FileTree, name_tensors_outside, tensor_records

if TYPE_CHECKING:
    from ..source.grids import WrittenGrid
    from ..source.index import Index, Source

# keys that are spelled whole in the paths of values, in characters
_SHORT = 1000

S = TypeVar("S", bound="Source")


# what answers with the root of a part of another grid: by the root of the first part that was read,
# the tensor-parallel rank and the number in it
OfOther = Callable[[Any, int, int], Any]


class CutParts(NamedTuple):
    """How an output is cut: what its parts are called, by rank, None for one that has no parts; and
    `of_other` where they are those of another grid than the source's, be it of the same
    `processes`.
    """

    called: Sequence[Sequence[str]] | None = None
    of_other: OfOther | None = None
    processes: bool = False


WHOLE = CutParts()


class OutputCut(NamedTuple):
    """How an output is cut: for a grid, for ranks whose files are called so, or not at all; and its
    parts.
    """

    grid: WrittenGrid | None = None
    ranks: Naming | None = None
    parts: CutParts = WHOLE


UNCUT = OutputCut()


def gathered(index: Index) -> tuple[CheckpointTree, dict[str, str]]:
    """The trees of ranks that become one, with what the others have beside the model kept in the
    first; and what tensors in there are called now, by what they were.

    As they are where nothing stands around the model, or where a value has the name of what is
    kept. State of optimizers is not kept so: it follows its parameters, or goes by a word.
    """
    outline = index.tree
    if outline is None:
        raise ValueError("a checkpoint without trees has no ranks to gather")
    first, *others = outline.parts
    called = _called_parts(index, len(outline.parts))
    alike = all(part.at == first.at and part.table is not None for part in outline.parts)
    if not others or not first.at or not alike or called is None:
        return outline, {}
    if any(part.root.get(PARTS) is not None and not names_of(part.root) for part in outline.parts):
        return outline, {}
    kept = [part._replace(root=without_optimizers(part.root)) for part in others]
    made = with_parts(first, list(zip(called[1:], kept, strict=True)), called[0])
    if not any(own.pairs for _, own in made.root.get(PARTS).pairs):
        # all of them have the same there
        return outline, {}
    prefix = outside_prefix(index.tensors)
    names = {
        outline.names[id(record)]: f"{prefix}{path}" for path, record in name_tensors_outside(made)
    }
    return replace(outline, parts=(made, *others)), names


def ranks_differ(items: Mapping[str, Any], parts: Sequence[FileTree], kept: int) -> bool:
    """Whether a rank from `kept` on holds other values than rank 0, of the `items` by path; those
    aside that are kept by part.
    """
    first, others = parts[0], parts[kept:]
    if not others:
        return False
    below = ".".join((*(first.at or ()), "")) if names_of(first.root) else ""
    plain = _plain_values(first) if below else None
    if plain is not None and all(
        part.at == first.at and _plain_values(part) == plain for part in others
    ):
        return False
    held: dict[int, dict[str, str]] = {}
    for path, value in items.items():
        if path.startswith(below):
            held.setdefault(rank_of(path) or 0, {})[path.rpartition("@")[0]] = repr(value)
    return any(held.get(rank, {}) != held.get(0, {}) for rank in range(kept, len(parts)))


def _plain_values(part: FileTree) -> list[tuple[str, str]] | None:
    """The keys and texts of the values in the dict that rules work on, none of which holds others;
    None where their paths could be those of anything else.
    """
    table, at = part.table, part.at or ()
    if table is None or len(at) != 1:
        return None
    below = f"{at[0]}."
    if any(type(key) is not str or key.startswith(below) for key, _ in part.root.pairs):
        return None
    pairs = [pair for pair in table.pairs if type(pair[1]) is not TensorRecord]
    if any(
        type(value) not in JSON_SCALARS or type(key) is not str or len(key) > _SHORT
        for key, value in pairs
    ):
        return None
    return [(key, repr(value)) for key, value in pairs]


class Parted(NamedTuple):
    """What stands around the model in each rank of an output, taken from what is kept by part.
    `renamed` are the tensors in there as in `gathered`, `lost` those that stand in no rank;
    `other_grid`: the ranks are other parts than those that something is kept of.
    """

    parts: Sequence[FileTree]
    renamed: Mapping[str, str]
    lost: Collection[str]
    other_grid: bool

    def unkept(self, drop: bool, put_back: AbstractSet[str]) -> set[str]:
        """The tensors that stand in no rank, but for those that are `put_back` into others. M916
        unless they may be dropped.
        """
        lost = set(self.lost) - put_back
        if lost and not drop:
            fail(
                "M916",
                f"{plural(len(lost), 'tensor')} kept of parts of another grid than the one "
                f"that is written: {listed(sorted(lost))}",
                help=f"{option('allow', 'drop')} leaves them out",
                permit="drop",
            )
        return lost


def parted(
    outline: CheckpointTree,
    tensors: Mapping[str, Any],
    cut: CutParts,
) -> Parted | None:
    """The trees of a checkpoint as those of ranks that consist of these parts, of which the first
    comes first; None where nothing is kept of parts, or is kept so already. Unless the processes of
    another grid are the same, tensors beside the model are those of processes that it has not, and
    stand in no part.
    """
    kept = [names_of(part.root) for part in outline.parts]
    held = {name: number for number, names in enumerate(kept) for name in names}
    groups = [list(names) for names in cut.called or ()]
    of_other = cut.of_other
    same = sorted(held) == sorted(name for names in groups for name in names)
    if not groups or (of_other is not None and not outline.parts[0].at):
        # there are no parts, or nothing stands around the model
        return None
    if of_other is None:
        # ranks that stay apart keep what they kept of their own parts
        stay = len(groups) == len(outline.parts) > 1 and all(len(names) == 1 for names in groups)
        if not held or stay or kept == [names if len(names) > 1 else [] for names in groups]:
            return None
        made = [part._replace(root=without_parts(part.root)) for part in outline.parts]
        if same:
            made = [
                _joined([(name, _part_of(outline.parts[held[name]], name)) for name in names])
                for names in groups
            ]
    else:
        same, made = same and cut.processes, []
        for rank, names in enumerate(groups):
            part = outline.parts[min(rank, len(outline.parts) - 1)]
            own = [
                _part_of(outline.parts[held[name]], name) if same else _without_tensors(part)
                for name in names
            ]
            roots = [of_other(one.root, rank, number) for number, one in enumerate(own)]
            changed = [one._replace(root=root) for one, root in zip(own, roots, strict=True)]
            made.append(_joined(list(zip(names, changed, strict=True))))
    prefix, mark = outside_prefix(tensors), "@{}" if len(groups) > 1 else ""
    renamed: dict[str, str] = {}
    for rank, one in enumerate(made):
        for path, record in name_tensors_outside(one):
            renamed.setdefault(outline.names[id(record)], f"{prefix}{path}{mark.format(rank)}")
    lost = [key for key in outline.passed_through if key not in renamed]
    of_others = not same and (bool(held) or len(outline.parts) > 1)
    return Parted(made, renamed, lost, of_others)


def _joined(parts: Sequence[tuple[str, FileTree]]) -> FileTree:
    """Parts by name as the tree that they are read as."""
    (called, first), *others = parts
    return with_parts(first, others, called) if others else first


def _without_tensors(part: FileTree) -> FileTree:
    """The tree of a first part without what holds tensors beside the model."""
    root = without_parts(part.root)
    if type(root) is not DictNode or not part.at:
        return part
    pairs = tuple(
        (key, value)
        for key, value in root.pairs
        if key == part.at[0] or not any(tensor_records([value]))
    )
    return part._replace(root=DictNode(root.kind, pairs, root.node, root.attributes))


def _part_of(part: FileTree, called: str) -> FileTree:
    found = of_part(part.root, called)
    return part if found is None else part._replace(root=found)


def with_other_values(index: Index, values: tuple[Any, Any]) -> Index:
    """The index with other values beside the model than `values[0]`, those of `values[1]`; of a
    checkpoint that is nothing but tensors as well, but not of a state dict in memory.
    """
    tree = index.tree
    if tree is None and not index.items:
        tree = CheckpointTree((plain_part({})[0],), {}, {}, {})
    if tree is None:
        return index
    from ..source.root_values import with_values

    tree = replace(tree, parts=tuple(with_values(part, *values) for part in tree.parts))
    return replace(index, tree=tree, items=ValuesByPath(tree.parts))


def as_written(source: S, made: Index, cut: CutParts, values: tuple[Any, Any] | None = None) -> S:
    """The source with what it has beside the model as an output with the trees of `made` has it,
    for the values to be compared; `values` are those that are other ones. It is closed with
    `source`.
    """
    index, was = source.index, source.index.tree
    if values is not None:
        index = with_other_values(index, values)
    tree = index.tree
    if tree is None or (made.tree is None and values is None):
        return source
    ranks, renamed = 1 if made.tree is None else len(made.tree.parts), dict[str, str]()
    outline = tree
    if ranks == 1:
        outline, renamed = gathered(index)
    parts: Sequence[FileTree] = outline.parts[:ranks]
    if apart := parted(outline, index.tensors, cut):
        parts, renamed = apart.parts, dict(apart.renamed)
    parts = [parts[min(rank, len(parts) - 1)] for rank in range(ranks)]
    same = was is not None and all(map(is_, parts, was.parts))
    if same:
        return source
    found = copy(source)
    renamed = renamed or {key: key for key in tree.passed_through}
    found.index = replace(
        index,
        items=ValuesByPath(parts),
        tree=replace(
            tree,
            parts=tuple(parts),
            names={number: renamed.get(key, key) for number, key in tree.names.items()},
            passed_through={
                renamed[k]: at for k, at in tree.passed_through.items() if k in renamed
            },
        ),
    )
    return found


def called_in(made: Index) -> Sequence[Sequence[str]] | None:
    """What the parts of each rank of a checkpoint are called; None where it has one part, or files
    that are not called by ranks.
    """
    ranks = 1 if made.tree is None else len(made.tree.parts)
    if made.grid is not None:
        names = [part_name(name) for name in made.grid.parts]
        count = len(names) // ranks
        return (
            None
            if len(names) < 2
            else [names[at : at + count] for at in range(0, len(names), count)]
        )
    found = _called_parts(made, ranks) if ranks > 1 else None
    return None if found is None else [[name] for name in found]


def called_parts(ranks: Naming, count: int) -> Sequence[Sequence[str]]:
    """What the parts of each of several ranks are called, of files that are named so."""
    return [[part_name(ranks.name(rank, ".pt"))] for rank in range(count)]


def _called_parts(index: Index, ranks: int) -> list[str] | None:
    """What the first part of each rank is called, which is what its tree is kept as; None where the
    files are not those of ranks.
    """
    if index.grid is not None:
        names = index.grid.parts
        return [part_name(name) for name in names[:: max(1, len(names) // ranks)]]
    named = naming(index.files)
    return None if named is None else [name for one in called_parts(named, ranks) for name in one]
