"""Numbers of rules that are numbers of a config.json: how many experts, how many heads.

A number becomes a param where one name has its value, so that the rule holds for a larger model as
well. Where several names have it, it stays, and a comment names them. One and two never become
params: they are pairs and halves, whatever else has this value.

A number in a key that is the only one in its place, as that of a single layer, may count or be a
name. Where it follows into the new key it is a capture; where it does not, it stays, and a comment
says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import MigrateError
from ..core.templates import SLOT, group, is_integer
from ..source.jsontext import parse
from .compact import patterns
from .relations import Relation, RuleDraft

if TYPE_CHECKING:
    from ..source.index import Source

CONFIG = "config.json"
# names of numbers that count neither tensors nor axes
_OTHERS = ("_id", "_ids", "_version")
# a whole segment of a pattern that takes any number
_INTEGER = re.compile(r"\{[a-z0-9_]+(:int)?\}")


class NamedNumbers(NamedTuple):
    """Relations with params for numbers; the params as they are declared, and their values."""

    relations: tuple[Relation, ...]
    params: Mapping[str, Mapping[str, Any]]
    values: Mapping[str, int]


def named_numbers(relations: Iterable[Relation], old: Source, new: Source) -> NamedNumbers:
    """The relations, their numbers of tensors and lengths of axes named by what either side's
    config.json has one name for.
    """
    before, after = (_numbers(side) for side in (old, new))
    # a name that means something else on the other side says nothing
    known = {
        path: value
        for path, value in {**after, **before}.items()
        if before.get(path, value) == after.get(path, value)
    }
    paths: dict[int, list[str]] = defaultdict(list)
    for path, value in known.items():
        paths[value].append(path)
    used: dict[str, str] = {}
    out = []
    for relation in relations:
        if not relation.ops:
            out.append(relation)
            continue
        doubts: dict[int, list[str]] = {}

        def named(value: Any, doubts: dict[int, list[str]] = doubts) -> Any:
            if not isinstance(value, int) or isinstance(value, bool) or value <= 2:
                return value
            found = paths.get(value, [])
            if len(found) > 1:
                doubts[value] = found
            if len(found) != 1:
                return value
            name = found[0].rsplit(".", 1)[-1]
            if used.setdefault(name, found[0]) != found[0]:
                return value
            return f"${name}"

        ops = tuple(
            {op: _named(given, named) for op, given in text.items()} for text in relation.ops
        )
        notes = [relation.note] if relation.note else []
        notes += [
            f"{n} is {' and '.join(names)} in {CONFIG}" for n, names in sorted(doubts.items())
        ]
        out.append(replace(relation, ops=ops, note="; ".join(notes) or None))
    params = {
        # where nothing says it, as here
        name: {"type": "int", "config": path, "default": known[path]}
        for name, path in used.items()
    }
    return NamedNumbers(tuple(out), params, {n: known[path] for n, path in used.items()})


def mark_lone(drafts: Iterable[RuleDraft], keys: Iterable[str]) -> list[RuleDraft]:
    """The rules, with a comment where a pattern has a number that all of `keys` have there."""
    made = list(drafts)
    asked = [
        [] if d.keep else [found for p in patterns(d.sources) for found in _integers(p.split("."))]
        for d in made
    ]
    # most rules have no such number, and there are as many keys as tensors
    there: dict[tuple[str, ...], set[str]] = {form: set() for some in asked for form, _ in some}
    for template in group(keys) if there else ():
        words = (template.text if template.literal else template.text.replace(SLOT, "0")).split(".")
        for number, (form, word) in enumerate(_integers(words)):
            if (values := there.get(form)) is not None:
                values.update(
                    (word,) if template.literal else (str(ints[number]) for ints in template.ints)
                )
    out = []
    for draft, some in zip(made, asked, strict=True):
        lone = dict.fromkeys(word for form, word in some if there[form] == {word})
        if lone:
            said = f"{' and '.join(lone)} may count or be a name: no other number is in its place"
            draft = replace(draft, note="; ".join(filter(None, (draft.note, said))))
        out.append(draft)
    return out


def _integers(words: Sequence[str]) -> list[tuple[tuple[str, ...], str]]:
    """The integers among the words, each behind the form of what stands before it."""
    return [(_form(words[:at]), word) for at, word in enumerate(words) if is_integer(word)]


def _form(words: Iterable[str]) -> tuple[str, ...]:
    """What words of a key and of a pattern have in common: numbers and captures of them are one."""
    return tuple("#" if is_integer(word) or _INTEGER.fullmatch(word) else word for word in words)


def _named(given: Mapping[str, Any], named: Any) -> Mapping[str, Any]:
    out = dict(given)
    if "count" in out:
        out["count"] = named(out["count"])
    if "axes" in out:
        out["axes"] = {axis: named(length) for axis, length in out["axes"].items()}
    return out


def _numbers(source: Source) -> dict[str, int]:
    """The integers of a checkpoint's config.json, by path."""
    if CONFIG not in {file.path for file in source.index.side_files}:
        return {}
    try:
        config = parse(source.side_file(CONFIG), CONFIG, floats=True, constants=True)
    except MigrateError:
        # no rule needs it
        return {}
    out: dict[str, int] = {}
    waiting = [("", config, 0)]
    while waiting:
        prefix, here, depth = waiting.pop()
        if not isinstance(here, dict):
            continue
        for name, value in here.items():
            if not name.isidentifier() or name.endswith(_OTHERS):
                continue
            if isinstance(value, dict) and depth < 2:
                waiting.append((f"{prefix}{name}.", value, depth + 1))
            elif isinstance(value, int) and not isinstance(value, bool):
                out[prefix + name] = value
    return out
