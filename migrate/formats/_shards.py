"""How tensors are dealt out to files, and found again: sizes as people write them, natural order,
greedy shards, their index.

The rule is huggingface_hub's `split_state_dict_into_shards_factory`: in order, never packed again,
a tensor above the limit alone in its file. The order is natural here (layer 2 before layer 10), so
that a model's layers lie in the order in which they are loaded, and so that the plan does not
depend on the order of the rules. What an index says is a claim of whoever wrote the checkpoint: it
may name plain files beside it and nothing else, and no file there may leave a doubt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..core.errors import fail, listed
from ..core.spec import Spec
from ..source.blobs import FileBlob
from ..source.jsontext import parse
from ..source.paths import Folder, check_weight_names, same_when_folded

INDEX = ".index.json"
MAX_INDEX = 120_000_000  # bytes; an entry is about 100
WHICH_HELP = "pass the file or the index itself"

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SHARD = re.compile(r"(.+)-(\d{5,9})-of-(\d{5,9})(\.[a-z]+)", re.ASCII)


def parse_size(size: int | str) -> int:
    """`size` in bytes: an int, or a number with B, kB, MB, GB, TB (powers of 1000) or KiB, MiB,
    GiB, TiB (of 1024).

    ValueError if it is neither (a float, say) or less than one byte. The SI meaning of GB is
    huggingface_hub's.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", size.lower(), re.ASCII)
        if not match or match[2] not in _UNITS or len(match[1]) > 18:
            raise ValueError(f"{size!r} is not a size: write 5GB or 500MB")
        number = match[1]
        # exact: 1.1GB through a float would be 1100000000.0000002
        whole, _, part = number.partition(".")
        scale: int = 10 ** len(part)
        count = int(whole + part) * _UNITS[match[2]] // scale
    elif isinstance(size, int) and not isinstance(size, bool):
        count = size
    else:
        raise ValueError(f"{size!r} is not a size: write 5GB, 500MB, or bytes as an int")
    if count < 1:
        raise ValueError(f"{size!r} is not a size: at least one byte is needed")
    return count


class _Padded(dict[str, str]):
    """Segment of a key -> the segment with its digit runs prefixed by their length, made once for
    each.
    """

    def __missing__(self, segment: str) -> str:
        made = re.sub("[0-9]+", lambda m: f"{len(m[0].lstrip('0')):04}{m[0].lstrip('0')}", segment)
        self[segment] = made
        return made


def in_natural_order(keys: Iterable[str]) -> list[str]:
    """The keys sorted by code point, runs of ASCII digits by their value; equal ones by code
    point.
    """
    padded = _Padded().__getitem__
    rank = {key: ".".join(map(padded, key.split("."))) for key in keys}
    return sorted(sorted(rank), key=rank.__getitem__)


def deal(keys: Sequence[str], specs: Mapping[str, Spec], limit: int) -> list[list[str]]:
    """The keys of each shard; at least one shard. The bytes of a shard of several tensors are at
    most `limit`.
    """
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

    `stem` is what sets of any size of the same weights begin with, and their suffix.
    """

    title: str
    stem: tuple[str, str]
    absent: tuple[str, ...]
    beyond: tuple[str, ...]


def shard_sets(names: Iterable[str]) -> list[ShardSet]:
    """The sets that the numbered ones of `names` belong to, sorted; names of another form are
    passed over.

    A name that claims more than 100,000 shards is no shard: listing what is absent would fill the
    memory.
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

    `beside` are all names there, `opened` is the index if it is open already. M906 for what is no
    index, M907 for names that are not those of plain files with the index's suffix, M908 for files
    that are not there, M914 above `MAX_INDEX`, and M915 for names that some file systems take for
    one, or where a file beside it could be meant as well.
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
    if type(weight_map) is not dict or not all(type(v) is str for v in weight_map.values()):
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
    return Unit(
        [below + n for n in names], below + name, {key: below + n for key, n in weight_map.items()}
    )
