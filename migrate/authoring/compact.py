"""Few short rules from many relations.

0. What is done alike on each rank is said without ranks (`_ranks`).
1. Integers that are whole segments, or end a word, become captures (`_indices`).
2. Where all of a subtree moves or stays, one rule says so with `{k...}` (`_subtrees`).
3. Rules that differ in one place by words become one, with alternatives and a `map` (`_words`).
4. Each rule takes its own keys and no others, by `where` or in its parts (`_exact`).

The same relations give the same rules in the same order, whatever order they come in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.templates import is_integer
from ._exact import KnownKeys, rest_of, settle
from ._indices import capture_integers
from ._lines import Hole, Line, Segment, Segments, bound, holes, plain, renamed, text
from ._ranks import without_ranks
from ._subtrees import REST, merge_subtrees
from ._words import merge_words
from .relations import Patterns, Relation, RuleDraft

# keys that are looked at before all are
_SOME = 64
# what parameters of a module are called; alone they say nothing about a rule
LEAVES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_INTEGERS = "nijlhbcd"
_WORDS = "wmsxyzuvfgoqrt"


def compact(
    relations: Iterable[Relation], *, params: Mapping[str, int] | None = None
) -> list[RuleDraft]:
    """Rules, and patterns of `keep`, that do to these keys what the relations say, and to no other
    of them anything else.

    params: values that a count or a bound may be written as, where one param alone has the value.
    Raises ValueError if the ops of a relation do not fit its keys.
    """
    known = params or {}
    bare, stands = without_ranks(relations)
    ordered = sorted(bare, key=lambda r: (r.sources, r.targets))
    targets: dict[str, list[str]] = {}
    for relation in ordered:
        for key in relation.sources:
            targets.setdefault(key, []).extend(relation.targets)
    sources = KnownKeys(targets)
    made = KnownKeys(dict.fromkeys(key for keys in targets.values() for key in keys))
    lines = capture_integers(ordered, known, (*sources.templates, *made.templates))
    best: list[RuleDraft] | None = None
    before: list[Line] | None = None
    for alone in (False, True):
        merged = [_spelled(line) for line in merge_words(merge_subtrees(lines, alone))]
        if merged == before:
            break
        before = merged
        settled = settle(merged, targets, sources, made)
        drafts = drafts_of([_spelled(line) for line in settled], known)
        if best is None or (size(drafts), len(drafts)) < (size(best), len(best)):
            best = drafts
    if stands:
        best = [
            replace(d, keys=tuple([k for key in d.keys for k in stands.get(key, (key,))]))
            for d in best or ()
        ]
    return best or []


def _spelled(line: Line) -> Line:
    """The line with a `{k...}` that is one and the same for all of its keys as it is."""
    source = line.sources[0]
    if len(line.sources) > 1 or source[-1] != REST or "k" in line.map:
        return line
    rests = rest_of(source, line.keys[:: max(1, len(line.keys) // _SOME)])
    if len(rests) == 1:
        rests = rest_of(source, line.keys)
    words = rests.pop().split(".") if len(rests) == 1 else [""]
    if any(word == "" or is_integer(word) for word in words):
        return line
    written = tuple((word,) for word in words)
    return replace(
        line,
        sources=((*source[:-1], *written),),
        targets=tuple((*p[:-1], *written) if p[-1] == REST else p for p in line.targets),
    )


def size(drafts: Iterable[RuleDraft]) -> int:
    """About how many characters the rules have."""
    return sum(
        8 + sum(map(len, patterns(d.sources))) + sum(map(len, patterns(d.targets)))
        + (0 if d.keep else 30 + len(str([d.via, d.map, d.where, d.fields])))
        for d in drafts
    )  # fmt: skip


def patterns(of: Patterns) -> list[str]:
    """The patterns of one side, in their order."""
    if isinstance(of, str):
        return [of]
    return [*(of.values() if isinstance(of, Mapping) else of)]


def drafts_of(
    lines: Sequence[Line], params: Mapping[str, int], ordered: bool = True
) -> list[RuleDraft]:
    """The lines as they are written; rules before what is kept, unless not `ordered`."""
    out: list[RuleDraft] = []
    names: set[str] = set()
    if ordered:
        lines = sorted(lines, key=lambda line: (line.kept, line.keys[0]))
    for line in lines:
        line = _named(_trimmed(line))
        seen: set[str] = set()
        sources = [text(p, seen) for p in line.sources]
        if line.kept:
            out.append(RuleDraft("", sources[0], keep=True, guessed=line.guessed, keys=line.keys))
            continue
        written = [text(p, seen) for p in line.targets]
        name = _unused(_name(line), names)
        names.add(name)
        out.append(
            RuleDraft(
                name,
                _side(sources, line.roles),
                _side(written, ()),
                line.via,
                line.map,
                {n: _limits(asked, params) for n, asked in line.where.items()},
                line.fields,
                guessed=line.guessed,
                note=line.note,
                keys=line.keys,
            )
        )
    return out


def _side(written: Sequence[str], roles: Sequence[str]) -> Patterns:
    if roles:
        return dict(zip(roles, written, strict=True))
    return written[0] if len(written) == 1 else tuple(written)


def _limits(asked: Any, params: Mapping[str, int]) -> Any:
    if not isinstance(asked, Mapping):
        return asked
    out = dict(asked)
    if "min" in out:
        out["min"] = bound(out["min"], params)
    if "max" in out:
        over = bound(out["max"] + 1, params)
        out["max"] = f"{over} - 1" if isinstance(over, str) else out["max"]
    return out


def _trimmed(line: Line) -> Line:
    """The line with `{w:q|k}_proj` for `{w:q_proj|k_proj}`, where nothing translates the words."""
    used = {h.name for p in (*line.sources, *line.targets) for h in holes(p)}
    names = {n for call in line.via for args in call.values() for n in _captures(args)}

    def pattern(of: Segments) -> Segments:
        out: list[Segment] = []
        for segment in of:
            if len(segment) == 1 and isinstance(hole := segment[0], Hole) and hole.name in tails:
                tail = tails[hole.name]
                values = tuple(v[: -len(tail)] for v in hole.values)
                out.append((Hole(hole.name, "enum", values), tail))
            else:
                out.append(segment)
        return tuple(out)

    tails: dict[str, str] = {}
    for hole in holes(line.sources[0]) if len(line.sources) == 1 else ():
        if hole.kind != "enum" or hole.name in line.map or hole.name in names:
            continue
        tail = _tail(hole.values)
        alone = all(
            len(segment) == 1
            for p in (*line.sources, *line.targets)
            for segment in p
            if any(isinstance(a, Hole) and a.name == hole.name for a in segment)
        )
        if tail and alone and hole.name in used and hole.name not in line.where:
            tails[hole.name] = tail
    if not tails:
        return line
    line.sources = tuple(map(pattern, line.sources))
    line.targets = tuple(map(pattern, line.targets))
    return line


def _captures(args: Mapping[str, Any]) -> Iterator[str]:
    yield from (str(args[word]) for word in ("over", "into") if word in args)
    yield from args.get("only") or ()


def _tail(words: Sequence[str]) -> str:
    if any("." in word for word in words):
        return ""
    shortest = min(words, key=len)
    end = next(
        (n for n in range(len(shortest)) if len({w[len(w) - 1 - n] for w in words}) > 1),
        len(shortest) - 1,
    )
    common = shortest[len(shortest) - end :] if end else ""
    cut = common.find("_")
    tail = common[cut:] if cut >= 0 else ""
    return tail if tail and all(len(w) > len(tail) for w in words) else ""


def _named(line: Line) -> Line:
    """The line with short names for its captures: by what they count, or in order."""
    found: dict[str, Hole] = {}
    before: dict[str, str] = {}
    for pattern in (*line.sources, *line.targets):
        for at, segment in enumerate(pattern):
            for atom in segment:
                if isinstance(atom, Hole) and atom.name not in found:
                    found[atom.name] = atom
                    text_before = segment[:1] if segment[0] is not atom else pattern[at - 1][:1]
                    before[atom.name] = plain(text_before) if at or segment[0] is not atom else ""
    taken: set[str] = set()
    out: dict[str, str] = {}
    for name, hole in found.items():
        if hole.kind == "path":
            wanted = "kp"
        elif hole.kind == "int":
            first = {"experts": "e", "expert": "e"}.get(before[name], "")
            wanted = ("r" if before[name].endswith("@") else first) + _INTEGERS
        elif set(hole.values) <= set(LEAVES):
            wanted = _WORDS
            if "leaf" not in taken:
                out[name] = "leaf"
                taken.add("leaf")
                continue
        else:
            wanted = _WORDS
        letter = next((c for c in wanted if c not in taken), None) or f"{wanted[0]}{len(taken)}"
        out[name] = letter
        taken.add(letter)
    return renamed(line, lambda name: out.get(name, name))


def _name(line: Line) -> str:
    """Words of the target that no capture stands for, its leaf left out."""
    pattern = (line.targets or line.sources)[0]
    words = ["".join(a for a in segment if isinstance(a, str)).strip("_") for segment in pattern]
    said = [w for w in words if w and w not in LEAVES] or [w for w in words if w]
    chosen = said[-2:] if len(said) > 1 and len(said[-1]) < 8 else said[-1:]
    joined = "-".join(chosen).lower()
    name = "".join(c if c.isascii() and (c.isalnum() or c == "-") else "-" for c in joined)
    name = "-".join(part for part in name.split("-") if part)[:40].rstrip("-")
    if not line.targets:
        return f"drop-{name}" if name else "drop"
    return name or "rest"


def _unused(name: str, names: set[str]) -> str:
    return next(
        n for n in (name, *(f"{name}-{i}" for i in range(2, len(names) + 3))) if n not in names
    )
