"""Numbers decoded where their columns are contiguous, against the same decoded in rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from migrate.codecs import get
from migrate.core.errors import OpError
from migrate.core.spec import Spec
from migrate.core.spec import spec as spec_of


def _parts(codec: Any, rows: int, columns: int) -> tuple[list[Any], list[Spec]]:
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 256, (2, rows, columns // 2), "u1")
    if codec.name == "nvfp4":
        scales = rng.integers(1, 0x7F, (2, rows, columns // 16), "u1")
        arrays = [codes, scales, np.array(0.5, "<f4").view("<u4")]
        dtypes = "uint8", "float8_e4m3fn", "float32"
    else:
        # of all that bfloat16 holds
        arrays = [codes, rng.integers(3, 250, (2, rows, columns // 32), "u1")]
        dtypes = "uint8", "uint8"
    specs = [Spec(dtype, array.shape) for dtype, array in zip(dtypes, arrays, strict=True)]
    return arrays, specs


@pytest.mark.parametrize(
    ("name", "dtype", "rows", "columns"),
    [
        ("mxfp4", "bfloat16", 512, 1024),
        ("mxfp4", "bfloat16", 300, 992),  # a last chunk that is shorter
        ("mxfp4", "bfloat16", 7, 64),  # too few numbers for a table
        ("nvfp4", "bfloat16", 512, 1024),
        ("mxfp4", "float32", 512, 1024),  # no table of halves
    ],
)
def test_decoding_into_columns_makes_the_same_numbers(
    name: str, dtype: str, rows: int, columns: int
) -> None:
    codec: Any = get(name)
    args = codec.Args()
    arrays, specs = _parts(codec, rows, columns)
    box = ((0, 2), (0, rows), (0, columns))
    kind = "<u4" if dtype == "float32" else "<u2"
    wanted = np.zeros((2, rows, columns), kind)
    codec.decode(args, arrays, specs, dtype, box, wanted)
    store = np.zeros((2, columns, rows), kind)
    codec.decode(args, arrays, specs, dtype, box, store.swapaxes(1, 2))
    assert wanted.any()
    assert (store == wanted.swapaxes(1, 2)).all()
    assert codec.decode_turns(args, specs, dtype) == (dtype != "float32")


def test_what_is_refused_in_rows_is_refused_in_columns() -> None:
    codec: Any = get("mxfp4")
    arrays, specs = _parts(codec, 512, 1024)
    arrays[0][1, 300, 40], arrays[1][1, 300, 2] = 0x77, 254
    box, said = ((0, 2), (0, 512), (0, 1024)), []
    store = np.zeros((2, 1024, 512), "<u2")
    for out in (np.zeros((2, 512, 1024), "<u2"), store.swapaxes(1, 2)):
        with pytest.raises(OpError) as caught:
            codec.decode(codec.Args(), arrays, specs, "bfloat16", box, out)
        said.append(caught.value.message)
    assert said[0] == said[1]
    assert "the number at [1, 300, " in said[0]


def test_other_layouts_are_decoded_in_rows() -> None:
    codec: Any = get("mxfp8")
    specs = [spec_of("float8_e4m3fn", (64, 64)), spec_of("uint8", (64, 2))]
    assert not codec.decode_turns(codec.Args(), specs, "bfloat16")
