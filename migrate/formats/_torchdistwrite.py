"""What a `torch_dist` checkpoint of Megatron will be, to the byte, before a tensor is read.

The tree is that of Megatron's training script, with the model under `model`. Its tensors become
entries as Megatron would save them on one rank: all layers of one kind in one, each a chunk of its
own, so that a tensor lies where it is written and nothing is put together. Extra states, and the
states of generators, are entries of their own; what else stands beside the model goes into
`common.pt`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, NamedTuple, NoReturn

from ..core.errors import MigrateError, fail, listed, option, printable, together
from ..core.spec import Spec
from ..source.jsontext import collector_paused
from ..source.paths import HISTORY, METADATA
from ..source.pickle.dcp_emit import emit_metadata
from ..source.pickle.nodes import ABSENT
from ..source.pickle.tree import Composite, DictNode, ListNode, TensorRecord
from ..source.shards import by_rank, in_natural_order
from ..source.table import flatten_table
from ..source.target import Target, TargetTree, check_holds, items_of, plain_part
from ..source.tree import PARTS, STATE, FileTree, is_state, kept_by_part, tensor_records
from ._dcpentries import SavedTree, named_anew, unshared
from ._dcpwrite import EntryPiece, EntryWriter, require_one_rank
from ._megatron import GROUPED, facts_of, folder_of
from ._runs import TRACKER, tracker_of
from ._torchdistkeys import (
    CONTENT,
    GATED,
    HALVES,
    STACKS,
    USUAL_CONTENT,
    VERSIONS,
    EntryKey,
    ShardKey,
    Spelling,
    are_versions,
    entry_of,
    fused_norm,
    layers_differ,
    ranks_of_parts,
    read_name,
    says_nothing,
    singles,
    with_numbers,
)
from ._torchwrite import file, plain

COMMON, MARKER = "common.pt", "metadata.json"
_MARKER = (
    b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", '
    b'"common_backend_version": 1}'
)
_MODEL, _OPTIMIZER, _RANDOM = "model", "optimizer", "rng_state"
_CHAINED = "chained_"
_CONTENT = DictNode("dict", tuple(USUAL_CONTENT.items()), None)
# linear layers, each of which has an extra state: None, where it is Megatron's own
_LINEAR = re.compile(
    r"(?:decoder|encoder)\.layers\.[0-9]+\..*"
    r"linear_[a-z0-9_]+\.weight[0-9]*",
    re.ASCII,
)
_OUTPUT_STATE = f"output_layer.{STATE}"
# the state of all experts of Transformer Engine's, which is one in its modules
_OF_ALL = re.compile(rf"(?:.+\.)?experts\.linear_fc[12]\.{STATE}")
_IN_EXPERTS = ".experts."
_PART = re.compile(r"mp_rank_([0-9]{2,5})(?:_([0-9]{3,5}))?", re.ASCII)
_FORMAT = "Megatron's torch_dist"


def describe(
    specs: Mapping[str, Spec],
    *,
    folder: bool,
    max_shard_size: int,
    stamp: str | None,
    tree: TargetTree | None,
) -> Target:
    """The whole output: the folder of a run with the checkpoint in it. A data file has at most
    `max_shard_size` bytes of tensors, or one chunk.

    M916 for what Megatron has no place for: keys of ranks, another dict than `model`, tensors that
    are objects, optimizer state that goes by number, keys that would be read again as others.
    """
    if not folder:
        fail(
            "M916",
            f"{_FORMAT} is a folder, not one file",
            help="give the output a name without a suffix",
        )
    require_one_rank(specs, join=f"join them: {option('to', 'megatron-gpt@mcore')}")
    with collector_paused():
        if tree is None:
            tree = plain(specs, by_rank(specs) if "@" in "".join(specs) else [])
        every = {**specs, **tree.passed_through}
        check_holds(every)
        part, lost = saved_part(tree.parts[0])
        entries = DistEntries(part, every, tree.names)
        writer = EntryWriter(every, tree, max_shard_size)
        for shard, value in entries.objects.items():
            writer.add_value(shard, value)
        for key, pieces in entries.tensors.items():
            writer.add_tensor(key, pieces)
        small = {METADATA: emit_metadata(writer.metadata())}
        own = replace(tree, first={})
        common = file(COMMON, FileTree(entries.common, None), every, own, None)
        files = writer.files()
        if common.tensors:
            files = (*files, common)
        else:
            small[COMMON] = common.header
        if stamp is not None:
            small[HISTORY] = stamp.encode()
        # a checkpoint without it is not whole
        small[MARKER] = _MARKER
        called = folder_of("", facts_of(part.root))
        files = tuple(replace(one, name=f"{called}/{one.name}") for one in files)
        small = {f"{called}/{name}": content for name, content in small.items()}
        small[TRACKER] = tracker_of(called)
        notes = [f"{_FORMAT} has no place for {one}" for one in lost]
        return Target(
            files,
            True,
            small,
            writer.copies,
            (*notes, *entries.notes),
            tuple([f"what has no place in {_FORMAT}"] * bool(lost)),
            beside=f"{called}/",
        )


def saved_part(part: FileTree) -> tuple[FileTree, list[str]]:
    """The tree as it is read again after it was written so, its tensors being those of `part`; and
    what is lost of it. M916 where it cannot be written.
    """
    part = flatten_table(part, _FORMAT)
    root, table = part.root, part.table
    if table is None or type(root) is not DictNode or part.at not in ((), (_MODEL,)):
        where = "the checkpoint is no dict" if part.at is None else f"it is `{'.'.join(part.at)}`"
        fail("M916", f"{_FORMAT} has the model under `{_MODEL}`, and {printable(where)}")
    attributes = table.attributes if are_versions(table.attributes) else None
    lost = ["attributes of the model"] * (table.attributes is not attributes)
    pairs = dict(root.pairs) if part.at else {_MODEL: table}
    if any(type(key) is not str for key in (*pairs, *(key for key, _ in table.pairs))):
        fail("M916", f"{_FORMAT} has keys that are texts, and nothing else")
    pairs.setdefault(CONTENT, _CONTENT)
    if _uneven(table.pairs):
        pairs = with_numbers(pairs)
    pairs[_MODEL] = DictNode(
        "dict" if attributes is None else "OrderedDict",
        tuple(_completed(dict(table.pairs)).items()),
        None,
        attributes,
    )
    kind = "dict" if part.at == () else root.kind
    return FileTree(DictNode(kind, tuple(pairs.items()), None), (_MODEL,)), lost


def _uneven(pairs: Sequence[tuple[str, Any]]) -> bool:
    """Whether layers have other tensors than their neighbours, or tensors of other shapes."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for key, value in pairs:
        at = entry_of(key, Spelling(True, True), numbered=False, apart=True)
        if at.layer is not None and at.stack in STACKS:
            said = None
            if type(value) is TensorRecord and not is_state(key):
                said = value.dtype, value.shape
            found.setdefault((at.stack, at.layer), {})[f"{at.key} {at.expert}"] = said
    first: dict[str, Any] = {}
    return any(first.setdefault(stack, one) != one for (stack, _), one in found.items())


def _completed(held: Mapping[str, Any]) -> dict[str, Any]:
    """The model's dict with the states that Megatron asks for in each linear layer: None, where it
    has none at all, and None for all experts, where theirs are None in whatever modules.
    """
    made = dict(held)
    states = [key for key in held if is_state(key)]
    # a group of linear layers has one state
    linear = {f"{key.rpartition('.')[0]}.{STATE}": None for key in held if _LINEAR.fullmatch(key)}
    experts = [key for key in states if _IN_EXPERTS in key]
    if not states:
        made.update(linear)
    elif experts and all(held[key] is None for key in experts):
        for key in experts:
            del made[key]
        linear = {key: None for key in linear if _IN_EXPERTS in key}
        made.update((key, None) for key in linear if key not in made)
    if any(key.startswith(STACKS) for key in made if is_state(key)):
        made.setdefault(_OUTPUT_STATE, None)
    return {key: made[key] for key in in_natural_order(made)}


def items_beside(specs: Mapping[str, Spec]) -> dict[str, Any]:
    """The values that stand beside a model of these tensors, if it came without any."""
    part, _ = saved_part(plain_part(specs)[0])
    content = ((CONTENT, part.root.get(CONTENT)),)
    return dict(items_of(FileTree(DictNode("dict", content, None), None)))


def saved_tree(part: FileTree, names: Mapping[int, str]) -> SavedTree | None:
    """As `_dcpentries.saved_tree`."""
    try:
        saved, lost = saved_part(part)
    except MigrateError:
        return None
    model = saved.table
    was: dict[int, str] = {}

    def alone(value: Any) -> Any:
        made: dict[int, Any] = {}
        own = unshared(value, made)
        was.update({id(made[id(one)]): names[id(one)] for one in tensor_records([value])})
        return own

    def each(value: Any) -> Any:
        return replace(value, pairs=tuple((key, alone(held)) for key, held in value.pairs))

    pairs = tuple(
        (key, each(value) if value is model else alone(value)) for key, value in saved.root.pairs
    )
    return named_anew(saved._replace(root=replace(saved.root, pairs=pairs)), was, lost)


class _Layered(NamedTuple):
    """A tensor or an extra state of the model, with the entry that holds it."""

    key: str
    entry: EntryKey
    value: Any


class DistEntries:
    """The entries of a tree as `saved_part` makes it, and what goes into `common.pt`.

    `objects` are values by the names of shards.
    """

    def __init__(self, part: FileTree, specs: Mapping[str, Spec], names: Mapping[int, str]) -> None:
        self._specs, self._names = specs, names
        root, model = part.root, part.root.get(_MODEL)
        args, content = root.get("args"), root.get(CONTENT)
        self._args, self._spelling = args, Spelling.of(args)
        self._apart = singles(content)
        self.tensors: dict[str, list[EntryPiece]] = {}
        self.objects: dict[str, Any] = {}
        self.notes: list[str] = []
        held = dict(model.pairs)
        self._check(held)
        self._numbered = layers_differ(args, content)
        if self._numbered and not layers_differ(args, None) and not self._apart:
            self.notes.append("each layer has entries of its own (`non_homogeneous_layers`)")
        self._model(held)
        pairs = []
        for key, value in self._generators(root).pairs:
            if key == _OPTIMIZER or key.startswith(_CHAINED):
                pairs.append((key, self._optimizer(key, value, held)))
            elif key != _MODEL:
                pairs.append((key, value))
        if model.attributes is not None:
            pairs.append((VERSIONS, DictNode("dict", model.attributes.pairs, None)))
        self.common = DictNode(root.kind, tuple(pairs), None)

    def _check(self, held: Mapping[str, Any]) -> None:
        """M916 for keys that would be read again as others, and for values without a place."""
        if not any(key.startswith(STACKS) for key in held):
            _refuse(
                f"a model of Megatron Core has layers called {listed(list(STACKS))}",
                list(held),
                f"write another format: {option('output_format', 'safetensors')}",
            )
        if grouped := [key for key in held if GROUPED.fullmatch(key)]:
            spelled = option("params", "experts=te")
            _refuse(
                "each expert has matrices of its own there, and these are of all",
                grouped,
                f"take them apart: {spelled}",
            )
        if joint := [k for k in held if _OF_ALL.fullmatch(k) and not says_nothing(held[k])]:
            _refuse(
                "each expert has a state of its own there, and these are of all",
                joint,
                "leave them out by a rule of your own (`drop`), or write another format: "
                f"{option('output_format', 'torch')}",
            )
        if objects := [key for key, value in held.items() if type(value) is Composite]:
            _refuse("it has no tensors that are objects", objects, "dequantize them")
        if others := [
            key
            for key, value in held.items()
            if type(value) is not TensorRecord and not is_state(key)
        ]:
            _refuse("only tensors and extra states stand in the model", others)
        wrong = []
        for key in held:
            entry = entry_of(key, self._spelling, numbered=False, apart=False)
            read = read_name(entry.key, self._spelling)
            other = read.axes != len(entry.numbers) or read.key(entry.numbers) != key
            # no spec but Megatron's own has both
            if other or (not self._spelling.norms and fused_norm(key) in held):
                wrong.append(key)
        if wrong:
            said = self._args.get("transformer_impl") if type(self._args) is DictNode else None
            known = f"`args.transformer_impl` is {said!r}" if said else "no `args` say which spec"
            _refuse(
                f"the specs share the names of norms and experts there, {printable(known, 80)}, "
                "and these would be read again as others",
                wrong,
                f"call them otherwise: {option('params', 'impl=te')}, or "
                f"{option('params', 'impl=local')}",
            )

    def _spec(self, record: TensorRecord) -> Spec:
        return self._specs[self._names[id(record)]]

    def _entry(self, key: str) -> EntryKey:
        return entry_of(key, self._spelling, numbered=self._numbered, apart=self._apart)

    def _model(self, held: Mapping[str, Any]) -> None:
        tensors: list[_Layered] = []
        states: list[_Layered] = []
        for key, value in held.items():
            if not is_state(key):
                tensors.append(_Layered(key, self._entry(key), value))
            elif key != _OUTPUT_STATE or value is not None:
                states += [_Layered(key, self._entry(one), value) for one in _of_each(key, held)]
        for name, several in _grouped(tensors):
            self._tensor(name, several)
        for name, several in _grouped(states):
            counts = _counts(several)
            for _, entry, value in several:
                shard = ShardKey(name, entry.numbers or (0,), counts or (1,))
                self.objects[str(shard)] = _NONE if value is None else _listed(value)

    def _tensor(self, name: str, several: Sequence[_Layered]) -> None:
        """An entry of tensors, or two of their halves."""
        _counts(several)
        first = self._spec(several[0].value)
        if other := [one.key for one in several if self._spec(one.value) != first]:
            _refuse(f"{printable(name)} is one tensor there, and these differ in shape", other)
        gated = self._apart and name.endswith(GATED) and self._is_gated()
        for at, end in enumerate(HALVES if gated else ("",)):
            self.tensors[name + end] = [
                EntryPiece(held.value, held.entry.numbers, at if gated else None)
                for held in several
            ]

    def _is_gated(self) -> bool:
        args = self._args
        return type(args) is DictNode and bool(args.get("swiglu") or args.get("gated_linear_unit"))

    def _generators(self, root: DictNode) -> DictNode:
        """Takes the state of generators: of one rank, or of each, as `mp_rank_00_001` or among what
        is kept of each part. The root without them.
        """
        value = root.get(_RANDOM, ABSENT)
        if value is ABSENT:
            return root
        left = {key: held for key, held in root.pairs if key != _RANDOM}
        ranks = {(0, 0): value}
        parts, kept = ranks_of_parts(root) or {}, dict(kept_by_part(root))
        own = {
            place: kept[name].get(_RANDOM, ABSENT)
            for name, place in parts.items()
            if place != (0, 0) and type(kept[name]) is DictNode
        }
        if len(own) == len(parts) - 1 and all(held is not ABSENT for held in own.values()):
            ranks.update(own)
            entries = [
                (name, _without(one, _RANDOM) if name in parts else one)
                for name, one in kept.items()
            ]
            left[PARTS] = DictNode("dict", tuple(entries), None)
        elif type(value) is DictNode and value.pairs:
            found = [(_PART.fullmatch(str(key)), held) for key, held in value.pairs]
            if all(part for part, _ in found):
                ranks = {(int(p[2] or 0), int(p[1])): held for p, held in found if p is not None}
        counts = tuple(max(at[axis] for at in ranks) + 1 for axis in range(2))
        if len(ranks) != prod(counts):
            _refuse("it has the generators of all ranks", [_RANDOM])
        for at, held in sorted(ranks.items()):
            self.objects[str(ShardKey(_RANDOM, at, counts))] = _listed(held)
        return replace(root, pairs=tuple(left.items()))

    def _optimizer(self, path: str, value: Any, model: Mapping[str, Any]) -> Any:
        """What of an optimizer goes into `common.pt`: its moments, by the names of parameters, are
        entries. M916 for state that goes otherwise.
        """
        if type(value) is not DictNode:
            return self._common_state(path, value)
        pairs = []
        for key, held in value.pairs:
            if path.startswith(_CHAINED) and key == _OPTIMIZER:
                held = self._optimizer(f"{path}.{key}", held, model)
            elif key == "state" and type(held) is DictNode:
                kept = []
                for moment, table in held.pairs:
                    if _by_name(table, model):
                        self._moment(f"{path}.state.{moment}", table)
                    else:
                        where = f"{path}.state.{moment}"
                        kept.append((moment, self._common_state(where, table)))
                held = DictNode(held.kind, tuple(kept), None, held.attributes)
                if not kept:
                    continue
            else:
                held = self._common_state(f"{path}.{key}", held)
            pairs.append((key, held))
        return DictNode(value.kind, tuple(pairs), None, value.attributes)

    def _moment(self, path: str, table: DictNode) -> None:
        tensors = [_Layered(key, self._entry(key), value) for key, value in table.pairs]
        for name, several in _grouped(tensors):
            self._tensor(f"{path}.{name}", several)

    def _common_state(self, path: str, value: Any) -> Any:
        """Settings and counters of an optimizer; M916 for tensors that belong to parameters."""
        if any(record.shape for record in tensor_records([value])):
            drop = together(option("params", "optimizer=drop"), option("allow", "drop"))
            _refuse(
                "optimizer state goes by the names of parameters there, and this does not",
                [path],
                f"leave it out: {drop}",
            )
        return value


def _without(node: DictNode, key: str) -> DictNode:
    return replace(node, pairs=tuple(pair for pair in node.pairs if pair[0] != key))


def _of_each(state: str, held: Mapping[str, Any]) -> Iterable[str]:
    """The states that one of a group of experts becomes; any other itself."""
    if not _OF_ALL.fullmatch(state):
        return (state,)
    module, count = state.removesuffix(STATE), 0
    while f"{module}weight{count}" in held:
        count += 1
    return [f"{module}{expert}.{STATE}" for expert in range(count)] or (state,)


def _listed(value: Any) -> ListNode:
    """What an entry of a value holds: a list of all that a rank has of it."""
    return ListNode("list", (value,), None)


# the state of most modules
_NONE = _listed(None)


def _by_name(table: Any, model: Mapping[str, Any]) -> bool:
    """Whether it has a tensor for each of some parameters of the model, by their keys."""
    return (
        type(table) is DictNode
        and bool(table.pairs)
        and all(
            type(key) is str and key in model and type(value) is TensorRecord
            for key, value in table.pairs
        )
    )


def _grouped(several: Iterable[_Layered]) -> list[tuple[str, list[_Layered]]]:
    found: dict[str, list[_Layered]] = {}
    for one in several:
        found.setdefault(one.entry.key, []).append(one)
    for held in found.values():
        held.sort(key=lambda one: one.entry.numbers)
    return list(found.items())


def _counts(several: Sequence[_Layered]) -> tuple[int, ...]:
    """How many layers and experts an entry has. M916 where one of them is not there."""
    axes = len(several[0].entry.numbers)
    counts = tuple(max(one.entry.numbers[axis] for one in several) + 1 for axis in range(axes))
    if len(several) != prod(counts):
        there = {one.entry.numbers for one in several}
        lost = next(numbers for numbers in product(*map(range, counts)) if numbers not in there)
        _refuse(
            "an entry is of all layers and experts there, and number "
            f"{'.'.join(map(str, lost))} is missing beside",
            [one.key for one in several],
        )
    return counts


def _refuse(why: str, keys: Sequence[str], help: str | None = None) -> NoReturn:
    fail("M916", f"{_FORMAT} cannot hold {listed(list(keys), 4)}: {why}", help=help)
