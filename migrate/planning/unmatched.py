"""What matched nothing: rules without a key, values of `where` and alternatives that no key has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..core.errors import Report, listed, option, printable
from ..core.keys import FOREIGN, foreign, foreign_text
from ..core.templates import takes
from ..rules.conditions import allows, selects
from .pipeline import CODING

if TYPE_CHECKING:
    from ..rules.compiled import DirectedRule
    from .graph import Tensor
    from .match import Reader

_ENCODED_ELSEWHERE = (
    "take a path that decodes these tensors, as those to plain weights do, or write a rule for them"
)


def require_keys(
    readers: Sequence[Reader],
    tensors: Mapping[str, Tensor],
    report: Report,
    stay: AbstractSet[str],
    elsewhere: AbstractSet[int],
    *,
    partial: bool,
) -> list[str]:
    """M206 for each rule that has to take a key and takes none. Keys that `stay` count as taken,
    and rules of values `elsewhere` need none.

    Where only a part of the checkpoint is here, notes on those whose keys may be in the others.
    """
    notes = []
    for needed in _required(readers):
        if any(
            reader.taken or reader.contested or id(reader.rule) in elsewhere for reader in needed
        ) or any(
            takes(side.pattern, key)
            for reader in needed
            for side in reader.rule.reads
            if not side.pattern.has_flat
            for key in stay
            if key in tensors
        ):
            continue
        if partial and any(reader.taken for reader in readers):
            named = listed([reader.rule.name for reader in needed])
            notes.append(f"rules that match no key, which may be in other parts: {named}")
            continue
        _refuse_idle(needed, tensors, report)
    return notes


def _required(readers: Sequence[Reader]) -> list[list[Reader]]:
    """The rules of which one has to take a key: each that is not optional by itself; where all are,
    those together that decode or encode, because without them the edge does nothing that it is for.
    """
    if required := [[reader] for reader in readers if not reader.rule.optional]:
        return required
    coding = [r for r in readers if any(step.name in CODING for step in r.rule.steps)]
    return [coding] if coding else []


def _refuse_idle(readers: Sequence[Reader], tensors: Mapping[str, Tensor], report: Report) -> None:
    rules = [reader.rule for reader in readers]
    encoded = None
    if any(step.name in CODING for rule in rules for step in rule.steps):
        from .encoded_modules import first_encoded

        encoded = first_encoded(tensors)
    refused = dict.fromkeys(taken.key for reader in readers for taken in reader.refused)
    texts = " and ".join(repr(side.pattern.text) for side in rules[0].reads)
    report.add(
        "M206",
        f"rule {rules[0].name!r} matches no key: {texts}"
        if len(rules) == 1
        else f"no key is decoded or encoded: rules {listed([rule.name for rule in rules], 12)} "
        "match none",
        spans=(rules[0].span,),
        notes=(
            *(note for rule in rules for note in _about_params(rule)),
            *((f"`when` rules out {listed(list(refused), 3)}",) if refused else ()),
            *((f"encoded, and not taken: {encoded}",) if encoded else ()),
        ),
        help=FOREIGN
        if any(foreign(side.pattern) for rule in rules for side in rule.reads)
        or any(foreign_text(*_texts(rule.params)) for rule in rules)
        else "there are no tensors where the rules work: name a dict of tensors, "
        f"{option('at', 'PATH')}, or all of the checkpoint, {option('at', '.')}"
        if not tensors
        else _ENCODED_ELSEWHERE
        if encoded
        else "is the layout the right one? a rule that may match nothing says `optional: true`"
        if not rules[0].optional
        else f"is the layout the right one? {option('from_', 'LINEAGE@LAYOUT')} says another",
    )


def _texts(params: Mapping[str, Any]) -> Iterator[str]:
    for value in params.values():
        yield from (str(item) for item in (value if isinstance(value, (list, tuple)) else [value]))


def _about_params(rule: DirectedRule) -> Iterator[str]:
    for name, value in rule.params.items():
        words = [printable(item) or "''" for item in _texts({name: value})]
        yield (
            f"`${name}` is {listed(words, 8) or 'an empty list'}"
            if value is not None
            else f"`${name}` is not set"
        )


def unmatched_values(readers: Sequence[Reader]) -> dict[tuple[str, tuple[str, ...]], list[str]]:
    """The values that `where` lists and no key has, in none of the rules that list them."""
    found: dict[tuple[str, tuple[str, ...]], set[str]] = {}
    for reader in readers:
        for name, wanted in reader.rule.where.items():
            if isinstance(wanted, (list, tuple)) and name in reader.names:
                if any(map(selects, wanted)):
                    continue
                at = reader.names.index(name)
                found.setdefault((name, tuple(map(str, wanted))), set()).update(
                    str(t.values[at]) for t in reader.taken
                )
    return {
        (name, wanted): [v for v in wanted if v not in values]
        for (name, wanted), values in found.items()
    }


def idle_alternatives(
    readers: Sequence[Reader], elsewhere: AbstractSet[int]
) -> dict[tuple[str, str], list[str]]:
    """The alternatives not ruled out by `where` and without a key, of the rules that have keys."""
    found = {}
    for reader in readers:
        rule = reader.rule
        enums = [
            name
            for name in reader.names
            if (kind := rule.types.get(name)) is not None and kind.kind == "enum"
        ]
        if not enums or not reader.taken or rule.optional or id(rule) in elsewhere:
            continue
        for name in enums:
            at, wanted = reader.names.index(name), rule.where.get(name)
            allowed = None if wanted is None else allows(wanted)
            left = {
                v: None
                for v in rule.types[name].values
                if v not in rule.optional_values.get(name, ()) and (not allowed or allowed(v))
            }
            for key in chain(reader.taken, reader.refused, reader.yielded):
                if not left:
                    break
                left.pop(key.values[at], None)
            if left:
                found[rule.name, name] = list(left)
    return found
