"""The question: what was asked, as it was asked. A saved plan holds it, so that `apply plan.json`
can ask it again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ..core.diagnostics import did_you_mean, fail, listed, printable
from ..core.errors import MigrateError, raise_all
from ..core.spelling import command, option

PLAN_VERSION = "1.0"
# what `allow` can hold; nothing else loosens anything
CHANGED_SOURCE = "changed-source"
ALLOWANCES = (
    "lossy",
    "drop",
    "opaque",
    "links",
    "delayed-scaling",
    "stale-optimizer",
    CHANGED_SOURCE,
)
# what can be written, as `--output-format` and messages call it
OUTPUT_FORMATS = ("safetensors", "torch")
_MOST_FIELDS, _MOST_FILES = 30, 5
# what a plan says of a file of the source; bytes in memory have no time
_STATE = {"name": str, "size": int, "mtime_ns": (int, type(None))}
# of a file of entries
_MOST_BYTES = 16_000_000
# a name with one of these is that of one file
SUFFIXES = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}
# of formats that are not written, beside those that are known among side files
_OTHERS = (".pkl", ".pickle", ".hdf5", ".keras", ".nemo", ".pt2")
# endings of fewer letters are near to too many words that a folder may end in
_LONG = 4
# permissions that only planning asks for
_ASKED_TOGETHER = frozenset({"lossy", "drop", "opaque", "delayed-scaling", "stale-optimizer"})
T = TypeVar("T")
PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Question:
    """`backwards`: a downgrade; None: whichever way leads there. `rules` are rule files, applied as
    they are, and at most one folder of lineages. `at` is the dict in a nested checkpoint that rules
    work on; `output_format` the name of the format to write. None: not said.
    """

    to: tuple[str, ...] = ()
    from_: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    allow: frozenset[str] = frozenset()
    backwards: bool | None = False
    at: str | None = None
    output_format: str | None = None

    @property
    def files(self) -> list[Path]:
        """The rule files given by hand."""
        return [Path(r) for r in self.rules if not Path(r).is_dir()]

    @property
    def folders(self) -> list[str]:
        return [r for r in self.rules if Path(r).is_dir()]

    def to_json(self) -> dict[str, Any]:
        """The question as a plan holds it; rules by absolute path."""
        return {
            "to": list(self.to),
            "from": list(self.from_),
            "rules": [os.path.abspath(r) for r in self.rules],
            "params": dict(self.params),
            "allow": sorted(self.allow),
            "backwards": self.backwards,
            "at": self.at,
            "output_format": self.output_format,
        }


def ask(
    to: str | Iterable[str],
    from_: str | Iterable[str],
    rules: Iterable[PathLike],
    params: Mapping[str, Any] | None,
    allow: Iterable[str],
    *,
    backwards: bool | None = False,
    at: str | None = None,
    output_format: str | None = None,
    planned: bool = False,
) -> Question:
    """The question, with one word taken for a list of one. M115 for an unknown allowance or format,
    and for anything but text.

    `planned`: it is put beside a saved plan, the only place where a changed source can be allowed.
    """
    places = (rules,) if isinstance(rules, (str, os.PathLike)) else _items("rules", rules)
    paths = tuple(path_text("rules", r) for r in places)
    if not isinstance(params, (Mapping, type(None))) or not all(
        isinstance(name, str) for name in params or ()
    ):
        fail("M115", f"`params` is a dict of values by name, not {printable(repr(params))}")
    given = dict(params or {})
    for name, value in given.items():
        if isinstance(value, str) and value.startswith("@"):
            given[name] = _entries(name, value[1:])
    if given:
        from ..source.pickle.encodings import PARAMETER, numbering

        if PARAMETER in given:
            given[PARAMETER] = numbering(given[PARAMETER])
    allowed = frozenset(_texts("allow", allow))
    for word in sorted(allowed.difference(ALLOWANCES)):
        hint = (
            did_you_mean(word, list(ALLOWANCES))
            or f"what can be allowed: {listed(list(ALLOWANCES))}"
        )
        fail("M115", f"`{printable(word)}` is nothing that can be allowed", help=hint)
    if CHANGED_SOURCE in allowed and not planned:
        hint = (
            "without one there is nothing that the source is compared with: leave "
            f"{option('allow', CHANGED_SOURCE)} out"
        )
        fail("M115", f"`{CHANGED_SOURCE}` can be allowed for a saved plan only", help=hint)
    if not isinstance(at, (str, type(None))):
        fail("M115", f"`at` is the path of a dict as text, not {printable(repr(at))}")
    if output_format is not None and output_format not in OUTPUT_FORMATS:
        fail(
            "M115",
            f"`{printable(str(output_format))}` is not a format that is written",
            help=f"one of {listed(list(OUTPUT_FORMATS))}",
        )
    return Question(
        _texts("to", to),
        _texts("from_", from_),
        paths,
        given,
        allowed,
        backwards,
        at,
        output_format,
    )


def with_permissions(question: Question, answer: Callable[[Question], T]) -> T:
    """What `answer` says to the question; where permissions are missing, one error with all of
    them.

    Stages of planning refuse one after the other, so that what was refused is asked again as if it
    were permitted, until only other problems are left. Never so for what would open or execute
    something else.
    """
    try:
        return answer(question)
    except MigrateError as error:
        if _ASKED_TOGETHER.isdisjoint(error.permits):
            raise
        found = list(error.diagnostics)
    asked = question
    while missing := _ASKED_TOGETHER.intersection(d.permit for d in found) - asked.allow:
        asked = replace(asked, allow=asked.allow | missing)
        try:
            answer(asked)
        except MigrateError as error:
            found += [d for d in error.diagnostics if d not in found]
    return raise_all(found)


def _entries(name: str, path: str) -> list[str] | str:
    """The entries of the file that `NAME=@path` means, one a line, or its text if that is a list in
    brackets.

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
            help="a value that begins with `@` is a file with an entry on each line",
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


def written_as(source_format: str, question: Question) -> str:
    """The name of the format of the output: what was asked for, else the source's, safetensors for
    what lies in memory.
    """
    return question.output_format or (
        source_format if source_format in OUTPUT_FORMATS else OUTPUT_FORMATS[0]
    )


def shape_of(name: str, source_format: str, question: Question) -> tuple[bool, Question]:
    """Whether an output of this name is a folder, and the question with the format that the name
    says.

    M115 if it says another format than the question, or, where the question says none, one that is
    not written or is misspelt.
    """
    suffix = os.path.splitext(name)[1]
    said = SUFFIXES.get(suffix)
    if said is None:
        if question.output_format is None:
            _refuse_ending(name, suffix)
        return True, question
    if question.output_format not in (None, said):
        both = (
            f"{option('output_format', question.output_format)} and a file called "
            f"`{printable(name)}`"
        )
        fail("M115", both, help="give it another ending, or none: a folder")
    return False, question if said == written_as(source_format, question) else replace(
        question, output_format=said
    )


def _refuse_ending(name: str, suffix: str) -> None:
    """M115 for a name that ends like a file of weights and would be that of a folder; other dots
    say nothing (`Llama-3.1-8B`).
    """
    from difflib import get_close_matches  # of such names only

    from ..source.sidefiles import WEIGHT_SUFFIXES

    low, endings = suffix.lower(), list(SUFFIXES)
    other = next(
        (ending for ending in (*WEIGHT_SUFFIXES, *_OTHERS) if name.lower().endswith(ending)), None
    )
    long = [ending for ending in endings if len(ending) > _LONG]
    near = (
        [low]
        if low in SUFFIXES
        else get_close_matches(low, long, n=1, cutoff=0.75)
        if low[1:].isalpha()
        else []
    )
    near = near or [
        ending for ending in endings if len(ending) >= _LONG and sorted(low) == sorted(ending)
    ]
    if not (near or other):
        return
    what = (
        f"`{printable(name)}` ends in `{printable(suffix)}`"
        if near
        else f"`{printable(name)}` is the name of a file in another format"
    )
    hint = (
        f"did you mean `{printable(name[: len(name) - len(suffix)] + near[0])}`?"
        if near
        else f"files end in {listed(endings)}"
    )
    fail(
        "M115",
        f"{what}, and would be a folder",
        help=f"{hint} (with {option('output_format')} a folder of this name is made)",
    )


def path_text(name: str, path: Any) -> str:
    """The path as text; M115 if the argument `name` is no path, or one in bytes."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        fail("M115", f"`{name}` is a path as str or os.PathLike, not {printable(repr(path))}")
    return text


def _items(name: str, words: Any) -> tuple[Any, ...]:
    if not isinstance(words, Iterable) or isinstance(words, (bytes, bytearray)):
        fail("M115", f"`{name}` is a str or a list of them, not {printable(repr(words))}")
    return tuple(words)


def _texts(name: str, words: Any) -> tuple[str, ...]:
    items = (words,) if isinstance(words, str) else _items(name, words)
    for word in items:
        if not isinstance(word, str):
            fail(
                "M115",
                f"`{name}` is a str or a list of them, and {printable(repr(word))} is not a str",
            )
    return items


def saved_plan(path: PathLike) -> dict[str, Any] | None:
    """The plan document at `path`; None if the name is not that of a plan file. M115 or M903 if it
    holds no plan of ours.
    """
    name = os.fspath(path)
    if not name.endswith(".json") or name.endswith(".index.json") or not os.path.isfile(name):
        return None
    try:
        with open(name, encoding="utf-8") as file:
            saved: dict[str, Any] = json.load(file)
    except (ValueError, RecursionError) as error:
        fail("M115", f"{name} is not a plan: {error}")
    if not isinstance(saved, dict) or saved.get("kind") != "plan" or not _is_whole(saved):
        fail("M115", f"{name} is not a plan", help=f"`{command('plan')}` makes plans")
    if str(saved.get("format_version")).split(".")[0] != PLAN_VERSION.split(".")[0]:
        fail(
            "M903",
            f"{name} was written in another plan format ({saved.get('format_version')})",
            help="plan again",
        )
    return saved


def _is_whole(saved: Mapping[str, Any]) -> bool:
    """Whether a plan has all that is read of it before it is planned again, each of its kind."""
    try:
        read = (
            saved["digest"],
            saved["source"]["path"],
            saved["options"]["max_shard_size"],
            saved["options"]["folder"],
        )
        asked = saved["question"]
        lists = [asked[name] for name in ("to", "from", "rules", "allow")]
        states = saved["source"].get("states", [])
        kinds: list[tuple[Any, Any]] = [
            (states, list),
            *((file[name], kind) for file in states for name, kind in _STATE.items()),
        ]
        kinds += [
            *zip(read, (str, str, int, bool), strict=True),
            (asked["params"], dict),
            (asked["backwards"], bool),
        ]
        kinds += [(asked.get(name) or "", str) for name in ("at", "output_format")]
    except (KeyError, TypeError):
        return False
    return all(isinstance(value, kind) for value, kind in kinds) and all(
        isinstance(words, list) and all(isinstance(word, str) for word in words) for words in lists
    )


def changed_files(saved: Mapping[str, Any], now: Mapping[str, Any], copied: bool) -> list[str]:
    """What of the source's files is not as a saved plan says: sizes, and but for a copy the times
    of their last change.
    """
    then, found = (
        {file["name"]: file for file in saved["states"]},
        {file["name"]: file for file in now["states"]},
    )
    if len(now["files"]) == 1 and saved["states"]:
        # a copy of a single file may be called otherwise
        then[now["files"][0]] = then.pop(saved["states"][0]["name"])
    changed = []
    for name in dict.fromkeys((*found, *then)):
        before, file = then.get(name), found.get(name)
        if before is None or file is None:
            changed.append(
                f"{printable(name)}: "
                f"{'it was not there' if before is None else 'it is no longer there'}"
            )
        elif before["size"] != file["size"]:
            changed.append(
                f"{printable(name)}: its size was {before['size']} bytes and is {file['size']}"
            )
        elif before["mtime_ns"] != file["mtime_ns"] and not copied:
            changed.append(
                f"{printable(name)}: it was written to or replaced, for its time of modification "
                "is another"
            )
    return changed


def require_source(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, copied: bool, changed: bool
) -> list[str]:
    """Notes on the files of the source that are not as a saved plan says. M903 unless that is
    allowed: `changed`.
    """
    if "states" not in saved["source"]:
        fail(
            "M903",
            "the plan does not say how large the files were that it was made for: an earlier "
            "version of migrate made it",
            help="plan again",
        )
    found = changed_files(saved["source"], now["source"], copied)
    if found and not changed:
        where = (
            "the copy is not what the plan was made for"
            if copied
            else "the source is not what it was when the plan was made"
        )
        others = (
            f"{option('allow', CHANGED_SOURCE)} runs the plan on the files as they are, if "
            "they hold the same tensors"
        )
        more = (f"and {len(found) - _MOST_FILES:,} more files",) if len(found) > _MOST_FILES else ()
        fail(
            "M903",
            f"{where}: {found[0]}",
            notes=(*found[1:_MOST_FILES], *more),
            help=f"plan again, and review the new plan; {others}",
        )
    return [f"not as the plan says, which was allowed: {one}" for one in found]


def changed_since(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The fields of a saved plan that are not what planning again gives, in the order of the new
    plan.

    Left out is what does not come from the checkpoint, the rules and the question: the version of
    the tool, the free space, and where source and rules lie (a comment above a rule moves it).
    """
    one, other = _reviewed(saved), _reviewed(json.loads(json.dumps(now)))
    return [
        name
        for name in {**other, **one}
        if name not in one or name not in other or one[name] != other[name]
    ]


_PARTS = {
    "source": "the checkpoint",
    "rules": "the rules",
    "params": "the params",
    "target": "the output's files",
    "decided": "values that decide keys",
}


# where a rule stands, at the end of a reason
_PLACE = re.compile(r" \([^()]*:\d+:\d+\)$")


def require_unchanged(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """M903 unless a saved plan is, whole, the plan that is made now: what was reviewed is what it
    says.
    """
    changed = changed_since(saved, now)
    if not changed:
        return
    stale = saved["digest"] != now["digest"]
    one, other = (printable(str(plan["digest"]), 15) for plan in (saved, now))
    named = ", ".join(f"`{printable(name)}`" for name in changed[:_MOST_FIELDS])
    fail(
        "M903",
        f"the plan does not fit any more: its digest is {one}, now it is {other}"
        if stale
        else f"the plan was edited: it says something else than planning again gives in {named}",
        notes=(
            *(
                f"changed since: {what}"
                for name, what in _PARTS.items()
                if stale and name in changed
            ),
            f"fields that differ: {named}",
        ),
        help="plan again, and review the new plan",
    )


def _reviewed(plan: Mapping[str, Any]) -> dict[str, Any]:
    out = {
        name: value
        for name, value in plan.items()
        if name not in ("format_version", "tool", "free")
    }
    source = out.get("source")
    if (
        isinstance(source, dict)
        and isinstance(source.get("files"), list)
        and len(source["files"]) == 1
    ):
        # the name of a single file is where it lies
        source = _without(source, "files")
    out["source"] = _without(_without(source, "path"), "states")
    way_back = out.get("downgrade")
    if isinstance(way_back, dict) and isinstance(way_back.get("because"), list):
        out["downgrade"] = {
            **way_back,
            "because": [
                _PLACE.sub("", why) if isinstance(why, str) else why for why in way_back["because"]
            ],
        }
    for name, place in (
        ("rows", "at"),
        ("losses", "at"),
        ("origins", "places"),
        ("warnings", "spans"),
        ("warnings", "help"),
    ):
        if isinstance(out.get(name), list):
            out[name] = [_without(entry, place) for entry in out[name]]
    return out


def _without(value: Any, name: str) -> Any:
    return {k: v for k, v in value.items() if k != name} if isinstance(value, dict) else value


def asked_in(saved: Mapping[str, Any]) -> Question:
    """The question that a saved plan answers."""
    asked = saved["question"]
    return ask(
        asked["to"],
        asked["from"],
        asked["rules"],
        asked["params"],
        asked["allow"],
        backwards=asked["backwards"],
        at=asked.get("at"),
        output_format=asked.get("output_format"),
    )
