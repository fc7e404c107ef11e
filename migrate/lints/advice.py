"""What works and could hurt somebody: counts and prefixes that are not said."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.diagnostics import Diagnostic
from ..core.matching import Literal, PathHead
from .inputs import CompiledFile, FileSet


def find_problems(fileset: FileSet) -> Iterator[Diagnostic]:
    """M650 and M651."""
    for file in fileset.files:
        yield from _prefix(file)
        yield from _counts(file)


def _prefix(file: CompiledFile) -> Iterator[Diagnostic]:
    """M650: some rules of the file find their keys in a nested model and others do not."""
    nested = any(
        isinstance(p.parts[0], PathHead) for rule in file.rules for p in rule.sources.values()
    )
    if not nested:
        return
    for rule in file.rules:
        for pattern in rule.sources.values():
            first = pattern.parts[0]
            if (
                isinstance(first, Literal)
                and first.text.count(".") > 1
                and not any(isinstance(part, PathHead) for part in pattern.parts)
            ):
                what = (
                    f"rule `{rule.rule.name}` finds its keys at the top only, and others of "
                    "the file at any depth"
                )
                yield Diagnostic(
                    "M650",
                    what,
                    (file.span(rule, "from"),),
                    (),
                    'begin the pattern with "{p...}." and `to` with "{p}."',
                )
                break


def _counts(file: CompiledFile) -> Iterator[Diagnostic]:
    """M651: the last member of a group may be missing and nobody would notice."""
    for rule in file.rules:
        for number, step in enumerate(rule.rule.via):
            capture = (
                (step.args or {}).get("over") if step.op in ("stack", "concat", "same") else None
            )
            kind = rule.types.get(capture) if capture else None
            if kind is not None and kind.kind == "int" and not {"count", "sizes"} & set(step.args):
                yield Diagnostic(
                    "M651",
                    f"rule `{rule.rule.name}`: {step.op} over {{{capture}}} takes as many as "
                    "there are, so the last ones may be missing",
                    (file.span(rule, "via", number, step.op),),
                    (),
                    "write `count`, with a param that has a `config:` place where the "
                    "configuration says it",
                )
