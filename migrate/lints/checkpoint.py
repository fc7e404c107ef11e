"""The rules held against the headers of a real checkpoint: what they would leave out, and which of them would take nothing.

Patterns only: params are not known, so conditions on them count as met, and nothing is bound.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

from ..core.diagnostics import Diagnostic, listed, printable
from ..core.keys import Pattern
from ..core.ranks import fitting
from ..core.templates import Template, collapse, group
from ..rules.lineage import detect
from ..source.index import Index
from ._lint import Shelf, Written

CODES = ("M660", "M661")


def find(shelf: Shelf, index: Index, read_side: Callable[[str], bytes | None], asked: Container[str]) -> Iterator[Diagnostic]:
    """M660 and M661 for the edges that begin in a layout the checkpoint shows; for loose files, for each of them."""
    begins = None
    if shelf.lineage is not None:
        begins = {f.layout for f in detect(shelf.lineage, index, read_side) if f.holds}
    templates = group(index.tensors)
    for (_, start, _), files in shelf.edges.items():
        if begins is None:
            for file in files:
                yield from _against([file], templates)
        elif start in begins and any(str(f.loaded.path) in asked for f in files):
            yield from _against(files, templates)


def _against(files: list[Written], templates: list[Template]) -> Iterator[Diagnostic]:
    known: set[str] = set()
    for file in files:
        for pattern in file.keep:
            known |= _taken(pattern, templates)
        for rule in file.rules:
            nothing = []
            for role, pattern in rule.sources.items():
                if pattern.has_flat or pattern.params:
                    known |= {key for t in templates for key in t.keys} if pattern.has_flat else set()
                    continue
                keys = _taken(pattern, templates)
                known |= keys
                optional = rule.rule.optional is True or (isinstance(rule.rule.optional, tuple) and role in rule.rule.optional)
                if not keys and not optional:
                    nothing.append(pattern)
            for pattern in nothing:
                what = f"rule `{rule.rule.name}` takes no key of the checkpoint: `{pattern}`"
                yield Diagnostic("M660", what, (file.span(rule, "from"),), (), "correct the pattern, or say `optional: true`")
    rest = [key for template in templates for key in template.keys if key not in known]
    if rest:
        notes = tuple(f"{printable(c.text)} ×{c.count}" for c in collapse(rest)[:12])
        what = f"{len(rest)} keys of the checkpoint are taken by no rule and kept by no pattern: {listed(rest, 3)}"
        yield Diagnostic("M661", what, (files[0].loaded.key_span("rules"),), notes, "keep them, drop them with a reason, or write a rule")


def _taken(pattern: Pattern, templates: list[Template]) -> set[str]:
    out: set[str] = set()
    for template in templates:
        out.update(key for key, fits in zip(template.keys, fitting(pattern, template), strict=True) if fits)
    return out
