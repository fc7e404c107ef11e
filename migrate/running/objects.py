"""Objects made of tensors, put together again from the tensors that rules made of their components.

A rule names components (`weight._rowwise_data`), and never the object. Where all components of one
object arrive under one key, it is that object again; where those of several alike arrive in stacks,
it is their group, and where a group's come apart, they are its members. Everything else is plain
tensors, which is what a rule means that dequantizes or changes the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.diagnostics import listed
from ..source.pickle.encodings import ask
from ..source.pickle.te_grouped import alike, group, member_of
from ..source.pickle.tree import Composite, TensorRecord


def regroup_objects(
    entries: Sequence[tuple[float, Any, Any]],
    made_of: Mapping[str, Sequence[tuple[Composite, str]]],
    notes: list[str],
) -> list[tuple[float, Any, Any]]:
    """The entries (place, key, tensor) of a dict with objects in place of their components, each
    where its first component stood.

    `made_of` has for each key that is made of components alone these objects and attributes. M955
    where an object whose integer has two meanings does not stay what it is: behind it nobody could
    tell what its numbers are.
    """
    leaves = {key: leaf for _, key, leaf in entries if type(leaf) is TensorRecord}
    gathered: dict[str, dict[str, str]] = {}
    parted: list[str] = []
    for key, origins in made_of.items():
        attributes = {attribute for _, attribute in origins}
        if len(attributes) != 1:
            continue
        (attribute,) = attributes
        if not attribute:
            gathered.setdefault(key, {})[""] = key
        elif key.endswith(f".{attribute}"):
            gathered.setdefault(key[: -len(attribute) - 1], {})[attribute] = key
        else:
            parted.append(key)
    whole: dict[str, tuple[str, Composite]] = {}
    for prefix, keys in gathered.items():
        made = _object(
            {attribute: leaves[key] for attribute, key in keys.items()},
            [made_of[key] for key in keys.values()],
        )
        if made is not None and (prefix not in leaves or prefix in keys.values()):
            whole.update(dict.fromkeys(keys.values(), (prefix, made)))
        else:
            parted += [key for attribute, key in keys.items() if attribute]
    _told(made_of, {id(made.node) for _, made in whole.values()}, parted, notes)
    out: list[tuple[float, Any, Any]] = []
    placed: dict[str, int] = {}
    for at, key, value in entries:
        found = whole.get(key) if type(value) is TensorRecord else None
        if found is None:
            out.append((at, key, value))
        elif found[0] not in placed:
            placed[found[0]] = len(out)
            out.append((at, *found))
        elif at < out[placed[found[0]]][0]:
            out[placed[found[0]]] = (at, *found)
    return out


def _told(
    made_of: Mapping[str, Sequence[tuple[Composite, str]]],
    still: set[int],
    parted: list[str],
    notes: list[str],
) -> None:
    """Says which keys are plain tensors now, and asks for what nobody could tell of them any more;
    `still`: the nodes of whole objects.
    """
    gone = {
        key: one.encoding
        for key, origins in made_of.items()
        for one, _ in origins
        if id(one.node) not in still
    }
    ask(gone)
    if parted:
        numbers = sorted(
            {e.number for e in gone.values() if e.number is not None and e.code is not None}
        )
        of = f"; the numbers of their data are {listed(numbers)}" if numbers else ""
        notes.append(
            f"plain tensors, and no parts of an object any more: {listed(sorted(parted), 4)}{of}"
        )


def _object(
    leaves: Mapping[str, TensorRecord], origins: Sequence[Sequence[tuple[Composite, str]]]
) -> Composite | None:
    """The object that these components make, by attribute; None if they make none."""
    sets = [list({id(one): one for one, _ in of}.values()) for of in origins]
    objects = {id(one): one for one in sets[0]}
    if any({id(one) for one in held} != objects.keys() for held in sets):
        return None
    first, *others = objects.values()
    if others:
        possible = [group(first, len(objects))] if all(alike(first, one) for one in others) else []
    else:
        possible = [first, member_of(first) if first.encoding.members else None]
    for like in possible:
        if like is None or {attribute for attribute, _ in like.components} != leaves.keys():
            continue
        components = tuple((attribute, leaves[attribute]) for attribute, _ in like.components)
        if all(
            (a.dtype, a.shape) == (b.dtype, b.shape)
            for (_, a), (_, b) in zip(components, like.components, strict=True)
        ):
            return replace(like, components=components)
    return None
