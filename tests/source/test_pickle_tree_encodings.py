"""Which dtype an integer of Transformer Engine means: known, concluded from the rest of the file,
or asked for.
"""

from __future__ import annotations

import pytest

from migrate.core.errors import CheckpointError
from migrate.source.pickle.tree import (
    NUMBERINGS,
    Encoding,
    answered,
    ask,
    numbering,
    readings,
    settled,
)

BOTH = tuple(NUMBERINGS)


def encoding(code: int, numberings: tuple[str, ...] = BOTH) -> Encoding:
    found = readings(code, numberings)
    return Encoding(
        "te-fp8",
        "x",
        (2, 2),
        "bfloat16",
        {},
        next(iter(found.values())) if len(found) == 1 else None,
        code,
        found,
    )


@pytest.mark.parametrize(
    ("code", "numbering", "number"), [(6, "0.8", "float8_e4m3fn"), (8, "2.4", "float8_e5m2")]
)
def test_an_integer_of_one_numbering_needs_nobody(code: int, numbering: str, number: str) -> None:
    assert readings(code, BOTH) == {numbering: number}


@pytest.mark.parametrize(
    ("witness", "number"), [(6, "float8_e5m2"), (8, "float8_e4m3fn"), (10, "float8_e4m3fn")]
)
def test_another_object_of_the_file_settles_the_integer_with_two_meanings(
    witness: int, number: str
) -> None:
    found = settled({"a": encoding(7), "b": encoding(witness)})
    assert found["a"].number == number
    ask(found)


def test_objects_that_contradict_each_other_settle_nothing() -> None:
    assert settled({"a": encoding(7), "b": encoding(6), "c": encoding(8)})["a"].number is None


def test_a_file_that_says_nothing_is_never_guessed_at() -> None:
    found = settled({"a": encoding(7), "b": encoding(7)})
    assert [e.number for e in found.values()] == [None, None]
    with pytest.raises(CheckpointError) as caught:
        ask(found)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "M955"
    assert "float8_e5m2 in 0.8 and later, float8_e4m3fn in 2.4 and later" in diagnostic.message
    assert 'params={"te_dtype_numbering": "2.4"}' in (diagnostic.help or "")


@pytest.mark.parametrize(("said", "number"), [("0.8", "float8_e5m2"), ("2.4", "float8_e4m3fn")])
def test_what_the_user_says_is_taken(said: str, number: str) -> None:
    found = answered({"a": encoding(7)}, said)
    assert found["a"].number == number
    ask(found)


@pytest.mark.parametrize(("code", "said"), [(6, "2.4"), (8, "0.8")])
def test_what_the_user_says_does_not_outvote_the_file(code: int, said: str) -> None:
    with pytest.raises(CheckpointError, match="M955"):
        answered({"a": encoding(7), "b": encoding(code)}, said)


def test_where_the_file_contradicts_itself_the_user_decides_what_is_open() -> None:
    found = answered({"a": encoding(7), "b": encoding(6), "c": encoding(8)}, "2.4")
    assert [e.number for e in found.values()] == ["float8_e4m3fn", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("said", ["3.0", "", None, 7])
def test_a_numbering_that_there_is_none_of_is_refused(said: object) -> None:
    with pytest.raises(CheckpointError, match="M955"):
        numbering(said)
    assert numbering(2.4) == "2.4"
