"""A naive witness of the rule language, written from docs/reference/rules.md alone: it imports
nothing of migrate.

`converted` matches each key against each pattern by backtracking, decides which pattern is narrower
by trying sample keys, and runs the ops one after the other over whole tensors in memory. A tensor
is its dtype and an array of its elements as unsigned integers, so that every op that moves elements
moves bits."""

from __future__ import annotations

import functools
import itertools
import operator
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from naive_ops import EACH, JOIN, PART, Refused, Tensor, integer, resolved

Captures = dict[str, Any]


# --- patterns -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A piece of a pattern: text, or a capture (plain, int, alternatives, path, flat), or
    arithmetic over an int capture.
    """

    kind: str
    text: str = ""  # of text: itself; else the capture's name
    alternatives: tuple[str, ...] = ()
    factor: int = 1
    summand: int = 0


@dataclass(frozen=True)
class Pattern:
    parts: tuple[Part, ...]
    rank: Part | None = None  # what stands behind `@`

    def names(self) -> list[str]:
        parts = [*self.parts, self.rank] if self.rank else self.parts
        return [part.text for part in parts if part is not None and part.kind != "text"]


def parse(text: str, params: Mapping[str, Any], typed: Mapping[str, Part] | None = None) -> Pattern:
    """A pattern as parts. `typed` holds captures whose type was written elsewhere, in `from`."""
    known: dict[str, Part] = dict(typed or {})
    parts: list[Part] = []
    for piece in re.findall(r"\{\{|\}\}|\{[^{}]*\}|[^{}]+", text):
        if piece in ("{{", "}}"):
            parts.append(Part("text", piece[0]))
        elif not piece.startswith("{"):
            parts.append(Part("text", piece))
        else:
            parts.append(capture(piece[1:-1], known, params))
            if parts[-1].kind in ("plain", "int", "alternatives", "path"):
                known.setdefault(parts[-1].text, parts[-1])
    rank = None
    if len(parts) > 1 and parts[-2].kind == "text" and parts[-2].text.endswith("@"):
        rank = parts.pop()
        parts[-1] = Part("text", parts[-1].text[:-1])
        if not parts[-1].text:
            parts.pop()
    return Pattern(tuple(parts), rank)


def capture(inside: str, known: Mapping[str, Part], params: Mapping[str, Any]) -> Part:
    if inside.endswith("..."):
        return Part("path", inside[:-3])
    if ":" in inside:
        name, kind = inside.split(":", 1)
        if kind in ("int", "flat"):
            return Part(kind, name)
        return Part("alternatives", name, tuple(kind.split("|")))
    if inside in known:
        return known[inside]
    if re.fullmatch(r"\w+", inside) and not inside[0].isdigit():
        return Part("plain", inside)
    name = next(word for word in re.findall(r"(?<![\w$])[A-Za-z_]\w*", inside))
    at = lambda n: integer(re.sub(rf"(?<![\w$]){name}\b", str(n), inside), params)  # noqa: E731
    return Part("arithmetic", name, factor=at(1) - at(0), summand=at(0))


def bare(key: str) -> tuple[str, int | None]:
    """A key without its rank, and the rank: of `x@1` 1, of `x` None."""
    found = re.fullmatch(r"(.*)@(\d+)", key, re.DOTALL)
    return (found[1], int(found[2])) if found else (key, None)


def readings(pattern: Pattern, key: str) -> list[Captures]:
    """Every way to give the captures values; the rank is `@` where the pattern does not name it."""
    name, rank = bare(key)
    out: list[Captures] = []
    for parts in shortened(pattern.parts):
        for values in cut(parts, name, 0, {}):
            whole = {**{part.text: "" for part in pattern.parts if part.kind == "path"}, **values}
            if pattern.rank is None:
                whole["@"] = rank
            elif pattern.rank.kind == "int":
                whole[pattern.rank.text] = rank or 0
            elif pattern.rank.text != str(rank or 0):
                continue
            if whole not in out:
                out.append(whole)
    return out


def shortened(parts: tuple[Part, ...]) -> Iterator[tuple[Part, ...]]:
    """The pattern with each choice of paths left out as empty, each with the dot beside it."""
    segments: list[list[Part]] = [[]]
    for part in parts:
        if part.kind != "text":
            segments[-1].append(part)
            continue
        first, *others = part.text.split(".")
        segments[-1].append(Part("text", first))
        segments += [[Part("text", other)] for other in others]
    segments = [
        [part for part in segment if part.kind != "text" or part.text] for segment in segments
    ]
    paths = sorted(
        {segment[0].text for segment in segments if segment and segment[0].kind == "path"}
    )
    for empty in itertools.product((False, True), repeat=len(paths)):
        gone = {path for path, out in zip(paths, empty, strict=True) if out}
        left = [
            segment
            for segment in segments
            if not (segment and segment[0].kind == "path" and segment[0].text in gone)
        ]
        joined: list[Part] = []
        for number, segment in enumerate(left):
            joined += [Part("text", "."), *segment] if number else segment
        yield tuple(joined)


def cut(parts: Sequence[Part], key: str, at: int, values: Captures) -> Iterator[Captures]:
    if not parts:
        if at == len(key):
            yield dict(values)
        return
    part = parts[0]
    for end, value in ends(part, key, at, values):
        if part.kind in ("text", "flat", "arithmetic"):
            yield from cut(parts[1:], key, end, values)
        elif part.text not in values:
            yield from cut(parts[1:], key, end, {**values, part.text: value})
        elif values[part.text] == value:
            yield from cut(parts[1:], key, end, values)


def ends(part: Part, key: str, at: int, values: Captures) -> Iterator[tuple[int, Any]]:
    if part.kind == "text":
        if key.startswith(part.text, at):
            yield at + len(part.text), None
    elif part.kind == "alternatives":
        for value in part.alternatives:
            if key.startswith(value, at):
                yield at + len(value), value
    elif part.kind == "int":
        found = re.compile(r"(?<![0-9])(0|[1-9][0-9]*)(?![0-9])", re.ASCII).match(key, at)
        if found:
            yield found.end(), int(found[0])
    elif part.kind == "plain":
        for end in range(at + 1, len(key) + 1):
            if key[end - 1] == ".":
                break
            yield end, key[at:end]
    elif part.kind == "path":
        for end in range(at + 1, len(key) + 1):
            if end == len(key) or key[end] == ".":
                yield end, key[at:end]
    else:
        raise NotImplementedError(f"{part.kind} is never read out of a key here")


def written(pattern: Pattern, values: Mapping[str, Any]) -> tuple[str, int | None]:
    """The key that the pattern makes of the values, and the rank it goes to."""
    texts: list[str] = []
    for part in pattern.parts:
        value = values.get(part.text)
        if part.kind == "text":
            texts.append(part.text)
        elif part.kind == "arithmetic":
            number = part.factor * int(value) + part.summand
            if number < 0:
                raise Refused("a negative number")
            texts.append(str(number))
        elif part.kind == "flat":
            texts.append(str(value).replace(".", ""))
        elif part.kind == "path" and value == "":
            texts.append("\0")
        else:
            texts.append(str(value))
    key = "".join(texts)
    while "\0" in key:  # an empty path, and the dot beside it
        key = (
            key.replace("\0.", "", 1)
            if "\0." in key
            else key.replace(".\0", "", 1)
            if ".\0" in key
            else key.replace("\0", "", 1)
        )
    rank = values.get("@") if pattern.rank is None else int(values[pattern.rank.text])
    return key, rank


@functools.cache
def narrower(one: Pattern, other: Pattern) -> bool:
    """Whether all keys that `one` can match `other` can match too, and not the other way round;
    tried on sample keys.
    """
    return within(one, other) and not within(other, one)


def within(one: Pattern, other: Pattern) -> bool:
    return all(readings(other, key) for key in samples(one, other))


def samples(pattern: Pattern, other: Pattern) -> list[str]:
    words = {
        word
        for p in (pattern, other)
        for part in p.parts
        for text in (part.text if part.kind == "text" else "", *part.alternatives)
        for word in text.split(".")
    }
    words = {word for word in words if word} | {"zq", "Zw9", "7", "07"}
    numbers = sorted(
        {0, 5, 12} | {int(word) for word in words if re.fullmatch(r"0|[1-9][0-9]*", word, re.ASCII)}
    )
    texts = {
        text
        for p in (other,)
        for part in p.parts
        for text in (part.text.strip("."), *part.alternatives)
        if part.kind in ("text", "alternatives") and text
    }
    pools: dict[str, list[Any]] = {}
    for part in pattern.parts:
        if part.kind == "plain":
            pools[part.text] = sorted(words)
        elif part.kind == "int":
            pools[part.text] = numbers
        elif part.kind == "alternatives":
            pools[part.text] = list(part.alternatives)
        elif part.kind == "path":
            pools[part.text] = [
                "",
                "zq",
                "zq.Zw9",
                "7",
                *sorted(words),
                *sorted(texts),
                *(f"zq.{text}.7" for text in sorted(texts)),
            ]
    every = itertools.product(*pools.values())
    count = functools.reduce(operator.mul, map(len, pools.values()), 1)
    if count > 3000:
        dice = random.Random(count)
        every = ([dice.choice(pool) for pool in pools.values()] for _ in range(3000))
    unranked = Pattern(pattern.parts)
    return [written(unranked, dict(zip(pools, values, strict=True)))[0] for values in every]


# --- rules ----------------------------------------------------------------------------------------


@dataclass
class Item:
    """A tensor on its way through a rule: what its captures are, and the keys that it was made
    of.
    """

    values: Captures
    tensor: Tensor
    sources: frozenset[str]


@dataclass
class Rule:
    name: str
    roles: dict[str, Pattern]  # "" where the rule has none
    to: dict[str, Pattern]
    said: Mapping[str, Any]
    orders: dict[str, tuple[Any, ...] | None] = field(
        default_factory=dict
    )  # of captures with an order that is written
    maps: dict[str, dict[Any, Any]] = field(default_factory=dict)

    @property
    def reads_only(self) -> bool:
        return bool(self.said.get("keep_source"))


def unset(said: Any, params: Mapping[str, Any]) -> bool:
    return (
        isinstance(said, str)
        and said.startswith("$")
        and said[1:] in params
        and params[said[1:]] is None
    )


def filled(said: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an op without those that are exactly an unset param."""
    return {name: value for name, value in said.items() if not unset(value, params)}


def as_list(said: Any) -> list[Any]:
    return list(said) if isinstance(said, (list, tuple)) else [said]


def items_of(said: Any, params: Mapping[str, Any]) -> list[Any]:
    """Values of a condition: `$param`s resolved, those that are lists as their items."""
    return [one for entry in as_list(said) for one in as_list(resolved(entry, params))]


def loaded(said: Mapping[str, Any], params: Mapping[str, Any]) -> Rule:
    typed: dict[str, Part] = {}

    def roles(side: Any) -> dict[str, Pattern]:
        named = (
            side
            if isinstance(side, Mapping)
            else {str(i): p for i, p in enumerate(side)}
            if isinstance(side, list)
            else {"": side}
        )
        out = {}
        for role, text in named.items():
            out[str(role)] = pattern = parse(text, params, typed)
            for part in [*pattern.parts, *([pattern.rank] if pattern.rank else [])]:
                if part.kind in ("plain", "int", "alternatives", "path"):
                    typed.setdefault(part.text, part)
        return out

    before = roles(said["from"])
    rule = Rule(said["name"], before, {}, said)
    for name, listed in said.get("map", {}).items():
        part = typed[name]
        change = {(int(a) if part.kind == "int" else a): b for a, b in listed.items()}
        if part.kind == "path":
            rule.maps[name] = change
            continue
        possible = part.alternatives if part.kind == "alternatives" else tuple(change)
        if not set(change) <= set(possible):
            raise Refused("a map of a value that the capture cannot have")
        rule.maps[name] = whole = {value: change.get(value, value) for value in possible}
        if len(set(map(str, whole.values()))) < len(whole):
            raise Refused("two values that become one")
        if part.kind == "plain":  # takes exactly these values, as if they were its alternatives
            enumerated = Part("alternatives", name, tuple(map(str, possible)))

            def replace(p, name=name, enumerated=enumerated):
                return enumerated if p.kind == "plain" and p.text == name else p

            rule.roles = {
                role: Pattern(tuple(map(replace, p.parts)), p.rank)
                for role, p in rule.roles.items()
            }
            typed[name] = enumerated
    rule.to = roles(said["to"]) if "to" in said else {}
    captures_add_up(rule)
    for part in typed.values():
        rule.orders[part.text] = part.alternatives or None
    if set(before) != {""}:
        rule.orders["role"] = tuple(before)
    return rule


def captures_add_up(rule: Rule) -> None:
    """Each capture of `from` is written in `to` or consumed, each other capture of `to` produced,
    and what is produced is in `to`.
    """
    bound = {name for pattern in rule.roles.values() for name in pattern.names()} | (
        {"role"} if "" not in rule.roles else set()
    )
    to = {name for pattern in rule.to.values() for name in pattern.names()} | (
        {"role"} if set(rule.to) - {""} else set()
    )
    for op in rule.said.get("via", []):
        for name, arguments in op.items():
            if name == "drop":
                return
            if "into" in arguments and (arguments["into"] in bound or arguments["into"] not in to):
                raise Refused("into a capture that is bound, or that `to` does not have")
            if "over" in arguments and arguments["over"] not in bound:
                raise Refused("over a capture that is not bound")
            bound = (
                (bound | {arguments["into"]})
                if "into" in arguments
                else bound - {arguments.get("over")}
            )
    if bound != to:
        raise Refused("captures of `from` and `to` that do not add up")


def present(rule: Rule, params: Mapping[str, Any]) -> bool:
    """Whether the conditions on params let the rule be there."""
    for name, wanted in rule.said.get("where", {}).items():
        if (
            name.startswith("$")
            and not unset(name, params)
            and params[name[1:]] not in items_of(wanted, params)
        ):
            return False
    return True


def where_holds(rule: Rule, values: Captures, params: Mapping[str, Any]) -> bool:
    for name, wanted in rule.said.get("where", {}).items():
        if name.startswith("$") or unset(wanted, params):
            continue
        value = values[name]
        if isinstance(wanted, Mapping):
            limits = {
                word: integer(limit, params)
                for word, limit in wanted.items()
                if not unset(limit, params)
            }
            if value < limits.get("min", value) or value > limits.get("max", value):
                return False
            if "multiple_of" in limits and value % limits["multiple_of"] != limits.get(
                "remainder", 0
            ):
                return False
        elif str(value) not in [
            str(one) for one in items_of(wanted, params) if not unset(one, params)
        ]:
            return False
    return all(
        values[n] in m for n, m in rule.maps.items() if n in values and isinstance(values[n], int)
    )


def when_holds(rule: Rule, role: str, tensor: Tensor) -> bool:
    said = rule.said.get("when")
    if not said:
        return True
    if role and not set(said) <= {"dtype", "ndim"}:
        said = said.get(role, {})
    return (tensor.dtype in as_list(said.get("dtype", tensor.dtype))) and (
        len(tensor.shape) in as_list(said.get("ndim", len(tensor.shape)))
    )


def the_reading(pattern: Pattern, key: str) -> Captures | None:
    found = readings(pattern, key)
    if len(found) > 1:
        raise Refused("two readings")
    return found[0] if found else None


def flat(pattern: Pattern) -> bool:
    return any(part.kind == "flat" for part in pattern.parts)


def flat_reading(
    rule: Rule, pattern: Pattern, key: str, others: Mapping[str, Tensor]
) -> Captures | None:
    """The values of another role's key from which the pattern makes this one."""
    found: list[Captures] = []
    for other, role in itertools.product(others, rule.roles.values()):
        values = None if flat(role) else the_reading(role, other)
        if (
            values is not None
            and named(*written(pattern, values)) == named(*bare(key))
            and values not in found
        ):
            found.append(values)
    if len(found) > 1:
        raise Refused("two readings")
    return dict(found[0]) if found else None


def consumed(rule: Rule) -> set[str]:
    """Captures that an op unbinds, so that tensors which differ in them belong to one group."""
    out = {
        arguments["over"]
        for op in rule.said.get("via", [])
        for arguments in op.values()
        if "over" in arguments
    }
    return out | {"role"}


def group_of(rule: Rule, values: Captures) -> tuple[Any, ...]:
    """What the members of a group have in common; a key without rank lies in the file of rank 0."""
    gone = consumed(rule)
    return tuple(
        sorted(
            (name, str(value or 0 if name == "@" else value))
            for name, value in values.items()
            if name not in gone
        )
    )


def taken(
    rules: Sequence[Rule], tensors: Mapping[str, Tensor], params: Mapping[str, Any]
) -> dict[str, list[Item]]:
    """For each rule the tensors that it takes or reads."""
    out: dict[str, list[Item]] = {rule.name: [] for rule in rules}
    found: dict[str, list[tuple[Rule, str, Captures]]] = defaultdict(list)
    for rule in rules:
        passed: dict[tuple[Any, ...], set[bool]] = defaultdict(set)
        for key, tensor in tensors.items():
            for role, pattern in rule.roles.items():
                values = (
                    flat_reading(rule, pattern, key, tensors)
                    if flat(pattern)
                    else the_reading(pattern, key)
                )
                if values is None or not where_holds(rule, values, params):
                    continue
                if role:
                    values["role"] = role
                passes = when_holds(rule, role, tensor)
                passed[group_of(rule, values)].add(passes)
                if passes:
                    found[key].append((rule, role, values))
        if any(len(answers) > 1 for answers in passed.values()):
            raise Refused("some members of a group pass and some do not")
    for key, candidates in found.items():
        for own in [
            [c for c in candidates if not c[0].reads_only],
            *([c for c in candidates if c[0] is rule] for rule in rules if rule.reads_only),
        ]:
            if not own:
                continue
            best = [
                c
                for c in own
                if all(d is c or narrower(c[0].roles[c[1]], d[0].roles[d[1]]) for d in own)
            ]
            if not best:
                raise Refused("two rules for one key")
            rule, _, values = best[0]
            out[rule.name].append(Item(values, tensors[key], frozenset([key])))
    return out


def complete_sets(rule: Rule, items: Sequence[Item]) -> None:
    """Each set of roles has all of them but the optional ones."""
    if set(rule.roles) == {""}:
        return
    optional = rule.said.get("optional", False)
    may = (
        optional.get("role", [])
        if isinstance(optional, Mapping)
        else optional
        if isinstance(optional, list)
        else []
    )
    shared = set.intersection(
        *({*pattern.names(), *(() if pattern.rank else ("@",))} for pattern in rule.roles.values())
    )
    sets: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for item in items:
        sets[
            tuple(
                sorted(
                    (n, str(item.values[n] or 0 if n == "@" else item.values[n])) for n in shared
                )
            )
        ].add(item.values["role"])
    for there in sets.values():
        if set(rule.roles) - set(map(str, may)) - there:
            raise Refused("a role is missing")


def translated(rule: Rule, values: Captures) -> Captures:
    out = dict(values)
    for name, change in rule.maps.items():
        if name not in out:
            continue
        if rule.orders.get(name) is not None or isinstance(out[name], int):
            out[name] = change[out[name]]
        else:
            out[name] = translated_path(out[name], change)
    return out


def translated_path(path: str, change: Mapping[str, str | None]) -> str:
    segments, out = path.split(".") if path else [], []
    at = 0
    while at < len(segments):
        for end in range(len(segments), at, -1):
            run = ".".join(segments[at:end])
            if run in change:
                out += [change[run]] if change[run] is not None else []
                at = end
                break
        else:
            out.append(segments[at])
            at += 1
    return ".".join(out)


def converted(
    file: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    params: Mapping[str, Any],
    allow: Sequence[str],
) -> dict[str, Tensor]:
    """What the rule file makes of the tensors, by key (`key@1` for that of rank 1); `Refused` where
    the page says that it is an error.
    """
    rules = [loaded(said, params) for said in file["rules"]]
    rules = [rule for rule in rules if present(rule, params)]
    keep = [parse(text, params) for text in file.get("keep", [])]
    items = taken(rules, tensors, params)
    gone = {
        key
        for rule in rules
        if not rule.reads_only
        for item in items[rule.name]
        for key in item.sources
    }
    read = {key for rule in rules for item in items[rule.name] for key in item.sources}
    stays = {}
    for key, tensor in tensors.items():
        if key not in gone:
            if key not in read and not any(readings(pattern, key) for pattern in keep):
                raise Refused("a key that nothing names")
            stays[named(*bare(key))] = tensor
    made: dict[str, Tensor] = {}
    for rule in rules:
        if not items[rule.name]:
            if rule.said.get("optional") is True:
                continue
            raise Refused("a rule that matches nothing")
        complete_sets(rule, items[rule.name])
        for outputs in sets_of(finished(rule, items[rule.name], params, allow)):
            there = [key for key in outputs if key in stays]
            if rule.said.get("if_exists") == "keep" and there:
                if len(there) < len(outputs):
                    raise Refused("some targets exist and some do not")
                equal = all(stays[key].equals(tensor) for key, tensor in outputs.items())
                if not equal and not rule.reads_only and "drop" not in allow:
                    raise Refused("a target that exists and is not equal")
                continue
            if there or set(outputs) & set(made):
                raise Refused("a key that is made twice, or made and kept")
            made |= outputs
    return stays | made


def named(key: str, rank: int | None) -> str:
    """The key as files know it: without a rank it lies in that of rank 0."""
    return f"{key}@{rank or 0}"


Made = list[tuple[str, Tensor, frozenset[str]]]


def sets_of(made: Made) -> list[dict[str, Tensor]]:
    """What was made of one set of keys, together."""
    groups: list[tuple[frozenset[str], dict[str, Tensor]]] = []
    for key, tensor, sources in made:
        outputs: dict[str, Tensor] = {}
        for other in [group for group in groups if group[0] & sources]:
            groups.remove(other)
            sources |= other[0]
            outputs |= other[1]
        if key in outputs or any(key in group[1] for group in groups):
            raise Refused("a key that is made twice")
        groups.append((sources, {**outputs, key: tensor}))
    return [outputs for _, outputs in groups]


def finished(
    rule: Rule, items: list[Item], params: Mapping[str, Any], allow: Sequence[str]
) -> Made:
    """The rule's ops over all its tensors, and the keys that come out."""
    for op in rule.said.get("via", []):
        ((name, said),) = op.items()
        arguments = filled(said, params)
        if name == "drop":
            if "drop" not in allow:
                raise Refused("drop is not allowed")
            return []
        if "over" in arguments:
            items = joined(rule, name, arguments, items, params)
        elif "into" in arguments:
            items = parted(rule, name, arguments, items, params)
        else:
            only = arguments.pop("only", {})
            items = [
                Item(item.values, EACH[name](item.tensor, arguments, params, allow), item.sources)
                if all(
                    str(item.values[n]) in [str(one) for one in items_of(v, params)]
                    for n, v in only.items()
                )
                else item
                for item in items
            ]
    out: Made = []
    for item in items:
        pattern = rule.to[item.values.get("role", "") if "" not in rule.to else ""]
        if pattern.rank is not None and item.values.get("@") is not None:
            raise Refused("a rank that is carried along, and another")
        key, rank = written(pattern, translated(rule, item.values))
        out.append((named(key, rank), item.tensor, item.sources))
    return out


def complete(
    rule: Rule,
    capture: str,
    values: Sequence[Any],
    arguments: Mapping[str, Any],
    params: Mapping[str, Any],
) -> list[Any]:
    """The values that a group must have, in their order."""
    order = rule.orders.get(capture)
    if order is not None:
        expected: list[Any] = list(order)
        if "count" in arguments and integer(arguments["count"], params) != len(expected):
            raise Refused("another count")
    else:
        if not all(isinstance(value, int) for value in values):
            raise Refused("a capture without an order")
        start = integer(arguments.get("start", 0), params)
        count = integer(arguments["count"], params) if "count" in arguments else len(values)
        expected = list(range(start, start + count))
    if sorted(map(str, expected)) != sorted(map(str, values)):
        raise Refused("a group that is not complete")
    return expected


def joined(
    rule: Rule, op: str, arguments: Mapping[str, Any], items: list[Item], params: Mapping[str, Any]
) -> list[Item]:
    over = arguments["over"]
    groups: dict[tuple[Any, ...], list[Item]] = defaultdict(list)
    for item in items:
        common = [(n, str(v or 0 if n == "@" else v)) for n, v in item.values.items() if n != over]
        groups[tuple(sorted(common))].append(item)
    out = []
    for members in groups.values():
        expected = complete(rule, over, [item.values[over] for item in members], arguments, params)
        by_value = {item.values[over]: item for item in members}
        ordered = [by_value[value] for value in expected]
        if len({item.tensor.dtype for item in ordered}) > 1:
            raise Refused("dtypes that differ")
        values = {name: value for name, value in ordered[0].values.items() if name != over}
        tensor = JOIN[op]([item.tensor for item in ordered], arguments, params, expected)
        out.append(Item(values, tensor, frozenset().union(*(item.sources for item in ordered))))
    return out


def parted(
    rule: Rule, op: str, arguments: Mapping[str, Any], items: list[Item], params: Mapping[str, Any]
) -> list[Item]:
    into = arguments["into"]
    order = rule.orders.get(into) if into != "role" else tuple(rule.to)
    out = []
    for item in items:
        count = integer(arguments["count"], params) if "count" in arguments else None
        if order is not None:
            if count is not None and count != len(order):
                raise Refused("another count")
            count = len(order)
        sizes = arguments.get("sizes")
        if count is None and sizes is not None:
            count = len(resolved(sizes, params))
        start = integer(arguments.get("start", 0), params)
        values = (
            list(order)
            if order is not None
            else None
            if count is None
            else list(range(start, start + count))
        )
        parts = PART[op](item.tensor, arguments, params, values)
        names = values if values is not None else list(range(start, start + len(parts)))
        out += [
            Item({**item.values, into: name}, part, item.sources)
            for name, part in zip(names, parts, strict=True)
        ]
    return out
