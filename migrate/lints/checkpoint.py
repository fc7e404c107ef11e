"""The rules held against the headers of a real checkpoint: what they would leave out, and which of
them would take nothing.

Patterns only: params are not known, so conditions on them count as met, and nothing is bound.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import suppress

from ..core.diagnostics import Diagnostic, listed, printable
from ..core.keys import Pattern, TwoReadings
from ..core.templates import Template, as_seen, collapse, fitting, group
from ..rules.compiled import CompiledRule
from ..rules.lineage import detect
from ..ruletests.binding import CompiledFile
from ..source.index import Index
from .inputs import FileSet

CODES = ("M624", "M660", "M661")


def find_problems(
    fileset: FileSet, index: Index, read_side: Callable[[str], bytes | None], asked: Container[str]
) -> Iterator[Diagnostic]:
    """M624, M660 and M661 for the edges that begin in a layout the checkpoint shows; for loose
    files, for each of them.
    """
    begins = None
    if fileset.lineage is not None:
        begins = {f.layout for f in detect(fileset.lineage, index, read_side) if f.holds}
    templates = group(index.tensors)
    for (_, start, _), files in fileset.edges.items():
        if begins is None:
            for file in files:
                yield from _against([file], templates)
        elif start in begins and any(str(f.loaded.path) in asked for f in files):
            yield from _against(files, templates)


def _against(files: list[CompiledFile], templates: list[Template]) -> Iterator[Diagnostic]:
    known: set[str] = set()
    for file in files:
        for pattern in file.keep:
            known |= _taken(pattern, templates)
        for rule in file.rules:
            nothing = []
            for role, pattern in rule.sources.items():
                if pattern.has_flat or pattern.params:
                    known |= (
                        {key for t in templates for key in t.keys} if pattern.has_flat else set()
                    )
                    continue
                keys = _taken(pattern, templates)
                known |= keys
                optional = rule.rule.optional is True or role in rule.rule.optional_roles
                if not keys and not optional:
                    nothing.append(pattern)
            for pattern in nothing:
                what = f"rule `{rule.rule.name}` takes no key of the checkpoint: `{pattern}`"
                yield Diagnostic(
                    "M660",
                    what,
                    (file.span(rule, "from"),),
                    (),
                    "correct the pattern, or say `optional: true`",
                )
            if not nothing:
                yield from _alternatives(file, rule, templates)
    rest = [key for template in templates for key in template.keys if key not in known]
    if rest:
        notes = tuple(f"{printable(c.text)} ×{c.count}" for c in collapse(rest)[:12])
        what = (
            f"{len(rest)} keys of the checkpoint are taken by no rule and kept by no pattern: "
            f"{listed(rest, 3)}"
        )
        yield Diagnostic(
            "M661",
            what,
            (files[0].loaded.key_span("rules"),),
            notes,
            "keep them, drop them with a reason, or write a rule",
        )


def _alternatives(
    file: CompiledFile, rule: CompiledRule, templates: list[Template]
) -> Iterator[Diagnostic]:
    """M624: alternatives of a rule that has keys, which none of them has."""
    said = rule.rule.optional
    for name in (
        () if said is True else (n for n, kind in rule.types.items() if kind.kind == "enum")
    ):
        patterns = [
            p for p in rule.sources.values() if name in p.captures and not (p.has_flat or p.params)
        ]
        wanted = rule.rule.where.get(name, rule.types[name].values)
        listed_ = [str(v) for v in (wanted if isinstance(wanted, (list, tuple)) else [wanted])]
        if any("$" in value for value in listed_):
            continue
        left = dict.fromkeys(
            v for v in listed_ if not (isinstance(said, dict) and v in said.get(name, ()))
        )
        seen = False
        for pattern in patterns:
            at = pattern.captures.index(name)
            for key in (
                k
                for t in templates
                for k, fits in zip(t.keys, fitting(pattern, t), strict=True)
                if fits
            ):
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
            yield Diagnostic("M624", what, (file.span(rule, "from"),), (), hint)


def _taken(pattern: Pattern, templates: list[Template]) -> set[str]:
    out: set[str] = set()
    for template in templates:
        out.update(
            key for key, fits in zip(template.keys, fitting(pattern, template), strict=True) if fits
        )
    return out
