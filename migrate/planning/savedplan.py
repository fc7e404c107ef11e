"""A saved plan: read, compared with what planning again gives, and asked again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, Final

from ..core.errors import command, fail, option, printable
from ..core.types import FORMAT_VERSION, PathLike
from .request import CHANGED_SOURCE, Request, make_request

_MOST_FIELDS, _MOST_FILES = 30, 5
# how the note ends of values that several parts of a run need
TWICE: Final = "computed by several parts, because each of them has a file that needs it"

# what a plan says of a file of the source; bytes in memory have no time
_STATE = {"name": str, "size": int, "mtime_ns": (int, type(None))}


def saved_plan(path: PathLike) -> dict[str, Any] | None:
    """The plan document at `path`; None if it is that of a checkpoint. M115 or M903 if it
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
    # headers of a checkpoint: a checkpoint, whose format says what it lacks
    if isinstance(saved, dict) and saved.get("kind") == "saved_index":
        return None
    return checked_plan(saved, name)


def checked_plan(saved: Any, name: str) -> dict[str, Any]:
    """The document `saved` as a plan, M115 or M903 if it is none of ours; `name` is that of its
    file.
    """
    if not isinstance(saved, dict) or saved.get("kind") != "plan" or not _is_whole(saved):
        fail("M115", f"{name} is not a plan", help=f"`{command('plan')}` makes plans")
    if str(saved.get("format_version")).split(".")[0] != FORMAT_VERSION.split(".")[0]:
        fail(
            "M903",
            f"{name} was written in another plan format ({saved.get('format_version')})",
            help="plan again",
        )
    found: dict[str, Any] = saved
    return found


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
        kinds += [(asked.get(name) or "", str) for name in ("at", "output_format", "side")]
        kinds += [(asked.get("chunks", 1), int), (asked.get("rewrite", False), bool)]
    except (KeyError, TypeError):
        return False
    return all(isinstance(value, kind) for value, kind in kinds) and all(
        isinstance(words, list) and all(isinstance(word, str) for word in words) for words in lists
    )


def changed_files(saved: Mapping[str, Any], now: Mapping[str, Any], copied: bool) -> list[str]:
    """What of the source's files differs from a saved plan: sizes, and but for a copy, times."""
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
                f"{printable(name)}: it was modified or replaced: its time of modification differs"
            )
    return changed


def require_source(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, copied: bool, changed: bool
) -> list[str]:
    """Notes on source files that differ from the saved plan. M903 unless allowed: `changed`."""
    if "states" not in saved["source"]:
        fail(
            "M903",
            "the plan does not record the sizes of the files that it was made for: an earlier "
            "version of migrate wrote it",
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
    return [f"different from the plan, which was allowed: {one}" for one in found]


def changed_since(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The fields of a saved plan that planning again gives otherwise, in the new plan's order.

    Left out is what does not come from the checkpoint, the rules and the request: the version of
    the tool, the free space, what a store would be asked for, into how many parts a run is divided,
    and where source and rules lie (a comment above a rule moves it). Of sentences only what they
    name is compared: an earlier version may have said it in other words.
    """
    one, other = _reviewed(saved), _reviewed(json.loads(json.dumps(now)))
    known = one.get("warnings")
    if isinstance(known, list) and not any(_is_later(warning) for warning in known):
        other["warnings"] = [one for one in other["warnings"] if not _is_later(one)]
    # nor did they speak of what a way back brings back
    for name in ("returns", "parts"):
        if name not in one and (later := other.pop(name, None)) is not None and name == "parts":
            other["bytes_written"] -= later["bytes"]
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

# what plans of the same format did not warn of from the beginning
_LATER = frozenset({"M411"})
# in a sentence, what is in backticks or has more than letters inside
_NAME = re.compile(r"`([^`]*)`|(\S*[0-9_/@{}]\S*|\S*\w\.\w\S*)")

# where a rule stands, at the end of a reason
_PLACE = re.compile(r" \([^()]*:\d+:\d+\)$")


def require_unchanged(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """M903 unless the saved plan is, whole, the plan made now: what was reviewed is what runs."""
    changed = changed_since(saved, now)
    if not changed:
        return
    stale = saved["digest"] != now["digest"]
    one, other = (printable(str(plan["digest"]), 15) for plan in (saved, now))
    named = ", ".join(f"`{printable(name)}`" for name in changed[:_MOST_FIELDS])
    fail(
        "M903",
        f"the plan no longer fits: its digest is {one}, now it is {other}"
        if stale
        else f"the plan was edited: planning again gives something else in {named}",
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
        if name not in ("format_version", "tool", "free", "store")
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
                _names_in(_PLACE.sub("", why) if isinstance(why, str) else why)
                for why in way_back["because"]
            ],
        }
    for name, place in (
        ("rows", "at"),
        ("losses", "at"),
        ("origins", "places"),
    ):
        if isinstance(out.get(name), list):
            out[name] = [_without(entry, place) for entry in out[name]]
    if isinstance(out.get("notes"), list):
        own = [one for one in out["notes"] if not (isinstance(one, str) and one.endswith(TWICE))]
        out["notes"] = [_names_in(note) for note in own]
    if isinstance(out.get("warnings"), list):
        out["warnings"] = [_reviewed_warning(warning) for warning in out["warnings"]]
    return out


def _is_later(warning: Any) -> bool:
    return isinstance(warning, dict) and warning.get("code") in _LATER


def _reviewed_warning(warning: Any) -> Any:
    if not isinstance(warning, dict):
        return warning
    notes = warning.get("notes")
    return {
        **{name: value for name, value in warning.items() if name not in ("spans", "help")},
        "message": _names_in(warning.get("message")),
        "notes": [_names_in(note) for note in notes] if isinstance(notes, list) else notes,
    }


def _names_in(sentence: Any) -> Any:
    """What a sentence names, if it is one: numbers, keys, paths, and what stands in backticks."""
    if not isinstance(sentence, str):
        return sentence
    found = (name.strip(".,;:()'") for pair in _NAME.findall(sentence) for name in pair)
    return sorted({name for name in found if name})


def _without(value: Any, name: str) -> Any:
    return {k: v for k, v in value.items() if k != name} if isinstance(value, dict) else value


def request_of(saved: Mapping[str, Any]) -> Request:
    """The request that a saved plan answers."""
    asked = saved["question"]
    return make_request(
        asked["to"],
        asked["from"],
        asked["rules"],
        asked["params"],
        asked["allow"],
        backwards=asked["backwards"],
        at=asked.get("at"),
        output_format=asked.get("output_format"),
        chunks=asked.get("chunks"),
        rewrite=asked.get("rewrite", False),
        undo=asked.get("undo", False),
        side=asked.get("side"),
    )
