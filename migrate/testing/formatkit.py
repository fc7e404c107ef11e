"""What every format has to satisfy, for the built-in ones and for those of third parties.

    import pytest
    from migrate.testing import formatkit

    def test_my_format_is_described():
        formatkit.check_description("my_format")

    @pytest.mark.parametrize("name, number", formatkit.cases(["my_format"]))
    def test_my_format(name, number, tmp_path):
        formatkit.check_sample(name, number, tmp_path)

    def test_my_format_refuses_what_is_broken(tmp_path):
        formatkit.check_broken("my_format", tmp_path)

A sample is a set of tensors, described as one file and as a folder. What is promised must be whole
before a byte is written: names, headers, and each tensor at its place, one after the other. It is
then written as promised, found among all formats that there are, and read again: the same keys,
dtypes, shapes and bytes, and the stamp. Files that were cut or changed must be refused by a
`MigrateError`, or read within their own bytes. Failures are AssertionErrors.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from .. import formats
from ..core.errors import MigrateError
from ..core.spec import BITS, Spec
from ..running.eager import read_elements
from ..source.blobs import read_bytes, rows_of
from .opkit import require

if TYPE_CHECKING:
    from ..source.index import Source
    from ..source.target import OutputFile, Target

# as a stamp is: JSON, with letters outside of ASCII
STAMP = '{"format_version": 1, "kind": "stamp", "why": "für alle – 所有"}'
LARGE = 1 << 40
SAMPLES: tuple[Mapping[str, Spec], ...] = (
    {},
    {"w": Spec("float32", (2, 3))},
    # of several dtypes, out of order, one without axes and two without elements
    {
        "b.weight": Spec("bfloat16", (3, 5)),
        "a.scale": Spec("float32", ()),
        "b.empty": Spec("float32", (0, 4)),
        "a.weight": Spec("float8_e4m3fn", (7,)),
        "c.mask": Spec("bool", (3,)),
        "c.none": Spec("int64", (2, 0, 3)),
        "c.count": Spec("int64", (1,)),
    },
    # keys as checkpoints have them, which mean nothing to a format
    {
        key: Spec("float16", (1 + number,))
        for number, key in enumerate(
            (
                "a",
                "A",
                "a b",
                "a/b",
                "../up",
                ".hidden",
                "naïve.Größe",
                'q"uote\\',
                "{braces}",
                "層",
            )
        )
    },
    {f"layers.{i}.w": Spec("bfloat16", (4, 2)) for i in range(300)},
)
MUTANTS = 300


def cases(names: Iterable[str] | None = None) -> list[tuple[str, int]]:
    """(name, number of the sample) for parametrize, of the formats `names`, by default all that are
    written.
    """
    chosen = [n for n in formats.FORMATS.names() if _writes(n)] if names is None else list(names)
    return [(name, number) for name in chosen for number in range(len(SAMPLES))]


def _writes(name: str) -> bool:
    return name in ("safetensors", "torchzip", "dcp") or formats.is_foreign(name, writes=True)


def check_description(name: str) -> None:
    """The format is called as it is declared, has the members of the contract, and its endings are
    endings that no built-in format has.
    """
    found = formats.FORMATS.get(name)
    require(found is not None, f"{name} is None, not a format")
    called = getattr(found, "name", None)
    require(isinstance(called, str) and bool(called), f"{name} has no name, but {called!r}")
    require(
        called == name or name in formats.FORMATS.builtin(),
        f"{name} calls itself {called!r}: what it writes would not be found again under that name",
    )
    for member in ("sniff", "open"):
        require(callable(getattr(found, member, None)), f"{name} has no `{member}`")
    suffixes = getattr(found, "suffixes", ())
    require(isinstance(suffixes, tuple), f"{name}: `suffixes` is no tuple")
    for suffix in suffixes:
        require(
            isinstance(suffix, str) and suffix.startswith(".") and len(suffix) > 1,
            f"{name}: {suffix!r} is no ending",
        )
        others = [one for one in formats.FORMATS.builtin() if one != name]
        taken = [o for o in others if suffix in getattr(formats.FORMATS.get(o), "suffixes", ())]
        require(not taken, f"{name}: files that end in {suffix} are {taken}'s")


def check_sample(name: str, number: int, folder: Path) -> None:
    """Everything that must hold where sample `number` is written in an empty folder, as one file
    and as a folder of them; a format that has only one of the two refuses the other with M916.
    """
    specs, forms = SAMPLES[number], _forms(name)
    for single in forms:
        for stamp in (None, STAMP):
            out = folder / f"{'file' if single else 'folder'}{'' if stamp is None else '-stamped'}"
            check_written(name, specs, out, single=single, stamp=stamp)


def _forms(name: str) -> list[bool]:
    """Whether it is one file, of the forms that an output can have."""
    forms = []
    for single in (True, False):
        try:
            _described(name, SAMPLES[1], single, None)
        except MigrateError as error:
            codes = {one.code for one in error.diagnostics}
            require(codes == {"M916"}, f"{name}: a form that it has not is refused as {codes}")
        else:
            forms.append(single)
    require(bool(forms), f"{name} is written neither as one file nor as a folder")
    return forms


def check_written(
    name: str,
    specs: Mapping[str, Spec],
    out: Path,
    *,
    single: bool,
    stamp: str | None,
    values: Mapping[str, bytes] | None = None,
) -> None:
    """These tensors are written at `out` as the format promises, and read again as they are;
    `values` are their bytes, by default different ones for each.
    """
    label = f"{name}, {len(specs)} tensors, {'one file' if single else 'a folder'}"
    held = _values(specs) if values is None else values
    target = _described(name, specs, single, stamp)
    require(target.folder is not single, f"{label}: `folder` is {target.folder}")
    check_target(target, specs, label)
    again = _described(name, specs, single, stamp)
    require(_promises(again) == _promises(target), f"{label}: described twice, it is another one")
    place = write(target, held, out, getattr(formats.get(name), "suffixes", ()))
    with closing(_opened(name, place, label)) as source:
        check_source(source, specs, held, label)
        found = None if source.history is None else source.history.decode()
        require(found == stamp, f"{label}: the stamp comes back as {found!r}")


def check_target(target: Target, specs: Mapping[str, Spec], label: str) -> None:
    """What is promised is whole: each tensor is placed once, inside of its file, behind the header
    and without a hole.
    """
    names = [*(f.name for f in target.files), *target.small]
    require(len(set(names)) == len(names), f"{label}: two files are called the same: {names}")
    require(target.folder or len(names) == 1, f"{label}: one file is {names}")
    placed: dict[str, list[tuple[int, int]]] = {}
    for file in target.files:
        at, sealed = len(file.header), file.seal is not None
        for one in file.tensors:
            right = one.offset >= at if sealed else one.offset == at
            require(right, f"{label}: {one.key} is at {one.offset} of {file.name}, not at {at}")
            at = one.offset + one.nbytes
            placed.setdefault(target.copies.get(one.key, one.key), []).append(
                (one.start, one.nbytes)
            )
        right = file.size >= at if sealed else file.size == at
        require(right, f"{label}: {file.name} has {file.size} bytes, and its tensors end at {at}")
    for key, spec in specs.items():
        end = 0
        for start, nbytes in sorted(placed.pop(key, [])):
            require(start == end, f"{label}: bytes {end} to {start} of {key} are not placed once")
            end = start + nbytes
        require(end == spec.nbytes, f"{label}: {end} of {spec.nbytes} bytes of {key} are placed")
    require(not placed, f"{label}: these are placed and were not asked for: {sorted(placed)}")


def check_source(
    source: Source, specs: Mapping[str, Spec], values: Mapping[str, bytes], label: str
) -> None:
    """The opened checkpoint has these tensors with these bytes, and nothing else."""
    found = {key: at.spec for key, at in source.index.tensors.items()}
    require(found == dict(specs), f"{label}: read again, it holds {_difference(found, specs)}")
    # a tree without anything in it is a value
    values_too = sorted(source.index.items) if specs else []
    require(not values_too, f"{label}: it holds values too: {values_too}")
    for key, spec in specs.items():
        require(_bytes(source, key, spec) == values[key], f"{label}: {key} has other bytes")


def check_broken(name: str, folder: Path, seed: int = 0) -> int:
    """Files of a sample that were cut or changed, in an empty folder, are refused by a
    MigrateError, or what they are read as lies within their bytes. How many were refused.
    """
    dice, refused, specs = random.Random(f"{seed} {name}"), 0, SAMPLES[2]
    target = _described(name, specs, _forms(name)[0], STAMP)
    suffixes = getattr(formats.get(name), "suffixes", ())
    place = write(target, _values(specs), folder / "written", suffixes)
    files = sorted(one for one in place.rglob("*") if one.is_file()) if target.folder else [place]
    wholes = [file.read_bytes() for file in files]
    for number in range(MUTANTS):
        one = dice.randrange(len(files))
        mutant, what = _mutant(wholes[one], number, dice)
        files[one].write_bytes(mutant)
        label = f"{name}: {files[one].name} {what}"
        try:
            with closing(formats.open(place)) as source:
                for key, at in source.index.tensors.items():
                    _bytes(source, key, at.spec)
        except MigrateError:
            refused += 1
        except AssertionError as error:
            raise AssertionError(f"{label}: {error}") from error
        except Exception as error:
            raise AssertionError(f"{label} ends in {type(error).__name__}: {error}") from error
        files[one].write_bytes(wholes[one])
    require(refused > 0, f"{name}: none of {MUTANTS} broken files is refused")
    return refused


def _mutant(whole: bytes, number: int, dice: random.Random) -> tuple[bytes, str]:
    if number % 3 == 0:
        size = dice.randrange(len(whole))
        return whole[:size], f"cut after {size} of {len(whole)} bytes"
    at = dice.randrange(len(whole))
    if number % 3 == 1:
        new = whole[at] ^ (1 << dice.randrange(8))
        return whole[:at] + bytes([new]) + whole[at + 1 :], f"whose byte {at} is {new:#x}"
    return whole[:at] + b"9" + whole[at:], f"with a 9 put in at {at}"


def _described(name: str, specs: Mapping[str, Spec], single: bool, stamp: str | None) -> Target:
    return formats.get(name).describe(
        specs, folder=not single, max_shard_size=LARGE, metadata={}, stamp=stamp
    )


def _promises(target: Target) -> Any:
    return [(f.name, f.header, f.tensors, f.size) for f in target.files], dict(target.small)


def write(
    target: Target, values: Mapping[str, bytes], out: Path, suffixes: tuple[str, ...] = ()
) -> Path:
    """The path of what was promised, written at `out` with these bytes of tensors; one file is
    called with the first of the `suffixes`.
    """
    held = {**values, **{new: values[old] for new, old in target.copies.items()}}
    if not target.folder:
        out = out.with_name(f"{out.name}{suffixes[0] if suffixes else ''}")
        (file,) = target.files
        _write(file, held, out)
        return out
    out.mkdir(parents=True)
    for file in target.files:
        _write(file, held, out / file.name)
    for path, text in target.small.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_bytes(text)
    return out


def _write(file: OutputFile, values: Mapping[str, bytes], path: Path) -> None:
    content = bytearray(file.size)
    content[: len(file.header)] = file.header
    sums: list[int] = []
    ends = [*(one.offset for one in file.tensors), file.size][1:]
    for one, end in zip(file.tensors, ends, strict=True):
        data = values[one.key][one.start : one.start + one.nbytes]
        content[one.offset : one.offset + one.nbytes] = data
        sums.append(crc32(data))
        behind = one.offset + one.nbytes
        if file.seal is not None and behind < end:
            content[behind:end] = file.seal(sums)
    if file.seal is not None and not file.tensors:
        content[len(file.header) :] = file.seal(sums)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(content))


def _values(specs: Mapping[str, Spec]) -> dict[str, bytes]:
    """Bytes that differ from tensor to tensor."""
    return {
        key: bytes(
            (number + at * 7) % (2 if spec.dtype == "bool" else 251) for at in range(spec.nbytes)
        )
        for number, (key, spec) in enumerate(specs.items())
    }


def _opened(name: str, path: Path, label: str) -> Source:
    try:
        source = formats.open(path)
    except MigrateError as error:
        raise AssertionError(f"{label}: what was written cannot be opened: {error}") from error
    called = formats.get(name).name
    if source.format != called:
        source.close()
        raise AssertionError(f"{label}: it is opened as {source.format}, not as {called}")
    return source


def _bytes(source: Source, key: str, spec: Spec) -> bytes:
    """The packed bytes of a tensor, in row-major order."""
    rows = rows_of(source.index.tensors[key])
    if rows is None:
        require(BITS[spec.dtype] >= 8, f"{key}: {spec.dtype} is stored in strides")
        return bytes(read_elements(source, key).tobytes())
    for at in rows:
        blob, end = source.blobs[at.blob], at.offset + at.spec.nbytes
        inside = at.offset >= 0 and end <= blob.size
        require(inside, f"{key} lies at {at.offset} to {end} of {blob.name}, of {blob.size} bytes")
    return b"".join(read_bytes(source.blobs[at.blob], at.offset, at.spec.nbytes) for at in rows)


def _difference(found: Mapping[str, Spec], wanted: Mapping[str, Spec]) -> str:
    more, less = sorted(found.keys() - wanted.keys()), sorted(wanted.keys() - found.keys())
    other = [f"{k}: {found[k]} instead of {s}" for k, s in wanted.items() if found.get(k, s) != s]
    return f"{more} too much, {less} too little, {other}"
