"""Which keys a file's patterns can take, decided on the patterns alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import prod
from typing import NamedTuple

from ..core.diagnostics import Diagnostic, listed, printable
from ..core.errors import PatternError
from ..core.keys import Pattern, TwoReadings, narrower, parse
from ..core.overlap import apart, common
from ..rules.compiled import CompiledRule
from ._lint import Shelf, Written

# every key is one of each of these
_EVERYTHING = tuple(map(parse, ("{k...}", "{k...}.{n}", "{n}.{k...}")))
MOST_VARIANTS = 64


class _Reads(NamedTuple):
    """One pattern that a rule reads."""

    file: Written
    rule: CompiledRule
    role: str | None
    pattern: Pattern

    @property
    def always(self) -> bool:
        """Whether the pattern alone decides what the rule takes."""
        return not (self.rule.rule.where or self.rule.rule.when or self.pattern.params)


def find(shelf: Shelf) -> Iterator[Diagnostic]:
    """M612 to M616."""
    for file in shelf.files:
        yield from _keeps(file)
    for files in shelf.edges.values():
        reads = [_Reads(file, rule, role, p) for file in files for rule in file.rules for role, p in rule.sources.items() if not p.has_flat]
        yield from _without_effect(reads)
        yield from _shadowed(reads)
        yield from _twice(reads)
    yield from _unreachable(shelf)


def _keeps(file: Written) -> Iterator[Diagnostic]:
    for number, pattern in enumerate(file.keep):
        if any(pattern.includes(key) for key in _EVERYTHING):
            yield Diagnostic(
                "M612",
                f"`{pattern}` keeps everything: a key that the rules should have taken stays as it is, and nobody is told",
                (file.loaded.span("keep", number),),
                (),
                "name the keys that stay, or say in a comment why they cannot be named",
            )


def _without_effect(reads: Sequence[_Reads]) -> Iterator[Diagnostic]:
    """M613: a rule from X to X exempts keys from a broader rule; where there is none it does nothing that `keep` would not."""
    for read in reads:
        rule = read.rule
        if rule.rule.via or rule.rule.map or read.role is not None or rule.rule.keep_source:
            continue
        target = rule.targets.get(None)
        if target is None or target.parts != read.pattern.parts:
            continue
        if not any(other.rule is not rule and not apart(other.pattern, read.pattern) for other in reads):
            what = f"rule `{rule.rule.name}` leaves its keys as they are, and no broader rule would take them"
            yield Diagnostic("M613", what, (read.file.span(rule),), (), "write the pattern under `keep`, or remove the rule")


def _shadowed(reads: Sequence[_Reads]) -> Iterator[Diagnostic]:
    """M614: every key of a rule belongs to narrower ones."""
    for read in reads:
        if len(read.rule.sources) > 1 or read.rule.rule.keep_source:
            continue
        others = [
            o for o in reads if o.rule is not read.rule and o.always and not o.rule.rule.keep_source and narrower(o.pattern, read.pattern)
        ]
        variants = _variants(read.pattern) if others else []
        if variants and all(any(o.pattern.includes(v) for o in others) for v in variants):
            names = listed(list(dict.fromkeys(f"`{o.rule.rule.name}`" for o in others)))
            yield Diagnostic(
                "M614", f"rule `{read.rule.rule.name}` never takes a key: narrower rules take all of them", (read.file.span(read.rule),),
                (f"the narrower ones: {names}",), "remove it, or make its pattern wider",
            )  # fmt: skip


def _variants(pattern: Pattern) -> list[Pattern]:
    """The pattern with each of its alternatives written out."""
    enums = {name: kind.values for name, kind in pattern.types.items() if kind.kind == "enum"}
    if not enums or prod(len(values) for values in enums.values()) > MOST_VARIANTS:
        return []
    out = []
    for chosen in product(*enums.values()):
        text = pattern.text
        for name, value in zip(enums, chosen, strict=True):
            literal = value.replace("{", "{{").replace("}", "}}")
            for written in (f"{{{name}:{'|'.join(enums[name])}}}", f"{{{name}}}"):
                text = text.replace(written, literal)
        try:
            out.append(parse(text))
        except PatternError:
            return []
    return out


def _twice(reads: Sequence[_Reads]) -> Iterator[Diagnostic]:
    """M615: two rules that match one key, and neither is the narrower one: a plan over such a key is refused."""
    for one, other in combinations(reads, 2):
        if one.rule is other.rule or not (one.always and other.always):
            continue
        if one.rule.rule.keep_source or other.rule.rule.keep_source:
            continue
        # among files of one edge nobody decides which is the narrower one
        apart = one.file is not other.file
        if not apart and (narrower(one.pattern, other.pattern) or narrower(other.pattern, one.pattern)):
            continue
        key = common(one.pattern.parts, other.pattern.parts)
        if key and _takes(one.pattern, key) and _takes(other.pattern, key):
            spans = (other.file.span(other.rule, "from"), one.file.span(one.rule, "from"))
            why = "they stand in two files of one edge" if apart else "neither is narrower"
            what = f"rules `{one.rule.rule.name}` and `{other.rule.rule.name}` both take `{printable(key)}`, and {why}"
            yield Diagnostic("M615", what, spans, (), "narrow one of them by its pattern, `where` or `when`")


def _takes(pattern: Pattern, key: str) -> bool:
    try:
        return pattern.match(key) is not None
    except TwoReadings:
        return False


def _unreachable(shelf: Shelf) -> Iterator[Diagnostic]:
    """M616: a rule whose keys no edge into its layout makes or keeps."""
    edges = shelf.edges
    for (lineage, start, goal), files in edges.items():
        before = [written for (name, source, target), written in edges.items() if (name, target) == (lineage, start) and source != goal]
        produced = [p for written in before for file in written for p in _products(file)]
        if not produced or any(p.params or p.has_flat or "@" in p.text for p in produced):
            continue
        for file in files:
            for rule in file.rules:
                for role, pattern in rule.sources.items():
                    if rule.rule.optional or pattern.has_flat or pattern.params or "@" in pattern.text:
                        continue
                    if all(apart(pattern, p) for p in produced):
                        what = f"rule `{rule.rule.name}` reads `{pattern}`, which no edge to `{start}` makes or keeps"
                        span = file.span(rule, "from") if role is None else file.loaded.span(*rule.path, "from", role)
                        yield Diagnostic(
                            "M616",
                            what,
                            (span,),
                            (),
                            f"correct the pattern, or say `optional: true` if other checkpoints in `{start}` have it",
                        )


def _products(file: Written) -> Iterator[Pattern]:
    for rule in file.rules:
        yield from rule.targets.values()
        if rule.rule.keep_source:
            yield from rule.sources.values()
    yield from file.keep
