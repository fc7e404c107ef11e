"""Each format, as each codec can be told to store it, recoded to each other: refused while
planning, refused at a number, or the same numbers, bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from marks import thorough
from recoded_parts import RECODE, computed_parts

from migrate import codecs
from migrate.codecs.kit.reference import reference
from migrate.core.declaration import NumberFormat
from migrate.core.errors import OpError
from migrate.core.spec import Spec
from migrate.ops.recode import _path_of

SHAPE = (18, 64)
ENCODING = [
    name for name in codecs.registry.builtin() if codecs.get(name).encodes
]  # fmt: skip
# formats of whole numbers, which no path leads to from others
INTEGERS = ("int-pack", "int8", "gptq", "awq", "int4-rows", "bnb-int8", "gguf")
# which becomes which, with some arguments
RECODED = {
    "int-pack": ("int-pack", "int8", "gptq", "awq", "int4-rows", "gguf"),
    "int8": ("int-pack", "int8", "gptq", "gguf"),
    "gptq": ("int-pack", "gptq", "awq", "int8"),
    "awq": ("int-pack", "gptq", "awq", "int8"),
    "int4-rows": ("int-pack", "int8", "gptq", "awq", "int4-rows", "gguf"),
    "bnb-int8": (),
    "gguf": ("gguf", "int-pack", "int8"),
}


def settings(name: str) -> list[Any]:
    """The arguments that the codec's samples have, each once."""
    return list(dict.fromkeys(args for args, _ in codecs.get(name).samples()))


def stored(name: str, args: Any, powers: bool) -> tuple[list[Spec], list[Any]] | None:
    """Parts of random numbers, whose scales are powers of two if the arguments permit."""
    codec, dice = codecs.get(name), np.random.default_rng(3)
    if powers:
        # the largest of each stretch of rows and columns is the same
        numbers = np.ldexp(dice.integers(-6, 7, SHAPE).astype("f4"), -3)
        numbers[::2, ::8] = 0.875
    else:
        numbers = dice.standard_normal(SHAPE, "f4")
    try:
        specs = codec.encoded(args, Spec("float32", SHAPE))
        parts = codec.reference_parts(args, numbers.view("<u4"), Spec("float32", SHAPE))
    except OpError:
        return None
    held = [(s, np.asarray(a)) for s, a in zip(specs, parts, strict=True) if s is not None]
    return [s for s, _ in held], [a for _, a in held]


def as_made(target: NumberFormat, source: NumberFormat, specs: list[Spec]) -> NumberFormat:
    """The target with what its codes stand for, which is what the source's do where it is open."""
    codec: Any = codecs.get(source.codec)
    elements = codec.layout(source.args, dict(zip(codec.parts, specs, strict=False))).elements
    if getattr(target.args, "codes", "") is not None or elements.bits != 8:
        return target
    return NumberFormat(target.codec, replace(target.args, codes=elements.dtype))


def numbers(form: NumberFormat, specs: list[Spec], held: list[Any]) -> Any:
    codec: Any = codecs.get(form.codec)
    there: list[Any] = [*specs, *[None] * (len(codec.parts) - len(specs))]
    arrays: list[Any] = [*held, *[None] * (len(codec.parts) - len(held))]
    # the sign of a zero that fnuz does not have
    found = codec.reference(form.args, arrays, there, "float32").view("<f4")
    return found + np.float32(0)


@pytest.mark.parametrize("powers", thorough([True, False]))
@pytest.mark.parametrize("one", ENCODING)
def test_numbers_are_the_same_or_refused(one: str, powers: bool) -> None:
    outcomes: dict[str, set[str]] = {}
    # or one that no path leads from or to yet
    integers = codecs.get(one).name in (*INTEGERS, "bnb-4bit")
    for own in settings(one):
        given = stored(one, own, powers)
        if given is None:
            continue
        specs, held = given
        roles = codecs.get(one).parts[: len(specs)]
        source = NumberFormat(one, own)
        planning = codecs.get(one).planning
        values = {r: a.tobytes() for r, a in zip(roles, held, strict=True) if r in planning}
        wanted = None if integers else numbers(source, specs, held)
        for other in ENCODING:
            if integers and codecs.get(other).name in INTEGERS:
                continue
            for theirs in settings(other):
                target = NumberFormat(other, theirs)
                args = RECODE.Args(from_=source, to=target)
                seen = outcomes.setdefault(other, set())
                try:
                    settled = RECODE.settle(args, roles, specs, values)
                except OpError as error:
                    seen.add(error.code)
                    continue
                order = [roles.index(role) for role in settled.inputs]
                inputs = [specs[i] for i in order], [held[i] for i in order]
                try:
                    made, out = computed_parts(settled, *inputs)
                except OpError as error:
                    seen.add(error.code)
                    continue
                seen.add("the same")
                np.testing.assert_array_equal(
                    numbers(as_made(target, source, specs), made, out),
                    wanted,
                    err_msg=f"{source} to {target}",
                )
                again = RECODE.eager(settled, inputs[1], dtypes=[s.dtype for s in inputs[0]])
                assert [a.tobytes() for a in out] == [a.tobytes() for a in again], (source, target)
    if integers:
        assert {"M308"} <= set.union(*outcomes.values()) <= {"M304", "M308"}
        return
    # to itself at the least
    assert "the same" in outcomes[one]
    codes = set.union(*outcomes.values()) - {"the same"}
    assert codes <= {"M303", "M304", "M308", "M310", "M406"}


def integers_stored(name: str) -> list[tuple[Any, dict[str, tuple[Spec, Any]]]]:
    """Arguments, and parts by role: those of random numbers, and those that the codec yields."""
    codec: Any = codecs.get(name)
    found: list[tuple[Any, list[Any]]] = list(codec.stored())
    dice = np.random.default_rng(5)
    for own in settings(name):
        for shape in (SHAPE, (24, 96), (2, 8, 64)):
            numbers = dice.standard_normal(shape, "f4").astype("<f2").view("<u2")
            of = Spec("float16", shape)
            try:
                specs = codec.encoded(own, of)
                parts = codec.reference_parts(own, numbers, of)
            except OpError:
                continue
            found.append((own, [s and (s, a) for s, a in zip(specs, parts, strict=True)]))
    return [
        (own, {r: p for r, p in zip(codec.parts, parts, strict=True) if p is not None})
        for own, parts in found
    ]


def goals(name: str) -> list[Any]:
    """The arguments that parts are asked to be made with, each once."""
    codec: Any = codecs.get(name)
    more = {
        "gptq": [{"form": "v1"}, {"form": "v2"}],
        "int-pack": [{}, {"symmetric": False}, {"bits": 8}, {"group": 32}, {"non_finite": "keep"}],
        "int8": [{}, {"group": 32}],
        "gguf": [{"type": "q4_0"}, {"type": "q8_0"}],
    }
    stored = [args for args, _ in codec.stored()]
    return list(
        dict.fromkeys(
            [*settings(name), *stored, *(codec.Args(**said) for said in more.get(name, []))]
        )
    )


def decoded_integers(name: str, own: Any, parts: dict[str, tuple[Spec, Any]]) -> Any:
    codec: Any = codecs.get(name)
    specs, arrays = ([parts[r][i] if r in parts else None for r in codec.parts] for i in (0, 1))
    said = {role: parts[role][1].tobytes() for role in codec.planning if role in parts}
    args = codec.settle(own, specs, said)
    return codec.reference(args, arrays, specs, "float32")


def pairs_of(one: str, other: str) -> Any:
    """(arguments, parts, settled arguments) of each way from the one to the other, or the code of
    the error.
    """
    for own, parts in integers_stored(one):
        said = {r: parts[r][1].tobytes() for r in codecs.get(one).planning if r in parts}
        specs = [spec for spec, _ in parts.values()]
        for theirs in goals(other):
            args = RECODE.Args(from_=NumberFormat(one, own), to=NumberFormat(other, theirs))
            target: Any = codecs.get(other)
            least = [role for role in target.parts if role not in target.optional]
            for named in (None, least, target.parts):
                try:
                    asked = args if named is None else RECODE.naming(args, gives=named)
                    yield own, parts, RECODE.settle(asked, [*parts], specs, said)
                except OpError as error:
                    yield own, parts, error.code


@pytest.mark.parametrize("other", INTEGERS)
@pytest.mark.parametrize("one", INTEGERS)
def test_integers_are_the_same_or_refused(one: str, other: str) -> None:
    seen: set[str] = set()
    for own, parts, settled in pairs_of(one, other):
        if isinstance(settled, str):
            seen.add(settled)
            continue
        specs, held = ([parts[role][i] for role in settled.inputs] for i in (0, 1))
        try:
            made, out = computed_parts(settled, specs, held)
        except OpError as error:
            seen.add(error.code)
            continue
        seen.add("the same")
        found = dict(zip(settled.outputs, zip(made, out, strict=True), strict=True))
        # what lengths do not tell of small parts is known here
        layout = _path_of(settled, specs).target.layout
        np.testing.assert_array_equal(
            reference(layout, *({r: p[i] for r, p in found.items()} for i in (0, 1)), "float32"),
            decoded_integers(one, own, parts),
            err_msg=str(settled),
        )
        again = RECODE.eager(settled, held, dtypes=[s.dtype for s in specs])
        assert [a.tobytes() for a in out] == [a.tobytes() for a in again], settled
        # what is copied is what would be computed
        for number, array in enumerate(out):
            copied = RECODE.copied(settled, specs, number)
            if copied is not None:
                moved = held[copied[0]]
                for step, how in copied[1]:
                    moved = moved.reshape(how) if step == "reshape" else moved.transpose(how)
                assert moved.tobytes() == array.tobytes(), (settled, settled.outputs[number])
    assert ("the same" in seen) == (other in RECODED[one]), seen
    assert seen - {"the same"} <= {"M303", "M304", "M308", "M310", "M406", "M408"}
