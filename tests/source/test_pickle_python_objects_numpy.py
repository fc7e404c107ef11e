"""numpy's arrays and numbers inside of checkpoints, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch_streams import decoded, reduce, tree

from migrate.core.errors import CheckpointError
from migrate.source.pickle import policy
from migrate.source.pickle.nodes import Call, Global
from migrate.source.pickle.tree import Array, Constant

ARRAYS = {
    "int64": np.arange(6).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big endian": np.arange(4, dtype=">i4"),
    "strided": np.arange(12, dtype="u2")[::3],
    "bool": np.array([True, False]),
    "half": np.ones((2, 0, 3), np.float16),
    "complex": np.array([1 + 2j]),
    "0-dim": np.array(3.5),
    "bytes": np.array([b"ab", b"c"]),
    "no bytes": np.array([], dtype="S3"),
    "text": np.array(["ab", "ü"]),
    "rng": np.random.RandomState(1).get_state()[1],
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_is_its_dtype_shape_and_bytes(name: str, protocol: int) -> None:
    value = ARRAYS[name]
    found = tree([value], protocol).items[0]
    assert type(found) is Array
    assert not found.scalar
    assert np.dtype(found.dtype) == value.dtype
    again = np.frombuffer(found.data, found.dtype).reshape(
        found.shape, order="F" if found.fortran else "C"
    )
    assert again.shape == value.shape
    assert again.tobytes() == value.tobytes()


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize(
    "value",
    [np.float32(1.5), np.int64(-3), np.bool_(True), np.float64(2), np.uint8(7), np.complex64(1j)],
    ids=str,
)
def test_a_number_of_numpy_is_its_bytes(value: Any, protocol: int) -> None:
    found = tree({"best": value}, protocol).get("best")
    assert (found.scalar, found.shape, found.dtype) == (True, (), value.dtype.str)
    assert found.data == value.tobytes()


def test_a_dtype_is_a_constant() -> None:
    found = tree([np.dtype("f4"), np.dtype(">i8"), np.dtype("bool")])
    assert [(c.kind, c.text) for c in found.items if type(c) is Constant] == [
        ("numpy.dtype", "<f4"),
        ("numpy.dtype", ">i8"),
        ("numpy.dtype", "|b1"),
    ]


OUTSIDE = {
    "objects": np.array([None, 3], dtype=object),
    "structures": np.zeros(2, dtype=[("a", "i4")]),
    "dates": np.array(["2020-01-01"], dtype="M8[D]"),
    "a subclass": np.ones((1, 1)).view(np.matrix),
    "a masked array": np.ma.ones(2),
    "a generator": np.random.RandomState(1),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_arrays_of_other_things_than_numbers_are_outside(name: str) -> None:
    found = decoded({"x": {"y": OUTSIDE[name]}})
    assert {path for row in found.outside for path in row.paths} == {"x.y"}


def test_the_axis_order_that_numpy_writes_under_protocol_5_is_outside() -> None:
    value = np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1)
    assert tree(value, 2).shape == (4, 2, 3)
    rows = decoded(value, 5).outside
    assert [row.name for row in rows] in ([], ["numpy._core.numeric._frombuffer"])


@pytest.mark.parametrize("core", ["core", "_core"])
def test_both_names_of_numpys_core_are_read(core: str) -> None:
    kind = reduce("numpy", "dtype", "f4", False, True)
    kind.state = (3, "<", None, None, None, -1, -1, 0)
    assert (
        policy.decode(
            reduce(f"numpy.{core}.multiarray", "scalar", kind, b"\0\0\x80?"), "x"
        ).tree.dtype
        == "<f4"
    )


def dtype(name: str = "f4", order: Any = "<", size: int = -1) -> Call:
    found = reduce("numpy", "dtype", name, False, True)
    found.state = (3, order, None, None, None, size, -1, 0)
    return found


def array(shape: Any, kind: Call, data: bytes) -> Call:
    found = reduce("numpy._core.multiarray", "_reconstruct", Global("numpy", "ndarray"), (0,), b"b")
    found.state = (1, shape, kind, False, data)
    return found


WRONG = {
    "other bytes than the 4": array((2,), dtype(), b"1234"),
    "negative": array((-1,), dtype(), b""),
    "a numpy number of <f4 with 3 bytes": reduce(
        "numpy._core.multiarray", "scalar", dtype(), b"123"
    ),
    "byte order": array((1,), dtype(order="?"), b"1234"),
    "without a byte order": array((1,), dtype(order="|"), b"1234"),
    "not that of its name": array((1,), dtype(size=8), b"1234"),
    "a tuple of integers": array(("1",), dtype(), b"1234"),
    "where bytes belong": array((1,), dtype(), []),  # type: ignore[arg-type]
    "65 dimensions": array((1,) * 65, dtype(), b"1234"),
    "not begun as numpy": reduce(
        "numpy._core.multiarray", "_reconstruct", Global("numpy", "ndarray"), (5,), b"b"
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_an_array_that_contradicts_itself_is_a_contradiction(words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        policy.decode(WRONG[words], "x")
    assert [d.code for d in caught.value.diagnostics] == ["M936"]
    assert words in caught.value.diagnostics[0].message


def test_a_huge_shape_needs_no_memory() -> None:
    with pytest.raises(CheckpointError, match="M936"):
        policy.decode(array((2**40, 2**40), dtype(), b""), "x")
    assert policy.decode(array((2**40, 0), dtype(), b""), "x").tree.shape == (2**40, 0)
