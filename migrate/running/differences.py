"""What two checkpoints differ in beside the bytes of tensors: keys and specs, side files, values,
ties and flags; and what no comparison of the two looks at.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import formats
from ..core.errors import listed, option, plural, printable
from ..core.templates import rank_of
from ..planning.optimizers import following_of
from ..planning.sides import SideFiles
from ..source.blobs import ChunkedTensor
from ..source.pickle.jsonform import to_json
from ..source.pickle.tree import Composite, DictNode, ListNode, TensorRecord, joined, segment
from ..source.places import is_folder
from ..source.table import flatten_table
from ..source.target import node_of
from ..source.tree import CheckpointTree, tensor_records
from .gathered_ranks import CutParts
from .output_tree import groups_of, items_of_index, output_tree
from .state_trees import followed_values

if TYPE_CHECKING:
    from ..planning.compose import Composition
    from ..source.index import Index, Source
    from ..source.tree import FileTree

# as many as there are values, at most, that are compared one by one
MOST_CONTAINERS = 1_000_000


class Unlooked(NamedTuple):
    """Something that a comparison did not look at: `what` it is, and `why`."""

    what: str
    why: str

    def to_json(self) -> dict[str, str]:
        return {"what": self.what, "why": self.why}


def spec_differences(composition: Composition, made: Source) -> list[dict[str, str]]:
    """Keys that are missing, too many, or of another spec than planned."""
    outputs, there = composition.graph.outputs, made.index.tensors
    out = [{"key": key, "what": "is not in the output"} for key in outputs if key not in there]
    out += extra_keys(key for key in there if key not in outputs)
    for key, tensor in outputs.items():
        if key in there and there[key].spec != tensor.spec:
            out.append({"key": key, "what": f"is {there[key].spec}, planned was {tensor.spec}"})
    return out


def extra_keys(keys: Iterable[str]) -> list[dict[str, str]]:
    """The differences that these keys of an output are, in order."""
    return [{"key": key, "what": "is in the output and nothing makes it"} for key in keys]


def side_differences(one: Source, other: Source, sides: SideFiles) -> list[dict[str, str]]:
    """Side files that differ or are missing, of two folders; `sides`: what `one`'s should be."""
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


def unread_differences(
    one: Source, other: Source, names: tuple[str, str] = ("A", "B")
) -> tuple[list[dict[str, str]], list[str]]:
    """Values that are not decoded and differ, and notes on how the equal ones were compared."""
    if not (one.index.unread or other.index.unread):
        return [], []
    from ..source.unread import entry_contents

    a = entry_contents(one.index.unread, one.blobs)
    b = entry_contents(other.index.unread, other.blobs)
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
    if a.tree is not None and b.tree is not None and (moved := _moved(a, b)):
        out.append(
            Unlooked(
                f"the order of keys, which differs from {listed(moved, 1)} on",
                "dicts are compared key by key",
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


def _moved(a: Index, b: Index) -> list[str]:
    """Of tensors and values that both have, each first key that stands elsewhere in the other."""
    found = []
    both: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...] = (
        (a.tensors, b.tensors),
        (a.passed_through, b.passed_through),
        (a.items, b.items),
    )
    for one, other in both:
        orders = (key for key in one if key in other), (key for key in other if key in one)
        found += [x for x, y in zip(*orders, strict=True) if x != y][:1]
    return found


TENSORS_ONLY = (
    "side files",
    "values that are not tensors",
    "ties, flags of parameters, versions of modules and kinds of dicts",
)


def _both_folders(one: Source, other: Source) -> bool:
    return is_folder(one.path) and is_folder(other.path)


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
    """Values that differ, other than tensors; where rules `moved` keys, those outside the dict."""
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
            "what": f"value {printable(path, 300)} is made of other containers, or of ones "
            "with keys of another type or with other attributes",
        }
        for path in unlike
    ]


def _kinds(index: Index, moved: bool) -> dict[str, list[Any]]:
    """The kinds of containers by path, their keys' types, their attributes, and what a defaultdict
    calls or how long a deque may be; each once, without the dict.
    """
    out: dict[str, list[Any]] = {}
    texts: dict[int, str] = {}
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
            if node is not part.table:
                types: list[str] = []
                said = None
                if type(node) is DictNode:
                    types = sorted({type(key).__name__ for key, _ in node.pairs})
                    said = node.attributes and _text(node.attributes, texts)
                made = node.node.arguments if node.kind in ("defaultdict", "deque") else ()
                out.setdefault(f"{joined(path, 300) or '.'}@{rank}", []).append(
                    (node.kind, types, said, to_json(made))
                )
            stack += [
                (child, (*path, segment(key)))
                for key, child in held
                if type(child) in (DictNode, ListNode)
            ]
    return out


def _same(a: Any, b: Any, known: dict[tuple[int, int], bool]) -> bool:
    """Equality that tells 1 from True and 0.0 from -0.0; `known` holds what was compared."""
    pair = (id(a), id(b))
    if pair not in known:
        known[pair] = repr(a) == repr(b)
    return known[pair]


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
    """Values of `held` ranks as an output of `made` ranks has them: new ranks have rank 0's."""
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


_Found = list[dict[str, str]]


def form_differences(one: Source, other: Source) -> _Found:
    """Where two checkpoints differ in ties, flags, versions and kinds, if both have a tree."""
    if one.index.tree is None or other.index.tree is None:
        return []
    return _compare(
        (_said_of(one.index.tree), _firsts(one.index)),
        (_said_of(other.index.tree), _firsts(other.index)),
    )


class WrittenTree(NamedTuple):
    """What an output holds beside what rules make, as its format gives it back: the trees, the keys
    of the tensors in them by the records' identity, and of each key what it is of a run's results
    or of the source's tensors (`origins`), and with which first key it is one tensor. `added` are
    the texts of values among the tensors that the format adds, `left_out` those that it leaves out.
    """

    parts: Sequence[FileTree]
    names: Mapping[int, str]
    origins: Mapping[str, str]
    first: Mapping[str, str]
    groups: Mapping[str, str]
    added: Mapping[str, str] = MappingProxyType({})
    left_out: Container[str] = ()

    @classmethod
    def of(
        cls,
        source: Source,
        composition: Composition,
        output: Source,
        cut: CutParts,
        values: tuple[Any, Any] | None,
    ) -> WrittenTree:
        """What the composition makes of the source where it is written as `output` is, and cut so;
        with other `values` beside the model.
        """
        out = output_tree(source, composition, drop=True, cut=cut, values=values)
        rest, was = out.rest, {new: old for old, new in out.called.items()}
        parts, names, origins = formats.tree_as_saved(rest, output.format)
        first = rest.first if parts is rest.parts else {key: key for key in origins}
        origins = {key: was.get(name, name) for key, name in origins.items()}
        several = composition.items is not None and composition.items.ranks
        said = groups_of(rest, several)
        if any(one.moved for one in following_of(composition)):
            said.update(followed_values(parts[0], names, composition))
        added = {
            name: repr(to_json(node_of(value))) for name, value in composition.put_back.items()
        }
        if parts is rest.parts:
            return cls(parts, names, origins, first, said, added)
        before, after = _values(rest.parts[0]), _values(parts[0])
        added |= {
            name: repr(to_json(node_of(value)))
            for name, value in after.items()
            if name not in before
        }
        return cls(parts, names, origins, first, said, added, before.keys() - after.keys())


def made_form_differences(
    source: Source, composition: Composition, wanted: WrittenTree, made: Source
) -> _Found:
    """The same for an output and what rules make of its source, values among tensors too."""
    if made.index.tree is None:
        return []
    found = _compare(
        (_said(wanted.parts, wanted.names), wanted.first),
        (_said_of(made.index.tree), _firsts(made.index)),
    )
    if composition.items is None or source.index.tree is None:
        return found
    before, there = composition.items, items_of_index(made.index)
    if before.ranks != there.ranks:
        return found
    kept, groups = len(made.index.tree.parts), wanted.groups
    due = dict(wanted.added)
    for name, was in before.names.items():
        # without a file for its rank, which the plan says, or without a place in the format
        if (before.ranks and (rank_of(name) or 0) >= kept) or name in wanted.left_out:
            continue
        due[name] = groups.get(name) or before.spelled(was)
    for name, text in due.items():
        if name not in there.names:
            found.append(
                {"key": name, "what": f"value {printable(name, 300)} is not in the output"}
            )
        elif there.spelled(name) != text:
            found.append({"key": name, "what": f"value {printable(name, 300)} differs"})
    more = [name for name in there.names if name not in due and name not in before.names]
    return found + [
        {"key": name, "what": f"value {printable(name, 300)} is in the output and nothing makes it"}
        for name in more
    ]


def _values(part: FileTree) -> dict[str, Any]:
    """The values that are no tensors among those that rules work on."""
    table = part.table
    return {
        key: value
        for key, value in (table.pairs if table is not None else ())
        if type(key) is str and type(value) not in (TensorRecord, Composite)
    }


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
    """For each key the first key that is one tensor with it in its rank's file."""
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
        elif isinstance(stored, ChunkedTensor) or stored.storage is None or not stored.spec.nbytes:
            out[key] = key
        else:
            out[key] = places.setdefault(
                (stored.storage, stored.offset, stored.strides, stored.spec), key
            )
    return out


def _said(parts: Sequence[FileTree], names: Mapping[int, str]) -> dict[str, str]:
    """What the dicts that rules work on and all tensors say: a name of the fact -> its text."""
    out: dict[str, str] = {}
    texts: dict[int, str] = {}
    for rank, part in enumerate(parts):
        # of what is nested, each dict has a kind, and the tensors say the keys
        table = flatten_table(part, "").table
        if table is not None:
            mark = f"@{rank}" if len(parts) > 1 else ""
            out[f"the kind of the dict{mark}"] = table.kind
            for name, value in table.attributes.pairs if type(table.attributes) is DictNode else ():
                if type(value) is DictNode:
                    out.update(
                        {
                            f"{name} of `{key}`{mark}": _text(held, texts)
                            for key, held in value.pairs
                        }
                    )
                else:
                    out[f"the attribute {name}{mark}"] = _text(value, texts)
        for leaf in tensor_records([table, part.root]):
            if leaf.parameter or leaf.requires_grad or leaf.subclass is not None:
                out[f"the flags of {names[id(leaf)]}"] = (
                    f"{leaf.parameter} {leaf.requires_grad} {leaf.subclass}"
                )
            if leaf.state is not None:
                out[f"the attributes of {names[id(leaf)]}"] = _text(leaf.state, texts)
    return out


def _text(value: Any, texts: dict[int, str]) -> str:
    """The text of a value; one value can stand under many names."""
    if id(value) not in texts:
        texts[id(value)] = repr(to_json(node_of(value)))
    return texts[id(value)]
