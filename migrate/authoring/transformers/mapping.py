"""The rules of a class: what each kind of key becomes, by which converter, and what else happens.

What transformers does without a word becomes a rule of its own: ties, modules that stay in float32,
keys that the model does not know, and duplicates, of which it takes the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from ...core.spec import Spec
from ..relations import Relation
from .classes import Built, Library
from .moves import Moved, Name, Numeral, filled, moves, renaming, split
from .operations import Conversion, Untold, Wanted, translated

_EXPERTS = re.compile(r"experts?(?:_num)?$|^num_.*experts$|^n_.*experts$")
_NO_COUNT = re.compile(r"shared|per_tok|top|activated|group|null|mlp|capacity")

_OPTIONAL = {"optional": True}
_OTHERS = "of other checkpoints of the class; the one that this was made for has none"


@dataclass(slots=True)
class Mapped:
    """What was found: relations between keys, params, and what no rule can say.

    `absent` are renamings of keys that only other checkpoints have; a rule that takes such a key
    must leave it to them. `origins` are the keys that a parameter is made of, `owners` the
    converter of each source pattern, `missing` parameters of the model that no key becomes.
    """

    relations: list[Relation] = field(default_factory=list)
    params: dict[str, Wanted] = field(default_factory=dict)
    absent: list[Relation] = field(default_factory=list)
    origins: dict[str, list[Moved]] = field(default_factory=dict)
    owners: Mapping[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)


def mapped(
    held: Library, made: Built, header: Mapping[str, Spec], *, whole: bool = False
) -> Mapped:
    """The rules for a checkpoint with these keys. `whole`: they are all that checkpoints of the
    class have, and what they become is to be saved, which needs no weight under several names.
    """
    return _Mapping(held, made, header).mapped(whole)


class _Mapping:
    def __init__(self, held: Library, made: Built, header: Mapping[str, Spec]) -> None:
        self.made, self.header = made, header
        self.names: Mapping[str, Any] = made.model.state_dict()
        transforms = held.get_model_conversion_mapping(made.model, None, None)
        self.transforms = transforms
        self.converters = [t for t in transforms if isinstance(t, held.WeightConverter)]
        self.owner = {p: c for c in self.converters for p in c.source_patterns}
        keys = sorted(header, key=held.dot_natural_key)
        base = made.model.base_model_prefix
        self.renamed = renaming(held, transforms, base)
        self.moves = moves(keys, self.names, self.renamed)
        self.indices = _indices(self.moves)
        self.plan = _dtype_plan(made)
        self.out = Mapped(owners=self.owner)
        self.produced: dict[str, str | None] = {}

    def mapped(self, whole: bool) -> Mapped:
        groups: dict[str, list[Moved]] = {}
        unknown: list[Moved] = []
        for move in self.moves:
            if move.renamed in self.names:
                groups.setdefault(move.renamed, []).append(move)
            else:
                unknown.append(move)
        alike: dict[Any, list[list[Moved]]] = {}
        for group in groups.values():
            alike.setdefault(_kind(group), []).append(group)
        for same in alike.values():
            try:
                self.out.relations += self._relations(same)
            except Untold as error:
                converter = self.owner.get(same[0][0].pattern or "")
                self.out.untold.append(_explained(error, converter, same[0]))
        self._absent(whole)
        if not whole:
            self._ties()
        self._unknown(unknown)
        self.out.missing = [k for k in self.names if k not in self.produced]
        return self.out

    def _relations(self, same: Sequence[list[Moved]]) -> Iterator[Relation]:
        """The rules for groups of keys that differ in numbers alone."""
        patterns = {move.pattern for group in same for move in group}
        if patterns == {None}:
            return self._renamed(same)
        if None in patterns:
            raise Untold("the checkpoint has this weight in both layouts")
        return self._converted(same)

    # ------------------------------------------------------------------ renamed

    def _renamed(self, same: Sequence[list[Moved]]) -> Iterator[Relation]:
        optional = self._optional(same)
        for first, *others in same:
            self.produced[first.renamed] = first.key
            self.out.origins[first.renamed] = [first]
            ops, note = self._cast(first)
            fields = optional if ops or first.key != first.renamed else {}
            yield Relation((first.key,), (first.renamed,), ops, note=note, fields=fields)
            why = f"transformers takes the first of several keys for {_any_number(first.target)}"
            for move in others:
                yield Relation((move.key,), (), _drop(why), fields=_OPTIONAL)
            if not others:
                yield from _shown(first, fields, same)

    def _cast(self, move: Moved) -> tuple[tuple[Any, ...], str | None]:
        """The cast of what the model holds in another dtype than the rest."""
        kept, stored = self._dtype(move.renamed), self.header[move.key].dtype
        if kept == stored or stored != self.made.dtype:
            return (), None
        return ({"cast": {"to": kept, "from": stored}},), f"the model keeps this in {kept}"

    def _dtype(self, name: str) -> str:
        return self.plan(name) or str(self.names[name].dtype).removeprefix("torch.")

    def _optional(self, same: Sequence[list[Moved]]) -> Mapping[str, Any]:
        """Whether only some of the numbered parts have this, so that a checkpoint may have none."""
        found: dict[tuple[str, ...], set[int]] = {}
        for group in same:
            for move in group:
                for before, number in _prefixes(move):
                    found.setdefault(before, set()).add(number)
        some = any(numbers != self.indices[before] for before, numbers in found.items())
        return _OPTIONAL if some else {}

    # ---------------------------------------------------------------- converted

    def _converted(self, same: Sequence[list[Moved]]) -> Iterator[Relation]:
        optional = self._optional(same)
        for group in same:
            converter = self.owner[group[0].pattern or ""]
            by = _by_pattern(group, converter)
            targets = _targets(converter, group[0].renamed)
            self.produced |= dict.fromkeys(targets)
            self.out.origins |= dict.fromkeys(targets, group)
            if any(type(o).__name__.startswith("ErnieFuse") for o in converter.operations):
                yield from self._halves(by, targets, converter.operations[0])
                continue
            chain = self._chain(by, targets, _star(group))
            translated(chain, converter.operations)
            if chain.cut_into == "e":
                targets = [targets[0].replace("*", str(i)) for i in range(chain.parts or 0)]
                self.produced |= dict.fromkeys(targets)
                self.out.origins |= dict.fromkeys(targets, group)
            for name, shape in zip(targets, chain.shapes, strict=False):
                there = tuple(self.names[name].shape) if name in self.names else shape
                if chain.cut_into is None and there != shape:
                    raise Untold(f"{name} has the shape {list(there)}, not {list(shape)}")
            sources = tuple(move.key for found in by.values() for move in found)
            yield Relation(sources, tuple(targets), tuple(chain.ops), fields=optional)

    def _chain(
        self, by: Mapping[str, list[Moved]], targets: list[str], star: int | None
    ) -> Conversion:
        counts = {len(found) for found in by.values()}
        numbered = None
        if star is not None:
            for found in by.values():
                numbers = [move.numbers[star] for move in found]
                if numbers != list(range(len(numbers))):
                    raise Untold(f"its numbers are {numbers[:4]} …, not 0, 1, 2 …")
            if len(counts) > 1:
                raise Untold(f"its patterns have {sorted(counts)} keys")
            numbered = counts.pop()
        elif counts != {1}:
            raise Untold("one of its patterns has several keys")
        shapes = []
        for found in by.values():
            held = {self.header[move.key].shape for move in found}
            if len(held) > 1:
                raise Untold(f"tensors that are joined differ in shape: {sorted(held)[:2]}")
            shapes.append(held.pop())
        expected = [tuple(self.names[name].shape) for name in targets if name in self.names]
        labels = tuple(by)
        out = tuple(self.owner[labels[0]].target_patterns)
        return Conversion(
            labels, shapes, numbered, expected, out, self._count, self._place, over_w=len(by) > 1
        )

    def _halves(
        self, by: Mapping[str, list[Moved]], targets: list[str], operation: Any
    ) -> Iterator[Relation]:
        """The first experts go to one target and the others to the next."""
        size = ceil(len(next(iter(by.values()))) / len(targets))
        count = self._count(size)
        for i, target in enumerate(targets):
            cut = [found[i * size : (i + 1) * size] for found in by.values()]
            ops: list[Any] = [{"stack": _told(dim=operation.stack_dim, count=count)}]
            if len(cut) > 1:
                ops.append({"concat": {"dim": operation.concat_dim}})
            keys = tuple(move.key for part in cut for move in part)
            yield Relation(keys, (target,), tuple(ops))

    def _absent(self, whole: bool) -> None:
        """What other checkpoints of the class have and this one has not, as far as the mapping
        tells: experts, unless it is `whole`, and parameters that get another name.

        Without them a rule for all of a module would take them too, as they are.
        """
        modules: dict[str, dict[str, None]] = {}
        for move in self.moves:
            parts = move.key.split(".")
            for i, part in enumerate(parts):
                modules.setdefault(part, {})[".".join([*parts[:i], ""])] = None
        unused = [transform for transform in self.transforms if not transform.was_used()]
        sizes = {w for p, w in _leaves(self.made.settings) if _counts_experts(p, w)}
        size = sizes.pop() if len(sizes) == 1 else 2
        for transform in unused:
            patterns = [p for pattern in transform.source_patterns if (p := _spelled(pattern))]
            if not patterns or len(patterns) < len(transform.source_patterns):
                continue
            ops = self._joined(getattr(transform, "operations", ()), size)
            if not ops and "*" in patterns[0]:
                continue
            for before in modules.get(patterns[0].split(".")[0], ()) if ops is not None else ():
                keys = [
                    before + p.replace("*", str(e))
                    for p in patterns
                    for e in range(size if ops else 1)
                ]
                sources = tuple(key for key in dict.fromkeys(keys) if key not in self.header)
                targets = {self.renamed(key, self.names)[0] for key in sources}
                if ops and len(targets) == 1 and not whole:
                    relation = Relation(
                        sources, tuple(targets), ops, fields=_OPTIONAL, note=_OTHERS
                    )
                    self.out.relations.append(relation)
                elif not ops and len(sources) == 1 and not targets & {*sources, *self.produced}:
                    self.out.absent.append(
                        Relation(sources, tuple(targets), fields=_OPTIONAL, note=_OTHERS)
                    )

    def _joined(self, operations: Sequence[Any], size: int) -> tuple[Any, ...] | None:
        """The ops of a converter that joins experts; none for a renaming, None for another."""
        kinds = [type(operation).__name__ for operation in operations]
        if kinds and (kinds[0] != "MergeModulelist" or set(kinds[1:]) - {"Concatenate"}):
            return None
        names = {"MergeModulelist": "stack", "Concatenate": "concat"}
        return tuple(
            {names[kind]: _told(dim=operation.dim, count=None if i else self._count(size))}
            for i, (kind, operation) in enumerate(zip(kinds, operations, strict=True))
        )

    # ------------------------------------------------------------------- params

    def _count(self, size: int) -> str | int:
        wanted = self._experts(size)
        return f"${wanted.name}" if wanted else size

    def _experts(self, size: int) -> Wanted | None:
        """The number of experts that config.json says under one name or several."""
        found = [
            path for path, value in _leaves(self.made.settings)
            if value == size and _counts_experts(path, value)
        ]  # fmt: skip
        if not found:
            return None
        name = found[-1].rpartition(".")[2]
        wanted = self._named(Wanted(name, tuple(found), size, "experts of each layer"))
        self.out.params[wanted.name] = wanted
        return wanted

    def _place(self, attribute: str, part: str | None, title: str) -> Wanted:
        config = self.made.config
        if part is not None and hasattr(config, part):
            return self._named(
                Wanted(
                    attribute,
                    (f"{part}.{attribute}",),
                    getattr(getattr(config, part), attribute, 1),
                    title,
                )
            )
        held = getattr(config, attribute, None)
        path = attribute
        if held is None or part is None:
            text = config.get_text_config()
            held = getattr(text, attribute, 1)
            for name, value in self.made.settings.items():
                if getattr(config, name, None) is text and isinstance(value, Mapping):
                    path = f"{name}.{attribute}"
        return self._named(Wanted(attribute, (path,), held, title))

    def _named(self, wanted: Wanted) -> Wanted:
        """The param of this place, under a name that no other place has."""
        for held in self.out.params.values():
            if held.path == wanted.path:
                return held
        name = re.sub(r"\W", "_", wanted.name)
        if name in self.out.params:
            name = re.sub(r"\W", "_", wanted.path[0])
        made = replace(wanted, name=name)
        self.out.params[name] = made
        return made

    # -------------------------------------------------------- what goes unsaid

    def _ties(self) -> None:
        """What the model holds under several names and the checkpoint under one of them."""
        tied = dict(getattr(self.made.model, "all_tied_weights_keys", None) or {})
        copies: dict[str, list[str]] = {}
        for name in self.names:
            if name in self.produced:
                continue
            group = {name} | {tied[name]} if name in tied else {name}
            group |= {a for a, b in tied.items() if b in group}
            origin = next((g for g in sorted(group) if self.produced.get(g)), None)
            if origin is not None:
                copies.setdefault(origin, []).append(name)
        note = "tied: the model has this weight under several names"
        for origin, names in copies.items():
            key = self.produced[origin] or ""
            self.produced |= dict.fromkeys(names)
            self.out.origins |= dict.fromkeys(names, self.out.origins[origin])
            every = _numbered([origin, *names])
            if every:
                self.out.relations = [r for r in self.out.relations if r.targets != (origin,)]
                count = self._layers(len(every))
                self.out.relations.append(
                    Relation((key,), tuple(every), ({"tie": {"count": count}},), note=note)
                )
                continue
            fields = {"keep_source": True, "if_exists": "keep", "optional": True}
            self.out.relations += [
                Relation((key,), (name,), note=note, fields=fields) for name in names
            ]

    def _layers(self, count: int) -> str | int:
        """The number of layers in config.json that this can only be."""
        found = [
            path for path, value in _leaves(self.made.settings)
            if value == count and not isinstance(value, bool)
            and path.rpartition(".")[2] in ("decoder_layers", "num_decoder_layers")
        ]  # fmt: skip
        if len(found) != 1:
            return count
        name = found[0].rpartition(".")[2]
        return f"${self._named(Wanted(name, tuple(found), count, 'layers of the decoder')).name}"

    def _unknown(self, unknown: Sequence[Moved]) -> None:
        why = f"{type(self.made.model).__name__} has no such parameter"
        self.out.relations += [
            Relation((move.key,), (), _drop(why), fields=_OPTIONAL) for move in unknown
        ]


def _counts_experts(path: str, value: Any) -> bool:
    """Whether a setting says how many experts a layer has."""
    name = path.rpartition(".")[2]
    counts = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return counts and bool(_EXPERTS.search(name)) and not _NO_COUNT.search(name)


def _spelled(pattern: str) -> str | None:
    """The key that a pattern is written for, from its first name on; None if it is no such key."""
    plain = pattern.replace("\\.", ".").removeprefix(".")
    return plain if re.fullmatch(r"\w+(\.\w+|\.\*\.\w+)+", plain) else None


def _told(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value}


def _numbered(names: Sequence[str]) -> list[str]:
    """The names in their order, if they differ in one number, which is 0, 1, 2 and so on."""
    cut = [split(name) for name in names]
    if len({texts for texts, _ in cut}) > 1:
        return []
    columns = [set(column) for column in zip(*(numbers for _, numbers in cut), strict=True)]
    varying = [column for column in columns if len(column) > 1]
    if varying != [set(range(len(names)))]:
        return []
    return [name for _, name in sorted(zip((numbers for _, numbers in cut), names, strict=True))]


def _any_number(name: Name) -> str:
    return "".join(part if isinstance(part, str) else "*" for part in name)


def _drop(why: str) -> tuple[Any, ...]:
    return ({"drop": {"why": why}},)


def _targets(converter: Any, renamed: str) -> list[str]:
    """The names of all targets of a converter, by that of the first."""
    first, *others = converter.target_patterns
    if others and first not in renamed:
        raise Untold(f"{renamed} does not hold {first}")
    return [renamed, *(renamed.replace(first, other, 1) for other in others)]


def _shown(
    move: Moved, fields: Mapping[str, Any], same: Sequence[list[Moved]]
) -> Iterator[Relation]:
    """One more key of the kind, where one alone does not show that its number is another after."""
    offsets = [part for part in move.target if isinstance(part, Numeral) and part.offset]
    if len(same) > 1 or not offsets:
        return
    numbers = [number + 1 for number in move.numbers]
    yield Relation((filled(move.source, numbers),), (filled(move.target, numbers),), fields=fields)


def _kind(group: Sequence[Moved]) -> Any:
    """Groups of one kind become one rule."""
    if group[0].pattern is None and len(group) == 1:
        return (group[0].source, group[0].target)
    if group[0].pattern is None:
        return (group[0].renamed,)
    return tuple(dict.fromkeys((m.source, m.target, m.pattern) for m in group))


def _by_pattern(group: Sequence[Moved], converter: Any) -> dict[str, list[Moved]]:
    """The keys of each pattern of a converter that has some, in its order."""
    found = {p: [m for m in group if m.pattern == p] for p in converter.source_patterns}
    return {p: m for p, m in found.items() if m}


def _star(group: Sequence[Moved]) -> int | None:
    """The position of the number that the target does not have, which `*` stood for."""
    gone = {
        slot.position for slot in group[0].source if isinstance(slot, Numeral)
    } - {slot.position for slot in group[0].target if isinstance(slot, Numeral)}  # fmt: skip
    if len(gone) > 1:
        raise Untold(f"{group[0].key} has {len(gone)} numbers that its new name has not")
    return gone.pop() if gone else None


def _prefixes(move: Moved) -> Iterator[tuple[tuple[str, ...], int]]:
    """What stands before each number of a key, with the numbers before it left out."""
    before: list[str] = []
    for part in move.source:
        if isinstance(part, Numeral):
            yield tuple(before), move.numbers[part.position]
            before.append("#")
        else:
            before.append(part)


def _indices(found: Sequence[Moved]) -> dict[tuple[str, ...], set[int]]:
    out: dict[tuple[str, ...], set[int]] = {}
    for move in found:
        for before, number in _prefixes(move):
            out.setdefault(before, set()).add(number)
    return out


def _leaves(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield before + name, value


def _explained(error: Untold, converter: Any, group: Sequence[Moved]) -> str:
    keys = ", ".join(move.key for move in group[:3])
    if converter is None:
        return f"{error}: {keys}"
    return (
        f"{error}: {converter.source_patterns} -> {converter.target_patterns}, which takes {keys}"
    )


def _dtype_plan(made: Built) -> Callable[[str], str | None]:
    """The dtype that the model gives a parameter of this name whatever the others have."""
    import torch

    plan = made.model._get_dtype_plan(getattr(torch, made.dtype))
    known = [
        (re.compile(g.replace("*", ".*")), str(d).removeprefix("torch.")) for g, d in plan.items()
    ]
    return lambda name: next((dtype for glob, dtype in known if glob.search(name)), None)
