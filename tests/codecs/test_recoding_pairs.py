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
from migrate.core.declaration import NumberFormat
from migrate.core.errors import OpError
from migrate.core.spec import Spec

SHAPE = (18, 64)
# formats that no path leads from or to yet
INTEGERS = ("int_pack", "int8", "bnb_4bit")
ENCODING = [
    name for name in codecs.registry.builtin() if codecs.get(name).encodes
]  # fmt: skip


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
    for own in settings(one):
        given = stored(one, own, powers)
        if given is None:
            continue
        specs, held = given
        roles = codecs.get(one).parts[: len(specs)]
        source = NumberFormat(one, own)
        planning = codecs.get(one).planning
        values = {r: a.tobytes() for r, a in zip(roles, held, strict=True) if r in planning}
        wanted = None if one in INTEGERS else numbers(source, specs, held)
        for other in ENCODING:
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
    if one in INTEGERS:
        assert "M308" in outcomes[one]
        assert set.union(*outcomes.values()) <= {"M304", "M308"}
        return
    # to itself at the least
    assert "the same" in outcomes[one]
    codes = set.union(*outcomes.values()) - {"the same"}
    assert codes <= {"M303", "M304", "M308", "M310", "M406"}
