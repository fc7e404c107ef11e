"""Side files, and places in them, as rule files name them: a path below the checkpoint, and
`file.json#key.path`.

What may be named is one pattern, so that the schema refuses what the loader refuses. It leaves out
what migrate writes itself and what a migration never carries: a rule that patched such a file would
begin it anew in each output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from ..core.diagnostics import printable
from ..source.sidefiles import CACHES, HISTORY, ITEMS, MAX_DEPTH, METADATA, PARTIAL, WEIGHT_SUFFIXES
from .fields import UNPRINTABLE, fits, kind_of, whole, word, wrong
from .steps import each


def _any_case(words: Iterable[str]) -> str:
    """What matches each text that `str.lower` makes one of the words."""
    others = {"k": "\\u212a"}
    alike = {c: f"[{c}{c.upper()}{others.get(c, '')}]" for c in "abcdefghijklmnopqrstuvwxyz"}
    return "|".join("".join(alike.get(c) or _literal(c) for c in word) for word in words)


def _literal(text: str) -> str:
    return text.replace(".", r"\.")


_END = "(?=#|$)"
_NAME = rf"[^/\\#{UNPRINTABLE}]{{1,255}}"
_FOLDER = rf"(?!\.)(?!(?:{_any_case(CACHES)})/)(?![^/#]*(?:{_any_case([PARTIAL])})/){_NAME}/"
_OWN = "|".join(map(_literal, (HISTORY, ITEMS, METADATA)))
_FILE = (
    rf"(?!\.\.?{_END})(?!(?:{_OWN}){_END})(?![^/#]*(?:{_any_case(WEIGHT_SUFFIXES)}){_END}){_NAME}"
)
_PATH = rf"(?:{_FOLDER}){{0,{MAX_DEPTH}}}{_FILE}"
_KEYS = rf"[^.#{UNPRINTABLE}]+(?:\.[^.#{UNPRINTABLE}]+)*"
# a path that is one, whatever it names
_BELOW = {"pattern": whole(rf"(?!\.\.?(?:/|$)){_NAME}(?:/(?!\.\.?(?:/|$)){_NAME})*")}

PATH = {"type": "string", "pattern": whole(_PATH)}
# a place in config.json needs no file
PLACE = {"type": "string", "pattern": whole(rf"(?:{_PATH}#)?{_KEYS}")}
PLACES = {**PLACE, "type": ["string", "array"], "items": PLACE, "minItems": 1}
LIST = {"type": "string", "pattern": whole(rf"{_PATH}#{_KEYS}")}


def _path(value: Any) -> str:
    name = word(value)
    if not fits(PATH, name):
        if fits(_BELOW, name):
            wrong(
                "M114",
                f"`{printable(name)}` is no side file: migrate writes such files itself, or "
                "leaves them behind",
            )
        wrong(
            "M114",
            f"`{printable(name)}` is not a path below the checkpoint",
            "name a side file, such as config.json",
        )
    return name


def _reader(schema: dict[str, Any], what: str, form: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        reference = word(value)
        if not fits(schema, reference):
            wrong("M114", f"`{printable(reference)}` {what}", form)
        return reference

    return read


_place = _reader(PLACE, "is not a place in a side file", "[file.json#]key.path")


def _places(value: Any) -> str | tuple[str, ...]:
    """One place, or several; a list of one is that one."""
    if not isinstance(value, (list, tuple)):
        if isinstance(value, Mapping):
            wrong(
                "M106",
                f"a place or a list of places is asked for, here stands {kind_of(value)}",
                "[file.json#]key.path",
            )
        return _place(value)
    found = tuple(each(value, _place)) or wrong("M114", "an empty list names no place")
    return found[0] if len(found) == 1 else found


SidePath = Annotated[str, BeforeValidator(_path), WithJsonSchema(PATH)]
Places = Annotated[str | tuple[str, ...], BeforeValidator(_places), WithJsonSchema(PLACES)]
ListPlace = Annotated[
    str,
    BeforeValidator(_reader(LIST, "does not name a list in a side file", "file.json#key.path")),
    WithJsonSchema(LIST),
]
