"""GGUF files, as llama.cpp reads them: one file, or shards called `…-00001-of-00003.gguf`.

A tensor of a plain type is a tensor as any other, its axes in torch's order. One whose type has
blocks of codes and scales is its bytes, uint8 with the blocks of a row along the last axis, and
beside it stands `…_type`, a scalar: the number of its type, which lies in the header of the file.
So the two are parts of a tensor in a number format, as those of every other format, and stay what
they are in any file that they are copied to.

The key-values are a side file, `gguf.json`: `llama.block_count` is `block_count` in `llama`. A key
that is a value and begins others (`tokenizer.chat_template`) is the value at the empty name. What
is longer than a configuration needs, as the tokens of a tokenizer, stands there with its kind and
its length alone.

It is a format of sources: nothing is written as GGUF.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ..core.errors import CheckpointError, Report, fail, listed, plural, printable
from ..source.blobs import FileBlob, Stored
from ..source.index import FileSource, Index, SideFile, Source
from ..source.paths import Beside, Folder, Place, look_beside, read_history
from ..source.shards import in_natural_order, shard_sets
from ._ggufheader import MAGIC, GgufHeader, Left, read_header

SUFFIX = ".gguf"
# the side file that the key-values are
KEY_VALUES = "gguf.json"
# what is behind the name of a tensor in blocks for that of its type
TYPE = "_type"
_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"
_WHICH = "pass the file that you mean; of a sharded one the first"


def _open(place: Place) -> Source:
    folder = place.folder
    blobs: list[FileBlob] = []
    try:
        names = _names(place)
        headers = _read_headers(folder, names, blobs, place.file)
        label = printable(place.path, 240)
        values = _check_shards(names, headers, label)
        tensors = _merged(names, headers, label)
        text = _as_json(values, label)
        beside = Beside(folder)
        history = None
        if place.file is None:
            beside = look_beside(folder, frozenset(names))
            history = read_history(folder, place.names)
            if any(f.path == KEY_VALUES for f in beside.side_files):
                fail(
                    "M915",
                    f"{label}: holds a {KEY_VALUES}, which is what the key-values of the GGUF file "
                    "are called",
                    help="pass the file, or move away what does not belong here",
                )
        side_files = tuple(sorted((*beside.side_files, SideFile(KEY_VALUES, len(text)))))
        index = Index(
            tensors,
            tuple(names),
            side_files=side_files,
            left_out=beside.left_out,
            notes=tuple(_notes(headers, values)),
        )
        return FileSource(
            place.path,
            "gguf",
            index,
            blobs,
            history=history,
            side=_side_reader(text, beside.read),
            watched=beside.identities,
            locate=folder.current,
            release=place.close,
            suspend=place.folder.suspend,
        )
    except BaseException:
        for blob in blobs:
            blob.close()
        raise


def _side_reader(text: bytes, others: Callable[[str], bytes]) -> Callable[[str], bytes]:
    return lambda path: text if path == KEY_VALUES else others(path)


def _names(place: Place) -> list[str]:
    """The files of the checkpoint: the one that was passed and, if it is numbered, the others of
    its set; or all that a folder holds. M908, M915.
    """
    label = printable(place.path, 240)
    if place.file is None:
        names = [n for n in place.names if n.endswith(SUFFIX)]
    else:
        names = [place.file.name]
        if own := shard_sets(names):
            alike = (n for n in place.folder.names() if n.endswith(SUFFIX))
            names = in_natural_order([n for n in alike if _title(n) == own[0].title])
            if names[0] != place.file.name:
                fail("M915", f"{label}: is not the first file of {own[0].title}", help=_WHICH)
    sets = shard_sets(names)
    if len(names) == 1 and not sets:
        return names
    if len(sets) != 1 or sets[0].beyond or any(not shard_sets([n]) for n in names):
        fail(
            "M915",
            f"{label}: {len(names)} GGUF files, so it is unclear what belongs together: "
            f"{listed(names)}",
            help=_WHICH,
        )
    sets[0].check_whole(label)
    return in_natural_order(names)


def _title(name: str) -> str | None:
    """What all files of a numbered one's set are called; None for one without a number."""
    return next((found.title for found in shard_sets([name])), None)


def _read_headers(
    folder: Folder, names: Sequence[str], blobs: list[FileBlob], opened: FileBlob | None
) -> list[GgufHeader]:
    """The headers of all files, which join the `blobs`; the problems of all files at once."""
    folder.expect(names)
    report = Report()
    headers = []
    for number, name in enumerate(names):
        try:
            own = opened is not None and opened.name == name
            blobs.append(opened if own and opened is not None else folder.open(name))
            headers.append(read_header(blobs[-1], number, folder.label(name)))
        except CheckpointError as error:
            report.diagnostics += error.diagnostics
            if len(report.diagnostics) >= 20:
                break
    report.check()
    return headers


def _check_shards(
    names: Sequence[str], headers: Sequence[GgufHeader], label: str
) -> dict[str, Any]:
    """The key-values of all files but what numbers them. M915 where that contradicts the names, or
    two files each other; M908 for a file of several that is alone.
    """
    report = Report()
    out: dict[str, Any] = {}
    total = sum(len(header.tensors) for header in headers)
    for number, (name, header) in enumerate(zip(names, headers, strict=True)):
        values = dict(header.values)
        said = values.pop(_COUNT, 1), values.pop(_NUMBER, 0), values.pop(_TENSORS, total)
        if len(names) == 1 and said[0] != 1 and said[0] != 0:
            fail(
                "M908",
                f"{label}: is one of {said[0]} files, and its name does not tell the others",
                help="give the files the names that llama-gguf-split writes",
            )
        if len(names) > 1 and said != (len(names), number, total):
            report.add(
                "M915",
                f"{label}: {printable(name)} says that it is number {said[1]} of {said[0]} files "
                f"with {said[2]} tensors, and it is number {number} of {len(names)} with {total}",
            )
        for key, value in values.items():
            if key in out and repr(out[key]) != repr(value):
                report.add("M915", f"{label}: two files give {printable(key)} other values")
            out.setdefault(key, value)
        if len(report.diagnostics) >= 20:
            break
    report.check()
    return out


def _merged(names: Sequence[str], headers: Sequence[GgufHeader], label: str) -> dict[str, Stored]:
    """The tensors of all files, each one in blocks with its type behind it. M915 naming what stands
    in two files, M906 a tensor that has the name of a type.
    """
    report = Report()
    out: dict[str, Stored] = {}
    for name, header in zip(names, headers, strict=True):
        for key, stored in header.tensors.items():
            if key in out:
                first = names[out[key].blob]
                report.add(
                    "M915" if first != name else "M906",
                    f"{label}: {printable(key)} stands in {printable(first)} and in "
                    f"{printable(name)}",
                )
                if len(report.diagnostics) >= 20:
                    break
            out[key] = stored
            if key in header.marks:
                if key + TYPE in out:
                    report.add(
                        "M906",
                        f"{label}: {printable(key + TYPE)} is a tensor, and the name of what says "
                        f"the type of {printable(key)}",
                    )
                out[key + TYPE] = header.marks[key]
    report.check()
    return out


def _as_json(values: Mapping[str, Any], label: str) -> bytes:
    """The key-values as a JSON object of objects. M906 where two keys are one in it."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        here = out
        *before, last = key.split(".")
        for name in before:
            below = here.get(name)
            if not isinstance(below, dict):
                # a value that begins other keys
                below = here[name] = {} if below is None else {"": below}
            here = below
        if isinstance(here.get(last), dict):
            here, last = here[last], ""
        if last in here:
            fail("M906", f"{label}: the key {printable(key)} is that of another value as well")
        here[last] = _Described(value) if isinstance(value, Left) else value
    return (json.dumps(out, indent=2, ensure_ascii=False, default=_Described.held) + "\n").encode()


class _Described:
    """A value that is not kept, and that no other key goes into."""

    def __init__(self, left: Left) -> None:
        self.left = left

    def held(self) -> dict[str, Any]:
        return {"type": self.left.kind, "length": self.left.length}


def _notes(headers: Iterable[GgufHeader], values: Mapping[str, Any]) -> Iterable[str]:
    kinds: Counter[str] = Counter()
    unknown: list[str] = []
    for header in headers:
        for name, (number, known) in header.types.items():
            kinds[f"type {number}" if known is None else known.name] += 1
            if known is None:
                unknown.append(name)
    if kinds:
        counted = ", ".join(f"{name} ×{count}" for name, count in kinds.most_common())
        yield f"types of GGUF: {counted}"
    if unknown:
        yield (
            f"{plural(len(unknown), 'tensor')} of unknown types: {listed(unknown, 4)}; they are "
            "carried as bytes, with the padding behind them"
        )
    left = [key for key, value in values.items() if isinstance(value, Left)]
    if left:
        yield f"{KEY_VALUES} has the lengths alone of {listed(left, 8)}"


def _refuse_writing(*_: Any, **__: Any) -> NoReturn:
    fail(
        "M916",
        "GGUF is read and not written",
        help="write safetensors, and convert that with convert_hf_to_gguf.py of llama.cpp",
    )


class GgufFormat:
    """The format: `sniff` and `open` as `formats.Format` asks; `describe` refuses by name."""

    name = "gguf"
    suffixes = (SUFFIX,)

    def sniff(self, place: Place) -> int:
        if place.file is None:
            # other weights beside it are what a folder is more often about
            return 1 if any(name.endswith(SUFFIX) for name in place.names) else 0
        return 2 if place.file.name.endswith(SUFFIX) or place.head(4) == MAGIC else 0

    def open(self, place: Place) -> Source:
        """The checkpoint at a file or a folder; M901, M905 to M915, and M943."""
        return _open(place)

    describe = staticmethod(_refuse_writing)


FORMAT = GgufFormat()
