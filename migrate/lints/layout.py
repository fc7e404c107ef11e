"""`layouts.yaml`: whether the layouts can be distinguished, reached, and are what the edges make.
And the rules held against the headers of a real checkpoint: what they would leave out, and which of
them would take nothing.

Of a checkpoint patterns only: params are not known, so conditions on them count as met.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise, permutations
from typing import Any

from ..core.errors import Diagnostic, listed, plural, printable
from ..core.keys import TwoReadings, parse
from ..core.overlap import apart
from ..core.templates import as_seen, collapse
from ..rules.compiled import CompiledRule
from ..rules.conditions import allows, written
from ..rules.lineage import Detect, Layout, Lineage, Matcher, detect
from ..ruletests.binding import CompiledFile
from ..source.index import Index
from ..source.yaml import Document
from .inputs import FileSet, finding


def find_problems(fileset: FileSet) -> Iterator[Diagnostic]:
    """M640 to M645."""
    lineage, document = fileset.lineage, fileset.layouts
    if lineage is None or document is None:
        return
    for layout in lineage.layouts:
        span = document.key_span(("layouts", layout.name))
        if not _has_signs(layout.detect) and not layout.note:
            yield finding(
                "M640",
                f"nothing identifies a checkpoint in layout `{layout.name}`",
                span,
                "write `detect:`, or a `note` that says why it has no signs",
            )
        if layout.status == "deprecated" and not layout.message:
            yield finding(
                "M644",
                f"layout `{layout.name}` is deprecated, and nothing says what to use",
                span,
                "write `message:`",
            )
    yield from _indistinct(lineage, document)
    yield from _reach(lineage, document)
    yield from _unmade(fileset, lineage, document)


def _has_signs(signs: Detect | None) -> bool:
    return signs not in (None, Detect())


def _indistinct(lineage: Lineage, document: Document) -> Iterator[Diagnostic]:
    """M641: whatever shows the one layout shows the other one too, so that detection finds two."""
    said: set[frozenset[str]] = set()
    for one, other in permutations(lineage.layouts, 2):
        if (
            one.detect is None
            or other.detect is None
            or not _has_signs(other.detect)
            or frozenset((one.name, other.name)) in said
        ):
            continue
        if _implies(one.detect, other.detect):
            said.add(frozenset((one.name, other.name)))
            span = document.span(("layouts", other.name, "detect"))
            what = (
                f"every checkpoint in layout `{one.name}` shows the signs of layout "
                f"`{other.name}` as well"
            )
            yield finding(
                "M641",
                what,
                document.key_span(("layouts", other.name, "detect")) or span,
                "add a sign under `absent` that the other one has",
            )


def _implies(one: Detect, other: Detect) -> bool:
    """Whether a checkpoint with all signs of `one` surely has all signs of `other`."""
    return (
        all(
            any(_inside(p, wider) for p in (*one.present, *one.dtype, *one.ndim, *one.shape))
            for wider in other.present
        )
        and all(any(_inside(p, wider) for wider in one.absent) for p in other.absent)
        and _agree(one.dtype, other.dtype)
        and _agree(one.ndim, other.ndim)
        and all(one.shape.get(pattern) == axes for pattern, axes in other.shape.items())
        and _agree(one.config, other.config)
        and _agree(one.module_version, other.module_version)
        and other.extra_state in ("", one.extra_state)
        and other.unless in (None, one.unless)
    )


def _inside(narrow: str, wide: str) -> bool:
    return narrow == wide or parse(wide).includes(parse(narrow))


def _agree(one: Mapping[str, Sequence[Any]], other: Mapping[str, Sequence[Any]]) -> bool:
    return all(
        name in one and set(map(repr, one[name])) <= set(map(repr, values))
        for name, values in other.items()
    )


def _reach(lineage: Lineage, document: Document) -> Iterator[Diagnostic]:
    """M642 for a layout on no edge, M643 for neighbours of an ordered lineage without one."""
    joined = {frozenset((e.source, e.target)) for e in lineage.edges}
    on_edge = {name for edge in joined for name in edge}
    for name in lineage.names:
        if name not in on_edge and len(lineage.layouts) > 1:
            span = document.key_span(("layouts", name))
            yield finding(
                "M642",
                f"no rule file leads to layout `{name}` or from it",
                span,
                "write one, or remove the layout",
            )
    for one, other in pairwise(lineage.names) if lineage.ordered else ():
        if {one, other} <= on_edge and frozenset((one, other)) not in joined:
            span = document.key_span(("layouts", other))
            yield finding(
                "M643",
                f"no path leads from layout `{one}` to the next one, `{other}`",
                span,
                f"write a rule file with `edge: [{one}, {other}]`",
            )


def _unmade(fileset: FileSet, lineage: Lineage, document: Document) -> Iterator[Diagnostic]:
    """M645: a sign of a layout that the edges to it, or from it, have no key for."""
    by_name = {layout.name: layout for layout in lineage.layouts}
    for (name, *ends), files in fileset.edges.items():
        if name != lineage.name:
            continue
        for side, end in zip(("from", "to"), ends, strict=True):
            layout: Layout | None = by_name.get(end)
            if layout is None or layout.detect is None:
                continue
            patterns = [
                p
                for f in files
                for r in f.rules
                for p in ((r.sources if side == "from" else r.targets).values())
            ] + [p for f in files for p in f.keep]
            if any(p.params or p.has_flat or "@" in p.text for p in patterns):
                continue
            for number, sign in enumerate(layout.detect.present):
                wanted = parse(sign)
                if all(apart(wanted, p) for p in patterns):
                    verb = "reads" if side == "from" else "makes"
                    what = (
                        f"layout `{end}` is recognised by `{sign}`, and no rule on edge "
                        f"{ends[0]} -> {ends[1]} {verb} or keeps such a key"
                    )
                    path = ("layouts", end, "detect", "present")
                    span = (
                        document.span((*path, number))
                        if (*path, number) in document
                        else document.span(path)
                    )
                    yield finding("M645", what, span, "correct the pattern, or the rules")


CODES = ("M624", "M660", "M661")


def find_misfits(
    fileset: FileSet,
    index: Index,
    match: Matcher,
    read_side: Callable[[str], bytes | None],
    asked: Container[str],
) -> Iterator[Diagnostic]:
    """M624, M660 and M661 for the edges that begin in a layout the checkpoint shows; for loose
    files, for each of them. `match` has the keys of the index.
    """
    begins = None
    if fileset.lineage is not None:
        begins = {f.layout for f in detect(fileset.lineage, index, read_side, match) if f.holds}
    for (_, start, _), files in fileset.edges.items():
        if begins is None:
            for file in files:
                yield from _against([file], match)
        elif start in begins and any(str(f.loaded.path) in asked for f in files):
            yield from _against(files, match)


def _against(files: list[CompiledFile], match: Matcher) -> Iterator[Diagnostic]:
    known: set[str] = set()
    for file in files:
        for pattern in file.keep:
            known.update(match.fitting(pattern))
        for rule in file.rules:
            nothing = []
            for role, pattern in rule.sources.items():
                if pattern.has_flat or pattern.params:
                    known.update(match.keys if pattern.has_flat else ())
                    continue
                keys = set(match.fitting(pattern))
                known |= keys
                optional = rule.rule.may_be_idle or role in rule.rule.optional_roles
                if not keys and not optional:
                    nothing.append(pattern)
            for pattern in nothing:
                what = f"rule `{rule.rule.name}` takes no key of the checkpoint: `{pattern}`"
                yield finding(
                    "M660",
                    what,
                    file.span(rule, "from"),
                    "correct the pattern, or say `optional: true`",
                )
            if not nothing:
                yield from _alternatives(file, rule, match)
    rest = [key for key in match.keys if key not in known]
    if rest:
        notes = tuple(f"{printable(c.text)} ×{c.count}" for c in collapse(rest)[:12])
        what = (
            f"{plural(len(rest), 'key')} of the checkpoint {'is' if len(rest) == 1 else 'are'} "
            f"taken by no rule and kept by no pattern: {listed(rest, 3)}"
        )
        yield finding(
            "M661",
            what,
            files[0].loaded.key_span("rules"),
            "keep them, drop them with a reason, or write a rule",
            notes=notes,
        )


def _alternatives(file: CompiledFile, rule: CompiledRule, match: Matcher) -> Iterator[Diagnostic]:
    """M624: alternatives of a rule that has keys, which none of them has."""
    said = rule.rule.optional
    for name in (
        ()
        if rule.rule.may_be_idle
        else (n for n, kind in rule.types.items() if kind.kind == "enum")
    ):
        patterns = [
            p for p in rule.sources.values() if name in p.captures and not (p.has_flat or p.params)
        ]
        values, condition = rule.types[name].values, rule.rule.where.get(name)
        if any("$" in str(value) for _, value in written(condition)):
            continue
        listed_ = [v for v in values if condition is None or allows(condition)(v)]
        left = dict.fromkeys(
            v for v in listed_ if not (isinstance(said, dict) and v in said.get(name, ()))
        )
        seen = False
        for pattern in patterns:
            at = pattern.captures.index(name)
            for key in match.fitting(pattern):
                seen = True
                with suppress(TwoReadings):
                    left.pop(
                        str((pattern.match(as_seen(pattern, key)) or ("",) * (at + 1))[at]), None
                    )
        if seen and left:
            what = (
                f"rule `{rule.rule.name}`: no key of the checkpoint has {{{name}}} = "
                f"{listed(list(left))}"
            )
            hint = f"correct it, or say `optional: {{{name}: [{', '.join(left)}]}}`"
            yield finding("M624", what, file.span(rule, "from"), hint)
