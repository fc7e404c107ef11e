"""A rule file as a thing that people find, read and edit: its name, its title, what it declares,
and the reason that it gives for what its rules lose.

An op that destroys or changes values, or that cannot be undone, is no mistake; a missing reason is.
A rule that only moves names back and forth needs no reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..core.errors import Diagnostic, Span
from ..core.notation import parse_expression
from ..ops.base import Loss, OneWay
from ..planning.pathstate import invert
from ..rules.compiled import CompiledCall, CompiledRule, DirectedRule
from ..rules.loading import used_params
from ..ruletests.binding import CompiledFile
from ..source import yaml
from .inputs import FileSet, directed, finding

_MODELINE = re.compile(r"#\s*yaml-language-server:\s*\$schema=\S")


def find_problems(fileset: FileSet) -> Iterator[Diagnostic]:
    """M604 to M611, and M652."""
    for file in fileset.files:
        yield from _place(fileset, file)
        yield from _title(file.loaded.document, file.model.title)
        yield from _modeline(file.loaded.document, "rulefile")
        if file.model.requires is None:
            yield finding(
                "M608",
                "the file does not say which migrate it needs",
                file.loaded.span("id"),
                'write `requires: ">=0.1"`',
            )
        used = {name for _, name in used_params(file.loaded)}
        followed = (text for param in file.model.params.values() for text in param.follows or ())
        used.update(name for text in followed for name in parse_expression(text).names)
        for name, param in file.model.params.items():
            # one with choices, or with two places that have to agree, refuses a checkpoint that
            # says otherwise, one with limits what params say together
            places = sum(map(bool, (param.shape, param.absent, param.value, param.config)))
            refuses = places > 1 or (param.choices and (param.value or param.config))
            limits = param.maximum is not None and param.follows
            if not (name in used or refuses or limits):
                yield finding(
                    "M607",
                    f"nothing uses the param `{name}`",
                    file.loaded.key_span("params", name),
                    "remove it",
                )
        yield from map(_number, find_numbers(file.loaded.document))
        for number, rule in enumerate(file.model.rules):
            if rule.guessed:
                yield finding(
                    "M652",
                    f"rule `{rule.name}` was guessed from names",
                    file.loaded.key_span("rules", number, "guessed"),
                    "compare values, then remove `guessed: true`",
                )
        for number, pattern in enumerate(file.model.guessed):
            there = pattern in file.model.keep
            yield finding(
                "M652",
                f"that `{pattern}` stays as it is was guessed from names"
                if there
                else f"`{pattern}` is called guessed, and is not under `keep`",
                file.loaded.span("guessed", number),
                "compare values, then remove it from `guessed`"
                if there
                else "remove it from `guessed`",
            )
    if fileset.layouts is not None and isinstance(fileset.layouts.data, dict):
        yield from _modeline(fileset.layouts, "layouts")
        yield from _title(fileset.layouts, str(fileset.layouts.data.get("title") or ""))
        if fileset.lineage:
            yield from map(_number, find_numbers(fileset.layouts, layouts=True))


def _place(fileset: FileSet, file: CompiledFile) -> Iterator[Diagnostic]:
    """Where the file lies in a lineage's folder, and whether its id says so."""
    if fileset.home is None:
        return
    model, path = file.model, file.loaded.path
    wanted = f"{model.lineage}/{model.edge[1]}/{path.stem}"
    if path.relative_to(fileset.home).parts[:-1] != (model.edge[1],):
        yield finding(
            "M611",
            f"the file leads to layout `{model.edge[1]}` and lies in `{path.parent.name}`",
            file.loaded.span("edge"),
            f"move it to {fileset.home.name}/{model.edge[1]}/{path.name}",
        )
    elif model.id != wanted:
        yield finding(
            "M604",
            f"the id `{model.id}` is not that of the file's place, `{wanted}`",
            file.loaded.span("id"),
            "rename the file, or change the id if no checkpoint has been migrated with it yet",
        )


def _title(document: yaml.Document, title: str) -> Iterator[Diagnostic]:
    words = title.split()
    wrong = []
    if title.endswith("."):
        wrong.append("ends with a period")
    if title[:1].islower() and words[0].isalpha():
        wrong.append("begins with a lower-case letter")
    shouting = [w for w in words[1:] if len(w) > 3 and w.istitle()]
    if len(words) > 3 and len(shouting) == len([w for w in words[1:] if len(w) > 3]) > 1:
        wrong.append("is capitalised like a headline")
    if wrong:
        yield finding(
            "M605",
            f"the title {' and '.join(wrong)}",
            document.span(("title",)),
            "write it like a sentence, without its period",
        )


def has_modeline(document: yaml.Document) -> bool:
    """Whether one of the first lines tells editors the schema."""
    return any(_MODELINE.match(line.lstrip()) for line in document.lines[:5])


def _modeline(document: yaml.Document, schema: str) -> Iterator[Diagnostic]:
    if not has_modeline(document):
        first = document.lines[0] if document.lines else ""
        hint = f"begin with `# yaml-language-server: $schema=…/{schema}.schema.json`"
        yield finding(
            "M610",
            "no line tells editors the schema of the file",
            Span(document.name, 1, 1, max(1, len(first)), first),
            hint,
        )


def find_numbers(document: yaml.Document, layouts: bool = False) -> Iterator[Span]:
    """Where layouts stand unquoted that are numbers to other readers: in the edge of a rule file,
    or as the names in a layouts.yaml.
    """
    if layouts:
        spans = [document.key_span(("layouts", name)) for name in document.data["layouts"]]
    else:
        spans = [document.span(("edge", number)) for number in (0, 1)]
    for span in spans:
        if _is_number(span.text[span.column - 1 : span.column - 1 + span.length]):
            yield span


def _is_number(text: str) -> bool:
    return isinstance(yaml.core(yaml.PlainScalar(text)), (int, float))


def _number(span: Span) -> Diagnostic:
    name = span.text[span.column - 1 : span.column - 1 + span.length]
    return finding(
        "M609",
        f"layout `{name}` is not quoted",
        span,
        f'write "{name}": other YAML readers take it for a number',
    )


def find_losses(fileset: FileSet) -> Iterator[Diagnostic]:
    """M606, M630 to M632."""
    edges = fileset.edges
    for file in fileset.files:
        lineage, start, goal = file.model.lineage, *file.model.edge
        written_back = start != goal and (lineage, goal, start) in edges
        for rule, forwards in directed(file):
            yield from _reason(file, rule, forwards)
            if not (written_back or rule.rule.inverse):
                yield from _way_back(file, rule, forwards)


def _reason(file: CompiledFile, rule: CompiledRule, forwards: DirectedRule) -> Iterator[Diagnostic]:
    """M606, M630, M631: a loss without a reason."""
    for number, step in enumerate(forwards.steps):
        span = file.span(rule, "via", number, step.name)
        if step.op.kind == "end":
            if not str(step.args.why).strip():
                yield finding(
                    "M631",
                    f"rule `{rule.rule.name}` drops its keys and gives no reason",
                    span,
                    "write `drop: {why: …}`",
                )
            continue
        loss = step.op.loss(step.args)
        if loss is Loss.LOSSLESS or file.model.why:
            continue
        if loss is Loss.DESTRUCTIVE:
            yield finding(
                "M630",
                f"rule `{rule.rule.name}` destroys values, and the file gives no reason",
                span,
                _help(step),
            )
        else:
            yield finding(
                "M606",
                f"rule `{rule.rule.name}` changes values, and the file gives no reason",
                span,
                "write `why:` below the title",
            )


def _help(step: CompiledCall) -> str:
    inverse = step.op.invert(step.args, enumerated=False)
    hint = inverse.help if isinstance(inverse, OneWay) else None
    return f"{hint}; or write `why:` below the title" if hint else "write `why:` below the title"


def _way_back(
    file: CompiledFile, rule: CompiledRule, forwards: DirectedRule
) -> Iterator[Diagnostic]:
    """M632: as any edge, this one can be walked back, but for this rule, and the file is silent."""
    if any(step.op.kind == "end" for step in forwards.steps) or forwards.keep_source:
        return
    back = invert(forwards)
    if not isinstance(back, OneWay):
        return
    first = next(
        (n for n, step in enumerate(forwards.steps) if back.because.startswith(f"{step.name}: ")), 0
    )
    span = file.span(rule, "via", first, forwards.steps[first].name)
    hint = back.help or (
        "say `inverse: skip` if the tensors are not needed on a downgrade, or why nothing leads "
        "back by `inverse: {refuse: …}`"
    )
    notes = (
        (
            "on a downgrade the plan is refused; a file with the reversed edge, or `inverse`, "
            "would say what happens there"
        ),
    )
    yield finding(
        "M632", f"rule `{rule.rule.name}` has no inverse: {back.because}", span, hint, notes=notes
    )
