"""Rule files read as their authors wrote them, and what can be said against one that is well
formed: names, params, presence. All problems come out in one report, with their lines.

The algebra of captures (`from` against `via` against `to`) is in `compiled`, with the patterns.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from .. import ops
from ..core.errors import Report, did_you_mean, listed, printable
from ..core.keys import parse
from ..core.notation import parse_expression
from ..source import yaml
from . import arguments, examples, file_patches, steps
from .arguments import NULL, PARAM, PATCH_WORDS
from .conditions import written
from .fields import (
    Model,
    kind_of,
    problems_of,
    unmet,
)
from .files import VALUES, LoadedFile
from .model import Rule, RuleFile
from .param_model import Groups, Param
from .params import RefusedError, convert, never
from .problem import Problem

# the lists of files that were loaded last, by places and bytes
_MOST_KEPT = 16
_unchanged: OrderedDict[Any, list[LoadedFile]] = OrderedDict()
_CAPTURE = re.compile(r"\{([^{}]*)\}")
_Path = tuple[Any, ...]


def load_files(paths: Iterable[Path | str]) -> list[LoadedFile]:
    """The rule files at `paths`, in that order; raises all problems of all of them at once (M1xx,
    M508), exit status 2.
    """
    report = Report()
    loaded = read_files(paths, report)
    report.check()
    return loaded


def load_files_once(paths: Iterable[Path | str]) -> list[LoadedFile]:
    """`load_files`, but files with the bytes that they had the last time are not parsed again: a
    training process attaches the same rules to module after module.
    """
    places = list(paths)
    content = _content(places)
    loaded = _unchanged.get(content)
    if content is None or loaded is None:
        loaded = [replace(file, sealed=file.hash) for file in load_files(places)]
        # what was written to in the meantime is not known
        if content is not None and content == _content(places):
            _unchanged[content] = loaded
            while len(_unchanged) > _MOST_KEPT:
                _unchanged.popitem(last=False)
    return list(loaded)


def _content(paths: Iterable[Path | str]) -> tuple[tuple[str, bytes], ...] | None:
    try:
        return tuple((str(path), Path(path).read_bytes()) for path in paths)
    except OSError:
        return None


def read_files(
    paths: Iterable[Path | str],
    report: Report,
    documents: Mapping[Path, yaml.Document] = MappingProxyType({}),
) -> list[LoadedFile]:
    """Those of the rule files that can be read; the problems of all go into the report. Those of
    the `documents` are not read again.
    """
    loaded = [
        file
        for path in map(Path, paths)
        if (
            file := load_document(path, documents.get(path) or yaml.read_file(path, report), report)
        )
    ]
    if len(loaded) > 1:
        check_ids(loaded, report)
    return loaded


def load_document(path: Path, document: yaml.Document, report: Report) -> LoadedFile | None:
    """The rule file that the document at `path` holds; None, after its problems were added to the
    report, if it cannot be read.
    """
    if not document.whole:
        return None
    if not isinstance(document.data, dict):
        add_problem(
            report,
            document,
            (),
            Problem("M106", f"a rule file is a mapping, not {kind_of(document.data)}"),
        )
        return None
    if problem := unmet(document.data.get("requires")):
        add_problem(report, document, ("requires",), problem)
        return None
    model = validate_data(RuleFile, document, report)
    if model is None:
        return None
    if model.values or model.values_back:
        # patched as side files are
        files = {**model.files, **({VALUES: model.values} if model.values else {})}
        back = {**model.files_back, **({VALUES: model.values_back} if model.values_back else {})}
        gone: dict[str, Any] = {"values": {}, "values_back": {}}
        model = model.model_copy(update={**gone, "files": files, "files_back": back})
    loaded = LoadedFile(path, model, document)
    _check(loaded, report)
    return loaded


def validate_data(model: type[Model], document: yaml.Document, report: Report) -> Any:
    """`model` of the document's data; None after its problems were reported with their places."""
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        for path, problem in problems_of(error, model):
            add_problem(report, document, path, problem)
        return None


def add_problem(
    report: Report, document: yaml.Document, path: tuple[str | int, ...], problem: Problem
) -> None:
    """Adds the problem at `path` of the document."""
    span = document.key_span(path) if problem.key or problem.code == "M101" else document.span(path)
    if problem.part is not None:
        quoted = span.text[span.column - 1 : span.column] in ("'", '"')
        start, end = problem.part
        if end <= span.length - 2 * quoted:
            span = replace(span, column=span.column + quoted + start, length=max(1, end - start))
    report.add(problem.code, problem.message, spans=(span,), help=problem.help)


def check_ids(loaded: Iterable[LoadedFile], report: Report) -> None:
    """M508 for each two files that have one id."""
    first: dict[str, LoadedFile] = {}
    for file in loaded:
        other = first.setdefault(file.model.id, file)
        if other is not file:
            spans = (file.span("id"), replace(other.span("id"), label="first written here"))
            report.add(
                "M508",
                f"two rule files have the id `{printable(file.model.id)}`",
                spans=spans,
                help="give one of them another id",
            )


def _check(loaded: LoadedFile, report: Report) -> None:
    """Adds what is wrong with the file to the report (M1xx)."""
    file = loaded.model
    for problem in _problems(loaded):
        add_problem(report, loaded.document, problem.at, problem)
    known = list(file.params)
    for path, name in used_params(loaded):
        restored = path[0] == "files_restored"
        in_patches = PATCH_WORDS if path[0] in file_patches.FIELDS else (NULL,) * restored
        if name in in_patches:
            continue
        if name not in file.params:
            hint = did_you_mean(name, known) or f"declare it: `params: {{{name}: {{type: int}}}}`"
            add_problem(
                report,
                loaded.document,
                path,
                Problem("M112", f"`${name}` is not a param of this file", hint),
            )


def _problems(loaded: LoadedFile) -> Iterator[Problem]:
    file = loaded.model
    if file.edge[0] == file.edge[1] and not any(p.follows for p in file.params.values()):
        yield Problem(
            "M114",
            f"an edge from `{printable(file.edge[0])}` to itself, and no param says what changes",
            "declare what it is asked for as a param that `follows` what is there",
            at=("edge",),
        )
    yield from _repeated("rule", ("rules",), [rule.name for rule in file.rules])
    yield from _repeated("test", ("tests",), [test.name for test in file.tests])
    if file.tests:
        yield from examples.problems(file.tests, file.params)
    above = set[str]()
    for name, param in file.params.items():
        for text in param.follows or ():
            if unknown := [one for one in parse_expression(text).names if one not in above]:
                yield Problem(
                    "M114",
                    f"`{printable(text)}` needs `{printable(unknown[0])}`, which is no param above",
                    "declare the params that others follow first",
                    at=("params", name, "follows"),
                )
        above.add(name)
        if name in PATCH_WORDS:
            yield Problem(
                "M114",
                f"`${name}` has a meaning of its own in patches of side files",
                "give the param another name",
                at=("params", name),
                key=True,
            )
        yield from (problem.below("params", name) for problem in param_problems(param))
    for number, rule in enumerate(file.rules):
        yield from (problem.below("rules", number) for problem in _rule(rule))
        if rule.where and file.params:
            # such a rule would silently never run
            for name, why in never(rule.where, file.params, "`where`"):
                yield Problem("M114", why, at=("rules", number, "where", name))
    if file.files or file.files_back or file.files_restored:
        yield from file_patches.problems(file)


def _repeated(kind: str, path: _Path, names: list[str]) -> Iterator[Problem]:
    seen: set[str] = set()
    for number, name in enumerate(names):
        if name in seen:
            yield Problem(
                "M113",
                f"two {kind}s are called `{printable(name)}`",
                "give each a name of its own",
                at=(*path, number, "name"),
            )
        seen.add(name)


def param_problems(param: Param) -> Iterator[Problem]:
    numbers = param.type == "int" or (param.type == "list" and param.items == "int")
    for bound in ("minimum", "maximum"):
        if getattr(param, bound) is not None and not numbers:
            yield Problem(
                "M114", f"`{bound}` is for integers, this is a {param.type}", key=True, at=(bound,)
            )
    if param.minimum is not None and param.maximum is not None and param.minimum > param.maximum:
        yield Problem("M114", "`maximum` is below `minimum`", at=("maximum",))
    if param.items is not None and param.type != "list":
        yield Problem(
            "M114", f"`items` is for lists, this is a {param.type}", key=True, at=("items",)
        )
    if param.modules and (param.type != "list" or param.items == "int"):
        yield Problem("M114", "`modules` is for lists of text", key=True, at=("modules",))
    if param.shape is not None and param.type != "int":
        yield Problem(
            "M114", f"a size in a shape is an int, this is a {param.type}", key=True, at=("shape",)
        )
    if param.dtype is not None and param.type != "str":
        yield Problem("M114", f"a dtype is a str, this is a {param.type}", key=True, at=("dtype",))
    if param.absent is not None and param.type != "bool":
        yield Problem(
            "M114",
            f"whether a tensor is absent is a bool, this is a {param.type}",
            key=True,
            at=("absent",),
        )
    if param.present is not None and param.type != "str":
        kind = f"which tensor is present is a str, this is a {param.type}"
        yield Problem("M114", kind, key=True, at=("present",))
    for key in param.shape.key if param.shape is not None else ():
        for field in ("count", "sum"):
            name = getattr(param.shape, field)
            if name not in (None, *parse(key).captures):
                yield Problem(
                    "M114",
                    f"`{printable(key)}` has no capture `{printable(str(name))}`",
                    at=("shape", field),
                )
    said = param.shape.model_fields_set if param.shape is not None else set[str]()
    if "count" in said and (others := sorted({"dim", "sum"} & said)):
        yield Problem(
            "M114",
            f"`{others[0]}` and `count` both say what the value is",
            "remove one of them",
            key=True,
            at=("shape", "count"),
        )
    if param.groups is not None:
        yield from (problem.below("groups") for problem in _groups(param, param.groups))
    for field, value in [
        ("default", param.default),
        *(("choices", choice) for choice in param.choices or ()),
        *(("present", value) for value in param.present or ()),
    ]:
        if value is None:
            continue
        try:
            chosen = field == "choices"
            convert(value, param, is_text=chosen and param.type == "float", choices=not chosen)
        except RefusedError as error:
            yield Problem("M114", f"`{field}`: {error}", at=(field,))


def _groups(param: Param, groups: Groups) -> Iterator[Problem]:
    if param.type != "list" or param.items == "int":
        kind = f"a list of {param.items}" if param.items else f"a {param.type}"
        yield Problem("M114", f"`groups` tells names, this is {kind}", key=True)
    pattern = parse(groups.key)
    for field in ("of", "over"):
        if (name := getattr(groups, field)) not in pattern.captures:
            hint = did_you_mean(name, list(pattern.captures))
            yield Problem(
                "M114",
                f"`{printable(groups.key)}` has no capture `{printable(name)}`",
                hint,
                at=(field,),
            )
        elif field == "over" and pattern.types[name].kind != "int":
            yield Problem(
                "M114",
                f"`{printable(name)}` is not an int capture",
                f"write {{{name}:int}}",
                at=(field,),
            )
        elif field == "of" and pattern.types[name].kind == "int":
            yield Problem(
                "M114",
                f"`{printable(name)}` is a number, and a list of names is expected",
                at=(field,),
            )


def _rule(rule: Rule) -> Iterator[Problem]:
    kinds = [ops.get(step.op).kind for step in rule.via]
    if not rule.targets and "end" not in kinds:
        hint = "only a rule that ends in drop has no `to`: `via: [{drop: {why: …}}]`"
        yield Problem("M101", f"rule `{printable(rule.name)}` has no `to`", hint)
    if rule.targets and "end" in kinds:
        yield Problem(
            "M114",
            "a rule that drops its keys has no `to`",
            "remove `to`, or remove the drop",
            key=True,
            at=("to",),
        )
    if rule.keep_source and "end" in kinds:
        yield Problem(
            "M114",
            "a rule cannot drop its keys and keep them",
            "remove `keep_source`",
            key=True,
            at=("keep_source",),
        )
    if rule.keep_source and isinstance(rule.inverse, Mapping):
        yield Problem(
            "M114",
            "backwards a rule that keeps its sources removes what it made, and needs no inverse",
            "remove `inverse`, or write `inverse: skip` to let it stay",
            key=True,
            at=("inverse",),
        )
    if isinstance(rule.optional, tuple):
        for number, role in enumerate(rule.optional):
            if role is not True and role not in rule.sources:
                roles = [str(r) for r in rule.sources if r is not None]
                hint = did_you_mean(role, roles) or (
                    f"the roles are {listed(roles)}" if roles else "write `optional: true`"
                )
                yield Problem(
                    "M114", f"`from` has no role `{printable(role)}`", hint, at=("optional", number)
                )
    if rule.when:
        yield from _when(rule)
    for name, words in rule.map.items():
        yield from _map(rule, name, words)
    for number, step in enumerate(rule.via):
        if problem := steps.fixed_problem(step.op, step.args):
            yield problem.below("via", number)


def _when(rule: Rule) -> Iterator[Problem]:
    if not any(isinstance(test, Mapping) for test in rule.when.values()):
        return
    roles = [str(r) for r in rule.sources if r is not None]
    for role in rule.when:
        if role not in roles:
            hint = did_you_mean(role, roles) or (
                f"the roles are {listed(roles)}" if roles else "write `when: {dtype: …}`"
            )
            yield Problem(
                "M114", f"`from` has no role `{printable(role)}`", hint, key=True, at=("when", role)
            )


def _map(rule: Rule, name: str, words: Mapping[str, str | None]) -> Iterator[Problem]:
    path = ("map", name)
    segments = any(
        f"{{{name}...}}" in pattern for pattern in (*rule.sources.values(), *rule.targets.values())
    )
    seen: dict[str, str] = {}
    for value, to in words.items():
        if not to and segments:
            continue
        if not to:
            hint = f"null removes segments of a `{{{name}...}}`; any other capture needs a value"
            yield Problem(
                "M114",
                f"value `{printable(value)}` of {{{printable(name)}}} is mapped to nothing",
                hint,
                at=(*path, value),
            )
        elif to in seen:
            message = (
                f"values `{printable(seen[to])}` and `{printable(value)}` of "
                f"{{{printable(name)}}} both become `{printable(to)}`"
            )
            yield Problem(
                "M114",
                message,
                "each needs a value of its own, or nothing could distinguish them afterwards",
                at=(*path, value),
            )
        else:
            seen[to] = value


def used_params(loaded: LoadedFile) -> Iterator[tuple[_Path, str]]:
    """(path, name) of each `$param` in the file."""
    file = loaded.model
    for number, rule in enumerate(file.rules):
        at: _Path = ("rules", number)
        for side, patterns in (("from", rule.sources), ("to", rule.targets)):
            for role, pattern in patterns.items():
                path = (*at, side) if role is None else (*at, side, role)
                path = path if path in loaded.document or role is None else (*at, side, int(role))
                for body in _CAPTURE.findall(pattern):
                    yield from ((path, name) for name in PARAM.findall(body))
        for name, condition in rule.where.items():
            if name.startswith("$"):
                yield (*at, "where", name), name[1:]
            for limit, value in written(condition):
                path = (*at, "where", name) if limit is None else (*at, "where", name, limit)
                yield from ((path, found) for found in _names(value))
        for index, step in enumerate(rule.via):
            yield from (
                ((*at, "via", index, step.op, *path), name)
                for path, name in arguments.used(step.op, step.args)
            )
    if file.files or file.files_back or file.files_restored:
        yield from file_patches.references(file)


def _names(value: Any) -> list[str]:
    return PARAM.findall(value) if isinstance(value, str) else []
