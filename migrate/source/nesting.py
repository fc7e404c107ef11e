"""A state dict made of dicts, as old Megatron writes it: seen flat by rules, and nested again on
its way out.

Rules name tensors by one key, so the keys on the way to a tensor are joined by dots, as torch
itself calls the parameters of modules inside modules. Each dict on the way is remembered, also when
it is emptied: a key that comes back to it on a downgrade lies in it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..core.diagnostics import fail, listed, printable
from ..core.spelling import option
from .pickle.tree import DictNode, ListNode

# what a module of torch calls the state that it keeps beside its parameters
STATE = "_extra_state"
_KINDS = ("dict", "OrderedDict")
MAX_DEPTH = 50
# of all joined keys together
MAX_TEXT = 64 << 20


class Nest(NamedTuple):
    """A dict inside the one that rules work on: the keys that lead to it, and the dict as it
    was.
    """

    path: tuple[str, ...]
    was: DictNode


class _Place:
    """Where keys of one dict go: the dicts inside it by name, and what is put into it."""

    __slots__ = ("held", "inner", "path")

    def __init__(self, path: tuple[str, ...]) -> None:
        self.path = path
        self.inner: dict[str, _Place] = {}
        self.held: dict[str, Any] = {}


def is_state(key: str) -> bool:
    """Whether a key is that of an extra state, of whichever rank."""
    # most keys are none, and there may be very many
    return STATE in key and key.partition("@")[0].rpartition(".")[2] == STATE


def is_object(key: Any, value: Any) -> bool:
    """Whether it is an extra state that is a list or a dict: one value, whatever tensors it
    holds.
    """
    return (
        (type(value) is DictNode or type(value) is ListNode) and type(key) is str and is_state(key)
    )


def leaves_of(node: Any) -> list[Any] | None:
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
                if not is_object(key, value):
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
    """Whether it is a dict whose entries are seen; not one whose name holds a dot, for it could not
    be told from two names.
    """
    return type(value) is DictNode and "." not in key and key != STATE and _plain(value)


def flattened(node: DictNode, label: str) -> tuple[DictNode, tuple[Nest, ...]]:
    """The dict with the entries of all dicts inside it among its own, under keys joined by dots,
    and those dicts.

    For one that `leaves_of` has values of. M945 if the way back could not tell where a key belongs.
    """
    entries = list(_entries(node, ()))
    nests = tuple(Nest(path, value) for path, value, inner in entries if inner)
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
        inner = _enters(key, value)
        yield (*path, key), value, inner
        if inner:
            yield from _entries(value, (*path, key))


def _places(nests: tuple[Nest, ...]) -> _Place:
    """The outermost place, with those of all dicts inside; a dict stands behind those around it in
    `nests`.
    """
    root = _Place(())
    for nest in nests:
        around = root
        for name in nest.path[:-1]:
            around = around.inner[name]
        around.inner[nest.path[-1]] = _Place(nest.path)
    return root


def _home(key: str, places: _Place) -> tuple[_Place, str]:
    """The innermost dict that the key belongs to, and what it is called there."""
    home, start = places, 0
    while (
        (dot := key.find(".", start)) >= 0
        and dot + 1 < len(key)
        and (inner := home.inner.get(key[start:dot])) is not None
    ):
        home, start = inner, dot + 1
    return home, key[start:]


def nested(table: DictNode, nests: tuple[Nest, ...]) -> DictNode:
    """The flat dict with its entries in the dicts that they belong to; one without entries stays,
    empty.

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
    for nest in nests:
        _show(places, nest.path)
    if twice:
        fail(
            "M916",
            f"rules make {listed(twice)}, and a dict is called so",
            help=f"name {printable(twice[0])} otherwise",
        )
    was = {nest.path: nest.was for nest in nests}

    def build(place: _Place) -> DictNode:
        like = was.get(place.path, table)
        pairs = tuple(
            (key, build(value) if type(value) is _Place else value)
            for key, value in place.held.items()
        )
        return DictNode(like.kind, pairs, like.node, like.attributes)

    return build(places)


def _show(places: _Place, path: tuple[str, ...]) -> None:
    """Gives the dict at a path, and those around it, their turn among the entries, if they have
    none.
    """
    around = places
    for name in path:
        inner = around.inner[name]
        around.held.setdefault(name, inner)
        around = inner
