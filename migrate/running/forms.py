"""What two checkpoints say of their tensors beside bytes, and where it differs: ties, flags,
versions of modules, kinds of dicts, values.

Only what both can say is compared. A checkpoint without an outline is tensors by name, and to hold
it against the kinds of a `.pt` would find a difference in every conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.diagnostics import printable
from ..core.ranks import rank_of
from ..source.pickle.jsonform import to_json
from ..source.pickle.tree import DictNode
from ..source.target_tree import node_of
from ..source.tree import CheckpointTree, flatten_table, tensor_records
from .output_tree import items_of_index, output_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..planning.compose import Composition
    from ..source.index import Index, Source
    from ..source.tree import FileTree

_Found = list[dict[str, str]]


def form_differences(one: Source, other: Source) -> _Found:
    """Where two checkpoints differ in ties, flags, versions and kinds; nothing if one of them has
    tensors alone.
    """
    if one.index.tree is None or other.index.tree is None:
        return []
    return _compare(
        (_said_of(one.index.tree), _firsts(one.index)),
        (_said_of(other.index.tree), _firsts(other.index)),
    )


def made_form_differences(source: Source, composition: Composition, made: Source) -> _Found:
    """Where an output differs so from what the rules make of its source, values among the tensors
    included.
    """
    if made.index.tree is None:
        return []
    out = output_tree(source, composition, drop=True)
    found = _compare(
        (_said(out.rest.parts, out.rest.names), out.rest.first),
        (_said_of(made.index.tree), _firsts(made.index)),
    )
    if composition.values is None or source.index.tree is None:
        return found
    before, there = composition.values, items_of_index(made.index)
    if before.ranks != there.ranks:
        return found
    kept = len(made.index.tree.parts)
    for name, was in before.names.items():
        if before.ranks and (rank_of(name) or 0) >= kept:
            # its rank has no file any more, which the plan says
            continue
        if name not in there.names:
            found.append(
                {"key": name, "what": f"value {printable(name, 300)} is not in the output"}
            )
        elif there.spelled(name) != before.spelled(was):
            found.append({"key": name, "what": f"value {printable(name, 300)} differs"})
    more = [name for name in there.names if name not in before.names]
    return found + [
        {"key": name, "what": f"value {printable(name, 300)} is in the output and nothing makes it"}
        for name in more
    ]


def _said_of(outline: CheckpointTree) -> dict[str, str]:
    return _said(outline.parts, outline.names)


def _compare(
    one: tuple[Mapping[str, str], Mapping[str, str]],
    other: tuple[Mapping[str, str], Mapping[str, str]],
) -> _Found:
    (a, ties_a), (b, ties_b) = one, other
    out = [
        {"key": what, "what": f"{printable(what, 300)} differs"}
        for what in sorted(a.keys() | b.keys())
        if a.get(what) != b.get(what)
    ]
    # a tensor that is in one of them only is a difference already
    both = [key for key in ties_a if key in ties_b]
    groups_a, groups_b = _groups(both, ties_a), _groups(both, ties_b)
    return out + [
        {
            "key": key,
            "what": f"{printable(key, 300)} is one tensor with others in one of them, and not in "
            "the other",
        }
        for key in both
        if groups_a[key] != groups_b[key]
    ]


def _groups(keys: Sequence[str], firsts: Mapping[str, str]) -> dict[str, str]:
    """For each key the first of these keys that is one tensor with it, in the same file of a rank:
    equal for equal groups.
    """
    found: dict[Any, str] = {}
    return {key: found.setdefault((firsts[key], rank_of(key)), key) for key in keys}


def _firsts(index: Index) -> dict[str, str]:
    """For each tensor the first one that is the same elements of one storage, often itself."""
    places: dict[Any, str] = {}
    out: dict[str, str] = {}
    ties = index.tree.ties if index.tree is not None else {}
    for key, stored in (*index.tensors.items(), *index.passed_through.items()):
        if key in ties:
            out[key] = ties[key]
        elif stored.storage is None or not stored.spec.nbytes:
            out[key] = key
        else:
            out[key] = places.setdefault(
                (stored.storage, stored.offset, stored.strides, stored.spec), key
            )
    return out


def _said(parts: Sequence[FileTree], names: Mapping[int, str]) -> dict[str, str]:
    """What the dicts that rules work on say: a name of the fact -> its text."""
    out: dict[str, str] = {}
    texts: dict[int, str] = {}
    for rank, part in enumerate(parts):
        # of what is nested, each dict has a kind, and the keys are told by the tensors
        table = flatten_table(part, "").table
        if table is None:
            continue
        mark = f"@{rank}" if len(parts) > 1 else ""
        out[f"the kind of the dict{mark}"] = table.kind
        for name, value in table.attributes.pairs if type(table.attributes) is DictNode else ():
            if type(value) is DictNode:
                out.update(
                    {f"{name} of `{key}`{mark}": _text(held, texts) for key, held in value.pairs}
                )
            else:
                out[f"the attribute {name}{mark}"] = _text(value, texts)
        for leaf in tensor_records([table]):
            if leaf.parameter or leaf.requires_grad or leaf.subclass is not None:
                out[f"the flags of {names[id(leaf)]}"] = (
                    f"{leaf.parameter} {leaf.requires_grad} {leaf.subclass}"
                )
    return out


def _text(value: Any, texts: dict[int, str]) -> str:
    """The text of a value; one value can stand under many names."""
    if id(value) not in texts:
        texts[id(value)] = repr(to_json(node_of(value)))
    return texts[id(value)]


__all__ = ["form_differences", "made_form_differences"]
