"""Where two checkpoints differ beside the bytes of their tensors, for `verify` and `diff`, and what
`inspect` says of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.diagnostics import listed, plural, printable
from ..core.spelling import option
from ..source.pickle.tree import DictNode, ListNode, joined, segment
from ..source.tree import object_encodings

if TYPE_CHECKING:
    from ..planning.compose import Composition
    from ..planning.sides import SideFiles
    from ..source.index import Index, Source

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
    a, b = dict(sides.listing(one.index.side_files)), dict(other.index.side_files)
    out = [
        {"key": name, "what": f"side file {printable(name, 300)} is in one of them only"}
        for name in sorted(a.keys() ^ b.keys())
    ]
    unlike = (
        n
        for n in sorted(a.keys() & b.keys())
        if a[n] != b[n] or sides.read(n) != other.side_file(n)
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
            differences.append({"key": path, "what": f"{name} is in {names[x is None]} only"})
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
                    "no part of the checkpoint",
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
                "only one of them can say these",
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
