"""The state of optimizers in a checkpoint: where it is, and which parameters it is of.

It is found by its structure, for every framework puts it elsewhere: `state` beside `param_groups`
(torch, Lightning, Megatron, FSDP), keys such as `optimizer.state.<name>.exp_avg`, and whatever
tensors lie below a key with `optim` in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import printable
from ..core.templates import rank_of
from ..source.pickle.tree import SCALARS, Composite, DictNode, ListNode, LocalShard, TensorRecord

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..source.index import Index

_LEAVES = (TensorRecord, Composite, LocalShard)
_NO_PAIRS = SCALARS.union(_LEAVES)

# state among the tensors that rules see: home, then parameter and moment in either order. Without
# a home it is what `get_optimizer_state_dict` flattens, in one dict with the model's tensors
SEEN = re.compile(r"(?:((?:.*\.)?[^.]*optim[^.]*)\.)?state\.(.+)", re.IGNORECASE | re.DOTALL)

_MOMENTS = frozenset((
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "exp_inf",
    "acc_delta", "grad_avg", "fp32_param",
))  # fmt: skip

# segments that only wrappers put into names
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

_FLOATS = ("float", "bfloat", "complex")

_KEYS = ("state", "param_groups")

GROUPS = "param_groups."


@dataclass(slots=True)
class OptimizerState:
    """The state of one optimizer. `place` says where it is, `path` has the keys that lead there.

    `nodes` are the values of the tree that hold it, `keys` the tensors that rules see. `names` are
    the parameters that it names, and `numbered` how many it counts without a name; `shapes` has
    those of each numbered one, for as long as all its tensors have one. `home` is the dict of
    `state` and `param_groups`, where it is outside of what rules see.
    """

    place: str
    path: tuple[str, ...] = ()
    nodes: list[Any] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    names: dict[str, list[str]] = field(default_factory=dict)
    numbered: int = 0
    shapes: list[tuple[int, ...] | None] = field(default_factory=list)
    called: list[str] = field(default_factory=list)
    tensors: int = 0
    home: Any = None


def find_states(index: Index) -> list[OptimizerState]:
    """The states of optimizers that the checkpoint holds, from headers alone."""
    found: list[OptimizerState] = []
    parts = () if index.tree is None else index.tree.parts
    keys = index.tensors
    if keys and all(key.startswith("state.") and _is_moment(key, "step") for key in keys):
        # rules work on the state of an optimizer, and not on what it is of
        return []
    if index.passed_through or index.items:
        several = len(parts) > 1
        for rank, part in enumerate(parts):
            found += _Search(part.root, rank if several else None, part.at or ()).found
        if index.tree is None:
            found += _Search(dict(index.items), None, ()).found
    text = "\n".join(index.tensors)
    if "optim" in text or "Optim" in text or text.startswith("state.") or "\nstate." in text:
        found += _seen(index.tensors)
    return found


def state_keys(keys: Mapping[str, Any]) -> frozenset[str]:
    """The tensors among these that are state of an optimizer."""
    return frozenset(key for state in _seen(keys) for key in state.keys)


class _Search:
    """The states below one value. Everything is looked at once, also where it is shared; `at` leads
    to the dict that rules work on.
    """

    def __init__(self, root: Any, rank: int | None, at: tuple[str, ...]) -> None:
        self.found: list[OptimizerState] = []
        self._rank = rank
        homes: list[tuple[tuple[str, ...], Any]] = []
        seen: set[int] = set()
        stack: list[tuple[Any, tuple[str, ...], Any]] = [(root, (), None)]
        held: set[int] = set()
        while stack:
            node, path, home = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            pairs = _pairs(node)
            if _is_dict(node) and (state := self._state(dict(pairs), path, home)) is not None:
                state.nodes = (
                    [home[1]]
                    if home is not None
                    else [node]
                    if path
                    else [v for k, v in pairs if k in _KEYS]
                )
                state.home = node
                held.add(id(state.nodes[0]))
                self.found.append(state)
                continue
            for key, value in reversed(pairs):
                if (
                    type(value) in _NO_PAIRS
                    or (type(value) is ListNode and SCALARS.issuperset(map(type, value.items)))
                    or not _pairs(value)
                ):
                    continue
                there = (*path, str(key))
                inner = home
                if (
                    home is None
                    and type(key) is str
                    and "optim" in key.lower()
                    and at[: len(there)] != there
                ):
                    inner = (there, value)
                    homes.append(inner)
                stack.append((value, there, inner))
        for path, node in homes:
            tensors = [] if id(node) in held else list(_tensors(node))
            if tensors:
                # of an order that only its framework knows; what it calls by a name is known
                names = {name: [name] for name in _texts(node)}
                place, count = _place(path, rank), len(tensors)
                self.found.append(
                    OptimizerState(
                        place,
                        path,
                        [node],
                        names=names,
                        numbered=count,
                        shapes=[None],
                        tensors=count,
                    )
                )
        self.found.sort(key=lambda state: state.place)

    def _state(
        self, held: Mapping[Any, Any], path: tuple[str, ...], home: Any
    ) -> OptimizerState | None:
        """What the dict says, if it is that of an optimizer."""
        groups, entries = held.get("param_groups"), held.get("state")
        listed_groups = (
            [dict(_pairs(group)) for _, group in _pairs(groups)] if _is_list(groups) else []
        )
        flat = (
            [
                key
                for key in held
                if type(key) is str and key.startswith(("state.", "param_groups."))
            ]
            if home is not None
            else []
        )
        if not (
            any("params" in group for group in listed_groups)
            or flat
            or (home is not None and _is_dict(entries) and _pairs(entries))
        ):
            return None
        found = OptimizerState(_place(path, self._rank), path)
        found.tensors = sum(
            1
            for _ in _tensors(
                held if path else {key: value for key, value in held.items() if key in _KEYS}
            )
        )
        for group in listed_groups:
            numbers = [number for _, number in _pairs(group.get("params"))]
            names = [name for _, name in _pairs(group.get("param_names")) if type(name) is str]
            found.names.update({name: [name] for name in numbers if type(name) is str})
            found.numbered += sum(type(number) is not str for number in numbers)
            found.called += names if len(names) == len(numbers) else []
        numbered = 0
        for key, entry in _pairs(entries) if _is_dict(entries) else ():
            moments = dict(_pairs(entry))
            if type(key) is str and not key.isdecimal():
                # the parameter, or a moment with its parameters below
                found.names[key] = [key]
                found.names.update(
                    {
                        name: [name]
                        for name, value in moments.items()
                        if type(name) is str and _is_tensor(value)
                    }
                )
                continue
            numbered += 1
            shapes = {
                _shape(value)
                for name, value in moments.items()
                if name != "step" and _is_tensor(value)
            }
            found.shapes.append(shapes.pop() if len(shapes) == 1 else None)
        found.numbered = max(found.numbered, numbered)
        for key in flat:
            rest = key.partition(".")[2]
            found.names[key] = _either(rest)
        return found


def _seen(keys: Mapping[str, Any]) -> list[OptimizerState]:
    """States whose tensors rules see, by their names alone."""
    homes: dict[str | None, OptimizerState] = {}
    for key in keys:
        if (match := SEEN.fullmatch(key)) is None or "." not in match[2]:
            continue
        # a module may be called `state`
        if match[1] is None and not _is_moment(key, "step"):
            continue
        place = "the top of the file" if match[1] is None else f"`{printable(match[1])}`"
        state = homes.setdefault(match[1], OptimizerState(place))
        state.keys.append(key)
        state.tensors += 1
        if match[2].count(".") == 1 and match[2].partition(".")[0].isdecimal():
            state.numbered += 1
        else:
            state.names[key] = _either(
                match[2].rpartition("@")[0] if rank_of(key) is not None else match[2]
            )
    others = set(keys).difference(key for state in homes.values() for key in state.keys)
    known = Names(others).of
    return [
        state
        for home, state in homes.items()
        # by itself it is no state beside a model
        if (home is not None and any(map(_is_moment, state.names)))
        or (state.numbered and (home is not None or others))
        or any(map(known, chain(*state.names.values())))
    ]


def _is_moment(key: str, other: str | None = None) -> bool:
    """Whether the key ends, or goes on behind `state`, in what optimizers keep of a parameter, or
    in the `other` name.
    """
    rest = SEEN.fullmatch(key)
    if rest is None:
        return False
    ends = rest[2].partition(".")[0], rest[2].rpartition(".")[2]
    return other in ends or not _MOMENTS.isdisjoint(ends)


def _either(text: str) -> list[str]:
    """The parameters that `<parameter>.<moment>` or `<moment>.<parameter>` may speak of."""
    return [text.rpartition(".")[0], text.partition(".")[2]]


def _place(path: Sequence[str], rank: int | None) -> str:
    return (f"`{printable('.'.join(path))}`" if path else "the top of the file") + (
        f" of rank {rank}" if rank is not None else ""
    )


def _is_dict(node: Any) -> bool:
    return type(node) is DictNode or isinstance(node, Mapping)


def _is_list(node: Any) -> bool:
    return type(node) is ListNode or isinstance(node, (list, tuple))


def _pairs(node: Any) -> Sequence[tuple[Any, Any]]:
    """What a container of a decoded tree, or of the caller's, holds; nothing for other values."""
    if type(node) is DictNode:
        return node.pairs
    if type(node) is ListNode:
        return list(enumerate(node.items))
    if isinstance(node, Mapping):
        return list(node.items())
    return list(enumerate(node)) if isinstance(node, (list, tuple)) else ()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, _LEAVES) or (
        hasattr(value, "shape")
        and hasattr(value, "dtype")
        and not isinstance(value, (DictNode, ListNode))
    )


def _shape(value: Any) -> tuple[int, ...] | None:
    return None if isinstance(value, Composite) else tuple(value.shape)


def _below(node: Any) -> Iterator[tuple[Any, Any]]:
    seen: set[int] = set()
    stack = [node]
    while stack:
        here = stack.pop()
        if id(here) in seen:
            continue
        seen.add(id(here))
        for key, value in _pairs(here):
            yield key, value
            stack.append(value)


def _tensors(node: Any) -> Iterator[Any]:
    return (value for _, value in _below(node) if _is_tensor(value))


def _texts(node: Any) -> Iterator[str]:
    return (key for key, _ in _below(node) if type(key) is str)


class ObjectCodes(NamedTuple):
    """A parameter that is an object: its shape, its components, and the key of the one that holds
    its codes as the numbers lie; None without one.
    """

    shape: tuple[int, ...]
    components: tuple[str, ...]
    key: str | None


def may_train(spec: Spec) -> bool:
    """Whether a tensor may be a parameter that is trained."""
    return spec.dtype.startswith(_FLOATS)


class Names:
    """The tensors that a name in an optimizer's state speaks of: called so, or so but for wrappers,
    or so below a prefix.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys: dict[str, str] = {}
        self._of_ranks: set[str] = set()
        for key in keys:
            short = key
            if "@" in key and rank_of(key) is not None:
                short = key.rpartition("@")[0]
                self._of_ranks.add(key)
            self._keys.setdefault(short, key)
        self._plain = {plain(key): whole for key, whole in self._keys.items()}

    @cached_property
    def _tails(self) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for key, whole in self._keys.items():
            # a tail that two keys have speaks of neither
            rest = key
            while "." in rest:
                rest = rest.partition(".")[2]
                found[rest] = None if rest in found else whole
        return found

    def of(self, name: str, rank: str = "") -> str | None:
        """The key that the name speaks of, of a `rank` ("@3") where that is said; None if it speaks
        of none.
        """
        if rank:
            return f"{name}{rank}" if f"{name}{rank}" in self._of_ranks else None
        for form in (name, plain(name)):
            found = self._keys.get(form) or self._plain.get(form)
            if found is not None:
                return found
        rest = name
        while "." in rest:
            rest = rest.partition(".")[2]
            if rest in self._keys:
                return self._keys[rest]
        return self._tails.get(name) if "." in name else None


def plain(name: str) -> str:
    """The name without the segments of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
