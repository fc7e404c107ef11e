"""What ranks have beside the model, where rules join their tensors and one tree is left of them,
and where that tree becomes ranks again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ..core.errors import fail, listed, option, plural
from ..source.by_part import (
    PARTS,
    names_of,
    of_part,
    part_name,
    with_parts,
    without_optimizers,
    without_parts,
)
from ..source.shards import Naming, naming
from ..source.target import items_of, outside_prefix
from ..source.tree import CheckpointTree, FileTree, name_tensors_outside

if TYPE_CHECKING:
    from ..source.index import Index, Source

S = TypeVar("S", bound="Source")


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
    prefix = outside_prefix(index.tensors)
    names = {
        outline.names[id(record)]: f"{prefix}{path}" for path, record in name_tensors_outside(made)
    }
    return replace(outline, parts=(made, *others)), names


class Parted(NamedTuple):
    """What stands around the model in each rank of an output, taken from what is kept by part.
    `renamed` are the tensors in there as in `gathered`, `lost` those that stand in no rank;
    `other_grid`: the ranks are other parts than those that something is kept of.
    """

    parts: Sequence[FileTree]
    renamed: Mapping[str, str]
    lost: Collection[str]
    other_grid: bool

    def unkept(self, drop: bool) -> set[str]:
        """The tensors that stand in no rank. M916 unless they may be dropped."""
        if self.lost and not drop:
            fail(
                "M916",
                f"{plural(len(self.lost), 'tensor')} kept of parts of another grid than the one "
                f"that is written: {listed(sorted(self.lost))}",
                help=f"{option('allow', 'drop')} leaves them out",
                permit="drop",
            )
        return set(self.lost)


def parted(index: Index, names: Sequence[str]) -> Parted | None:
    """The one tree of a checkpoint as the parts of these names have it, by rank; None where nothing
    is kept of parts. The first part's for all of them where it is kept of others.
    """
    outline = index.tree
    if outline is None or len(outline.parts) > 1:
        return None
    known = names_of(outline.parts[0].root)
    if not known:
        return None
    part = outline.parts[0]
    found = [of_part(part.root, name) for name in names] if sorted(known) == sorted(names) else []
    roots = [root for root in found if root is not None] or [without_parts(part.root)]
    made = [part._replace(root=root) for root in roots]
    prefix = outside_prefix(index.tensors)
    renamed: dict[str, str] = {}
    for rank, one in enumerate(made):
        for path, record in name_tensors_outside(one):
            renamed.setdefault(outline.names[id(record)], f"{prefix}{path}@{rank}")
    lost = [key for key in outline.passed_through if key not in renamed]
    return Parted(made, renamed, lost, not found)


def as_written(source: S, made: Index) -> S:
    """The source with what it has beside the model as an output with the trees of `made` has it,
    for the values to be compared. It is closed with `source`.
    """
    index, tree = source.index, source.index.tree
    if tree is None or made.tree is None:
        return source
    ranks = len(made.tree.parts)
    if ranks == 1:
        outline, renamed = gathered(index)
        parts: Sequence[FileTree] = outline.parts[:1]
    elif (called := called_in(made)) is not None and (
        apart := parted(index, [called(rank) for rank in range(ranks)])
    ):
        parts, renamed = apart.parts, dict(apart.renamed)
        parts = (*parts, *parts[-1:] * (ranks - len(parts)))
    else:
        return source
    if all(one is other for one, other in zip(parts, tree.parts, strict=False)):
        return source
    found = copy(source)
    mark = "@{}" if ranks > 1 else ""
    found.index = replace(
        index,
        items={
            path + mark.format(rank): value
            for rank, part in enumerate(parts)
            for path, value in items_of(part)
        },
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


def called_in(made: Index) -> Callable[[int], str] | None:
    """What the part of each rank of a checkpoint is called; None where it has one rank, or files
    that are not called by ranks.
    """
    ranks = 1 if made.tree is None else len(made.tree.parts)
    names = _called_parts(made, ranks) if ranks > 1 else None
    return None if names is None else names.__getitem__


def called_parts(ranks: Naming) -> Callable[[int], str]:
    """What the part of each rank is called, of files that are named so."""
    return lambda rank: part_name(ranks.name(rank, ".pt"))


def _called_parts(index: Index, ranks: int) -> list[str] | None:
    """What the first part of each rank is called, which is what its tree is kept as; None where the
    files are not those of ranks.
    """
    if index.grid is not None:
        names = index.grid.parts
        return [part_name(name) for name in names[:: max(1, len(names) // ranks)]]
    named = naming(index.files)
    return None if named is None else [called_parts(named)(rank) for rank in range(ranks)]
