"""What safetensors has no place for, beside it: `migrate.items.json`, and
`migrate.items.safetensors` for the tensors in it.

A training checkpoint becomes a folder whose `model.safetensors` is what others expect, the weights
and nothing else. All the tree (nesting, optimizer state, numbers and text, versions of modules,
which tensors were one) lies in two files of migrate's own, from which a .pt file is made again with
equal bits. They say for which tensors they were written; where these were changed since, they are
left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..core.errors import fail
from ..core.spec import Spec
from ..core.types import FORMAT_VERSION
from ..source.blobs import Stored
from ..source.index import specs_hash
from ..source.jsontext import collector_paused, parse
from ..source.pickle.jsonform import Ref, from_json, to_json
from ..source.pickle.tree import DictNode, TensorRecord
from ..source.target import TargetTree
from ..source.target_tree import items_of, nodes, tensor_ref, torch_form
from ..source.tree import (
    CheckpointTree,
    FileTree,
    dict_at,
    flatten_table,
    tensor_records,
    tensors_of,
    tensors_outside,
)

TENSORS = "migrate.items.safetensors"
IN_HEADER = "migrate.items"
MAX_ITEMS = 120_000_000
_HELP = "remove it to go on with the tensors alone"


def items_text(tree: TargetTree, specs: Mapping[str, Spec]) -> str | None:
    """The JSON text that says all of `tree` but the bytes of tensors; None if it is a flat dict of
    tensors alone, by rank.
    """
    with collector_paused():
        if _trivial(tree):
            return None

        states: dict[int, Any] = {}

        def tensor(found: TensorRecord) -> Ref:
            key = tree.names[id(found)]
            first = tree.first.get(key, key)
            return tensor_ref(found, key, first if first != key else None, states)

        parts = [
            {
                "at": None if part.at is None else list(part.at),
                "root": to_json(nodes(part.root, tensor)),
            }
            for part in tree.parts
        ]
        document = {
            "format_version": FORMAT_VERSION,
            "kind": "items",
            "output": specs_hash({**specs, **tree.passed_through}),
            "carried": list(tree.passed_through),
            "parts": parts,
        }
        return (
            json.dumps(document, ensure_ascii=True, separators=(",", ":"), allow_nan=False) + "\n"
        )


def _trivial(tree: TargetTree) -> bool:
    if tree.passed_through or any(first != key for key, first in tree.first.items()):
        return False
    for part in tree.parts:
        table = part.root
        if (
            part.at != ()
            or type(table) is not DictNode
            or table.kind != "dict"
            or table.attributes is not None
        ):
            return False
        for _, value in table.pairs:
            if (
                type(value) is not TensorRecord
                or value.parameter
                or value.requires_grad
                or value.subclass
                or value.state is not None
            ):
                return False
    return True


def read_items(
    data: bytes, tensors: Mapping[str, Stored], carried: Mapping[str, Stored], label: str
) -> tuple[CheckpointTree | None, dict[str, Any], str | None]:
    """The tree that the text describes over these tensors, its items by path, and a note if it
    was written for others.

    `tensors` are those that rules see, by their keys with ranks. M906 for what is no such text,
    M930 to M936 as for a pickle.
    """
    with collector_paused():
        document = parse(data, label, floats=True)
        match document:
            case {
                "format_version": str(version),
                "kind": "items",
                "output": str(output),
                "carried": list(names),
                "parts": list(parts),
            }:
                pass
            case _:
                fail("M906", f"{label}: is not what migrate writes beside tensors", help=_HELP)
        if version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
            return None, {}, f"{label}: is of another version ({version[:20]!a}) and is left alone"
        every = {**tensors, **carried}
        fits = all(type(name) is str for name in names) and set(names) == set(carried)
        if not parts:
            fail("M906", f"{label}: describes no file", help=_HELP)
        if not fits or specs_hash({key: stored.spec for key, stored in every.items()}) != output:
            return (
                None,
                {},
                (
                    f"{label}: was written for other tensors (the index hash differs) and is left "
                    "alone"
                ),
            )
        return (*_read(parts, every, carried, label), None)


def _read(
    parts: list[Any], every: Mapping[str, Stored], carried: Mapping[str, Stored], label: str
) -> tuple[CheckpointTree, dict[str, Any]]:
    # what reads pickles; most checkpoints have no such file
    from ..source.pickle.policy import decode
    from ..source.pickle.rebuild import Rebuilder
    from .torchzip import unfit

    numbers = {key: str(number) for number, key in enumerate(every)}
    keys = list(every)
    ties: dict[str, str] = {}
    made: list[FileTree] = []
    names: dict[int, str] = {}
    items: dict[str, Any] = {}
    for rank, part in enumerate(parts):
        at = part.get("at") if type(part) is dict else None
        if (
            type(part) is not dict
            or "root" not in part
            or not (at is None or (type(at) is list and all(type(word) is str for word in at)))
        ):
            fail("M906", f"{label}: part {rank} is not what migrate writes", help=_HELP)
        rebuilder, used = Rebuilder(), set[str]()

        def tensor(found: Ref, rebuilder: Rebuilder = rebuilder, used: set[str] = used) -> Any:
            if found.key not in every or (found.tied is not None and found.tied not in every):
                fail("M906", f"{label}: names a tensor that is not there", help=_HELP)
            if found.tied is not None and found.tied != found.key:
                ties[found.key] = found.tied
            spec = every[found.key].spec
            dtype, shape = torch_form(spec)
            used.add(numbers[found.key])
            return rebuilder.tensor(
                numbers[found.key],
                dtype,
                shape,
                spec.nbytes,
                requires_grad=found.requires_grad,
                parameter=found.parameter,
                subclass=found.subclass,
                state=found.state,
            )

        root = from_json(part["root"], tensor, label)
        decoded = decode(
            root, label, {number: every[keys[int(number)]].spec.nbytes for number in used}
        )
        if decoded.outside or unfit(decoded.tree)[1]:
            fail("M906", f"{label}: holds values that migrate does not write", help=_HELP)
        path = None if at is None else tuple(at)
        if path is not None and dict_at(decoded.tree, path) is None:
            fail("M906", f"{label}: part {rank} has no dict at its path", help=_HELP)
        one = flatten_table(FileTree(decoded.tree, path), label)
        names.update({id(leaf): keys[int(leaf.storage.key)] for leaf in tensor_records([one.root])})
        mark = f"@{rank}" if len(parts) > 1 else ""
        items.update({where + mark: value for where, value in items_of(one)})
        made.append(one)
    _check_complete(made, every, carried, names, label)
    return CheckpointTree(tuple(made), names, carried, ties), items


def _check_complete(
    parts: list[FileTree],
    every: Mapping[str, Stored],
    carried: Mapping[str, Stored],
    names: Mapping[int, str],
    label: str,
) -> None:
    """Raises unless each tensor stands in the tree, where tensors of its kind stand."""
    inside = {names[id(record)] for part in parts for _, record in tensors_of(part.table)}
    outside = {
        names[id(record)] for part in parts for _, record in tensors_outside(part.root, part.table)
    }
    if (
        set(names.values()) != set(every)
        or not inside.isdisjoint(carried)
        or not outside <= carried.keys()
    ):
        fail("M906", f"{label}: does not name each tensor where it belongs", help=_HELP)
