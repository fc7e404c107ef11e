"""What ranks have beside the model, where rules join their tensors and one tree is left of them."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ..source.by_part import PARTS, names_of, part_name, with_parts, without_optimizers
from ..source.target import items_of, outside_prefix
from ..source.tree import CheckpointTree, name_tensors_outside

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


def with_gathered(source: S, ranks: int) -> S:
    """The source with what it has beside the model as an output with so many trees has it, for the
    values to be compared. It is closed with `source`.
    """
    index, tree = source.index, source.index.tree
    if tree is None or ranks != 1 or len(tree.parts) == 1:
        return source
    outline, called = gathered(index)
    part = outline.parts[0]
    if part is tree.parts[0]:
        return source
    found = copy(source)
    found.index = replace(
        index,
        items=dict(items_of(part)),
        tree=replace(
            outline,
            parts=(part,),
            names={number: called.get(key, key) for number, key in tree.names.items()},
            passed_through={called[k]: at for k, at in tree.passed_through.items() if k in called},
        ),
    )
    return found


def _called_parts(index: Index, ranks: int) -> list[str] | None:
    """What the first part of each rank is called, which is what its tree is kept as; None where the
    files are not those of ranks.
    """
    names = index.grid.parts if index.grid is not None else index.files
    if not names or len(names) % ranks:
        return None
    return [part_name(name) for name in names[:: len(names) // ranks]]
