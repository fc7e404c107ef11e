"""Parts with coordinates as Megatron writes them, out of the trees of tensor-parallel ranks: the
run folder, each file of the grid, and the tracker.

Nothing is computed here. A tensor goes to the parts that hold it, under the number that its layer
and its expert have there; what several parts hold is written again for each. Whether the model can
be cut so is known from its keys, before a tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, NamedTuple, NoReturn

from ..core.errors import fail, listed, option, plural, printable, together
from ..core.spec import Spec, spec
from ..source.by_part import of_part, with_states, without_kept, without_parts, without_states
from ..source.grids import AskedGrid, WrittenGrid
from ..source.jsontext import collector_paused
from ..source.paths import HISTORY
from ..source.pickle.tree import DictNode, TensorRecord
from ..source.shards import MAX_RANKS, by_rank
from ..source.target import OutputFile, Placed, Target, TargetTree, check_holds, output_record
from ..source.tree import STATE, FileTree, tensor_records
from . import _megatron
from ._joinparts import with_value
from ._megatron import EMBEDDING, OUTPUT, STATE_OF_GROUP, Order
from ._megatronargs import GridOfArgs, args_for
from ._runs import TRACKER, tracker_of
from ._torchwrite import file, plain
from .torchzip import MEGATRON

_MODEL, _ARGS = "model", "args"
# of the ways to divide, named in a message
_NAMED = 12


def fit(asked: AskedGrid, specs: Mapping[str, Spec], ranks: int, root: Any) -> WrittenGrid:
    """The grid that an output of these tensors has, which are those of one of so many
    tensor-parallel ranks. `root` is what stands around the model, as far as it is known.

    M929 where the model cannot be cut as it is `asked`, or the ranks are others.
    """
    like = asked.like
    if like is not None and not _is_sound(like):
        _refuse("what the stamp says of the grid is of no grid that migrate reads", None)
    sizes = _sizes(asked, like, ranks)
    names = tuple(specs)
    numbers = _megatron.numbers_in(names)
    count = len(numbers.layers)
    if sorted(numbers.layers) != list(range(count)):
        _refuse(f"layers are numbered up to {max(numbers.layers)}, and there are {count}", None)
    if sizes["PP"] > 1:
        _one_stack(numbers, names)
    if sizes["EP"] > 1:
        _groups(asked, numbers, sizes["EP"])
    _states_of_groups(specs, dict.fromkeys(sizes, 1) if like is None else like.sizes, sizes)
    layers = _stages(asked, like, sizes, count)
    facts = _megatron.facts_of(root)
    order = _megatron.ORDER
    forms = {_megatron.form_of(name).text for name in names}
    if like is not None and forms <= {*like.order}:
        order = _with_output(like.order)
    made = WrittenGrid(
        _megatron.NAME,
        sizes,
        layers,
        _megatron.folder_of("" if like is None else like.folder, facts),
        MEGATRON[0] if like is None else like.file,
        order,
        tuple(
            tuple(
                _called(tensor, stage, group, sizes)
                for stage in range(sizes["PP"])
                for group in range(sizes["EP"])
            )
            for tensor in range(sizes["TP"])
        ),
    )
    return made.like(like)


def _with_output(order: Sequence[str]) -> tuple[str, ...]:
    """The order with a place for the copy of a tied embedding, which a single stage has not."""
    if OUTPUT in order:
        return tuple(order)
    module = OUTPUT.rpartition(".")[0]
    at = next((n for n, form in enumerate(order) if form.startswith(f"{module}.")), len(order))
    return (*order[:at], OUTPUT, *order[at:])


def _refuse(why: str, help: str | None) -> NoReturn:
    fail("M929", why, help=help)


def _is_sound(like: WrittenGrid) -> bool:
    """Whether a grid is one of this table, and names files as parts are called."""
    sizes = {axis: like.sizes.get(axis, 0) for axis in _megatron.SIZES}
    return (
        like.table == _megatron.NAME
        and like.sizes.keys() == sizes.keys()
        and min(sizes.values()) > 0
        and len(like.layers) == sizes["VPP"]
        and all(len(row) == sizes["PP"] for row in like.layers)
        and bool(_megatron.FOLDER.fullmatch(like.folder))
        and like.file in MEGATRON
    )


def _sizes(asked: AskedGrid, like: WrittenGrid | None, ranks: int) -> dict[str, int]:
    """The sizes of the axes: as asked, else as they were, else 1."""
    was = dict.fromkeys(_megatron.SIZES, 1) | (dict(like.sizes) if like is not None else {})
    sizes: dict[str, int] = {**was, **asked.sizes}
    said = asked.sizes.get("TP", ranks)
    if said != ranks:
        _refuse(
            f"the tensors are those of {plural(ranks, 'tensor-parallel rank')}, and "
            f"{_option(asked, 'TP', said)} asks for others",
            "only rules cut and join tensors",
        )
    sizes["TP"] = ranks
    if sizes["PP"] == 1 and "VPP" not in asked.sizes:
        sizes["VPP"] = 1
    if sizes["PP"] == 1 and sizes["VPP"] > 1:
        _refuse(
            f"{sizes['VPP']} virtual stages of a single pipeline stage: there are none without "
            "several stages",
            f"leave {_option(asked, 'VPP', sizes['VPP'])} out, or give a number of stages with it",
        )
    if (count := prod(n for axis, n in sizes.items() if axis != "VPP")) > MAX_RANKS:
        _refuse(f"a grid of {count} parts, more than {MAX_RANKS}", None)
    return sizes


def _option(asked: AskedGrid, what: str, value: object = None) -> str:
    name = asked.params.get(what, what.lower())
    return option("params", name if value is None else f"{name}={value}")


def _one_stack(numbers: _megatron.Numbers, names: Collection[str]) -> None:
    """M929 for keys of which nothing says in which stage they are."""
    if numbers.others:
        several = sorted({f"{numbers.stack}.layers", *numbers.others})
        _refuse(
            f"there are layers of {listed(several, 4)}, and only those of one decoder, or of one "
            "encoder, are dealt out to pipeline stages",
            "write a single stage",
        )
    if not numbers.layers:
        _refuse("there are no layers to deal out to pipeline stages", "write a single stage")
    _known(names)


def _known(names: Iterable[str]) -> None:
    homeless = [
        name
        for name in names
        if _megatron.layer_of(name) is None and _megatron.end_of(name) is None
    ]
    if homeless:
        _refuse(
            f"nothing says in which pipeline stage {listed(homeless, 4)} "
            f"{'stands' if len(homeless) == 1 else 'stand'}",
            "write a single stage",
        )


def _groups(asked: AskedGrid, numbers: _megatron.Numbers, groups: int) -> None:
    """M929 unless experts divide by groups."""
    count = len(numbers.experts)
    if numbers.grouped:
        # how many there are is known from tensors
        return
    if not count:
        _refuse(
            f"{groups} expert groups of a model without experts",
            f"leave {_option(asked, 'EP', groups)} out",
        )
    if sorted(numbers.experts) != list(range(count)) or count % groups:
        _refuse(
            f"{count} experts do not divide by {groups} groups",
            f"{_option(asked, 'EP')} can be {_divisors(count)}",
        )


def _states_of_groups(
    specs: Mapping[str, Spec], was: Mapping[str, int], sizes: Mapping[str, int]
) -> None:
    """M929 for a state that Transformer Engine has of all experts of a group, where that is another
    group, or one of another grid.
    """
    several = max(was["EP"], sizes["EP"]) > 1
    other = several and any(was[axis] != size for axis, size in sizes.items() if axis != "VPP")
    for key, held in specs.items():
        found = STATE_OF_GROUP.fullmatch(key) if key.endswith(STATE) else None
        if found is None or not held.nbytes:
            continue
        if other or f"{found[1]}.weight0" not in specs:
            way = together(option("params", "states=drop"), option("allow", "drop"))
            _refuse(
                f"{printable(key)} is one state of all experts of a group, for "
                f"{plural(was['EP'], 'group')} of the grid that was read, and is not taken apart "
                "for another one or for other modules",
                f"leave the states of all modules out: {way}",
            )


def _divisors(count: int) -> str:
    found = [str(n) for n in range(1, count + 1) if count % n == 0]
    return listed(found, _NAMED)


def _stages(
    asked: AskedGrid, like: WrittenGrid | None, sizes: Mapping[str, int], count: int
) -> list[list[int]]:
    """How many layers each virtual stage and stage has: as asked, else as they were where the
    stages are the same, else as many in each.
    """
    stages, virtual, said = sizes["PP"], sizes["VPP"], asked.stages
    same = like is not None and all(like.sizes[axis] == sizes[axis] for axis in ("PP", "VPP"))
    if not said and like is not None and same and sum(map(sum, like.layers)) == count:
        return [list(row) for row in like.layers]
    if said and stages == 1:
        names = listed([_option(asked, what) for what in said])
        _refuse(f"{names} of a single pipeline stage", f"give {_option(asked, 'PP')} with it")
    if "layout" in said:
        _check_layout(asked, str(said["layout"]))
    found = _megatron.spread(
        _megatron.facts_that_say(count, said.get("first"), said.get("last"), said.get("layout")),
        stages,
        virtual,
    )
    if not isinstance(found, list):
        parts = _option(asked, "PP") + (
            f" times {_option(asked, 'VPP')}" if "VPP" in asked.params and virtual > 1 else ""
        )
        uneven = [
            _option(asked, what) for what in ("first", "last", "layout") if what in asked.params
        ]
        _refuse(
            str(found),
            f"{parts} can be {_divisors(count)}, or {listed(uneven)} say how many layers stages "
            "have",
        )
    return found


def _check_layout(asked: AskedGrid, text: str) -> None:
    """M929 for a layout with anything but the embedding first, layers, and the loss last."""
    others = sorted(what for what in ("first", "last") if what in asked.stages)
    if others:
        both = listed([_option(asked, what) for what in ("layout", *others)])
        _refuse(f"{both} say the same", "give one of them")
    plain = _megatron.unrolled(text)
    if plain is None or plain.count("E") != 1 or plain.count("L") != 1:
        _refuse(
            f"the layout {printable(text, 80)} has not one embedding `E` and one loss `L`", None
        )
    rows = plain.split("|")
    inner = plain.replace("|", "")
    if inner[0] != "E" or inner[-1] != "L" or "E" not in rows[0] or "L" not in rows[-1]:
        _refuse(
            f"the layout {printable(text, 80)} has the embedding or the loss in another stage than "
            "the first and the last",
            None,
        )
    if set(inner) - set("EtL"):
        strange = listed(sorted(set(inner) - set("EtL")), 4)
        _refuse(f"the layout {printable(text, 80)} has {strange}, which is not dealt out", None)


def _called(tensor: int, stage: int, group: int, sizes: Mapping[str, int]) -> str:
    """What the part at these coordinates is called."""
    name = f"mp_rank_{tensor:02}"
    if sizes["PP"] > 1:
        name += f"_{stage:03}"
    return name + (f"_{group:03}" if sizes["EP"] > 1 else "")


@collector_paused()
def describe(
    specs: Mapping[str, Spec], grid: WrittenGrid, *, stamp: str | None, tree: TargetTree | None
) -> Target:
    """The run folder: every file of every part, and the tracker that names the checkpoint.

    M916 naming every tensor that torch cannot hold, M929 for what stands in no part.
    """
    check_holds(specs)
    if tree is None:
        tree = plain(specs, by_rank(specs))
    cutter = _Cutter(grid, tree, {**specs, **tree.passed_through})
    files = tuple(cutter.files())
    small = {} if stamp is None else {f"{grid.folder}/{HISTORY}": stamp.encode()}
    small[TRACKER] = tracker_of(grid.folder)
    note = f"written as {grid}: {plural(grid.count, 'part')} in {grid.folder}"
    return Target(files, True, small, cutter.copies, (note,), beside=f"{grid.folder}/")


class _Spot(NamedTuple):
    """Where a name belongs, None for everywhere; what it is called there, and its place in the
    order.
    """

    virtual: int | None
    stage: int | None
    group: int | None
    local: str
    rank: tuple[int, ...]


_Pairs = list[tuple[tuple[int, ...], str, Any]]


class _Cutter:
    """Deals the dicts of the model out to parts."""

    def __init__(self, grid: WrittenGrid, tree: TargetTree, specs: dict[str, Spec]) -> None:
        self._grid, self._tree, self._specs = grid, tree, specs
        self._order = Order(grid.order)
        self._stages, self._virtual = grid.sizes["PP"], grid.sizes["VPP"]
        self._count = grid.sizes["EP"]
        # of each layer of the model: virtual stage, stage, number there
        self._homes = [
            (v, p, n)
            for v, row in enumerate(grid.layers)
            for p, count in enumerate(row)
            for n in range(count)
        ]
        self._spots: dict[str, _Spot] = {}
        self._per_group = 0
        # the key of each tensor that is written again -> its own, and how often each was
        self.copies: dict[str, str] = {}
        self._times: dict[str, int] = {}
        # the key of each group's part of a tensor of all experts, by the identity of its record
        self._parts: dict[int, tuple[str, TensorRecord]] = {}
        # of these keys that of the whole, and where in its bytes the part begins
        self._wholes: dict[str, tuple[str, int]] = {}

    def files(self) -> Iterator[OutputFile]:
        """The files, by tensor-parallel rank, stage and expert group."""
        tables = [self._table(part) for part in self._tree.parts]
        keys = [key for key, _ in tables[0].pairs]
        if strange := [key for key in keys if type(key) is not str]:
            _refuse(
                f"{listed(list(map(repr, strange)), 4)} in the dict of the model is no name", None
            )
        experts = len(_megatron.numbers_in(keys).experts)
        self._per_group = experts // self._count
        if self._stages > 1:
            _known(keys)
        for number, table in enumerate(tables[1:], 1):
            if unlike := {key for key, _ in table.pairs} ^ {*keys}:
                _refuse(
                    f"tensor-parallel ranks 0 and {number} do not have the same keys: "
                    f"{listed(sorted(map(str, unlike)), 4)}",
                    None,
                )
        for rank, part in enumerate(self._tree.parts):
            yield from self._of_rank(rank, part, tables[rank])

    def _table(self, part: FileTree) -> DictNode:
        table = part.table
        if table is None or part.nested_dicts or part.at not in ((), (_MODEL,)):
            where = "" if part.at is None else f" at `{printable('.'.join(part.at))}`"
            _refuse(
                f"the tensors{where} are in no flat dict `{_MODEL}`, and parts of a grid hold "
                "nothing else",
                f"write another format, or one that is not cut: {option('output_format', 'dcp')}",
            )
        return table

    def _of_rank(self, rank: int, part: FileTree, table: DictNode) -> Iterator[OutputFile]:
        model = self._dealt(table.pairs, modules=False)
        said = table.attributes.get("_metadata") if type(table.attributes) is DictNode else None
        versions = self._dealt(said.pairs, modules=True) if type(said) is DictNode else None
        self._tie(model, table, part.root)
        called = iter(self._grid.parts[rank])
        for stage in range(self._stages):
            for group in range(self._count):
                name = next(called)
                whole, states = self._own_states(self._whole_root(part, name), table)
                models = []
                for virtual in range(self._virtual):
                    attributes = table.attributes
                    if versions is not None and type(said) is DictNode:
                        there = tuple(_gathered(versions, virtual, stage, group))
                        made = DictNode(said.kind, there, said.node, said.attributes)
                        attributes = with_value(attributes, "_metadata", made)
                    own = states.get((virtual, stage), {})
                    held = tuple(
                        (key, own.get(key, value))
                        for key, value in _gathered(model, virtual, stage, group)
                    )
                    models.append(DictNode(table.kind, held, table.node, attributes))
                root = self._root(part, whole, table, models)
                yield self._file(f"{self._grid.folder}/{name}/{self._grid.file}", root)

    def _dealt(
        self, pairs: Iterable[tuple[Any, Any]], modules: bool
    ) -> dict[tuple[int, int, int | None], _Pairs]:
        """The pairs by virtual stage, stage and expert group; under None what all groups have."""
        found: dict[tuple[int, int, int | None], _Pairs] = {}
        pairs = tuple(pairs)
        known = dict(pairs)
        # of modules most have no tensor; parts that were joined have theirs one behind the other
        order = self._order
        if modules:
            order = Order(dict.fromkeys(_megatron.form_of(str(key)).text for key, _ in pairs))
        for key, value in pairs:
            spot = self._spot(key)
            place = order.rank(_megatron.form_of(key)) if modules else spot.rank
            stages = range(self._stages) if spot.stage is None else (spot.stage,)
            virtual = range(self._virtual) if spot.virtual is None else (spot.virtual,)
            held = [(spot.group, value)]
            if self._count > 1 and _megatron.GROUPED.fullmatch(key) and not modules:
                held = list(enumerate(self._of_groups(key, value, known)))
            for v, p, (group, one) in product(virtual, stages, held):
                found.setdefault((v, p, group), []).append((place, spot.local, one))
        for dealt in found.values():
            dealt.sort(key=_place)
        return found

    def _of_groups(self, key: str, value: Any, known: Mapping[Any, Any]) -> Iterator[TensorRecord]:
        """What each expert group has of a tensor of all experts, whose number the router tells."""
        found, groups = _megatron.GROUPED.fullmatch(key), self._count
        whole = self._tree.names.get(id(value), "")
        router = known.get(f"{found[1]}router.weight") if found is not None else None
        there = self._specs.get(self._tree.names.get(id(router), ""))
        held = self._specs.get(whole)
        if found is None or held is None or len(held.shape) != 2 or there is None:
            _refuse(
                f"{printable(key)} has all experts in one tensor, and no router tells how many",
                "write one group",
            )
        if there.shape[0] % groups:
            _refuse(
                f"{there.shape[0]} experts of {printable(key)} do not divide by {groups} groups",
                f"the number of groups can be {_divisors(there.shape[0])}",
            )
        at = 1 if found[2] == "1" else 0
        if held.shape[at] % groups:
            _refuse(f"{printable(key)}, {held}, does not divide by {groups} groups", None)
        shape = list(held.shape)
        shape[at] //= groups
        part = spec(held.dtype, tuple(shape))
        for group in range(groups):
            name = f"{whole}#{group}"
            while name in self._specs:
                name += "#"
            record = output_record(part, value)
            self._specs[name] = part
            self._parts[id(record)] = name, record
            self._wholes[name] = whole, part.nbytes * group
            yield record

    def _spot(self, name: str) -> _Spot:
        known = self._spots.get(name)
        if known is None:
            known = self._spots[name] = self._found(name)
        return known

    def _found(self, name: str) -> _Spot:
        form = _megatron.form_of(name)
        rank = self._order.rank(form)
        group, first_expert = None, 0
        if form.expert is not None and self._per_group:
            group = form.expert // self._per_group
            first_expert = group * self._per_group
        if form.layer is not None:
            if form.layer >= len(self._homes):
                # a module without tensors, of a layer that is not there
                return _Spot(0, 0, group, name, rank)
            virtual, stage, here = self._homes[form.layer]
            local = _megatron.renumber(here - form.layer, -first_expert)(name)
            return _Spot(virtual, stage, group, local, rank)
        end = _megatron.end_of(name) if self._stages > 1 else None
        if end == "first":
            return _Spot(0, 0, group, name, rank)
        if end == "last":
            return _Spot(self._virtual - 1, self._stages - 1, group, name, rank)
        return _Spot(None, None, group, name, rank)

    def _tie(
        self, model: dict[tuple[int, int, int | None], _Pairs], table: DictNode, root: Any
    ) -> None:
        """Puts the copy of a tied embedding into the last of several stages."""
        if self._stages == 1 or table.get(OUTPUT) is not None:
            return
        embedding = table.get(EMBEDDING)
        args = _megatron.facts_of(root).args or {}
        if embedding is None or args.get("untie_embeddings_and_output_weights") is True:
            return
        last = model.setdefault((self._virtual - 1, self._stages - 1, None), [])
        last.append((self._order.rank(_megatron.form_of(OUTPUT)), OUTPUT, embedding))
        last.sort(key=_place)

    def _whole_root(self, part: FileTree, called: str) -> DictNode | None:
        """What stands around the model in a part; None where nothing does."""
        if part.at == ():
            return None
        root = of_part(part.root, called) or without_parts(part.root)
        return root if called == self._grid.parts[0][0] else without_kept(root)

    def _own_states(
        self, root: DictNode | None, table: DictNode
    ) -> tuple[DictNode | None, dict[tuple[int | None, int | None], dict[str, Any]]]:
        """What stands around the model without the states of modules that this part has otherwise,
        and these by virtual stage and stage and by what they are called there. What the model has
        no place for stays where it is.
        """
        found: dict[tuple[int | None, int | None], dict[str, Any]] = {}
        if root is None:
            return None, found
        root, states = without_states(root)
        there = {key for key, _ in table.pairs} if states else {}
        for key in there & states.keys():
            spot = self._spot(key)
            found.setdefault((spot.virtual, spot.stage), {})[spot.local] = states.pop(key)
        return with_states(root, states), found

    def _root(
        self, part: FileTree, root: DictNode | None, table: DictNode, models: Sequence[DictNode]
    ) -> DictNode:
        """What the file of a part holds."""
        names = [_MODEL] if len(models) == 1 else [f"{_MODEL}{n}" for n in range(len(models))]
        made = tuple(zip(names, models, strict=True))
        if root is None:
            return DictNode("dict", made, None)
        pairs = [
            pair
            for key, value in root.pairs
            for pair in (made if value is table else ((key, value),))
        ]
        return DictNode(root.kind, tuple(pairs), root.node, root.attributes)

    def _file(self, name: str, root: DictNode) -> OutputFile:
        names: dict[int, str] = {}
        first: dict[str, str] = {}
        there: dict[str, str] = {}
        for record in tensor_records([root]):
            if id(record) in self._parts:
                names[id(record)] = self._parts[id(record)][0]
                continue
            key = self._tree.names[id(record)]
            names[id(record)] = made = self._again(key)
            tied = self._tree.first.get(key, key)
            first[made] = there.setdefault(tied, made)
        tree = TargetTree((), names, {}, first, self._tree.carries)
        whole = file(name, FileTree(root, None), self._specs, tree, None)
        if not self._parts:
            return whole
        return replace(whole, tensors=tuple(map(self._within, whole.tensors)))

    def _within(self, placed: Placed) -> Placed:
        """The place as that of a stretch of the whole tensor, if it is of one."""
        key, start = self._wholes.get(placed.key, (placed.key, placed.start))
        return placed._replace(key=key, start=start)

    def _again(self, key: str) -> str:
        """What a tensor is called in the files, each time otherwise."""
        number = self._times[key] = self._times.get(key, 0) + 1
        if number == 1:
            return key
        name = f"{key}#{number}"
        while name in self._specs:
            name += "#"
        self.copies[name] = key
        self._specs[name] = self._specs[key]
        return name


def roots_of(grid: WrittenGrid, specs: Mapping[str, Spec]) -> Callable[[Any, int, int], Any]:
    """What makes the root of a part of this grid out of that of a part of another one."""
    embedding = specs.get(EMBEDDING, specs.get(f"{EMBEDDING}@0"))
    rows = embedding.shape[0] * grid.sizes["TP"] if embedding and embedding.shape else None
    said, groups = GridOfArgs.of(grid, rows), grid.sizes["EP"]

    def root_of(root: Any, rank: int, number: int) -> Any:
        args = root.get(_ARGS)
        if type(args) is not DictNode:
            return root
        return with_value(root, _ARGS, args_for(args, said, rank, *divmod(number, groups)))

    return root_of


def _place(one: tuple[tuple[int, ...], str, Any]) -> tuple[int, ...]:
    return one[0]


def _gathered(
    dealt: Mapping[tuple[int, int, int | None], _Pairs], virtual: int, stage: int, group: int
) -> Iterator[tuple[str, Any]]:
    """The pairs of one part in their order."""
    shared = dealt.get((virtual, stage, None), [])
    own = dealt.get((virtual, stage, group), [])
    pairs = sorted([*shared, *own], key=_place) if own else shared
    return ((name, value) for _, name, value in pairs)
