"""What every codec has to satisfy, for the built-in ones and for those of third parties.

    import pytest
    from migrate.testing import codeckit

    @pytest.mark.parametrize("name, number", codeckit.cases(["my-codec"]))
    def test_my_codec(name, number):
        codeckit.check_sample(name, number)

    def test_my_codec_is_described():
        codeckit.check_description("my-codec")

Each sample is encoded and decoded whole, box by box, from and into arrays with gaps, and once more
by the codec's reference; the bits must be the same each time. What a codec has `stored` is decoded
in the same ways. Failures are AssertionErrors.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from .. import codecs
from ..codecs.base import Codec, Convention, OpError
from ..core.part_names import stored_part
from ..core.spec import BITS, Spec
from ..elements.raw import as_bytes, carrier, pack
from ..ops.base import needed_columns
from .opkit import require

if TYPE_CHECKING:
    import numpy as np

    from ..ops.base import Box

    Array = np.ndarray[Any, Any]

# what numbers may become; a codec refuses those it does not decode to
DECODED = ("float32", "bfloat16", "float16")
# the arguments of the ops that codecs carry out
OWN = ("codec", "dtype", "from", "to")


def cases(names: Iterable[str] | None = None) -> list[tuple[str, int]]:
    """(name, number of the sample) for parametrize, of the codecs `names`, by default all."""
    chosen = codecs.names() if names is None else list(names)
    return [
        (name, number)
        for name in chosen
        for number in range(len([*codecs.get(name).samples(), *codecs.get(name).stored()]))
    ]


def numbers(spec: Spec, seed: int = 0) -> Array:
    """Raw elements of `spec`, a float dtype: small normal numbers, and among them zeros of both
    signs, subnormals and an outlier.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    made = np.asarray(rng.standard_normal(spec.shape) * 0.02, "f4")
    flat = made.reshape(-1)
    odd = np.array([0.0, -0.0, 1e-40, -3e-8, 1e-4, 30.0], "f4")[: flat.size]
    flat[rng.permutation(flat.size)[: odd.size]] = odd
    if len(spec.shape) > 1:
        made[..., : spec.shape[-2] // 3, : spec.shape[-1] // 2] = 0
    if spec.dtype == "bfloat16":
        return np.asarray(made.view("<u4") >> 16, "<u2")
    kind = {"float32": "<f4", "float16": "<f2"}[spec.dtype]
    return made.astype(kind).view(carrier(spec.dtype))


def encoded(codec: Codec, args: Any, array: Array, spec: Spec) -> list[Array | None]:
    """All parts of a tensor; None for those that `args` do not make."""
    import numpy as np

    out: list[Array | None] = []
    survey = surveyed(codec, args, array, spec)
    for number, part in enumerate(codec.encoded(args, spec)):
        if part is None:
            out.append(None)
            continue
        whole = _whole(part)
        made = np.empty(part.shape, carrier(part.dtype))
        needed = codec.encode_needs(args, spec, number, whole)
        codec.encode(args, _cut(array, needed), spec, number, whole, made, **survey)
        out.append(made)
    return out


def surveyed(codec: Codec, args: Any, array: Array, spec: Spec, rows: int = 0) -> dict[str, Any]:
    """What `encode` is given of a first pass over all numbers: in boxes of so many rows, 0 for one
    of all; nothing for a codec without one.
    """
    if not codec.surveys(args, spec):
        return {}
    found, box = None, _whole(spec)
    if not rows or not box:
        return {"survey": codec.survey(args, array, spec, box)}
    for row in range(0, spec.shape[0], rows):
        part = ((row, min(row + rows, spec.shape[0])), *box[1:])
        found = codec.survey(args, _with_gaps_of(_cut(array, part)), spec, part, found)
    return {"survey": found}


def decoded(
    codec: Codec,
    args: Any,
    parts: Sequence[Array | None],
    specs: Sequence[Spec | None],
    dtype: str,
) -> Array:
    """All numbers of a tensor, with arguments that are settled (`settled`)."""
    import numpy as np

    spec = codec.decoded(args, specs, dtype)
    made = np.empty(spec.shape, carrier(dtype))
    held = _boxes_of(codec, args, parts, specs, _whole(spec))
    codec.decode(args, held, specs, dtype, _whole(spec), made)
    return made


def settled(
    codec: Codec, args: Any, parts: Sequence[Array | None], specs: Sequence[Spec | None]
) -> Any:
    """The arguments with what the bytes of the parts say that are read while planning."""
    values = {
        role: part.tobytes()
        for role, part in zip(codec.parts, parts, strict=True)
        if part is not None and role in codec.planning
    }
    return codec.settle(args, specs, values)


def check_sample(name: str, number: int) -> None:
    """Everything that must hold for sample `number` of the codec called `name`."""
    codec = codecs.get(name)
    samples = list(codec.samples())
    if number < len(samples):
        args, spec = samples[number]
        codec.validate(args, True)
        _check_numbers(codec, args, spec, number)
        return
    args, stored = list(codec.stored())[number - len(samples)]
    specs = [None if part is None else part[0] for part in stored]
    parts = [None if part is None else part[1] for part in stored]
    _check_parts(codec, args, parts, specs)


def _check_numbers(codec: Codec, args: Any, spec: Spec, seed: int) -> None:
    """All that must hold where numbers of this spec are encoded, and decoded again."""
    array = numbers(spec, seed)
    check_encoding(codec, args, array, spec)
    _check_parts(codec, args, encoded(codec, args, array, spec), codec.encoded(args, spec))


def _check_parts(
    codec: Codec, args: Any, parts: Sequence[Array | None], specs: Sequence[Spec | None]
) -> None:
    """All that must hold where these parts are decoded."""
    codec.validate(args, False)
    found = settled(codec, args, parts, specs)
    taken = 0
    for dtype in DECODED:
        try:
            codec.decoded(found, specs, dtype)
        except OpError:
            continue
        taken += 1
        if not _is_beyond(codec, found, parts, specs, dtype):
            check_decoding(codec, found, parts, specs, dtype)
    _check_odd_parts(codec, args, parts, specs)
    require(taken > 0, f"{codec.name} decodes {args} to none of {DECODED}")


def _is_beyond(
    codec: Codec,
    args: Any,
    parts: Sequence[Array | None],
    specs: Sequence[Spec | None],
    dtype: str,
) -> bool:
    """Whether parts that are decoded exactly hold a number which is out of the range of `dtype`,
    and therefore refused.
    """
    try:
        decoded(codec, args, parts, specs, dtype)
    except OpError as error:
        if error.code != "M406" or not codec.exact(args, specs, dtype):
            raise
        return True
    return False


def check_axes(name: str, seed: int = 0) -> int:
    """Numbers of 0 to 4 axes, of sizes from 0 on, with the arguments of each sample: they are
    refused by an OpError, or encoded and decoded as samples are. How many were.
    """
    codec, dice = codecs.get(name), random.Random(f"{seed} {name}")
    taken = 0
    for args, sample in codec.samples():
        for axes in range(5):
            spec = Spec(sample.dtype, tuple(dice.choice((0, 1, 2, 3, 7)) for _ in range(axes)))
            try:
                codec.encoded(args, spec)
            except OpError:
                continue
            taken += 1
            _check_numbers(codec, args, spec, seed)
    return taken


def _check_odd_parts(
    codec: Codec, args: Any, parts: Sequence[Array | None], specs: Sequence[Spec | None]
) -> None:
    """Parts of another rank, size or dtype, and parts that are not there, are taken or refused by
    an OpError, before anything is decoded.
    """
    for number, part in enumerate(specs):
        if part is None:
            continue
        odd = [Spec(part.dtype, shape) for shape in _odd_shapes(part.shape)]
        for one in [*odd, Spec("float64", part.shape), None]:
            if one is None and codec.parts[number] not in codec.optional:
                continue
            given = [one if n == number else other for n, other in enumerate(specs)]
            there = [None if s is None else a for s, a in zip(given, parts, strict=True)]
            try:
                codec.decoded(settled(codec, args, there, given), given, DECODED[0])
            except OpError:
                continue
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise AssertionError(
                    f"{codec.name} {args}: {codec.parts[number]} as {one} ends in {what}"
                ) from error


def _odd_shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    made = [(), (*shape, 1), (2, *shape), tuple(n + 1 for n in shape), (0,) * len(shape)]
    return [one for one in made if one != shape]


def check_encoding(codec: Codec, args: Any, array: Array, spec: Spec) -> None:
    """The parts are those of the reference, whole and box by box."""
    import numpy as np

    specs, made = codec.encoded(args, spec), encoded(codec, args, array, spec)
    label = f"{codec.name} {args} of {spec}"
    require(
        len(specs) == len(codec.parts), f"{label}: {len(specs)} parts, the codec has {codec.parts}"
    )
    wanted = codec.reference_parts(args, array, spec)
    # a first pass finds the same however the numbers are cut
    survey = surveyed(codec, args, array, spec, rows=3)
    for number, (part, one, other) in enumerate(zip(specs, made, wanted, strict=True)):
        role = codec.parts[number]
        if part is None or one is None:
            require(role in codec.optional, f"{label} makes no {role}, which is not optional")
            require(other is None, f"{label}: the reference makes a {role}")
            continue
        require(other is not None, f"{label}: the reference makes no {role}")
        _same(f"{label}: {role}", one, other)
        for box in boxes(part, codec.grain(args, spec, number)):
            needed = codec.encode_needs(args, spec, number, box)
            out = _with_gaps(tuple(high - low for low, high in box), one.dtype)
            given = _with_gaps_of(_cut(array, needed))
            codec.encode(args, given, spec, number, box, out, **survey)
            _same(
                f"{label}: {role} in {box}",
                np.array(out, order="C"),
                np.array(_cut(one, box), order="C"),
            )

    if spec.shape and spec.numel and codec.reference_by_rows(args, spec):
        _check_parts_of_rows(codec, args, array, spec, wanted, label)


def _check_parts_of_rows(
    codec: Codec, args: Any, array: Array, spec: Spec, wanted: Sequence[Any], label: str
) -> None:
    """The reference makes rows of the parts of the rows of numbers that these need."""
    found, is_surveyed = None, codec.surveys(args, spec)
    for start in range(0, len(array) if is_surveyed else 0, 3):
        found = codec.reference_survey(args, array[start : start + 3], spec, start, found)
    for number, whole in enumerate(wanted):
        if whole is None:
            continue
        box = tuple((0, n) for n in whole.shape)
        if whole.ndim:
            each = codec.grain(args, spec, number)[0]
            low = each if len(whole) > each else 0
            box = ((low, min(low + each, len(whole))), *box[1:])
        first, last = codec.encode_needs(args, spec, number, box)[0]
        rows = array[first:last] if first < last else None
        if is_surveyed:
            made = codec.reference_parts(args, rows, spec, found, first)[number]
        elif rows is not None:
            made = codec.reference_parts(args, rows, Spec(spec.dtype, rows.shape))[number]
        else:
            continue
        if box and (rows is None or len(made) != box[0][1] - box[0][0]):
            # what follows from all numbers, or from the survey, is made whole
            made = made[slice(*box[0])]
        _same(f"{label}: {codec.parts[number]} of rows {first} to {last}", made, _cut(whole, box))


def check_decoding(
    codec: Codec,
    args: Any,
    parts: Sequence[Array | None],
    specs: Sequence[Spec | None],
    dtype: str,
) -> None:
    """The numbers are those of the reference, whole and box by box; `args` are settled."""
    import numpy as np

    spec = codec.decoded(args, specs, dtype)
    made = decoded(codec, args, parts, specs, dtype)
    label = f"{codec.name} {args} of {[str(s) for s in specs]} to {dtype}"
    _same(label, made, codec.reference(args, parts, specs, dtype))
    for box in boxes(spec, codec.decode_grain(args, specs, dtype)):
        out = _with_gaps(tuple(high - low for low, high in box), made.dtype)
        held = [
            None if a is None else _with_gaps_of(a)
            for a in _boxes_of(codec, args, parts, specs, box)
        ]
        codec.decode(args, held, specs, dtype, box, out)
        _same(f"{label} in {box}", np.array(out, order="C"), np.array(_cut(made, box), order="C"))
    _check_rows(codec, args, parts, specs, dtype, made, label)


def _check_rows(
    codec: Codec,
    args: Any,
    parts: Sequence[Array | None],
    specs: Sequence[Spec | None],
    dtype: str,
    made: Array,
    label: str,
) -> None:
    """The reference makes rows of the parts of these rows, where the codec says that it can."""
    each = codec.reference_rows(args, specs) if made.ndim else None
    if each is None or len(made) <= each:
        return
    rows = (each, min(len(made), 2 * each))
    needed = codec.decode_needs(args, specs, (rows, *((0, n) for n in made.shape[1:])))
    held = [
        None if a is None or box is None else _cut_rows(a, box)
        for a, box in zip(parts, needed, strict=True)
    ]
    cut = [
        None if a is None or s is None else Spec(s.dtype, a.shape)
        for a, s in zip(held, specs, strict=True)
    ]
    _same(f"{label}: rows {rows}", codec.reference(args, held, cut, dtype), made[slice(*rows)])


def _check_convention(codec: Codec, convention: Convention) -> None:
    who = f"{codec.name}: {convention.producer}"
    odd = set(convention.parts) - set(codec.parts)
    require(not odd, f"{who} has roles that are no parts: {sorted(odd)}")
    first = next(iter(convention.parts), None)
    require(first == codec.parts[0], f"{who} does not begin with {codec.parts[0]}")
    for text in convention.parts.values():
        try:
            stored_part(text)
        except ValueError as error:
            raise AssertionError(f"{who}: {error}") from error


def check_description(name: str) -> None:
    """The codec is called as in its registry, says what it does, and names parts and bound."""
    codec = codecs.get(name)
    require(isinstance(codec, Codec), f"{name} is {codec!r}, not a Codec")
    require(codec.name == name, f"{name} calls itself {codec.name}")
    require(bool(codec.summary.strip()), f"{name} has no summary")
    require(
        bool(codec.parts) and len(set(codec.parts)) == len(codec.parts),
        f"{name} has the parts {codec.parts}",
    )
    for said in ("optional", "planning", "follow"):
        odd = set(getattr(codec, said)) - set(codec.parts)
        require(not odd, f"{name}: `{said}` has roles that are no parts: {sorted(odd)}")
    require(
        not set(codec.unused) & set(codec.parts), f"{name}: `unused` names parts of the numbers"
    )
    require(codec.parts[0] not in codec.optional, f"{name}: the first part is not optional")
    require(bool(codec.names), f"{name} does not say how its parts are called on disk")
    for convention in codec.names:
        _check_convention(codec, convention)
    require(is_dataclass(codec.Args), f"{name}: its Args are no dataclass")
    for field in fields(codec.Args):
        word = field.metadata.get("alias", field.name)
        require(bool(field.metadata.get("doc")), f"{name}: `{word}` has no description")
        require(word not in OWN, f"{name}: `{word}` is what `dequantize` and `quantize` take")
    samples = list(codec.samples())
    require(bool(samples) == codec.encodes, f"{name} has samples exactly if it encodes")
    require(bool(samples) or bool(list(codec.stored())), f"{name} has nothing to decode")
    for args, spec in samples:
        require(
            bool(codec.bound(args).strip()),
            f"{name} does not say how large the error of {args} is",
        )
        require(
            len(codec.encoded(args, spec)) == len(codec.parts),
            f"{name}: {args} makes other parts than {codec.parts}",
        )
    for args in [*(args for args, _ in samples), *(args for args, _ in codec.stored())]:
        for odd_args in _outside(args):
            try:
                codec.validate(odd_args, codec.encodes)
            except OpError as error:
                require(error.code == "M308", f"{name}: {odd_args} is refused as {error.code}")
            else:
                raise AssertionError(f"{name} takes {odd_args}")


def _outside(args: Any) -> Iterator[Any]:
    """The arguments, each time with one of them beyond what its declaration says."""
    for field in fields(args):
        said = field.metadata
        if "words" in said:
            yield replace(args, **{field.name: "no such word"})
        if "values" in said:
            yield replace(args, **{field.name: max(said["values"]) + 1})
        value = getattr(args, field.name)
        if "least" in said and not isinstance(value, str):
            low = said["least"] - 1
            several = isinstance(value, tuple) or "length" in said
            wrong = (low,) * said.get("length", 1) if several else low
            yield replace(args, **{field.name: wrong})
        if "length" in said:
            yield replace(args, **{field.name: (1,) * (said["length"] + 1)})


def boxes(spec: Spec, grain: Sequence[int]) -> Iterator[Box]:
    """Boxes of a tensor: parts of its middle, corners, one element, and one cut at the grain."""
    shape = spec.shape
    if not prod(shape):
        return
    yield tuple((n // 3, max(n // 3 + 1, n - n // 4)) for n in shape)
    yield tuple((0, max(1, n // 2)) for n in shape)
    yield tuple((n - 1, n) for n in shape)
    yield tuple(
        ((n // 2) // g * g, min(n, (n // 2) // g * g + g))
        for n, g in zip(shape, grain, strict=True)
    )


def _whole(spec: Spec) -> Box:
    return tuple((0, n) for n in spec.shape)


def _cut_rows(array: Array, box: Box) -> Array:
    """What rows of numbers are made of: rows of a part, or columns of one that is turned."""
    import numpy as np

    rows = array[slice(*box[0])] if box else array
    for columns in needed_columns(box, array.shape):
        rows = rows[..., slice(*columns)]
    return np.ascontiguousarray(rows)


def _cut(array: Array, box: Box) -> Array:
    # of an array without axes the ellipsis makes a view; without it, a copy
    cut: Any = (*(slice(low, high) for low, high in box), ...)
    made: Array = array[cut]
    return made


def _boxes_of(
    codec: Codec,
    args: Any,
    parts: Sequence[Array | None],
    specs: Sequence[Spec | None],
    box: Box,
) -> list[Array | None]:
    """Of each part what decoding a box of the numbers is given."""
    needed = codec.decode_needs(args, specs, box)
    loose = any(s is not None and BITS[s.dtype] < 8 for s in specs)
    packed = codec.packed(args, specs) if loose else ()
    out: list[Array | None] = []
    roles = codec.parts[: len(parts)]
    for role, part, spec, need in zip(roles, parts, specs, needed, strict=True):
        if part is None or need is None or spec is None:
            out.append(None)
            continue
        held = _cut(part, need)
        if role in packed:
            held = as_bytes(pack(held, spec.dtype), Spec(spec.dtype, held.shape))
        out.append(held)
    return out


def _with_gaps(shape: tuple[int, ...], dtype: Any) -> Array:
    """Room whose rows do not lie side by side."""
    import numpy as np

    if not shape:
        return np.empty((), dtype)
    return np.empty((*shape[:-1], shape[-1] + 3), dtype)[..., : shape[-1]]


def _with_gaps_of(array: Array) -> Array:
    out = _with_gaps(array.shape, array.dtype)
    out[...] = array
    return out


def _same(label: str, one: Array, other: Array) -> None:
    require(one.shape == other.shape, f"{label}: {one.shape} instead of {other.shape}")
    require(one.dtype == other.dtype, f"{label}: {one.dtype} instead of {other.dtype}")
    if one.tobytes() != other.tobytes():
        import numpy as np

        at = tuple(int(i) for i in np.argwhere(one != other)[0]) if one.ndim else ()
        raise AssertionError(f"{label}: at {at} {one[at]:#x} instead of {other[at]:#x}")
