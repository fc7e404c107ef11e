"""The request: what was asked, as it was asked. A saved plan holds it for `apply plan.json`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ..core.errors import MigrateError, did_you_mean, fail, listed, option, printable, raise_all
from ..core.types import PACK, PathLike
from ..source.places import full_location
from ..source.registry import declared
from ..source.torn_tensors import REQUANTIZE

# what `allow` can hold; nothing else loosens anything
CHANGED_SOURCE, STALE_OPTIMIZER = "changed-source", "stale-optimizer"
DELAYED_SCALING = "delayed-scaling"
ALLOWANCES = (
    "lossy",
    "drop",
    "opaque",
    "carry",
    "links",
    DELAYED_SCALING,
    STALE_OPTIMIZER,
    CHANGED_SOURCE,
)
# the one param that says what becomes of optimizer state; it is no rule's
OPTIMIZER_PARAM = "optimizer"
# and the one that says which parameters an optimizer numbers
OPTIMIZER_NAMES = "optimizer_names"
# and the one that says in the words of which release objects are written
OBJECT_FORM = "object_form"
# and the one that says what a number in the names of parts counts, where it has two meanings
PARTS_PARAM = "parts"
# params that are no rule's, and about what is beside the tensors that rules see
BUILT_IN = (OPTIMIZER_PARAM, OPTIMIZER_NAMES, OBJECT_FORM, REQUANTIZE, PARTS_PARAM)
# those that are something to do by themselves
_MAKE_ANEW = frozenset({OBJECT_FORM, REQUANTIZE})
# what can be written, as `--output-format` and messages call it, beside third parties' formats
OUTPUT_FORMATS = ("safetensors", "torch", "dcp", "torch_dist")
# the one whose tensors are cut for ranks
DISTRIBUTED = OUTPUT_FORMATS[2]
# those that `.metadata` describes, and that are always a folder; Megatron's holds whole tensors
DESCRIBED = OUTPUT_FORMATS[2:]
WHOLE_TENSORS = DESCRIBED[-1]
# of the ranks that an output can be cut for
MOST_CHUNKS = 65_536
# of a file of entries
_MOST_BYTES = 16_000_000
# permissions that only planning asks for
_ASKED_TOGETHER = frozenset({"lossy", "drop", "opaque", DELAYED_SCALING, STALE_OPTIMIZER})
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """`backwards`: a downgrade; None: whichever way leads there. `rules` are rule files, applied as
    they are, and at most one folder of lineages or `pack:NAME`, an installed pack. `at` is the dict
    in a nested checkpoint that rules work on; `output_format` the name of the format to write;
    `chunks` for how many ranks tensors are cut, in a format that cuts them. None: not said.
    `rewrite`: data files are written anew even where names alone change. `undo`: what the way back
    does not bring back is kept, or, backwards, is there. `side` is a folder whose side files are
    taken as if they lay beside the checkpoint. `declared` is what the stamp of a copy says without
    a migration: `lineage`, `layout` and, where signs speak against it, `why`.
    """

    to: tuple[str, ...] = ()
    from_: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    allow: frozenset[str] = frozenset()
    backwards: bool | None = False
    at: str | None = None
    output_format: str | None = None
    chunks: int | None = None
    rewrite: bool = False
    undo: bool = False
    side: str | None = None
    declared: Mapping[str, str] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        """The rule files given by hand."""
        return [Path(r) for r in self.rules if not (r.startswith(PACK) or Path(r).is_dir())]

    @property
    def opening(self) -> dict[str, Any]:
        """What decides how a checkpoint is opened, as `formats.open` takes it."""
        said = self.params.get(PARTS_PARAM)
        return {
            "allow_links": "links" in self.allow,
            "at": self.at,
            "parts": None if said is None else str(said),
            "side": self.side,
        }

    @property
    def reshapes(self) -> bool:
        """Whether another format, other chunks or new files are wanted: by itself something to
        do.
        """
        return self.output_format is not None or self.recuts

    @property
    def recuts(self) -> bool:
        """Whether data files are to be cut or written anew, whatever changes."""
        return self.chunks is not None or self.rewrite or not _MAKE_ANEW.isdisjoint(self.params)

    @property
    def takes_back(self) -> bool:
        """Whether what an earlier run kept is there to be taken back."""
        return self.undo and bool(self.backwards)

    @property
    def folders(self) -> list[str]:
        return [r for r in self.rules if r.startswith(PACK) or Path(r).is_dir()]

    def to_json(self) -> dict[str, Any]:
        """The request as a plan holds it; rules by absolute path, or by the name of their pack."""
        return {
            "to": list(self.to),
            "from": list(self.from_),
            "rules": [r if r.startswith(PACK) else os.path.abspath(r) for r in self.rules],
            "params": dict(self.params),
            "allow": sorted(self.allow),
            "backwards": self.backwards,
            "at": self.at,
            "output_format": self.output_format,
            **({} if self.chunks is None else {"chunks": self.chunks}),
            **({"rewrite": True} if self.rewrite else {}),
            **({"undo": True} if self.undo else {}),
            **({} if self.side is None else {"side": full_location(self.side)}),
        }


def make_request(
    to: str | Iterable[str],
    from_: str | Iterable[str],
    rules: PathLike | Iterable[PathLike],
    params: Mapping[str, Any] | None,
    allow: Iterable[str],
    *,
    backwards: bool | None = False,
    at: str | None = None,
    output_format: str | None = None,
    chunks: int | None = None,
    rewrite: bool = False,
    undo: bool = False,
    side: PathLike | None = None,
    planned: bool = False,
) -> Request:
    """The request, with one word taken for a list of one. M115 for an unknown allowance or format,
    and for anything but text.

    `planned`: it is put beside a saved plan, the only place where a changed source can be allowed.
    """
    places = (rules,) if isinstance(rules, (str, os.PathLike)) else _items("rules", rules)
    paths = tuple(path_text("rules", r) for r in places)
    if not isinstance(params, (Mapping, type(None))) or not all(
        isinstance(name, str) for name in params or ()
    ):
        fail("M115", f"`params` must be a dict of values by name, not {printable(repr(params))}")
    given = dict(params or {})
    for name, value in given.items():
        if isinstance(value, str) and value.startswith("@"):
            given[name] = _entries(name, value[1:])
    if given:
        from ..source.pickle.tree import PARAMETER, numbering

        if PARAMETER in given:
            given[PARAMETER] = numbering(given[PARAMETER])
        if OBJECT_FORM in given:
            from ..source.object_forms import require_form

            given[OBJECT_FORM] = require_form(given[OBJECT_FORM])
        if REQUANTIZE in given:
            given[REQUANTIZE] = _patterns(REQUANTIZE, given[REQUANTIZE])
    allowed = frozenset(_texts("allow", allow))
    for word in sorted(allowed.difference(ALLOWANCES)):
        hint = (
            did_you_mean(word, list(ALLOWANCES))
            or f"these can be allowed: {listed(list(ALLOWANCES))}"
        )
        fail("M115", f"`{printable(word)}` cannot be allowed", help=hint)
    if CHANGED_SOURCE in allowed and not planned:
        hint = (
            "without one there is nothing that the source is compared with: leave "
            f"{option('allow', CHANGED_SOURCE)} out"
        )
        fail("M115", f"`{CHANGED_SOURCE}` can be allowed for a saved plan only", help=hint)
    if not isinstance(at, (str, type(None))):
        fail("M115", f"`at` must be the path of a dict as text, not {printable(repr(at))}")
    if output_format is not None and output_format not in OUTPUT_FORMATS:
        foreign = [entry.name for entry in declared("migrate.formats")]
        if output_format not in foreign:
            fail(
                "M115",
                f"`{printable(str(output_format))}` is not a format that is written",
                help=f"one of {listed([*OUTPUT_FORMATS, *foreign])}",
            )
    if chunks is not None and (type(chunks) is not int or not 1 <= chunks <= MOST_CHUNKS):
        fail(
            "M115",
            f"`chunks` must be a number of ranks from 1 to {MOST_CHUNKS}, not "
            f"{printable(repr(chunks))}",
        )
    return Request(
        _texts("to", to),
        _texts("from_", from_),
        paths,
        given,
        allowed,
        backwards,
        at,
        output_format,
        chunks,
        rewrite,
        undo,
        None if side is None else path_text("side", side),
    )


def with_permissions(request: Request, answer: Callable[[Request], T]) -> T:
    """What `answer` says to the request; where permissions are missing, one error with all of them.

    Stages of planning refuse one after the other, so that what was refused is asked again as if it
    were permitted, until only other problems are left. Never so for what would open or execute
    something else.
    """
    try:
        return answer(request)
    except MigrateError as error:
        if _ASKED_TOGETHER.isdisjoint(error.permits):
            raise
        found = list(error.diagnostics)
    asked = request
    while missing := _ASKED_TOGETHER.intersection(d.permit for d in found) - asked.allow:
        asked = replace(asked, allow=asked.allow | missing)
        try:
            answer(asked)
        except MigrateError as error:
            found += [d for d in error.diagnostics if d not in found]
    return raise_all(found)


def _entries(name: str, path: str) -> list[str] | str:
    """The entries of the file in `NAME=@path`, one a line, or its text if a list in brackets.

    `""` is the empty name, which is the root module.
    """
    what = f"{option('params', f'{name}=@{printable(path, 300)}')}:"
    try:
        with open(path, "rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = (
            "the file is not text in UTF-8"
            if isinstance(error, UnicodeDecodeError)
            else error.strerror or str(error)
        )
        fail(
            "M115",
            f"{what} {why}",
            help="a value that begins with `@` names a file with one entry per line",
        )
    if len(raw) > _MOST_BYTES:
        fail(
            "M115",
            f"{what} the file is larger than {_MOST_BYTES} bytes",
            help="write patterns: `layers.{n:int}.mlp`",
        )
    text = text.removeprefix("\ufeff")
    if text.lstrip().startswith("["):
        return text.strip()
    lines = [line.strip() for line in text.split("\n")]
    entries = ["" if line == '""' else line for line in lines if line and not line.startswith("#")]
    if not entries:
        fail(
            "M115",
            f"{what} the file has no entry",
            help='one on each line; `""` is the root module, `#` begins a comment',
        )
    return entries


def _patterns(name: str, value: Any) -> list[str]:
    """The patterns of keys that a setting lists: one, or several in a list. M115 for what is none.

    Text in brackets is a list in YAML's notation, as it is for params of rules.
    """
    from ..core.errors import PatternError
    from ..core.keys import parse

    texts = value
    if isinstance(value, str):
        texts = value.strip()
        texts = texts[1:-1].split(",") if texts[:1] + texts[-1:] == "[]" else [texts]
        texts = [one.strip().strip("\"'") for one in texts]
    if not isinstance(texts, (list, tuple)) or not all(isinstance(one, str) for one in texts):
        fail("M115", f"`{name}` is a list of patterns, not {printable(repr(value))}")
    for text in texts:
        try:
            parse(text)
        except PatternError as error:
            fail("M115", f"`{name}`: {printable(text)} is no pattern: {error}")
    if not texts or not all(texts):
        fail("M115", f"`{name}` is empty", help=option("params", f"{name}=PATTERN"))
    return list(texts)


def path_text(name: str, path: Any) -> str:
    """The path as text; M115 if the argument `name` is no path, or one in bytes."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        fail("M115", f"`{name}` must be a path as str or os.PathLike, not {printable(repr(path))}")
    return text


def _items(name: str, words: Any) -> tuple[Any, ...]:
    if not isinstance(words, Iterable) or isinstance(words, (bytes, bytearray)):
        fail("M115", f"`{name}` must be a str or a list of them, not {printable(repr(words))}")
    return tuple(words)


def _texts(name: str, words: Any) -> tuple[str, ...]:
    items = (words,) if isinstance(words, str) else _items(name, words)
    for word in items:
        if not isinstance(word, str):
            fail(
                "M115",
                f"`{name}` must be a str or a list of them, and {printable(repr(word))} is no str",
            )
    return items
