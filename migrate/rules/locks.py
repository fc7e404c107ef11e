"""The lock of a lineage: what its released rule files and layouts mean, so that none changes
unnoticed.

`rules.lock` stands beside `layouts.yaml`. Its first line is the sum over the others; each of these
has a hash, the id of a rule file (or `layouts.yaml` for what that one says of layouts), and the
meaning itself as canonical JSON, of which the hash is made. The meaning is there so that a change
can be told by rule and field, not by two hashes alone. A file that the lock does not name is new
and may change until the lineage is sealed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.errors import Diagnostic, Report, Span, fail, listed, option, printable
from ..source import yaml
from .files import LAYOUTS, LoadedFile, files_below, shipped_lineage

if TYPE_CHECKING:
    from .lineage import Lineage

LOCK = "rules.lock"
# more than any lineage means
MAX_BYTES = 64 << 20
_LINE = re.compile(r"(m1:[0-9a-f]{64}) (\S+) (.*)")
_SHOWN = 8
# folders of <lineage>/<to>/<slug>.yaml
_DEPTH = 2
# values longer than this are cut in the list of changes
_LONGEST = 200
# what a layout says to people, and what belongs to the names of a checkpoint's folder
_PROSE = ("title", "message", "note", "status")


@dataclass(frozen=True, slots=True)
class Lock:
    """What was sealed: id -> (hash, meaning as JSON text); layouts stand under `layouts.yaml`."""

    path: Path
    entries: Mapping[str, tuple[str, str]]

    def text(self) -> str:
        """The file: sorted, with the sum of all other lines in the first."""
        lines = [f"{code} {name} {said}\n" for name, (code, said) in sorted(self.entries.items())]
        return "".join([_sum(lines) + "\n", *lines])

    @property
    def sum(self) -> str:
        """The first line, which stands for the whole."""
        return self.text().partition("\n")[0]


def read_lock(home: Path) -> Lock | None:
    """The lock of the lineage in this folder, None if it has none; M522 if it cannot be one."""
    path = home / LOCK
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        fail("M522", f"{printable(str(path), 300)} cannot be read: {error.strerror}")
    if len(data) > MAX_BYTES:
        _refuse(path, 1, f"more than {MAX_BYTES >> 20} MB")
    try:
        lines = data.decode("ascii").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        _refuse(path, data.count(b"\n", 0, error.start) + 1, "a byte outside ASCII")
    for number, line in enumerate(lines, 1):
        if line.startswith(("<<<<<<<", "=======", ">>>>>>>", "|||||||")):
            _refuse(path, number, "a conflict marker of a merge", line)
    entries: dict[str, tuple[str, str]] = {}
    for number, line in enumerate(lines[1:], 2):
        found = _LINE.fullmatch(line.rstrip("\n"))
        if found is None:
            _refuse(path, number, "not a hash, an id and what the file means", line)
        code, name, said = found.groups()
        if name in entries:
            _refuse(path, number, f"`{printable(name)}` a second time", line)
        if _hash(said) != code:
            _refuse(
                path, number, f"a hash that is not that of what `{printable(name)}` means", line
            )
        entries[name] = (code, said)
    if not lines or lines[0].rstrip("\n") != _sum(lines[1:]):
        _refuse(path, 1, "a sum that is not that of the other lines", lines[0] if lines else "")
    return Lock(path, entries)


def lock_of(home: Path, lineage: Lineage, files: Iterable[LoadedFile]) -> Lock:
    """The lock that the lineage would have if it were sealed now."""
    from .model import meaning

    said = {file.model.id: _canonical(meaning(file.model)) for file in files}
    said[LAYOUTS] = layouts_said(lineage)
    return Lock(home / LOCK, {name: (_hash(text), text) for name, text in said.items()})


def layouts_said(lineage: Lineage) -> str:
    """What `layouts.yaml` says of layouts, without prose, as canonical JSON."""
    layouts = [_plain(layout) for layout in lineage.layouts]
    return _canonical({"ordered": lineage.ordered, "layouts": layouts})


def layouts_hash(lineage: Lineage) -> str:
    """The hash of `layouts_said`; of a packaged lineage as it was when it was packaged."""
    return lineage.sealed or _hash(layouts_said(lineage))


def check_lineage(home: Path, lineage: Lineage) -> None:
    """M521 where the lineage has a lock and its layouts are others, or a sealed file is gone."""
    lock = read_lock(home)
    if lock is None:
        return
    report = Report()
    gone = sorted(lock.entries.keys() - {LAYOUTS, *lineage.ids})
    report.diagnostics.extend(_gone(lock, name) for name in gone)
    if (sealed := lock.entries.get(LAYOUTS)) and sealed[0] != layouts_hash(lineage):
        span = Span(str(home / LAYOUTS), 1, 1, 1)
        now = layouts_said(lineage) if not lineage.sealed else ""
        report.diagnostics.append(_changed(LAYOUTS, sealed, layouts_hash(lineage), now, span))
    report.check()


def check_files(files: Iterable[LoadedFile], *, alone: bool = False) -> None:
    """M521 for each of the rule files that means something else than what was sealed of it; where
    they are used `alone`, without `check_lineage`, also for sealed files of the same folder that
    are gone.
    """
    homes: dict[Path, list[LoadedFile]] = {}
    for file in files:
        if (home := _home(file.path)) is not None:
            homes.setdefault(home, []).append(file)
    report = Report()
    for home, inside in homes.items():
        lock = read_lock(home)
        if lock is None:
            continue
        for file in inside:
            sealed = lock.entries.get(file.model.id)
            if sealed is not None and sealed[0] != file.hash:
                report.diagnostics.append(_changed_file(file.model.id, file, sealed))
        if alone:
            report.diagnostics.extend(_lost(home, lock, inside))
    report.check()


def _lost(home: Path, lock: Lock, files: Collection[LoadedFile]) -> Iterator[Diagnostic]:
    """M521 for each sealed id that no file of the lineage has, by what it means now where one of
    `files` stands in its place.
    """
    lost = lock.entries.keys() - {LAYOUTS, *(file.model.id for file in files)}
    if not lost:
        return
    shipped = shipped_lineage(home)
    lost -= set(map(_id_of, files_below(home)) if shipped is None else shipped.ids)
    placed = {(home.name, *file.path.resolve().parts[-2:]): file for file in files}
    for name in sorted(lost):
        lineage, *place = name.split("/")
        file = placed.get((lineage, *place[:-1], f"{place[-1]}.yaml")) if place else None
        yield _changed_file(name, file, lock.entries[name]) if file else _gone(lock, name)


def _id_of(path: Path) -> str:
    try:
        return _id_in(path.read_bytes())
    except OSError:
        return ""


# a training process attaches the same rules to module after module
@lru_cache(maxsize=256)
def _id_in(data: bytes) -> str:
    said = yaml.read_yaml(data.decode("utf-8-sig", "replace"), "", Report()).data
    return str(said.get("id")) if isinstance(said, dict) else ""


def _changed_file(name: str, file: LoadedFile, sealed: tuple[str, str]) -> Diagnostic:
    """M521 for the rule file that stands for a sealed id and means something else."""
    from .loading import load_files
    from .model import meaning

    # a packaged file is read as it is written, because its model there is a stand-in
    model = load_files([file.path])[0].model if file.sealed else file.model
    return _changed(name, sealed, file.hash, _canonical(meaning(model)), file.span("id"))


def compared(old: Lock, new: Lock, spans: Mapping[str, Span]) -> list[Diagnostic]:
    """M521 for each sealed file that is gone or means something else."""
    out = []
    for name, sealed in sorted(old.entries.items()):
        now = new.entries.get(name)
        if now is None:
            out.append(_gone(old, name))
        elif now[0] != sealed[0]:
            out.append(_changed(name, sealed, *now, spans[name]))
    return out


def _home(path: Path) -> Path | None:
    """The folder with the lock of the lineage that a rule file lies in, whichever way leads there.

    A lock further up than rule files are put is one only beside layouts.
    """
    for place in dict.fromkeys((os.path.abspath(path), os.path.realpath(path))):
        for depth, folder in enumerate(Path(place).parents):
            beside = depth < _DEPTH or os.path.isfile(folder / LAYOUTS)
            if beside and os.path.isfile(folder / LOCK):
                return folder
    return None


def _gone(lock: Lock, name: str) -> Diagnostic:
    return Diagnostic(
        "M521",
        f"`{printable(name)}` was sealed and is gone",
        spans=(Span(str(lock.path), 1, 1, 1),),
        notes=(f"sealed as {lock.entries[name][0]}",),
        help="put the file back: stamps of checkpoints name it; `supersedes` in another file "
        "replaces it",
    )


def _changed(name: str, sealed: tuple[str, str], code: str, now: str, span: Span) -> Diagnostic:
    notes = [f"sealed as {sealed[0]}", f"it is now {code}"]
    if now:
        found = list(_differences(json.loads(sealed[1]), json.loads(now)))
        notes += found[:_SHOWN]
        if len(found) > _SHOWN:
            notes.append(f"and {len(found) - _SHOWN} more differences")
    what = "the layouts mean" if name == LAYOUTS else f"`{printable(name)}` means"
    way = (
        "put back what they said, or add a layout for what is new"
        if name == LAYOUTS
        else "put back what it said and write a rule file of its own for the change, with "
        f"`supersedes: {printable(name)}` if this one never worked"
    )
    return Diagnostic(
        "M521", f"{what} something else than when sealed", spans=(span,), notes=tuple(notes),
        help=f"{way}; `migrate seal {option('replace', True)}` seals what was never released",
    )  # fmt: skip


def _differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Each field that differs, with what it was and is; rules and layouts by their names."""
    if isinstance(before, dict) and isinstance(after, dict):
        for word in sorted(before.keys() | after.keys()):
            if before.get(word) == after.get(word):
                continue
            if word in ("rules", "layouts") and not place:
                yield from _by_name(word[:-1], before.get(word, []), after.get(word, []))
            elif isinstance(before.get(word), dict) and isinstance(after.get(word), dict):
                yield from _differences(before[word], after[word], f"{place}{printable(word)}.")
            else:
                yield f"{place}{printable(word)}: {_short(before, word)} → {_short(after, word)}"
    else:
        yield f"{place or 'all'}: {_cut(before)} → {_cut(after)}"


def _by_name(kind: str, before: list[Any], after: list[Any]) -> Iterator[str]:
    old, new = ({item["name"]: item for item in some} for some in (before, after))
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in new:
            yield f"{kind} `{printable(name)}` is gone"
        elif name not in old:
            yield f"{kind} `{printable(name)}` is new"
        elif old[name] != new[name]:
            yield from _differences(old[name], new[name], f"{kind} `{printable(name)}`, ")
    if old == new:
        yield f"the order of {kind}s: {listed(list(old))} → {listed(list(new))}"


def _short(some: Mapping[str, Any], word: str) -> str:
    return _cut(some[word]) if word in some else "nothing"


def _cut(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _plain(value: Any) -> Any:
    """A layout as JSON data without prose and without what stands at its default."""
    from pydantic import BaseModel

    from .model import meaning

    if isinstance(value, BaseModel):
        return meaning(value)
    if is_dataclass(value):
        out = {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
        return {
            k: v for k, v in out.items() if k not in _PROSE and v not in ("", None, [], {}, False)
        }
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _canonical(value: Any) -> str:
    return json.dumps(
        value, ensure_ascii=True, sort_keys=True, separators=(",", ":"), allow_nan=True
    )


def _hash(said: str) -> str:
    return f"m1:{hashlib.sha256(said.encode('ascii')).hexdigest()}"


def _sum(lines: Iterable[str]) -> str:
    return _hash("".join(line.rstrip("\n") + "\n" for line in lines))


def _refuse(path: Path, number: int, what: str, line: str = "") -> NoReturn:
    text = line.rstrip("\n")[:_LONGEST]
    fail(
        "M522",
        f"{printable(str(path), 300)} has {what}",
        spans=(Span(str(path), number, 1, max(1, len(text)), text),),
        help="take the file as it was committed; `migrate seal` writes it anew after a merge of "
        "both sides' rule files",
    )
