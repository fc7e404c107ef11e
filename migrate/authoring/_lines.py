"""Keys as segments, and relations as lines: patterns whose integers still stand as they are.

A segment is a tuple of atoms: text, an integer that could become a capture, or a `Hole`, which is a
capture. The tensors that a join takes differ in one place of their keys, and that place becomes a
hole; where they differ in several, the patterns stay apart and become roles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from .. import ops
from ..core.notation import parse_expression
from ..core.templates import is_integer, rank_of
from ._nested import as_one
from .relations import Relation

ROLE = "role"
# a word and the number that it ends in, without leading zeros; of a word that ends so
ENDS = re.compile(r"(.*[^0-9@])(0|[1-9][0-9]{0,8})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Hole:
    """A capture: `kind` is int, enum (of `values`) or path; in `to` it may be factor * n + offset.

    values of an int: those that a join takes or a part makes, if it is theirs.
    """

    name: str
    kind: str
    values: tuple[Any, ...] = ()
    factor: int = 1
    offset: int = 0


Atom: TypeAlias = "str | int | Hole"
Segment: TypeAlias = "tuple[Atom, ...]"
Segments: TypeAlias = "tuple[Segment, ...]"


@dataclass(slots=True)
class Line:
    """A rule on its way: one pattern for each role. `keys` are the source keys that are its own;
    `parts` are the lines that it was made of, which say the same.
    """

    sources: tuple[Segments, ...]
    targets: tuple[Segments, ...]
    roles: tuple[str, ...] = ()
    via: tuple[Mapping[str, Any], ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    map: dict[str, dict[str, str | None]] = field(default_factory=dict)
    where: dict[str, Any] = field(default_factory=dict)
    guessed: bool = False
    note: str | None = None
    keys: tuple[str, ...] = ()
    parts: Sequence[Line] = ()

    @property
    def kept(self) -> bool:
        return self.sources == self.targets and not (self.via or self.fields or self.map)

    @property
    def plain(self) -> bool:
        """Whether tensors only get other names, one by one."""
        return (
            len(self.sources) == len(self.targets) == 1
            and not self.roles
            and not (self.via or self.where)
        )

    def how(self) -> str:
        """All but the patterns; equal for lines that one rule could do."""
        said = (self.via, self.fields, self.map, self.where, self.roles, self.guessed, self.note)
        return json.dumps(said, sort_keys=True, default=str)


def segments(key: str) -> Segments:
    """The key with its whole integers, and the rank at its end, as integers."""
    rank = rank_of(key)
    base = key if rank is None else key[: key.rindex("@") + 1]
    out: list[Segment] = [(int(s),) if is_integer(s) else (s,) for s in base.split(".")]
    if rank is not None:
        out[-1] = (*out[-1], rank)
    return tuple(out)


def text(pattern: Segments, known: set[str]) -> str:
    """The pattern as it is written; `known` are the captures whose type was written before, and
    gets those that are written here.
    """
    return ".".join("".join(_atom(atom, known) for atom in segment) for segment in pattern)


def _atom(atom: Atom, known: set[str]) -> str:
    if isinstance(atom, str):
        return atom.replace("{", "{{").replace("}", "}}")
    if isinstance(atom, int):
        return str(atom)
    name, first = atom.name, atom.name not in known
    known.add(name)
    if (atom.factor, atom.offset) != (1, 0):
        factor = f"{atom.factor}*" if atom.factor != 1 else ""
        return f"{{{factor}{name}{atom.offset:+d}}}" if atom.offset else f"{{{factor}{name}}}"
    if not first:
        return f"{{{name}}}"
    if atom.kind == "path":
        return f"{{{name}...}}"
    return f"{{{name}:{'int' if atom.kind == 'int' else '|'.join(map(str, atom.values))}}}"


def holes(pattern: Segments) -> list[Hole]:
    return [atom for segment in pattern for atom in segment if isinstance(atom, Hole)]


def literal(segment: Segment) -> bool:
    """Whether the segment is text that could stand among the alternatives of a capture."""
    return all(isinstance(a, (str, int)) for a in segment) and not set("|{}") & set(plain(segment))


def plain(segment: Segment) -> str:
    return "".join(str(atom) for atom in segment)


class _ApartError(ValueError):
    pass


def line_of(relation: Relation, params: Mapping[str, int]) -> Line:
    """The line of one relation. ValueError if its ops do not fit its keys."""
    try:
        return _line_of(relation, params)
    except _ApartError:
        ops = as_one(relation.ops, len(relation.sources), len(relation.targets))
        if ops is None:
            raise
        return line_of(replace(relation, ops=tuple(ops)), params)


def _line_of(relation: Relation, params: Mapping[str, int]) -> Line:
    sources = [segments(key) for key in relation.sources]
    targets = [segments(key) for key in relation.targets]
    calls: list[dict[str, dict[str, Any]]] = [
        {name: dict(args or {})} for op in relation.ops for name, args in op.items()
    ]
    joins = [] if relation.roles else [c for c in calls if _takes(c, "over")]
    parts = [c for c in calls if _takes(c, "into")]
    for number, call in enumerate(joins):
        outer = number == len(joins) - 1
        sources = _folded(sources, call, "over", f"s{number}", params, outer)
    for number, call in enumerate(reversed(parts)):
        outer = number == len(parts) - 1
        targets = _folded(targets, call, "into", f"t{number}", params, outer)
    if len(sources) == len(targets) == 1:
        sources[0], targets[0] = _numbers_apart(sources[0], targets[0])
    _settle_only(calls)
    if not (joins or relation.roles) and len(sources) > 1:
        raise ValueError(f"nothing joins {', '.join(relation.sources[:3])}")
    if not parts and len(targets) > 1:
        raise ValueError(f"nothing makes several of {', '.join(relation.targets[:3])}")
    return Line(
        tuple(sources),
        tuple(targets),
        relation.roles,
        tuple(_written(call, params) for call in calls),
        relation.fields,
        guessed=relation.guessed,
        note=relation.note,
        keys=relation.sources,
    )


def _numbers_apart(source: Segments, target: Segments) -> tuple[Segments, Segments]:
    """Both with the numbers that words of one end in as integers, if the other has more integers
    that are whole segments: `block_3` may become `blocks.3`.
    """
    more = len(whole_integers(source)) - len(whole_integers(target))
    if more < 0:
        return _ends_apart(source, target), target
    return source, _ends_apart(target, source) if more else target


def whole_integers(pattern: Segments) -> list[int]:
    return [s[0] for s in pattern if len(s) == 1 and isinstance(s[0], int)]


def _ends_apart(pattern: Segments, other: Segments) -> Segments:
    out: list[Segment] = []
    for segment in pattern:
        word = segment[0] if len(segment) == 1 else None
        found = ENDS.fullmatch(word) if isinstance(word, str) and segment not in other else None
        out.append((found[1], int(found[2])) if found else segment)
    return tuple(out)


def joined(pattern: Segments) -> Segments:
    """The pattern with numbers in words that are no captures as text again."""
    return tuple(
        (plain(segment),)
        if len(segment) == 2 and literal(segment) and not str(segment[0]).endswith("@")
        else segment
        for segment in pattern
    )


def _takes(call: Mapping[str, Any], argument: str) -> bool:
    return argument in getattr(ops.get(next(iter(call))).Args, "__dataclass_fields__", {})


def number(value: Any, params: Mapping[str, int]) -> int | None:
    """The integer that is written so; None where it is none or a param has no value."""
    if isinstance(value, str):
        try:
            return parse_expression(value).evaluate(params)
        except (LookupError, ValueError):
            return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _folded(
    patterns: list[Segments],
    call: dict[str, dict[str, Any]],
    argument: str,
    name: str,
    params: Mapping[str, int],
    outer: bool,
) -> list[Segments]:
    """The patterns, each run of them as one with a hole, which the call then names."""
    args = next(iter(call.values()))
    sizes = args.get("sizes")
    count = len(sizes) if isinstance(sizes, (list, tuple)) else number(args.get("count"), params)
    if outer:
        count = len(patterns)
    if not count or len(patterns) % count:
        raise ValueError(f"{next(iter(call))} does not say how many of {len(patterns)} it joins")
    runs = [patterns[at : at + count] for at in range(0, len(patterns), count)]
    folded = [fold(run, name) for run in runs]
    if None in folded or len({_axis(p, name) for p in folded}) > 1:
        if len(runs) > 1:
            raise _ApartError(f"the keys of one {next(iter(call))} differ in several places")
        args[argument] = ROLE
        args["\0values"] = [str(n) for n in range(count)]
        args.pop("count", None)
        return patterns
    hole = _axis(folded[0], name)
    args[argument] = name
    args["\0values"] = list(hole.values)
    if hole.kind == "int":
        args.setdefault("count", count)
        if hole.values[0]:
            args["start"] = hole.values[0]
    else:
        args.pop("count", None)
    return [p for p in folded if p is not None]


def _axis(pattern: Segments | None, name: str) -> Hole:
    return next(h for h in holes(pattern or ()) if h.name == name)


def fold(patterns: Sequence[Segments], name: str) -> Segments | None:
    """One pattern with a hole where these differ, its values in their order; None if they differ
    in more than one place, or in what no capture can take.
    """
    first, last = patterns[0], patterns[-1]
    if len(patterns) == 1:
        at = max((i for i, s in enumerate(first) if isinstance(s[0], int)), default=None)
        if at is None:
            at = next((i for i in reversed(range(len(first))) if literal(first[i])), None)
        if at is None:
            return None
        return (*first[:at], *_hole(name, [first[at]]), *first[at + 1 :])
    shortest = min(map(len, patterns))
    start = 0
    while start < shortest and all(p[start] == first[start] for p in patterns):
        start += 1
    end = 0
    while end < shortest - start and all(p[-1 - end] == last[-1 - end] for p in patterns):
        end += 1
    if start == shortest:
        start -= 1
    end = min(end, shortest - start - 1)
    runs = [p[start : len(p) - end] for p in patterns]
    if not all(literal(s) for run in runs for s in run):
        return None
    if all(len(run) == 1 for run in runs):
        middle = _hole(name, [run[0] for run in runs])
    else:
        if any(isinstance(atom, int) for run in runs for segment in run for atom in segment):
            return None
        words = tuple(".".join(plain(s) for s in run) for run in runs)
        if len(set(words)) < len(words) or "" in words:
            return None
        middle = ((Hole(name, "enum", words),),)
    return (*first[:start], *middle, *first[len(first) - end :])


def _hole(name: str, parts: Sequence[Segment]) -> Segments:
    words = [plain(segment) for segment in parts]
    head, tail = _common(words)
    cut = [word[len(head) : len(word) - len(tail)] for word in words]
    numbers = [int(c) if is_integer(c) else -1 for c in cut]
    if numbers[0] >= 0 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        hole = Hole(name, "int", tuple(numbers))
        return (tuple(a for a in (head, hole, tail) if a != ""),)
    head, tail = _at_underscores(head, tail, words)
    cut = [word[len(head) : len(word) - len(tail)] for word in words]
    hole = Hole(name, "enum", tuple(cut))
    return (tuple(a for a in (head, hole, tail) if a != ""),)


def _common(words: Sequence[str]) -> tuple[str, str]:
    """What all words begin and end with, digits left out: an integer takes all its digits."""
    shortest = min(map(len, words))
    head = 0
    while head < shortest and len({w[head] for w in words}) == 1:
        head += 1
    while head and words[0][head - 1].isdigit():
        head -= 1
    tail = 0
    while tail < shortest - head and len({w[-1 - tail] for w in words}) == 1:
        tail += 1
    while tail and words[0][-tail].isdigit():
        tail -= 1
    return words[0][:head], words[0][len(words[0]) - tail :]


def _at_underscores(head: str, tail: str, words: Sequence[str]) -> tuple[str, str]:
    """The common ends where a word ends: `q_proj|k_proj` is `q|k` and `_proj`."""
    head = head[: head.rfind("_") + 1]
    tail = tail[tail.find("_") :] if "_" in tail else ""
    if any(len(word) <= len(head) + len(tail) for word in words):
        return "", ""
    return head, tail


def _settle_only(calls: Sequence[dict[str, dict[str, Any]]]) -> None:
    """Positions under `only` become values of the capture of the nearest join or part."""
    for at, call in enumerate(calls):
        args = next(iter(call.values()))
        if not isinstance(args.get("only"), (list, tuple)):
            continue
        after = [c for c in calls[at + 1 :] if "over" in next(iter(c.values()))]
        before = [c for c in reversed(calls[:at]) if "into" in next(iter(c.values()))]
        for near in (*after[:1], *before[:1]):
            of = next(iter(near.values()))
            name = of.get("over") or of["into"]
            args["only"] = {name: [of["\0values"][n] for n in args["only"]]}
            break
        else:
            raise ValueError("`only` without a join or a part beside it")


def _written(call: Mapping[str, Mapping[str, Any]], params: Mapping[str, int]) -> dict[str, Any]:
    ((name, args),) = call.items()
    order = sorted(args, key=lambda word: word not in ("over", "into"))
    out = {word: args[word] for word in order if word != "\0values"}
    if isinstance(count := out.get("count"), int):
        out["count"] = bound(count, params)
    return {name: out}


def bound(value: int, params: Mapping[str, int]) -> int | str:
    """The number, or the one param that has this value."""
    named = [name for name, known in params.items() if known == value]
    return f"${named[0]}" if len(named) == 1 and value > 1 else value


def renamed(line: Line, name: Callable[[str], str]) -> Line:
    """The line with its captures called otherwise."""

    def pattern(of: Segments) -> Segments:
        return tuple(
            tuple(
                Hole(name(a.name), a.kind, a.values, a.factor, a.offset)
                if isinstance(a, Hole)
                else a
                for a in segment
            )
            for segment in of
        )

    def call(of: Mapping[str, Any]) -> dict[str, Any]:
        ((op, args),) = of.items()
        out = dict(args)
        for word in ("over", "into"):
            if word in out and out[word] != ROLE:
                out[word] = name(out[word])
        if isinstance(out.get("only"), Mapping):
            out["only"] = {n if n == ROLE else name(n): v for n, v in out["only"].items()}
        return {op: out}

    return Line(
        tuple(map(pattern, line.sources)),
        tuple(map(pattern, line.targets)),
        line.roles,
        tuple(map(call, line.via)),
        line.fields,
        {name(n): dict(words) for n, words in line.map.items()},
        {name(n): limits for n, limits in line.where.items()},
        line.guessed,
        line.note,
        line.keys,
        line.parts,
    )
