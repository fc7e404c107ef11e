"""What is written under `files` and `files_back`, checked when the rule file is read: the params it
names, the conditions and choices in it, and which paths it makes. And the same of the files that a
layout makes where a checkpoint has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..core.errors import did_you_mean, printable
from .arguments import (
    BY,
    CODEC,
    EACH,
    ENCODED_MODULES,
    MOST_OF,
    NULL,
    PARAM,
    PATCH_WORDS,
    is_choice,
    is_condition,
    is_each,
)
from .files import written_at
from .params import never
from .problem import Problem

if TYPE_CHECKING:
    from .model import RuleFile
    from .param_model import Param

_Path = tuple[Any, ...]
# the fields of a rule file whose patches may take lists of modules
FIELDS = ("files", "files_back", "values", "values_back")


def _patches(file: RuleFile) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "files", file.files
    yield "files_back", file.files_back
    yield "files_restored", file.files_restored


def problems(file: RuleFile) -> Iterator[Problem]:
    """What can be said against the patches of side files without any checkpoint (M106, M114)."""
    return (problem._replace(at=written_at(problem.at)) for problem in _problems(file))


def _problems(file: RuleFile) -> Iterator[Problem]:
    for field, patches in _patches(file):
        for path, held in _objects(patches, (field,)):
            if is_choice(held):
                if not _chooses(held[f"${ENCODED_MODULES}"]):
                    yield Problem(
                        "M114",
                        f"`${ENCODED_MODULES}` is narrowed by an object with the name of a codec "
                        "or several, and arguments of it",
                        f"write `${ENCODED_MODULES}: {{codec: nvfp4}}`",
                        at=path,
                    )
            elif is_each(held):
                if not _sorts(held):
                    yield Problem(
                        "M114",
                        f"`{EACH}` is an object for each set of values of arguments of a codec, "
                        f"which `{BY}` lists",
                        f"write `${ENCODED_MODULES}: {{codec: int-pack, {BY}: [bits, group]}}`",
                        at=path,
                    )
            else:
                yield from (problem.below(*path) for problem in _conditions(file.params, held))
        for name in patches:
            if below := next((other for other in patches if other.startswith(f"{name}/")), None):
                yield Problem(
                    "M114",
                    f"`{printable(name)}` cannot be a file and the folder of `{printable(below)}`",
                    key=True,
                    at=(field, name),
                )


def made_problems(
    files: Mapping[str, Any], params: Mapping[str, Param], path: _Path
) -> Iterator[Problem]:
    """What can be said against the objects of `files`, which stand at `path` and which a layout
    makes of `params` (M106, M112, M114).
    """
    for at, name in _references(files, path):
        if name not in params and name != NULL:
            yield Problem(
                "M112",
                f"`${name}` is not a param of this file",
                did_you_mean(name, list(params)) or "declare it under `params`",
                at,
            )
    for at, held in _objects(files, path):
        if not (is_choice(held) or is_each(held)):
            yield from (problem.below(*at) for problem in _conditions(params, held))


def made_params(files: Mapping[str, Any]) -> set[str]:
    """The names of the params of which the objects of `files` are made."""
    return {name for _, name in _references(files, ())} - {NULL}


def references(file: RuleFile) -> Iterator[tuple[_Path, str]]:
    """(path, name) of each whole text `$name` and each condition on a param; other text may hold
    dollars of its own.
    """
    for field, patches in _patches(file):
        yield from ((written_at(at), name) for at, name in _references(patches, (field,)))


def _references(value: Any, path: _Path) -> Iterator[tuple[_Path, str]]:
    if isinstance(value, str) and (match := PARAM.fullmatch(value)):
        yield path, match[1]
    elif is_each(value):
        by = value[f"${ENCODED_MODULES}"]
        by = by.get(BY) if isinstance(by, Mapping) else None
        known = by if isinstance(by, (list, tuple)) else ()
        for part in (EACH, MOST_OF):
            for at, name in _references(value.get(part), (*path, part)):
                if name not in known:
                    yield at, name
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if is_condition(key) and not is_choice(value):
                yield (*path, key), key[1:]
            yield from _references(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _references(item, (*path, number))


def _objects(value: Any, path: _Path) -> Iterator[tuple[_Path, Mapping[str, Any]]]:
    """(path, object) of each object in patches, without what a choice of a list asks for."""
    if isinstance(value, Mapping):
        yield path, value
        own = (f"${ENCODED_MODULES}",) if is_each(value) else ()
        below = [(name, one) for name, one in value.items() if name not in own]
        for key, item in () if is_choice(value) else below:
            yield from _objects(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _objects(item, (*path, number))


def _conditions(params: Mapping[str, Param], held: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with the conditions of an object: such an object would never be written."""
    asked = {name: wanted for name, wanted in held.items() if is_condition(name)}
    for name, wanted in asked.items():
        values = wanted if isinstance(wanted, (list, tuple)) else [wanted]
        if name[1:] in PATCH_WORDS:
            yield Problem(
                "M114",
                f"`{name}` is no param that an object could depend on",
                "as a value it stands for what it means, and so does "
                f"`{{${ENCODED_MODULES}: {{codec: …}}}}` alone",
                key=True,
                at=(name,),
            )
        elif not values or any(isinstance(v, (Mapping, list, tuple)) or v is None for v in values):
            yield Problem(
                "M106",
                f"`{name}` in an object of a patch is a condition, and asks for a value or a list "
                "of values",
                "the object is written where the param is one of them",
                at=(name,),
            )
        else:
            for _, why in never({name: wanted}, params, "an object of a patch"):
                yield Problem("M114", why, at=(name,))


def _sorts(held: Mapping[str, Any]) -> bool:
    wanted = held[f"${ENCODED_MODULES}"]
    by = wanted.get(BY) if isinstance(wanted, Mapping) else None
    objects = all(isinstance(held.get(part, {}), Mapping) for part in (EACH, MOST_OF))
    if not isinstance(by, (list, tuple)) or not by or not objects:
        return False
    return all(isinstance(name, str) for name in by) and _chooses(
        {name: one for name, one in wanted.items() if name != BY}
    )


def _chooses(wanted: Any) -> bool:
    if not isinstance(wanted, Mapping) or CODEC not in wanted:
        return False
    values = [v if isinstance(v, (list, tuple)) else [v] for v in wanted.values()]
    return all(
        one and not any(isinstance(v, (Mapping, list, tuple)) or v is None for v in one)
        for one in values
    )
