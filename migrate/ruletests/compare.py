"""What an example made against what it says: every key that rules make, dtype, shape, and each
element bit for bit.

A NaN that is written stands for any NaN; with `rtol` numbers are compared instead of bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from typing import Any

from ..core import elements
from ..core.diagnostics import Diagnostic, Span, did_you_mean, listed, printable
from ..core.spec import BITS, Spec, coordinates, spec
from ..rules.examples import ExpectedTensor, expand, fill_in, flat, indexes, shape_of
from .binding import BoundTest, rule_behind, unwritable
from .source import elements as encoded
from .source import packed, require_held, side_bytes


def compare(bound: BoundTest, number: int, *, values: bool) -> list[Diagnostic]:
    """What differs from what the test expects: M702 keys, M701 tensors, M711 side files; without
    `values` names, dtypes and shapes only.
    """
    file, test = bound.file, bound.test
    out: list[Diagnostic] = []
    wanted: dict[str, tuple[ExpectedTensor, str, dict[str, int]]] = {}
    for written, expected in (test.expect or {}).items():
        wanted.update((key, (expected, written, at)) for key, at in expand(written))
    specs = bound.specs
    for key, (expected, written, at) in wanted.items():
        place = file.document.key_span(("tests", number, "expect", written))
        if key not in specs:
            unnamed = [k for k in specs if k not in wanted]
            hint = did_you_mean(key, unnamed)
            said = (
                f"made and not expected: {listed(unnamed, 8)}"
                if unnamed
                else f"made: {listed(list(specs), 8)}"
            )
            out.append(
                Diagnostic(
                    "M702",
                    f"test {test.name!r}: {printable(key)} does not come out",
                    (place,),
                    (said,),
                    hint,
                )
            )
            continue
        out += _tensor(bound, key, expected, written, at, place, values)
    extra = [key for key in specs if key not in wanted and rule_behind(bound, key) is not None]
    if extra and test.expect is not None:
        place = file.document.key_span(("tests", number, "expect"))
        notes = tuple(f"{printable(k)}  {specs[k]}" for k in extra[:8])
        what = (
            f"test {test.name!r}: {len(extra)} key{'s come' if len(extra) > 1 else ' comes'} "
            "out that `expect` does not name"
        )
        rules = tuple(dict.fromkeys(rule_behind(bound, k).rule.span for k in extra))
        out.append(
            Diagnostic(
                "M702",
                what,
                (place, *rules[:2]),
                notes,
                "name every key that a rule makes; keys that are kept may be left out",
            )
        )
    return out + list(_side(bound, number))


def _tensor(
    bound: BoundTest,
    key: str,
    expected: ExpectedTensor,
    entry: str,
    at: dict[str, int],
    place: Span,
    values: bool,
) -> list[Diagnostic]:
    """What differs in one tensor that comes out; `entry` is the key as the test writes it, with
    these values of its ranges.
    """
    made, name = bound.specs[key], bound.test.name
    by = rule_behind(bound, key)
    spans = (place,) if by is None else (place, by.rule.span)
    origin = (
        "kept as it was"
        if by is None
        else f"rule {by.rule.name!r} makes it of {listed(list(by.keys), 4)}"
    )
    like = None if expected.same_as is None else fill_in(expected.same_as, at)
    said = _said(bound, expected, like, made)
    if said != made:
        unlike = (f"- expected  {said}", f"+ made      {made}", origin)
        return [
            Diagnostic(
                "M701", f"test {name!r}: {printable(key)} is not what is expected", spans, unlike
            )
        ]
    for written, numbers in expected.slices.items():
        if why := _misplaced(written, numbers, made.shape):
            here = bound.file.document.key_span(
                ("tests", bound.number, "expect", entry, "slices", written)
            )
            return [
                Diagnostic(
                    "M701",
                    f"test {name!r}: {printable(key)} is not what is expected: {why}",
                    (here, *spans[1:]),
                    (origin,),
                )
            ]
    try:
        require_held(made, expected.fill, expected.values)
        for numbers in expected.slices.values():
            require_held(made, 0, numbers)
    except ValueError as error:
        return [unwritable(name, key, str(error), place)]
    if not values:
        return []
    there = bound.fill()[key]
    out = []
    for start, shape, want in _pieces(bound, expected, like, made):
        differ = _differing(made, there, start, want, expected.rtol)
        if not differ:
            continue
        index = coordinates(start + differ[0], made.shape)
        got, wish = (
            elements.value(made.dtype, elements.at(made.dtype, raw, n))
            for raw, n in ((there, start + differ[0]), (want, differ[0]))
        )
        notes = (f"{len(differ)} of {prod(shape)} elements that are written differ", origin)
        what = (
            f"test {name!r}: {printable(key)}{list(index)} is {_spell_number(got, made)}, expected "
            f"{_spell_number(wish, made)}"
        )
        out.append(Diagnostic("M701", what, spans, notes))
        break
    return out


def _said(bound: BoundTest, expected: ExpectedTensor, like: str | None, made: Spec) -> Spec:
    """The spec that the test says; what it leaves open is as it came out."""
    shape, dtype = expected.shape, expected.dtype
    if shape is None and expected.values is not None:
        shape = shape_of(expected.values)
    if like is not None:
        source = bound.source.index.tensors[like].spec
        shape, dtype = (
            source.shape if shape is None else shape,
            source.dtype if dtype is None else dtype,
        )
    return spec(dtype or made.dtype, made.shape if shape is None else shape)


def _misplaced(written: str, numbers: Any, shape: tuple[int, ...]) -> str:
    """Why a tensor of the shape has no such slice; "" if it has."""
    at = indexes(written)
    if len(at) > len(shape):
        return (
            f"slice {written!r} has {len(at)} indexes, the shape {list(shape)} has "
            f"{len(shape)} axes"
        )
    if any(not -length <= position < length for position, length in zip(at, shape, strict=False)):
        return f"slice {written!r} is outside of {list(shape)}"
    rest = shape[len(at) :]
    if isinstance(numbers, list) and shape_of(numbers) != rest:
        return (
            f"slice {written!r} has the shape {list(rest)}, the lists have "
            f"{list(shape_of(numbers))}"
        )
    return ""


def _pieces(
    bound: BoundTest, expected: ExpectedTensor, like: str | None, made: Spec
) -> Iterator[tuple[int, tuple[int, ...], bytes]]:
    """(first element, shape, bytes) of what is written of the tensor."""
    if like is not None:
        yield 0, made.shape, bound.source.read_tensor(like)
    elif expected.values is not None or expected.fill is not None:
        yield 0, made.shape, encoded(made, expected.fill, expected.values)
    for written, numbers in expected.slices.items():
        start, rest = 0, made.shape
        for position in indexes(written):
            length, rest = rest[0], rest[1:]
            start += (position % length) * prod(rest)
        if isinstance(numbers, list):
            yield start, rest, packed(made.dtype, flat(numbers))
        else:
            yield start, rest, encoded(spec(made.dtype, rest), numbers, None)


def _differing(
    of: Spec, there: memoryview, start: int, want: bytes, rtol: float | None
) -> list[int]:
    """The numbers of the elements of `want` that the tensor does not have from `start` on."""
    count = of.numel if start == 0 and len(want) == of.nbytes else len(want) * 8 // BITS[of.dtype]
    if start == 0 and count == of.numel and bytes(there) == want:
        return []
    out = []
    for n in range(min(count, of.numel - start)):
        code, wish = elements.at(of.dtype, there, start + n), elements.at(of.dtype, want, n)
        if code != wish and not elements.close(
            elements.value(of.dtype, code), elements.value(of.dtype, wish), rtol
        ):
            out.append(n)
    return out


def _spell_number(number: elements.Number, of: Spec) -> str:
    if isinstance(number, float) and number.is_integer() and abs(number) < 1e15:
        return "-0.0" if str(number) == "-0.0" else str(int(number))
    return f"{number:.9g}" if of.dtype == "float32" and isinstance(number, float) else repr(number)


def _side(bound: BoundTest, number: int) -> Iterator[Diagnostic]:
    """M711 for side files that are not what is expected, and for those that changed although the
    test does not name them.
    """
    test, file = bound.test, bound.file
    there = bound.side_files()
    for name, content in test.expect_side.items():
        place = file.document.key_span(("tests", number, "expect_side", name))
        if name not in there:
            yield Diagnostic(
                "M711",
                f"test {test.name!r}: side file {printable(name)} does not come out",
                (place,),
            )
        elif lines := _unlike(there[name], content):
            yield Diagnostic(
                "M711",
                f"test {test.name!r}: side file {printable(name)} is not what is expected",
                (place,),
                tuple(lines),
            )
    for name, content in test.side.items():
        if name not in test.expect_side and there.get(name) != side_bytes(content):
            place = file.document.key_span(("tests", number, "side", name))
            hint = "write what becomes of it in `expect_side`"
            yield Diagnostic(
                "M711",
                f"test {test.name!r}: side file {printable(name)} changes, and no one expects it",
                (place,),
                (),
                hint,
            )


def _unlike(there: bytes, wanted: Any) -> list[str]:
    """The lines in which a side file differs; JSON is compared as values."""
    if isinstance(wanted, str):
        return (
            []
            if there == wanted.encode()
            else [
                f"- expected  {printable(wanted)}",
                f"+ made      {printable(there.decode(errors='replace'))}",
            ]
        )
    try:
        found = json.loads(there)
    except ValueError as error:
        return [f"it is not JSON: {error}"]
    one, other = (
        json.dumps(value, indent=1, sort_keys=True).splitlines() for value in (wanted, found)
    )
    if one == other:
        return []
    import difflib

    return [
        printable(line)
        for line in difflib.unified_diff(one, other, "expected", "made", lineterm="", n=1)
    ][2:22]
