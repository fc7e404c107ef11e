"""Where shards of quantized tensors may end, and what all of them share: what docs/distributed.md
says is what the table of layouts does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from quantized_ranks import KINDS
from stored_objects import NAMES, saved

from migrate import formats
from migrate.source.component_grids import misplaced
from migrate.source.quantized_layouts import layout_of
from migrate.source.tree import objects_of

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


class Borders(NamedTuple):
    """The row of the page, its words; shards may end at multiples of so many rows and columns, None
    where they may not; what they share.
    """

    row: str
    words: tuple[str, ...]
    rows: int
    columns: int | None
    shared: tuple[str, ...] = ()


_MX = "`MXFP8Tensor`, also swizzled"
_MX_WORDS = ("any row, columns at multiples of 32", "columnwise scales rows at multiples of 32")
_1D = "`Float8BlockwiseQTensor`, 1-D, both data formats"
_1D_WORDS = ("any row, columns at multiples of 128", "columnwise scales rows at multiples of 128")
_FP8 = "Transformer Engine `Float8Tensor` (delayed and current scaling)"
_2D = "`Float8BlockwiseQTensor`, 2-D"
_AO = "torchao `Float8Tensor` and `Int8Tensor`, one scale"
TABLE = {
    "te-float8": Borders(_FP8, ("any row or column",), 1, 1, ("_scale_inv",)),
    "te-float8-transposed": Borders(_FP8, ("any row or column",), 1, 1, ("_scale_inv",)),
    "te-mxfp8": Borders(_MX, _MX_WORDS, 32, 32),
    "te-mxfp8-swizzled": Borders(_MX, _MX_WORDS, 32, 32),
    "te-mxfp8-rowwise": Borders(_MX, _MX_WORDS, 1, 32),
    "te-block-2d": Borders(_2D, ("rows and columns at multiples of 128",), 128, 128),
    "te-block-2d-even": Borders(_2D, ("rows and columns at multiples of 128",), 128, 128),
    "te-block-1d": Borders(_1D, _1D_WORDS, 128, 128),
    "te-block-1d-gemm-ready": Borders(_1D, _1D_WORDS, 1, 128),
    "te-block-1d-compact": Borders(_1D, _1D_WORDS, 1, 128),
    "te-nvfp4-2d": Borders(
        "`NVFP4Tensor`, also swizzled",
        ("columns at multiples of 16", "2-D quantization rows at multiples of 16"),
        16,
        16,
        ("_amax_columnwise", "_amax_rowwise"),
    ),
    "te-nvfp4-rows": Borders("`NVFP4Tensor`, row-scaled", ("any row, no column",), 1, None),
    "ao-float8-tensor": Borders(_AO, ("any row or column",), 1, 1, ("scale",)),
    "ao-float8-row": Borders("by row", ("any row, no column",), 1, None),
    "ao-int8": Borders("by row", ("any row, no column",), 1, None),
    "ao-float8-block": Borders("by block", ("multiples of the block",), 128, 128),
    "ao-int4": Borders(
        "`IntxUnpackedToInt8Tensor`, `Int4Tensor`",
        ("any row, columns at multiples of a group",),
        1,
        32,
    ),
    "ao-mx": Borders("`MXTensor`, also swizzled", ("any row, columns at multiples of 32",), 1, 32),
    "ao-mx-fp4": Borders(
        "`MXTensor`, also swizzled", ("any row, columns at multiples of 32",), 1, 32
    ),
    **dict.fromkeys(
        ("ao-nvfp4", "ao-nvfp4-swizzled"),
        Borders(
            "`NVFP4Tensor`, also swizzled",
            ("any row, columns at multiples of 16",),
            1,
            16,
            ("per_tensor_scale",),
        ),
    ),
}


@pytest.fixture(scope="module")
def page() -> Mapping[str, list[tuple[str, str]]]:
    """The cells of the table beside each class."""
    text = PAGE.read_text(encoding="utf-8").partition("| class | joins exactly")[2]
    found: dict[str, list[tuple[str, str]]] = {}
    for line in text.partition("\n\n")[0].splitlines()[2:]:
        _, name, joins, shared, _ = (cell.strip() for cell in line.split("|"))
        found.setdefault(name.removeprefix("torchao "), []).append((joins, shared))
        found.setdefault(name, []).append((joins, shared))
    return found


def test_the_page_says_what_the_layouts_do(
    page: Mapping[str, list[tuple[str, str]]], tmp_path: Path
) -> None:
    assert TABLE.keys() == set(NAMES)
    with formats.open(saved(tmp_path / "in.pt", NAMES)) as source:
        assert source.index.tree is not None
        objects = {path[-1]: one for path, one in objects_of(source.index.tree.parts[0].root)}
    for kind, due in TABLE.items():
        layout, shape = layout_of(objects[kind].encoding), KINDS[kind].shape
        assert layout is not None
        names = [name for name, _ in objects[kind].components if "." not in name]

        def first(axis: int) -> int | None:
            for at in range(1, shape[axis]):
                sizes = (at, shape[1]) if axis == 0 else (shape[0], at)
                if misplaced(layout, names, shape, (0, 0), sizes) is None:
                    return at
            return None

        assert (first(0), first(1)) == (due.rows, due.columns), kind
        assert tuple(sorted(n for n in names if layout.grids[n].shared)) == due.shared, kind
        cells = page[due.row]
        assert any(
            all(word in joins for word in due.words)
            and all(f"`{name}`" in shared for name in due.shared)
            for joins, shared in cells
        ), (kind, cells)
