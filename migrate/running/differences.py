"""Where two checkpoints differ beside the bytes of their tensors, for `verify` and `diff`, and what
`inspect` says of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import listed, option, plural, printable
from ..core.templates import rank_of
from ..source.pickle.jsonform import to_json
from ..source.pickle.tree import DictNode, ListNode, joined, segment
from ..source.target import node_of
from ..source.tree import CheckpointTree, flatten_table, object_encodings, tensor_records
from .output_tree import items_of_index, output_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..planning.compose import Composition
    from ..planning.sides import SideFiles
    from ..source.index import Index, Source
    from ..source.tree import FileTree

MOST_ITEMS = 1000
# characters of one value
LONGEST = 10_000
# as many as there are values, at most, that are compared one by one
MOST_CONTAINERS = 1_000_000


def spec_differences(composition: Composition, made: Source) -> list[dict[str, str]]:
    """Keys that are missing, too many, or of another spec than planned."""
    outputs, there = composition.graph.outputs, made.index.tensors
    out = [{"key": key, "what": "is not in the output"} for key in outputs if key not in there]
    out += [
        {"key": key, "what": "is in the output and nothing makes it"}
        for key in there
        if key not in outputs
    ]
    for key, tensor in outputs.items():
        if key in there and there[key].spec != tensor.spec:
            out.append({"key": key, "what": f"is {there[key].spec}, planned was {tensor.spec}"})
    return out


def side_differences(one: Source, other: Source, sides: SideFiles) -> list[dict[str, str]]:
    """Side files that are not byte for byte the same, where both are folders; `sides` are those of
    `one` as they shall be.
    """
    if not _both_folders(one, other):
        return []
    a, b = dict(sides.list_files(one.index.side_files)), dict(other.index.side_files)
    out = [
        {"key": name, "what": f"side file {printable(name, 300)} is in one of them only"}
        for name in sorted(a.keys() ^ b.keys())
    ]
    unlike = (
        n
        for n in sorted(a.keys() & b.keys())
        if a[n] != b[n] or sides.read_file(n) != other.side_file(n)
    )
    return out + [
        {"key": name, "what": f"side file {printable(name, 300)} differs"} for name in unlike
    ]


class Unlooked(NamedTuple):
    """Something that a comparison did not look at: `what` it is, and `why`."""

    what: str
    why: str

    def to_json(self) -> dict[str, str]:
        return {"what": self.what, "why": self.why}


def unread_differences(
    one: Source, other: Source, names: tuple[str, str] = ("A", "B")
) -> tuple[list[dict[str, str]], list[str]]:
    """Values that are not decoded and are not the same in both, and notes on how those that are
    were compared.
    """
    if not (one.index.unread or other.index.unread):
        return [], []
    from ..source.unread import entry_contents

    a, b = (
        entry_contents(one.index.unread, one.blobs),
        entry_contents(other.index.unread, other.blobs),
    )
    differences: list[dict[str, str]] = []
    alike: list[str] = []
    whole: list[str] = []
    for path in sorted(a.keys() | b.keys()):
        x, y = a.get(path), b.get(path)
        name = (
            f"value {printable(path, 300)} ({printable((a.get(path) or b[path]).name, 100)}, "
            "not decoded)"
        )
        if x is None or y is None:
            differences.append({"key": path, "what": f"{name} is only in {names[x is None]}"})
        elif x.bytes != y.bytes or x.digest != y.digest:
            by = (
                "; it is too large to be compared but by the bytes of its file's pickle"
                if x.bytes or y.bytes
                else ""
            )
            differences.append({"key": path, "what": f"{name} differs{by}"})
        else:
            (whole if x.bytes else alike).append(printable(path, 300))
    notes = [
        (
            "not decoded, and equal by its canonical pickle stream and the bytes of its storages: "
            f"{listed(alike)}"
        )
    ] * bool(alike)
    return differences, [
        *notes,
        *[f"not decoded, and equal by the bytes of the whole pickle: {listed(whole)}"]
        * bool(whole),
    ]


def not_compared(one: Source, other: Source, names: tuple[str, str] = ("A", "B")) -> list[Unlooked]:
    """What two checkpoints hold and no comparison of the two looks at, stamps apart."""
    a, b = one.index, other.index
    out = []
    for name, index in zip(names, (a, b), strict=True):
        if index.left_out:
            files = plural(len(index.left_out), "file")
            out.append(
                Unlooked(
                    f"{files} beside {name}: {listed(list(index.left_out), 8)}",
                    "not part of the checkpoint",
                )
            )
        if index.side_files and not _both_folders(one, other):
            listing = listed([f.path for f in index.side_files], 8)
            out.append(
                Unlooked(f"side files of {name}: {listing}", "the other one is not a folder")
            )
        if _too_many(index):
            out.append(
                Unlooked(
                    f"values of {name} beyond the first {MOST_CONTAINERS:,}",
                    "too many to be compared one by one",
                )
            )
    if (a.tree is None) != (b.tree is None):
        out.append(
            Unlooked(
                "ties, flags of parameters, versions of modules and kinds of dicts",
                "only one of the two can hold these",
            )
        )
    # the default is written where the source says nothing
    said, other_said = ({"format": "pt", **index.metadata} for index in (a, b))
    if unlike := sorted(
        k for k in said.keys() | other_said.keys() if said.get(k) != other_said.get(k)
    ):
        out.append(
            Unlooked(
                f"metadata in the headers, which differs: {listed(unlike, 8)}",
                "text that no tensor depends on",
            )
        )
    return out


TENSORS_ONLY = (
    "side files",
    "values that are not tensors",
    "ties, flags of parameters, versions of modules and kinds of dicts",
)


def _both_folders(one: Source, other: Source) -> bool:
    return os.path.isdir(one.path) and os.path.isdir(other.path)


def _too_many(index: Index) -> bool:
    """Whether the checkpoint has more values than are compared one by one."""
    parts = index.tree.parts if index.tree is not None else ()
    return len(index.items) >= MOST_CONTAINERS or any(
        _containers(part.root) >= MOST_CONTAINERS for part in parts
    )


def _containers(root: Any) -> int:
    seen: set[int] = set()
    stack = [root]
    while stack and len(seen) < MOST_CONTAINERS:
        node = stack.pop()
        if type(node) not in (DictNode, ListNode) or id(node) in seen:
            continue
        seen.add(id(node))
        held = (value for _, value in node.pairs) if type(node) is DictNode else node.items
        stack += [child for child in held if type(child) in (DictNode, ListNode)]
    return len(seen)


def unread_outcome(
    source: Source, made: Source, allowed: bool
) -> tuple[list[dict[str, str]], list[Unlooked]]:
    """For `verify`: differences in what is not decoded, and what it did not look at.

    No run writes what it did not decode. An output without it is what its source gives only if that
    was `allowed`.
    """
    names = ("the source", "the output")
    differences, _ = unread_differences(source, made, names)
    unlooked = not_compared(source, made, names)
    lost = [path for path in source.index.unread if path not in made.index.unread]
    if lost and allowed:
        differences = [d for d in differences if d["key"] not in lost]
        unlooked.append(
            Unlooked(
                f"what is not decoded and was left out of the output: {listed(lost, 20)}",
                option("allow", "opaque"),
            )
        )
    said = f"; if it was left out with {option('allow', 'opaque')}, say so here too"
    return [{**d, "what": d["what"] + said * (d["key"] in lost)} for d in differences], unlooked


def item_differences(one: Source, other: Source, moved: bool = False) -> list[dict[str, str]]:
    """Values that are no tensors and are not the same in both; where rules `moved` keys, those
    outside of their dict alone.
    """
    a, b = _items(one.index, moved), _items(other.index, moved)
    held, made = (
        max(1, len(x.index.tree.parts)) if x.index.tree is not None else 1 for x in (one, other)
    )
    if moved and held != made:
        a = _of_ranks(a, held, made)
    known: dict[tuple[int, int], bool] = {}
    out = [
        {"key": path, "what": f"value {printable(path, 300)} is in one of them only"}
        for path in sorted(a.keys() ^ b.keys())
    ]
    out += [
        {"key": path, "what": f"value {printable(path, 300)} differs"}
        for path in sorted(a.keys() & b.keys())
        if not _same(a[path], b[path], known)
    ]
    kinds, others = _kinds(one.index, moved), _kinds(other.index, moved)
    unlike = (path for path in sorted(kinds.keys() & others.keys()) if kinds[path] != others[path])
    return out + [
        {
            "key": path,
            "what": f"value {printable(path, 300)} is made of other containers, or has keys of "
            "another type",
        }
        for path in unlike
    ]


def _kinds(index: Index, moved: bool) -> dict[str, list[Any]]:
    """What the containers of values are, by path, and the types of their keys; each once, without
    the dict that rules work on.
    """
    out: dict[str, list[Any]] = {}
    for rank, part in enumerate(index.tree.parts if index.tree is not None else ()):
        seen: set[int] = set()
        stack: list[tuple[Any, tuple[str, ...]]] = [(part.root, ())]
        while stack and len(seen) < MOST_CONTAINERS:
            node, path = stack.pop()
            if (
                type(node) not in (DictNode, ListNode)
                or id(node) in seen
                or (moved and node is part.table)
            ):
                continue
            seen.add(id(node))
            held = node.pairs if type(node) is DictNode else enumerate(node.items)
            if path and node is not part.table:
                types = (
                    sorted({type(key).__name__ for key, _ in node.pairs})
                    if type(node) is DictNode
                    else []
                )
                out.setdefault(f"{joined(path, 300)}@{rank}", []).append((node.kind, types))
            stack += [
                (child, (*path, segment(key)))
                for key, child in held
                if type(child) in (DictNode, ListNode)
            ]
    return out


def _same(a: Any, b: Any, known: dict[tuple[int, int], bool]) -> bool:
    """Equality that tells 1 from True and 0.0 from -0.0; `known` of what was compared, for one
    value can stand in many places.
    """
    pair = (id(a), id(b))
    if pair not in known:
        known[pair] = repr(a) == repr(b)
    return known[pair]


def _shortened(value: Any, known: dict[int, Any]) -> Any:
    """A value, or the begin of its JSON text if that is long."""
    if id(value) not in known:
        text = json.dumps(value)
        known[id(value)] = value if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return known[id(value)]


def _items(index: Index, moved: bool) -> Mapping[str, Any]:
    if not moved or index.tree is None:
        return index.items
    roots = [".".join(part.at) for part in index.tree.parts if part.at is not None]
    if "" in roots:
        return {}
    return {
        path: value
        for path, value in index.items.items()
        if not any(path.startswith(f"{root}.") for root in roots)
    }


def _of_ranks(items: Mapping[str, Any], held: int, made: int) -> dict[str, Any]:
    """Values of `held` ranks as an output of `made` ranks has them: a rank that is new has those of
    rank 0.
    """
    ranks: list[dict[str, Any]] = [{} for _ in range(held)]
    for path, value in items.items():
        name, _, rank = path.rpartition("@") if held > 1 else (path, "", "0")
        ranks[int(rank)][name] = value
    mark = "@{}" if made > 1 else ""
    return {
        path + mark.format(r): value
        for r in range(made)
        for path, value in ranks[r if r < held else 0].items()
    }


def describe_items(index: Index, numbering: str | None = None) -> dict[str, Any]:
    """What a checkpoint holds beside the tensors that rules work on, as `inspect` tells it;
    `numbering` as for `outline.encodings`.
    """
    outline = index.tree
    first = outline.parts[0].at if outline is not None and outline.parts else ()
    carried = index.passed_through
    known: dict[int, Any] = {}
    return {
        "at": None if first is None else ".".join(first),
        "items": [
            {"path": path, "value": _shortened(value, known)}
            for path, value in list(index.items.items())[:MOST_ITEMS]
        ],
        "objects": [
            {"key": key, **e.described()}
            for key, e in list(object_encodings(outline, numbering).items())[:MOST_ITEMS]
        ],
        "items_more": max(0, len(index.items) - MOST_ITEMS),
        "carried": {
            "tensors": len(carried),
            "bytes": sum(stored.spec.nbytes for stored in carried.values()),
        },
        "outside": [
            {"name": o.name, "reason": o.reason, "count": o.count, "paths": list(o.paths)}
            for o in index.outside
        ],
    }


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
    if composition.items is None or source.index.tree is None:
        return found
    before, there = composition.items, items_of_index(made.index)
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
