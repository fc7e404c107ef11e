"""The journal of a run into a bucket: of which plan, over which state of the source, which uploads.

It is written before the first upload is begun and again when all are, so that what a run has begun
can be told from what others have. Of a run in parts it says how many there are, which of them wrote
it, and when it is `ready`: the others wait for that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, NoReturn, TypeAlias

from ..core.errors import fail, option, printable
from ..source.stores.s3_uploads import LARGEST, LEAST, PARTIAL, S3Output

FORMAT_VERSION = 1


def refuse_left(output: S3Output) -> NoReturn:
    where = printable(output.location, 240)
    fail(
        "M911",
        f"{where}{PARTIAL} was left by an earlier run, or another one is writing there now",
        help=f"run it again with {option('resume', True)} to finish it, or throw it away with "
        f"`migrate clean {where}`",
    )


def parse_journal(content: bytes, output: S3Output) -> dict[str, Any]:
    """The journal of a run; M926 for anything else, M918 for one of another version."""
    parsed: Any = None
    with suppress(ValueError, RecursionError):
        parsed = json.loads(content)
    is_journal = isinstance(parsed, dict) and parsed.get("kind") == "journal"
    found: dict[str, Any] = parsed if is_journal else {}
    version = found.get("format_version")
    fit = all(name in found and fits(found[name]) for name, fits in _FIELDS.items())
    if not fit and type(version) is int and version != FORMAT_VERSION:
        _refuse_version(output)
    if not fit or not all(fits(found[name]) for name, fits in _MORE.items() if name in found):
        fail(
            "M926",
            f"{printable(output.shown(output.journal), 300)} is no journal of a run",
            notes=("no run of migrate leaves that behind",),
            help="find out where it comes from, remove it and start over",
        )
    return found


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda found: type(found) in kinds


def _texts(found: Any) -> bool:
    return isinstance(found, list) and all(type(one) is str for one in found)


def _texts_by_name(found: Any) -> bool:
    return isinstance(found, dict) and _texts([*found.values()])


def _tags(found: Any) -> bool:
    """By name of a file and number of a part, as JSON has numbers in names."""
    return isinstance(found, dict) and all(
        _texts_by_name(parts) and all(re.fullmatch("[1-9][0-9]{0,4}", number) for number in parts)
        for parts in found.values()
    )


def _states(found: Any) -> bool:
    """What tells a state of a file, by its name; None of a source without files."""
    return found is None or (isinstance(found, dict) and all(map(_is(list), found.values())))


_Fits: TypeAlias = Callable[[Any], bool]
# what a run writes: what each journal has, and what some have beside
_FIELDS: Final[Mapping[str, _Fits]] = {
    "digest": _is(str),
    "run": lambda found: type(found) is str and re.fullmatch("[0-9a-f]{32}", found) is not None,
    "single": _is(bool),
    "source": _states,
    "parts": _is(str),
    "copied": _is(bool),
    "files": _texts,
    "others": _texts,
    "uploads": _texts_by_name,
}
_MORE: Final[Mapping[str, _Fits]] = {
    "checksum": _is(str, type(None)),
    "uploaded": lambda found: type(found) is int and LEAST <= found <= LARGEST,
    "tags": _tags,
    "doubled": _texts,
    "why": _is(str, type(None)),
    "begun": _is(dict),
    "by": _is(int),
    "ready": _is(bool),
}


def _refuse_version(output: S3Output) -> NoReturn:
    where = printable(output.location, 240)
    fail(
        "M918",
        f"{where}{PARTIAL} was begun by another version of migrate",
        help=f"`migrate clean {where}` and start over, or resume with the version it was begun "
        "with",
    )


def require_same(head: Mapping[str, Any], found: Mapping[str, Any], output: S3Output) -> None:
    """M918 unless the journal is that of this plan over this state of the source."""
    where = f"{printable(output.location, 240)}{PARTIAL}"
    way = f"`migrate clean {printable(output.location, 240)}`"
    if found.get("format_version") != FORMAT_VERSION:
        _refuse_version(output)
    if found["digest"] != head["digest"]:
        fail(
            "M918",
            f"{where} belongs to another plan",
            notes=(
                f"digest there {printable(found['digest'])}",
                f"digest of this plan {head['digest']}",
            ),
            help=f"{way}, or resume with the plan it was begun with",
        )
    then, now = found.get("source"), head["source"]
    if then is None or then != now:
        names = [name for name in now or () if (then or {}).get(name) != (now or {})[name]]
        what = f": {printable(names[0])}" if names else ""
        fail(
            "M918",
            f"{where} was begun over another state of the source{what}",
            help=f"{way} and start over: what it holds was made of the files as they were",
        )


def word_of(run: str, number: int) -> str:
    """The name under which a part of a run says what it did."""
    return f"{run[:16]}-{number}.json"


def word_of_made(run: str, number: int) -> str:
    """The name under which a part of a run takes down which parts of uploads it has made."""
    return f"{run[:16]}-{number}-made.json"


def own_words(words: Iterable[str], run: str) -> list[str]:
    """Those that parts of this run have left."""
    form = re.compile(rf"{run[:16]}-\d+(-made)?\.json", re.ASCII)
    return [name for name in words if form.fullmatch(name)]


def made_words(words: Iterable[str], run: str) -> list[str]:
    """Those of them in which parts of uploads are taken down."""
    return [name for name in own_words(words, run) if name.endswith("-made.json")]


def tags_of(found: Any) -> dict[str, dict[int, str]]:
    """ETags of parts by file and number, as a journal or a word has them; none of anything else."""
    if not _tags(found):
        return {}
    return {name: {int(n): tag for n, tag in parts.items()} for name, parts in found.items()}


def begun_unnamed(found: Mapping[str, Any], output: S3Output) -> Iterator[tuple[str, str]]:
    """(key, id) of uploads that a run began and does not name: it was killed before it took them
    down, or an answer was lost and the store began one twice. They are at keys of its files that
    have none or were asked for again, not there before the run, and without any part.
    """
    named = found["uploads"]
    names = [name for name in found["files"] if name not in named] + found.get("doubled", [])
    keys = {output.key_of(name) for name in names}
    for upload, (key, _) in output.uploads().items() if keys else ():
        known = upload in found["others"] or upload in named.values()
        if key in keys and not known and not output.parts(key, upload):
            yield key, upload


def text_of(journal: Mapping[str, Any]) -> bytes:
    return json.dumps(journal, separators=(",", ":")).encode()
