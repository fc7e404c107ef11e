"""The two ways through a header: the quick one must find what the long one finds, or leave it to
the long one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from migrate.core.errors import CheckpointError
from migrate.core.spec import BITS, spec
from migrate.formats._header import _canonical, _validated, write_header
from migrate.source.jsontext import parse

SPECS = {
    "a.0.weight": spec("float32", (2, 3)),
    "a.1.weight": spec("float32", (2, 3)),
    "b.é.bias": spec("bfloat16", (4,)),
    "scalar": spec("uint8", ()),
    "none": spec("int64", (0, 7)),
}
START = 1000


def header(metadata: dict[str, str]) -> tuple[bytes, int]:
    """The JSON of a header of these specs, and the size of a file whose data starts at START."""
    file = write_header("x", list(SPECS), SPECS, metadata)
    data = file.header[8:]
    return data, START + sum(s.nbytes for s in SPECS.values())


def spaced(data: bytes) -> bytes:
    """The header as Python's json writes it."""
    return json.dumps(json.loads(data), ensure_ascii=False).encode()


def long_way(data: bytes, size: int) -> object:
    return _validated(
        parse(data, "x"), 3, START, size, "x", booleans=b"true" in data or b"false" in data
    )


@pytest.mark.parametrize("written", [bytes, spaced])
@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"format": "pt"},
        {"stamp": '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'},
        {"stamp": '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '},
    ],
)
def test_a_header_as_writers_make_it_takes_the_quick_way(
    metadata: dict[str, str], written: Callable[[bytes], bytes]
) -> None:
    data, size = header(metadata)
    data = written(data)
    quick = _canonical(data, 3, START, size, "x")
    assert quick is not None
    assert quick == long_way(data, size)
    assert list(quick.tensors) == list(long_way(data, size).tensors)  # type: ignore[attr-defined]


@pytest.mark.parametrize("written", [bytes, spaced])
@pytest.mark.parametrize("seed", range(20))
def test_what_the_quick_way_accepts_the_long_way_accepts_alike(
    seed: int, written: Callable[[bytes], bytes]
) -> None:
    rng = random.Random(seed)
    data, size = header({"format": "pt"} if seed % 2 else {})
    data = written(data)
    accepted = 0
    for _ in range(400):
        mutated = bytearray(data)
        for _ in range(rng.randint(1, 2)):
            at, kind = rng.randrange(len(mutated)), rng.randrange(4)
            if kind == 0:
                mutated[at] = rng.choice(b'0123456789,:[]{}" \\aF-+.\x00\xff')
            elif kind == 1:
                del mutated[at]
            elif kind == 2:
                mutated.insert(at, rng.choice(b'0,"{}[] '))
            else:
                other = rng.randrange(len(mutated))
                mutated[at : at + 20], mutated[other : other + 20] = (
                    mutated[other : other + 20],
                    mutated[at : at + 20],
                )
        text = bytes(mutated)
        quick = _canonical(text, 3, START, size, "x")
        if quick is not None:
            accepted += 1
            assert quick == long_way(text, size)
    assert accepted or not seed % 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"shape":[2,3]', b'"shape":[02,3]'),
        (b'"shape":[2,3]', b'"shape":[2,,3]'),
        (b'"shape":[2,3]', b'"shape":[2,3,]'),
        (b'"shape":[2,3]', b'"shape":[3,2,2]'),
        (b'"a.1.weight"', b'"a.0.weight"'),
        (b'"a.1.weight"', b'"__metadata__"'),
        (b'"F32"', b'"F31"'),
    ],
)
def test_what_is_wrong_is_left_to_the_long_way_that_says_so(old: bytes, new: bytes) -> None:
    data, size = header({})
    changed = data.replace(old, new, 1)
    assert changed != data
    assert _canonical(changed, 3, START, size, "x") is None
    with pytest.raises(CheckpointError):
        long_way(changed, size)


def test_a_header_with_spaces_in_some_places_takes_the_long_way() -> None:
    data, size = header({})
    mixed = data.replace(b'"shape":[2,3]', b'"shape":[2, 3]', 1)
    assert mixed != data
    assert _canonical(mixed, 3, START, size, "x") is None
    assert set(long_way(mixed, size).tensors) == set(SPECS)  # type: ignore[attr-defined]


def test_entries_in_another_order_than_their_data_take_the_long_way() -> None:
    data = b'{"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'  # noqa: E501
    assert _canonical(data, 3, START, START + 4, "x") is None
    assert list(long_way(data, START + 4).tensors) == ["b", "a"]  # type: ignore[attr-defined]


def test_what_is_to_come_last_comes_last_where_it_lies_aligned() -> None:
    specs = {
        "a": spec("float32", (3,)),
        "b": spec("float8_e4m3fn", (2, 4)),
        "c": spec("bfloat16", (2,)),
        "d": spec("float64", (1,)),
    }
    last = {"a", "d"}
    file = write_header("x", list(specs), specs, {}, None, last)
    assert [placed.key for placed in file.tensors] == ["d", "a", "c", "b"], (
        "12 bytes before an element of 8"
    )
    specs["c"] = spec("bfloat16", (4,))
    file = write_header("x", list(specs), specs, {}, None, last)
    assert [placed.key for placed in file.tensors] == ["c", "b", "d", "a"]
    assert all(placed.offset % (BITS[specs[placed.key].dtype] // 8) == 0 for placed in file.tensors)
    data = file.header[8:]
    assert list(
        _validated(parse(data, "x"), 0, len(file.header), file.size, "x", booleans=False).tensors
    ) == ["c", "b", "d", "a"]
