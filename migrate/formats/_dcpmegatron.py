"""The entries of a distributed checkpoint of Megatron, under the keys that its model has.

Megatron's keys there are not those of its modules: all layers of one kind are one tensor with the
layers along its first axis, experts along the next, the two halves of a gated projection may be
entries of their own, and anything but a tensor is an entry for each layer, expert or rank
(`…/shard_2_8`: number 2 of 8). Here every layer and every expert gets its own tensor back, which is
a part of the stored one where it lies; no element moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from math import prod
from typing import Any

from ..core.errors import Report, fail, listed, printable
from ..core.spec import BITS, spec
from ..source.blobs import ChunkedTensor, Stored, StoredTensor, chunks_of
from ..source.pickle.nodes import ABSENT
from ..source.pickle.tree import DictNode, ListNode, TensorRecord
from ..source.shards import in_natural_order
from ..source.tree import PARTS, STATE, is_state, kept_by_part
from ._megatron import OLDEST_VERSION, UNTIED, tie_contradicted
from ._torchdistkeys import (
    EXPERTS,
    GATED,
    HALVES,
    OF_EXPERT,
    STACKS,
    VERSIONS,
    ModelKey,
    ShardKey,
    Spelling,
    are_versions,
    part_name,
    ranks_of_parts,
    read_name,
    read_shard,
    says_nothing,
    with_numbers,
)

# keys that layers and experts may make; no model comes near
MOST_KEYS = 1_000_000
_OPTIMIZER, _MODEL = "optimizer", ("model",)
# what a rank's generators were is kept for each
_RANDOM = "rng_state"
# the entries of `common.pt` behind which the training script puts the model
_BEFORE = ("iteration", "checkpoint_version", "args")
# of the width of the model
_LAST_NORM = "decoder.final_layernorm.weight"
# the state that no entry has, because it is always None
_LEFT_OUT = f"output_layer.{STATE}"


def arrange(
    leaves: Mapping[str, Any],
    common: Any,
    placed: dict[int, StoredTensor],
    label: str,
    report: Report,
) -> DictNode:
    """The tree that Megatron's training script saved, of the entries of a distributed checkpoint
    and the values of `common.pt`; tensors that are made get their places in `placed`.

    M925 in `report` for an older version, M937 for what is not read, M938 for what contradicts
    itself; M914 for too many keys.
    """
    if type(common) is not DictNode or any(type(key) is not str for key, _ in common.pairs):
        fail("M938", f"{label}: the file beside it holds no dict by names")
    made = _Arranged(placed, label, report, Spelling.of(common.get("args")))
    for key, value in leaves.items():
        if type(value) is TensorRecord:
            made.take_tensor(key, value, leaves)
        elif (shard := read_shard(key)) is not None:
            made.take_shard(key, shard, value)
        else:
            made.put(*_home(key), value, key)
    made.spread()
    made.check()
    made.compare(common)
    return made.tree(common)


class _Arranged:
    """The entries of one checkpoint, while they get their keys."""

    def __init__(
        self,
        placed: dict[int, StoredTensor],
        label: str,
        report: Report,
        spelling: Spelling,
    ) -> None:
        self._spelling = spelling
        self._placed, self._label, self._report = placed, label, report
        # by the path of the dict that they stand in
        self._tables: dict[tuple[str, ...], dict[str, Any]] = {}
        # path of layers or experts -> how many there are, with an entry that says so; and the
        # numbers of those that have entries of their own
        self._counts: dict[str, dict[int, str]] = {}
        self._numbers: dict[str, set[int]] = {}
        self._shards: dict[str, tuple[tuple[int, ...], dict[tuple[int, ...], Any]]] = {}
        self._left = MOST_KEYS

    def _wrong(self, what: str, code: str = "M938", help: str | None = None) -> None:
        self._report.add(code, f"{self._label}: {what}", help=help)

    def put(self, path: tuple[str, ...], key: str, value: Any, origin: str) -> None:
        table = self._tables.setdefault(path, {})
        if key in table:
            self._wrong(f"{printable(origin)}: another entry is {printable(key)} as well")
        table[key] = value

    def take_tensor(self, key: str, record: TensorRecord, leaves: Mapping[str, Any]) -> None:
        half = next((end for end in HALVES if key.endswith(end)), "")
        whole = key.removesuffix(half) if half else key
        if half and any(type(leaves.get(whole + end)) is not TensorRecord for end in HALVES):
            if whole.endswith(GATED):
                self._wrong(f"{printable(key)}: half of a tensor, and there is no other half")
                return
            half, whole = "", key
        if half == HALVES[1]:
            return
        path, rest = _home(whole)
        name = read_name(rest, self._spelling)
        parts = self._cut(key, name, record)
        if half and parts is not None:
            other = self._cut(whole + HALVES[1], name, leaves[whole + HALVES[1]])
            parts = None if other is None else self._join(whole, parts, other)
        if parts is None:
            return
        for numbers, at in parts.items():
            shape = at.spec.shape
            leaf = record._replace(shape=shape, strides=_row_major(shape))
            self._placed[id(leaf)] = at
            self.put(path, name.key(numbers), leaf, key)
        if path == _MODEL:
            self._note(key, name, record.shape)

    def _cut(
        self, key: str, name: ModelKey, record: TensorRecord
    ) -> dict[tuple[int, ...], StoredTensor] | None:
        """The parts of a tensor, by their places along its leading axes; a problem without."""
        at = self._placed.get(id(record))
        if at is None or (isinstance(at, ChunkedTensor) and at.view is not None):
            self._wrong(f"{printable(key)}: a tensor made of several, which is not read", "M937")
            return None
        if not name.axes:
            return {(): at}
        shape = at.spec.shape
        if len(shape) < name.axes or BITS[at.spec.dtype] % 8:
            self._wrong(f"{printable(key)}: {at.spec}, which has no axis of layers or experts")
            return None
        self._left -= prod(shape[: name.axes])
        if self._left < 0:
            fail(
                "M914",
                f"{self._label}: its axes of layers and experts make more than {MOST_KEYS:,} "
                f"tensors; {printable(key)} is {at.spec}",
            )
        return _unbound(at, name.axes)

    def _join(
        self,
        whole: str,
        first: Mapping[tuple[int, ...], StoredTensor],
        second: Mapping[tuple[int, ...], StoredTensor],
    ) -> dict[tuple[int, ...], StoredTensor] | None:
        """The tensors of two halves; a problem where they do not fit each other."""
        joined = {
            numbers: made
            for numbers, at in first.items()
            if numbers in second and (made := _joined(at, second[numbers])) is not None
        }
        if len(joined) == len(first) == len(second):
            return joined
        self._wrong(f"{printable(whole)}: its halves {' and '.join(HALVES)} differ in shape")
        return None

    def _note(self, key: str, name: ModelKey, shape: tuple[int, ...]) -> None:
        """Remembers how many layers and experts an entry has, or which of them it is."""
        axis = 0
        for group in (name.layers, name.experts):
            if group is None:
                continue
            where, number = group
            if number is None:
                self._counts.setdefault(where, {}).setdefault(shape[axis], key)
                axis += 1
            else:
                self._numbers.setdefault(where, set()).add(number)

    def take_shard(self, key: str, shard: ShardKey, value: Any) -> None:
        # a rank saves a list of all that it has of it, which is one
        if type(value) is ListNode and value.kind == "list" and len(value.items) == 1:
            value = value.items[0]
        counts, held = self._shards.setdefault(shard.key, (shard.counts, {}))
        if counts != shard.counts:
            self._wrong(
                f"{printable(key)}: one of {_text(shard.counts)}, and others of it are of "
                f"{_text(counts)}"
            )
            return
        held[shard.numbers] = value

    def spread(self) -> None:
        """Puts what is saved for each layer, expert or rank where it belongs."""
        for key, (counts, held) in self._shards.items():
            if (lost := prod(counts) - len(held)) > 0:
                self._wrong(
                    f"{printable(key)}: {lost:,} of its {prod(counts):,} shards are missing"
                )
                continue
            path, rest = _home(key)
            if rest.rpartition(".")[2] != STATE:
                parts = [(_part_name(key, n, counts), value) for n, value in sorted(held.items())]
                alone = len(parts) == 1
                value = parts[0][1] if alone else DictNode("dict", tuple(parts), None)
                self.put(() if path == _MODEL else path, rest, value, key)
                continue
            name = read_name(rest, self._spelling)
            if len(counts) != max(name.axes, 1) or (not name.axes and counts != (1,)):
                self._wrong(f"{printable(key)}: {_text(counts)} shards, which are no layers")
                continue
            for numbers, value in sorted(held.items()):
                self.put(path, name.key(numbers if name.axes else ()), value, key)
            self._note(key, name, counts)

        model = self._tables.get(_MODEL, {})
        self._gather_states(model)
        if any(key.startswith(STACKS) and is_state(key) for key in model):
            model.setdefault(_LEFT_OUT, None)

    def _gather_states(self, model: dict[str, Any]) -> None:
        """Gives groups of experts one state, as their module has it, where none of theirs says
        anything.
        """
        groups: dict[str, list[str]] = {}
        for key in model if not self._spelling.experts else ():
            if EXPERTS in key and is_state(key) and (found := OF_EXPERT.fullmatch(key)):
                groups.setdefault(f"{found[1]}.{STATE}", []).append(key)
        for joint, keys in groups.items():
            states = [model[key] for key in keys]
            alike = all(map(says_nothing, states)) and len(set(map(type, states))) == 1
            if alike and joint not in model:
                model[joint] = states[0]
                for key in keys:
                    del model[key]

    def check(self) -> None:
        """Problems for layers and experts that are missing, or differ in number."""
        for where, counts in self._counts.items():
            if len(counts) > 1:
                said = [f"{count:,} in {printable(key)}" for count, key in sorted(counts.items())]
                self._wrong(f"{printable(where)}: entries differ in number: {listed(said, 4)}")
        for where, numbers in self._numbers.items():
            top = max(numbers) + 1
            if top > len(numbers):
                lost = [str(n) for n in islice((n for n in range(top) if n not in numbers), 9)]
                self._wrong(
                    f"{printable(where)}: {top - len(numbers):,} of {top:,} are missing: "
                    f"{listed(lost, 8)}",
                    help="fetch the checkpoint again, or take an earlier one",
                )

    def compare(self, common: DictNode) -> None:
        """Problems where the arguments in `common.pt` are those of another model."""
        version = common.get("checkpoint_version")
        if type(version) in (int, float) and version < OLDEST_VERSION:
            self._wrong(
                f"common.pt is of checkpoint_version {version}, whose rows of queries, keys and "
                "values are in another order",
                "M925",
                help="load it with Megatron and save it again",
            )
        args = common.get("args")
        if type(args) is not DictNode:
            return
        held = {where: next(iter(counts)) for where, counts in self._counts.items()}
        held.update({where: max(numbers) + 1 for where, numbers in self._numbers.items()})
        layers = [where for where in STACKS if where in held]
        experts = [where for where in held if where.endswith(f".{EXPERTS}")]
        norm = self._tables.get(_MODEL, {}).get(_LAST_NORM)
        width = args.get("hidden_size", ABSENT)
        if type(norm) is TensorRecord and type(width) is int and norm.shape != (width,):
            self._wrong(
                f"{_LAST_NORM} has the shape {list(norm.shape)}, and the arguments in common.pt "
                f"say `hidden_size` {width:,}",
                help="these are files of two checkpoints: fetch the one you want again",
            )
        if why := tie_contradicted(args.get(UNTIED), self._tables.get(_MODEL, {})):
            self._wrong(
                f"of the arguments in common.pt {why}",
                help="these are files of two checkpoints: fetch the one you want again",
            )
        said = {
            "num_layers": [(where, held[where]) for where in layers if len(layers) == 1],
            "num_experts": [(where, held[where]) for where in experts] or [(EXPERTS, 0)],
        }
        for field, found in said.items():
            due = args.get(field, ABSENT)
            if due is None:
                # without experts Megatron has no number of them
                due = 0 if field == "num_experts" else ABSENT
            wrong = [where for where, count in found if type(due) is int and count != due]
            for where in wrong[:1]:
                self._wrong(
                    f"has {dict(found)[where]:,} of {printable(where)}, and the arguments in "
                    f"common.pt say `{field}` {due:,}",
                    help="these are files of two checkpoints: fetch the one you want again",
                )

    def tree(self, common: DictNode) -> DictNode:
        """All of it, in the order in which the training script saves."""
        new: dict[str, Any] = {}
        versions = common.get(VERSIONS)
        if not are_versions(versions):
            versions = None
        else:
            common = replace(common, pairs=tuple(p for p in common.pairs if p[0] != VERSIONS))
        for path, table in self._tables.items():
            if not path:
                new.update(table)
                continue
            keys = in_natural_order(table) if path == _MODEL else list(table)
            node = DictNode("dict", tuple((key, table[key]) for key in keys), None)
            if path == _MODEL and versions is not None:
                node = replace(node, kind="OrderedDict", attributes=versions)
            for part in reversed(path[1:]):
                node = DictNode("dict", ((part, node),), None)
            new[path[0]] = self._merged(path[0], new.get(path[0], node), node)
        said = dict(common.pairs)
        if any(where in self._numbers for where in STACKS):
            said = with_numbers(said)
            common = replace(common, pairs=tuple(said.items()))
        both = {key: self._merged(key, said[key], new[key]) for key in said if key in new}
        first = [key for key in (*_MODEL, _OPTIMIZER) if key in new]
        more = [
            (key, new[key])
            for key in (*first, *(key for key in new if key not in first))
            if key not in said
        ]
        behind = next((key for key in _BEFORE if key in said), None)
        pairs = [] if behind else more
        for key, value in common.pairs:
            pairs.append((key, both.get(key, value)))
            pairs += more if key == behind else []
        made = DictNode(common.kind, tuple(pairs), common.node, common.attributes)
        return _with_generators(made) if PARTS in said else made

    def _merged(self, where: str, one: Any, two: Any) -> Any:
        """Two dicts as one; a problem where both say something else of one key."""
        if one is two:
            return one
        if type(one) is not DictNode or type(two) is not DictNode:
            self._wrong(f"{printable(where)}: stands there, and beside it in common.pt")
            return one
        new = dict(two.pairs)
        pairs = [
            (key, self._merged(f"{where}.{key}", value, new.pop(key)) if key in new else value)
            for key, value in one.pairs
        ]
        return replace(one, pairs=(*pairs, *new.items()))


def _home(key: str) -> tuple[tuple[str, ...], str]:
    """The path of the dict that an entry stands in, and its key there: the model's, or those of an
    optimizer, whose state has the names of parameters below the name of each moment.
    """
    parts = key.split(".")
    if _OPTIMIZER not in parts or not (parts[0] == _OPTIMIZER or parts[0].startswith("chained_")):
        return _MODEL, key
    at = parts.index(_OPTIMIZER) + 1
    if parts[at : at + 1] == ["state"] and len(parts) > at + 2:
        at += 2
    if len(parts) == at:
        return tuple(parts[:-1]), parts[-1]
    return tuple(parts[:at]), ".".join(parts[at:])


def _unbound(at: StoredTensor, axes: int) -> dict[tuple[int, ...], StoredTensor]:
    """The parts of a stored tensor at each place along its first axes, where they lie."""
    whole = at.spec.shape
    starts = at.starts if isinstance(at, ChunkedTensor) else ((0,) * len(whole),)
    size = BITS[at.spec.dtype] // 8
    found: dict[tuple[int, ...], list[tuple[tuple[int, ...], Stored]]] = {}
    for chunk, start in zip(chunks_of(at), starts, strict=True):
        shape = chunk.spec.shape
        strides = chunk.strides or _row_major(shape)
        inner = spec(at.spec.dtype, shape[axes:])
        below = chunk.strides[axes:] if chunk.strides is not None else None
        for place in product(*map(range, shape[:axes])):
            by = sum(n * stride for n, stride in zip(place, strides, strict=False)) * size
            numbers = tuple(n + first for n, first in zip(place, start, strict=False))
            part = chunk._replace(spec=inner, offset=chunk.offset + by, strides=below)
            found.setdefault(numbers, []).append((start[axes:], part))
    due = spec(at.spec.dtype, whole[axes:])
    out: dict[tuple[int, ...], StoredTensor] = {}
    for numbers in product(*map(range, whole[:axes])):
        parts = sorted(found[numbers], key=lambda one: one[0])
        alone = len(parts) == 1
        out[numbers] = (
            parts[0][1]
            if alone
            else ChunkedTensor(due, tuple(p for _, p in parts), tuple(s for s, _ in parts))
        )
    return out


def _joined(first: StoredTensor, second: StoredTensor) -> StoredTensor | None:
    """Two halves one after the other along the first axis; None where they do not fit."""
    one, two = first.spec, second.spec
    if not one.shape or one != two:
        return None
    rows = one.shape[0]
    zeros = (0,) * len(one.shape)
    chunks: list[Stored] = []
    starts: list[tuple[int, ...]] = []
    for at, by in ((first, 0), (second, rows)):
        chunks += chunks_of(at)
        begins = at.starts if isinstance(at, ChunkedTensor) else (zeros,)
        starts += [(start[0] + by, *start[1:]) for start in begins]
    return ChunkedTensor(spec(one.dtype, (2 * rows, *one.shape[1:])), tuple(chunks), tuple(starts))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _part_name(key: str, numbers: tuple[int, ...], counts: tuple[int, ...]) -> str:
    """What a shard is called that belongs to a rank: generators as the rank's own folder is in
    Megatron's other format.
    """
    if key == _RANDOM and len(numbers) == 2:
        stage, rank = numbers
        return part_name(rank, stage if counts[0] > 1 else None)
    return _text(numbers)


def _with_generators(root: DictNode) -> DictNode:
    """The tree with the generators of each rank among what is kept of its part, if that is kept for
    each of them, as it is where parts were joined.
    """
    random, places = root.get(_RANDOM), ranks_of_parts(root)
    if places is None or type(random) is not DictNode:
        return root
    ranks = dict(random.pairs)
    several = max(stage for stage, _ in places.values()) > 0
    own = {
        name: ranks.get(part_name(rank, stage if several else None), ABSENT)
        for name, (stage, rank) in places.items()
    }
    if len(own) != len(ranks) or ABSENT in own.values():
        return root
    first = next(name for name, place in places.items() if place == (0, 0))
    entries = tuple(
        (name, replace(kept, pairs=(*kept.pairs, (_RANDOM, own[name]))))
        if name in own and name != first
        else (name, kept)
        for name, kept in kept_by_part(root)
    )
    new = {_RANDOM: own[first], PARTS: DictNode("dict", entries, None)}
    return replace(root, pairs=tuple((key, new.get(key, value)) for key, value in root.pairs))


def _text(numbers: Sequence[int]) -> str:
    return " x ".join(map(str, numbers))
