"""Checkpoints of several files: shards with their index, and the files of ranks. Which files are
theirs, what their keys are called, how tensors are dealt out to files and found again.

The rule for shards is huggingface_hub's `split_state_dict_into_shards_factory`: in order, never
packed again, a tensor above the limit alone in its file. The order is natural here (layer 2 before
layer 10), so that a model's layers lie in the order in which they are loaded, and so that the plan
does not depend on the order of the rules. What an index says is a claim of the checkpoint's author:
it may name plain files beside it and nothing else, and no file there may leave a doubt.

Two ways of laying out ranks are known: `consolidated.00.pth`, `consolidated.01.pth` (Meta's
releases), and a folder for each rank, `mp_rank_00/…`, `mp_rank_01/…` (Megatron, tensor parallel).
The number is the rank, from 0 on without a gap: a rank that is missing would leave tensors that
look whole and are not. A key that stands in one file only keeps its name if that is the file of
rank 0, so that what is replicated nowhere (one rank, or what only the first one writes) needs no
`@` in any rule.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeVar

from ..core.errors import Report, fail, listed, printable
from ..core.spec import Spec
from ..core.templates import rank_of
from .blobs import FileBlob
from .index import Index
from .jsontext import parse
from .paths import Folder, Place, check_weight_names, plain_name, same_when_folded

# where tensors lie
T = TypeVar("T")
INDEX = ".index.json"
MAX_INDEX = 120_000_000  # bytes; an entry is about 100
WHICH_HELP = "pass the file or the index itself"

_SHARD = re.compile(r"(.+)-(\d{5,9})-of-(\d{5,9})(\.[a-z]+)", re.ASCII)


class _Padded(dict[str, str]):
    """Segment of a key -> the segment with the lengths of digit runs before them, made once."""

    def __missing__(self, segment: str) -> str:
        made = re.sub("[0-9]+", lambda m: f"{len(m[0].lstrip('0')):04}{m[0].lstrip('0')}", segment)
        self[segment] = made
        return made


def in_natural_order(keys: Iterable[str]) -> list[str]:
    """The keys sorted by code point, runs of ASCII digits by value, equal ones by code point."""
    padded = _Padded().__getitem__
    rank = {key: ".".join(map(padded, key.split("."))) for key in keys}
    return sorted(sorted(rank), key=rank.__getitem__)


def deal(keys: Sequence[str], specs: Mapping[str, Spec], limit: int) -> list[list[str]]:
    """The keys of each shard, at least one. A shard of several tensors is at most `limit` bytes."""
    shards: list[list[str]] = []
    current: list[str] = []
    filled = 0
    sizes: dict[int, int] = {}
    for key in keys:
        spec = specs[key]
        size = sizes.get(id(spec))
        if size is None:
            size = sizes[id(spec)] = spec.nbytes
        if size > limit:
            shards.append([key])
            continue
        if filled + size > limit:
            shards.append(current)
            current, filled = [], 0
        current.append(key)
        filled += size
    if current or not shards:
        shards.append(current)
    return shards


def shard_names(count: int, suffix: str = ".safetensors") -> list[str]:
    """`model.safetensors`, or `model-00001-of-00003.safetensors` and so on."""
    if count == 1:
        return [f"model{suffix}"]
    return [f"model-{i:05}-of-{count:05}{suffix}" for i in range(1, count + 1)]


@dataclass(frozen=True, slots=True)
class ShardSet:
    """Files called `stem-00001-of-00003.suffix`: a `title` for all of them, those `absent`, those
    numbered `beyond` the total.

    `stem` is what the names of all sets of the same weights begin with, and their suffix.
    """

    title: str
    stem: tuple[str, str]
    absent: tuple[str, ...]
    beyond: tuple[str, ...]

    def check_whole(self, label: str) -> None:
        """M908 naming the files that are missing."""
        if self.absent:
            fail(
                "M908",
                f"{label}: {len(self.absent)} files of {self.title} are missing: "
                f"{listed(list(self.absent))}",
                help="fetch them again",
            )


def shard_sets(names: Iterable[str]) -> list[ShardSet]:
    """The sets that the numbered ones of `names` belong to, sorted; other names are passed over.

    More than 100,000 shards are not believed: listing what is absent would fill the memory.
    """
    groups: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in names:
        match = _SHARD.fullmatch(name)
        if match and len(match[2]) == len(match[3]) and int(match[3]) <= 100_000:
            groups.setdefault((match[1], match[3], match[4]), {})[int(match[2])] = name
    out = []
    for (stem, total, suffix), present in sorted(groups.items()):
        numbers = range(1, int(total) + 1)
        absent = [
            f"{stem}-{i:0{len(total)}}-of-{total}{suffix}" for i in numbers if i not in present
        ]
        beyond = [name for i, name in sorted(present.items()) if i not in numbers]
        out.append(
            ShardSet(f"{stem}-*-of-{total}{suffix}", (stem, suffix), tuple(absent), tuple(beyond))
        )
    return out


class Unit(NamedTuple):
    """What one index, one numbering or one rank makes a unit: its files, and the index that says
    which key stands where.

    Names are paths in the checkpoint's folder.
    """

    names: list[str]
    index_name: str | None = None
    weight_map: Mapping[str, str] | None = None


def index_in(names: Iterable[str], suffixes: tuple[str, ...], label: str) -> str | None:
    """The one index of files with one of these suffixes among the names of a folder, None if it has
    none; M915 if it has several.
    """
    indexes = [n for n in names if n.endswith(INDEX) and n.removesuffix(INDEX).endswith(suffixes)]
    if len(indexes) > 1:
        fail("M915", f"{label}: holds {len(indexes)} indexes: {listed(indexes)}", help=WHICH_HELP)
    return indexes[0] if indexes else None


def indexed(
    folder: Folder, below: str, beside: Iterable[str], name: str, opened: FileBlob | None = None
) -> Unit:
    """The files that the index `name` in the folder `below` ("" or with a slash at its end) names,
    in natural order.

    `beside` are all names there, `opened` is the index if it is open already. M906 for anything but
    an index, M907 for names that are not those of plain files with the index's suffix, M908 for
    files that are not there, M914 above `MAX_INDEX`, and M915 for names that some file systems take
    for one, or where a file beside it could be meant as well.
    """
    label = folder.label(below + name)
    blob = opened or folder.open(below + name)
    try:
        if blob.size > MAX_INDEX:
            fail("M914", f"{label}: an index of {blob.size} bytes, more than {MAX_INDEX}")
        # transformers has written total_size as a float
        content = parse(blob.read(0, blob.size), label, floats=True)
    finally:
        if opened is None:
            blob.close()
    weight_map = content.get("weight_map") if type(content) is dict else None
    if type(weight_map) is not dict or not {str}.issuperset(map(type, weight_map.values())):
        fail("M906", f"{label}: has no weight_map of key to file name")
    whole = name.removesuffix(INDEX)
    suffix = whole[whole.rfind(".") :]
    names = in_natural_order(set(weight_map.values()))
    check_weight_names(folder, below + name, names, suffix)
    for group in same_when_folded(names):
        fail(
            "M915",
            f"{label}: names that differ only in case are one file on some systems: "
            f"{listed(group)}",
        )
    present, named, sets = frozenset(beside), frozenset(names), shard_sets(names)
    # a set of another size under the same name is a doubt too, unless the index itself was passed
    titles, stems = {s.title for s in sets}, {s.stem for s in sets} if opened is None else set()
    numbered = [
        n
        for n in present - named
        if any(s.title in titles or s.stem in stems for s in shard_sets([n]))
    ]
    doubtful = sorted({*numbered, *(present - named).intersection((whole, f"model{suffix}"))})
    if doubtful:
        fail(
            "M915",
            f"{label}: does not name {listed(doubtful)} beside it",
            help=f"{WHICH_HELP}, or move away what does not belong here",
        )
    if absent := [n for n in names if n not in present]:
        fail(
            "M908",
            f"{label}: {len(absent)} of {len(names)} files are missing: {listed(absent)}",
            help="fetch them again",
        )
    if below:
        paths = {n: below + n for n in names}
        weight_map = {key: paths[n] for key, n in weight_map.items()}
    return Unit([below + n for n in names], below + name, weight_map)


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
    """How files of ranks are called, without suffix: `consolidated.00`, `mp_rank_00/model`."""

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
    """What the folder of a rank holds; nothing for anything but a folder. M907 if it is a link."""
    return tuple(folder.names(name)) if folder.is_folder(name) else ()


def join_ranks(parts: Sequence[Mapping[str, T]], label: str) -> Mapping[str, T]:
    """The tensors of all ranks: `key@r` where a key stands in several files, or in one other than
    the first; else plain.

    M921 naming keys that end like a rank themselves.
    """
    if len(parts) == 1:
        return parts[0]
    out: dict[str, T] = {}
    if all(part.keys() == parts[0].keys() for part in parts[1:]):
        # as nearly always
        refuse_literal(parts[0], label)
        for rank, part in enumerate(parts):
            mark = f"@{rank}"
            out.update(zip([key + mark for key in part], part.values(), strict=True))
        return out
    refuse_literal(dict.fromkeys(chain.from_iterable(parts)), label)
    several = set[str]().union(*parts[1:])
    for rank, part in enumerate(parts):
        for key, stored in part.items():
            out[f"{key}@{rank}" if rank or key in several else key] = stored
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
    joined = index.tree is not None and len(index.tree.parts) > 1
    if not (several or joined):
        refuse_literal(index.tensors, printable(path, 240))


def by_rank(keys: Iterable[str]) -> list[list[tuple[str, str]]]:
    """For each rank, from 0 to the highest of the keys: (key, its name in the file of the rank).

    M916 naming keys of which two would be one in the file of rank 0, or of too many ranks.
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
