"""Checkpoints that several ranks wrote: which files are theirs, what their keys are called, how
files are called on the way out.

Two ways of laying them out are known: `consolidated.00.pth`, `consolidated.01.pth` (Meta's
releases), and a folder for each rank, `mp_rank_00/…`, `mp_rank_01/…` (Megatron, tensor parallel).
The number is the rank, from 0 on without a gap: a rank that is missing would leave tensors that
look whole and are not. A key that stands in one file only keeps its name if that is the file of
rank 0, so that what is replicated nowhere (one rank, or what only the first one writes) needs no
`@` in any rule.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..core.errors import Report, fail, listed, printable
from ..core.templates import rank_of
from .blobs import Stored
from .index import Index
from .paths import Folder, Place, plain_name

MAX_RANKS = 10_000
# what the names of files and folders of ranks begin with
RANK_NAMES = ("consolidated.", "mp_rank_")
_FILE = re.compile(r"(consolidated\.)([0-9]{2,5})()", re.ASCII)
_FOLDER = re.compile(r"(mp_rank_)([0-9]{2,5})((?:_[0-9]+)*)", re.ASCII)
_NAME = re.compile(r"(consolidated\.|mp_rank_)([0-9]{2,5})(/.+)?(\.[a-z]+)", re.ASCII)
_PARALLEL = (
    "the second number is that of a pipeline stage or an expert group, and such parts are "
    "not joined by rank"
)


class Naming(NamedTuple):
    """How the files of ranks are called, without their suffix: `consolidated.00`,
    `mp_rank_00/model`.
    """

    before: str = "consolidated."
    digits: int = 2
    after: str = ""

    def name(self, rank: int, suffix: str) -> str:
        return f"{self.before}{rank:0{self.digits}}{self.after}{suffix}"


def naming(files: Sequence[str]) -> Naming | None:
    """How the first of these weight files is called, if by its rank."""
    match = _NAME.fullmatch(files[0]) if files else None
    if (
        match is None
        or (match[1] == "mp_rank_") != bool(match[3])
        or (match[3] and not plain_name(match[3][1:]))
    ):
        return None
    # what stands in a folder may be many shards, and is one file on the way out
    alone = match[3] is None or not any(f.startswith(f"{match[1]}{match[2]}/") for f in files[1:])
    return Naming(match[1], len(match[2]), (match[3] or "") if alone else "/model")


class Entry(NamedTuple):
    """What one rank wrote: a `name` in the checkpoint's folder, that of a file or, where `names`
    lists what it holds, of a folder.
    """

    name: str
    names: tuple[str, ...] | None


def rank_entries(place: Place, suffix: str) -> list[Entry]:
    """The files or folders of the ranks in a folder, by rank; [] if it is no checkpoint of ranks
    with weights of this suffix.

    M920 naming all ranks that are missing; M915 where they are not the only weights there, or two
    stand for one rank.
    """
    found: dict[str, list[tuple[int, Entry]]] = {}
    parallel: list[str] = []
    for name in place.names:
        if match := _FILE.fullmatch(name.removesuffix(suffix)) if name.endswith(suffix) else None:
            found.setdefault(match[1], []).append((int(match[2]), Entry(name, None)))
        elif match := _FOLDER.fullmatch(name):
            within = _names(place.folder, name)
            if any(_holds_weights(n, suffix) for n in within):
                parallel += [name] * bool(match[3])
                found.setdefault(match[1], []).append((int(match[2]), Entry(name, within)))
    if not found:
        return []
    label = place.folder.label("")
    if parallel:
        fail(
            "M915",
            f"{label}: {listed(parallel)}: {_PARALLEL}",
            help="merge them with the framework that wrote them",
        )
    entries = [entry for kind in found.values() for _, entry in kind]
    taken = {entry.name for entry in entries}
    others = [n for n in place.names if _holds_weights(n, suffix) and n not in taken]
    if others or len(found) > 1:
        mixed = [
            *(n for n in others),
            *(kind[0][1].name for kind in found.values() if len(found) > 1),
        ]
        fail(
            "M915",
            f"{label}: holds the files of {len(entries)} ranks "
            f"({listed([e.name for e in entries], 3)}) and beside them {listed(mixed)}",
            help="pass the file or the index that you mean, or move away what does not belong here",
        )
    return _complete(next(iter(found.values())), place, suffix)


def _complete(found: list[tuple[int, Entry]], place: Place, suffix: str) -> list[Entry]:
    by_rank: dict[int, list[Entry]] = {}
    for rank, entry in sorted(found):
        by_rank.setdefault(rank, []).append(entry)
    label = place.folder.label("")
    if twice := [e.name for same in by_rank.values() if len(same) > 1 for e in same]:
        fail(
            "M915",
            f"{label}: two stand for one rank: {listed(twice)}",
            help="move away what does not belong here",
        )
    if max(by_rank) >= MAX_RANKS:
        fail(
            "M914",
            f"{label}: {by_rank[max(by_rank)][0].name} would be one of more than {MAX_RANKS} ranks",
        )
    sample = found[0][1]
    called = (
        naming([sample.name if sample.names is None else f"{sample.name}/model{suffix}"])
        or Naming()
    )
    absent = [
        called.name(r, suffix).partition("/")[0] for r in range(max(by_rank)) if r not in by_rank
    ]
    if absent:
        fail(
            "M920",
            f"{label}: {len(absent)} of {max(by_rank) + 1} ranks are missing: {listed(absent, 20)}",
            help="fetch them again: the tensors of a checkpoint are whole only with the files of "
            "all its ranks",
        )
    return [same[0] for same in by_rank.values()]


def _holds_weights(name: str, suffix: str) -> bool:
    return name.endswith((suffix, f"{suffix}.index.json")) and not name.startswith("migrate.items.")


def _names(folder: Folder, name: str) -> tuple[str, ...]:
    """What the folder of a rank holds; nothing if it is no folder. M907 if it is a link."""
    if not os.path.isdir(os.path.join(folder.path, name)):
        return ()
    return tuple(folder.names(name))


def join_ranks(parts: Sequence[Mapping[str, Stored]], label: str) -> Mapping[str, Stored]:
    """The tensors of all ranks: `key@r` where a key stands in several files, or in one other than
    the first; else plain.

    M921 naming keys that end like a rank themselves.
    """
    if len(parts) == 1:
        return parts[0]
    refuse_literal((key for part in parts for key in part), label)
    counts = Counter(key for part in parts for key in part)
    out: dict[str, Stored] = {}
    for rank, part in enumerate(parts):
        for key, stored in part.items():
            out[key if rank == 0 and counts[key] == 1 else f"{key}@{rank}"] = stored
    return out


def refuse_literal(keys: Iterable[str], label: str) -> None:
    """M921 naming the keys, as they stand in files, that end like a rank."""
    unfit = list(dict.fromkeys(key for key in keys if "@" in key and rank_of(key) is not None))
    if unfit:
        fail(
            "M921",
            f"{label}: keys that end in `@` and a number: {listed(unfit)}",
            help="rename them where the checkpoint is written",
        )


def check_names(index: Index, path: str) -> None:
    """M921 if keys of one file, or of shards, would be taken for those of ranks on the way out."""
    called = naming(index.files)
    several = called is not None and any(
        not f.startswith(called.name(0, "").partition("/")[0]) for f in index.files
    )
    if not several:
        refuse_literal(index.tensors, printable(path, 240))


def by_rank(keys: Iterable[str]) -> list[list[tuple[str, str]]]:
    """For each rank, from 0 to the highest that a key names: (key, the name it has in that rank's
    file).

    M916 naming keys of which two would be one in a file of rank 0, and keys of more ranks than can
    be.
    """
    found: dict[int, list[tuple[str, str]]] = {0: []}
    for key in keys:
        rank = rank_of(key) if "@" in key else None
        found.setdefault(rank or 0, []).append(
            (key, key if rank is None else key.rpartition("@")[0])
        )
    report = Report()
    if max(found) >= MAX_RANKS:
        report.add("M916", f"{found[max(found)][0][0]} would be one of more than {MAX_RANKS} ranks")
    names = Counter(name for _, name in found[0])
    if twice := [key for key, name in found[0] if names[name] > 1]:
        report.add(
            "M916",
            f"the file of rank 0 cannot hold both of {listed(twice)}",
            help="rename one of them",
        )
    report.check()
    return [found.get(rank, []) for rank in range(max(found) + 1)]
