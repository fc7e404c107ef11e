"""Dicts inside the dict that rules work on: seen flat, under keys joined by dots, and written
nested again.

Which dict a key belongs to is read from the key, so that a new key finds its place. Where two dicts
could be meant, nothing is flattened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..core.errors import fail, listed, option, printable
from .pickle.tree import DictNode
from .tree import STATE, NestedDict, is_object

# less than what a stream may have
MAX_DEPTH = 50
_KINDS = ("dict", "OrderedDict")
# of all joined keys together
MAX_TEXT = 64 << 20


class _OpenDict:
    """Where keys of one dict go: the dicts inside it by name, and what is put into it. With `like`
    it has dicts alone, each of which is one parameter's, and new ones are like that one.
    """

    __slots__ = ("held", "inner", "like", "path")

    def __init__(self, path: tuple[str, ...], like: DictNode | None = None) -> None:
        self.path, self.like = path, like
        self.inner: dict[str, _OpenDict] = {}
        self.held: dict[str, Any] = {}


def values_below(node: Any) -> list[Any] | None:
    """The values in this dict and in all dicts inside it that are reached through dicts of text
    keys; None if it is no such dict.

    Extra states that are lists or dicts are left out.
    None also where one dict stands in two places, or names are very long: a few bytes could name
    more places, or spell longer keys, than any machine can hold.
    """
    if type(node) is not DictNode or not _plain(node):
        return None
    out: list[Any] = []
    seen = {id(node)}
    stack = [(node, 0, 0)]
    text = 0
    while stack:
        here, depth, before = stack.pop()
        for key, value in here.pairs:
            length = before + len(key) + 1
            text += length
            if not _enters(key, value):
                if key == "state" and _is_state_by_name(value):
                    out += [leaf for _, held in value.pairs for _, leaf in held.pairs]
                elif not is_object(key, value):
                    out.append(value)
            elif id(value) in seen or depth > MAX_DEPTH or text > MAX_TEXT:
                return None
            else:
                seen.add(id(value))
                stack.append((value, depth + 1, length))
    return out if text <= MAX_TEXT else None


def _plain(node: DictNode) -> bool:
    return node.kind in _KINDS and all(type(key) is str and key for key, _ in node.pairs)


def _enters(key: str, value: Any) -> bool:
    """Whether the entries of a dict are seen; not if its name holds a dot, which reads as two."""
    if type(value) is not DictNode or "." in key or key == STATE or not _plain(value):
        return False
    return key != "state" or not _is_state_by_name(value)


def _is_state_by_name(node: Any) -> bool:
    """Whether a dict called `state` is an optimizer's as get_optimizer_state_dict of torch nests
    it: a dict for each parameter, whose name has dots. In joined keys the last name is the moment.
    """
    return (
        type(node) is DictNode
        and _plain(node)
        and any("." in name for name, _ in node.pairs)
        and all(type(held) is DictNode and _plain(held) for _, held in node.pairs)
        and not any(
            "." in name or type(leaf) is DictNode
            for _, held in node.pairs
            for name, leaf in held.pairs
        )
    )


def flatten(node: DictNode, label: str) -> tuple[DictNode, tuple[NestedDict, ...]]:
    """The dict with the entries of all dicts inside it, under keys joined by dots, and those dicts.

    For one that `values_below` has values of. M945 if the way back could not tell where a key
    belongs.
    """
    entries = list(_entries(node, ()))
    nests = tuple(NestedDict(path, value) for path, value, inner in entries if inner)
    places = _places(nests)
    flat: dict[str, Any] = {}
    unclear: list[str] = []
    for path, value, inner in entries:
        if inner:
            continue
        key = ".".join(path)
        home, last = _home(key, places)
        if key in flat or home.path != path[:-1] or last in home.inner:
            unclear.append(key)
        flat[key] = value
    if unclear:
        what = (
            f"{label}: keys of nested dicts hold dots themselves, and it is not clear which "
            f"dict they belong to: {listed(unclear, 4)}"
        )
        fail("M945", what, help=f"say with {option('at')} which one of the dicts is meant")
    return DictNode(node.kind, tuple(flat.items()), node.node, node.attributes), nests


def _entries(node: DictNode, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, bool]]:
    """(path, value, whether it is a dict that is entered), in order."""
    for key, value in node.pairs:
        inner, named = _enters(key, value), key == "state" and _is_state_by_name(value)
        yield (*path, key), value, inner or named
        if inner:
            yield from _entries(value, (*path, key))
        for name, held in value.pairs if named else ():
            yield (*path, key, name), held, True
            yield from (((*path, key, name, last), leaf, False) for last, leaf in held.pairs)


def _places(nests: tuple[NestedDict, ...]) -> _OpenDict:
    """The outermost place, with all dicts inside; in `nests`, a dict follows those around it."""
    root = _OpenDict(())
    for nest in nests:
        around = root
        for name in nest.path[:-1]:
            around = around.inner[name]
        named = nest.path[-1] == "state" and _is_state_by_name(nest.was)
        around.inner[nest.path[-1]] = _OpenDict(nest.path, nest.was.pairs[0][1] if named else None)
    return root


def _home(key: str, places: _OpenDict) -> tuple[_OpenDict, str]:
    """The innermost dict that the key belongs to, and what it is called there."""
    home, start = places, 0
    while (
        (dot := key.find(".", start)) >= 0
        and dot + 1 < len(key)
        and (inner := home.inner.get(key[start:dot])) is not None
    ):
        home, start = inner, dot + 1
        if home.like is not None and (dot := key.rfind(".", start)) >= 0:
            name, start = key[start:dot], dot + 1
            return home.inner.setdefault(name, _OpenDict((*home.path, name))), key[start:]
    return home, key[start:]


def nest(table: DictNode, nests: tuple[NestedDict, ...]) -> DictNode:
    """The flat dict with its entries in the dicts that they belong to; empty ones stay.

    M916 if a tensor or value is called like one of these dicts.
    """
    if not nests:
        return table
    places = _places(nests)
    twice: list[str] = []
    for key, value in table.pairs:
        home, last = _home(key, places) if type(key) is str else (places, key)
        if last in home.inner or last in home.held:
            twice.append(key)
        if home.path:
            _show(places, home.path)
        home.held[last] = value
    named = {one.path for one in nests if one.path[-1] == "state" and _is_state_by_name(one.was)}
    for nest in nests:
        # the dict of a parameter goes with its name, any other stays
        if nest.path[:-1] not in named or not nest.was.pairs:
            _show(places, nest.path)
    if twice:
        fail(
            "M916",
            f"rules make {listed(twice)}, and a dict has this name",
            help=f"name {printable(twice[0])} otherwise",
        )
    was = {nest.path: nest.was for nest in nests}

    def build(place: _OpenDict, like: DictNode) -> DictNode:
        like = was.get(place.path, like)
        pairs = tuple(
            (key, build(value, place.like or table) if type(value) is _OpenDict else value)
            for key, value in place.held.items()
        )
        return DictNode(like.kind, pairs, like.node, like.attributes)

    return build(places, table)


def _show(places: _OpenDict, path: tuple[str, ...]) -> None:
    """Gives the dict at a path, and those around it, their place among the entries."""
    around = places
    for name in path:
        inner = around.inner[name]
        around.held.setdefault(name, inner)
        around = inner
