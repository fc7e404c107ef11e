"""What safetensors has no place for, beside it: `migrate.items.json`, and
`migrate.items.safetensors` for the tensors in it.

A training checkpoint becomes a folder whose `model.safetensors` is what others expect, the weights
and nothing else. All the rest (nesting, optimizer state, numbers and text, versions of modules,
which tensors were one) lies in two files of migrate's own, from which a .pt file is made again with
equal bits. They say for which tensors they were written; where these were changed since, they are
left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..core.diagnostics import fail
from ..core.spec import Spec
from ..source.index import Stored, specs_hash
from ..source.jsontext import collector_paused, parse
from ..source.outline import Outline, Part, at_path, flat, records, tensors_of
from ..source.pickle.jsonform import Ref, from_json, to_json
from ..source.pickle.tree import DictNode, TensorRecord
from ..source.target import Rest
from ._torchtree import items_of, nodes, ref, torch_form

TENSORS = "migrate.items.safetensors"
IN_HEADER = "migrate.items"
MAX_ITEMS = 120_000_000
FORMAT_VERSION = "1.0"
_HELP = "remove it to go on with the tensors alone"


def text(rest: Rest, specs: Mapping[str, Spec]) -> str | None:
    """The JSON text that says all of `rest` but the bytes of tensors; None if it is a flat dict of
    tensors alone, by rank.
    """
    with collector_paused():
        if _trivial(rest):
            return None

        states: dict[int, Any] = {}

        def tensor(found: TensorRecord) -> Ref:
            key = rest.names[id(found)]
            first = rest.first.get(key, key)
            return ref(found, key, first if first != key else None, states)

        parts = [
            {
                "at": None if part.at is None else list(part.at),
                "root": to_json(nodes(part.root, tensor)),
            }
            for part in rest.parts
        ]
        document = {
            "format_version": FORMAT_VERSION,
            "kind": "items",
            "output": specs_hash({**specs, **rest.carried}),
            "carried": list(rest.carried),
            "parts": parts,
        }
        return (
            json.dumps(document, ensure_ascii=True, separators=(",", ":"), allow_nan=False) + "\n"
        )


def _trivial(rest: Rest) -> bool:
    if rest.carried or any(first != key for key, first in rest.first.items()):
        return False
    for part in rest.parts:
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


def read(
    data: bytes, tensors: Mapping[str, Stored], carried: Mapping[str, Stored], label: str
) -> tuple[Outline | None, dict[str, Any], str | None]:
    """The outline that the text describes over these tensors, its items by path, and a note if it
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
) -> tuple[Outline, dict[str, Any]]:
    # what reads pickles; most checkpoints have no such file
    from ..source.pickle.policy import decode
    from ..source.pickle.rebuild import Rebuilder
    from ._torchread import unfit

    numbers = {key: str(number) for number, key in enumerate(every)}
    keys = list(every)
    ties: dict[str, str] = {}
    made: list[Part] = []
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
        if path is not None and at_path(decoded.tree, path) is None:
            fail("M906", f"{label}: part {rank} has no dict at its path", help=_HELP)
        one = flat(Part(decoded.tree, path), label)
        names.update({id(leaf): keys[int(leaf.storage.key)] for leaf in records([one.root])})
        mark = f"@{rank}" if len(parts) > 1 else ""
        items.update({where + mark: value for where, value in items_of(one)})
        made.append(one)
    _check_complete(made, every, carried, names, label)
    return Outline(tuple(made), names, carried, ties), items


def _check_complete(
    parts: list[Part],
    every: Mapping[str, Stored],
    carried: Mapping[str, Stored],
    names: Mapping[int, str],
    label: str,
) -> None:
    """Raises unless each tensor stands in the tree, where tensors of its kind stand."""
    from ._torchread import elsewhere

    inside = {names[id(record)] for part in parts for _, record in tensors_of(part.table)}
    outside = {
        names[id(record)] for part in parts for _, record in elsewhere(part.root, part.table)
    }
    if (
        set(names.values()) != set(every)
        or not inside.isdisjoint(carried)
        or not outside <= carried.keys()
    ):
        fail("M906", f"{label}: does not name each tensor where it belongs", help=_HELP)
