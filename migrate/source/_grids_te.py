"""The grids of Transformer Engine's quantized tensors, 1.2 to 2.20; shapes and orders are those of
its quantizers' `get_scale_shape` and of common/cast/mxfp8/swizzle.cuh.
"""

from __future__ import annotations

from .component_grids import ALL, TILE, ComponentGrid, ComponentLayout
from .pickle.quantized_tensors import COMPACT
from .pickle.tree import Encoding

_PLAIN, _TURNED = ComponentGrid(deep=True), ComponentGrid(turned=True, deep=True)
_SHARED = ComponentGrid(ALL, ALL, line=True)


def _float8(_: Encoding) -> ComponentLayout:
    return ComponentLayout({"_data": _PLAIN, "_transpose": _TURNED, "_scale_inv": _SHARED})


def _mxfp8(encoding: Encoding) -> ComponentLayout:
    swizzled = (encoding.options or {}).get("with_gemm_swizzled_scales")
    # the order of columnwise scales is that of the transposed tensor's, their shape is not
    by_row, by_column = ("rows", "turned") if swizzled else ("", "")
    grids = {
        "_rowwise_data": _PLAIN,
        "_rowwise_scale_inv": ComponentGrid(1, 32, tile=TILE, swizzled=by_row),
        "_columnwise_data": _PLAIN,
        "_columnwise_scale_inv": ComponentGrid(32, 1, tile=TILE[::-1], swizzled=by_column),
    }
    return ComponentLayout(grids, _square(encoding))


def _float8_block(encoding: Encoding) -> ComponentLayout:
    options = encoding.options or {}
    if options.get("is_2D_scaled"):
        by_row = ComponentGrid(128, 128, tile=(1, 4))
        by_column = ComponentGrid(128, 128, turned=True, tile=(1, 4))
    elif options.get("data_format") == COMPACT:
        return ComponentLayout(
            {
                "_rowwise_data": _PLAIN,
                "_rowwise_scale_inv": ComponentGrid(1, 128),
                "_columnwise_data": _PLAIN,
                "_columnwise_scale_inv": ComponentGrid(128, 1),
            }
        )
    else:
        by_row, by_column = (
            ComponentGrid(1, 128, turned=True, tile=(1, 4)),
            ComponentGrid(128, 1, tile=(1, 4)),
        )
    return ComponentLayout(
        {
            "_rowwise_data": _PLAIN,
            "_rowwise_scale_inv": by_row,
            "_columnwise_data": _TURNED,
            "_columnwise_scale_inv": by_column,
        }
    )


def _nvfp4(encoding: Encoding) -> ComponentLayout:
    options = encoding.options or {}
    swizzled = "rows" if options.get("with_gemm_swizzled_scales") else ""
    of_row = ComponentGrid(1, ALL, line=True) if options.get("row_scaled_nvfp4") else _SHARED
    grids = {
        "_rowwise_data": ComponentGrid(1, 2, deep=True),
        "_rowwise_scale_inv": ComponentGrid(1, 16, tile=TILE, swizzled=swizzled),
        "_columnwise_data": ComponentGrid(2, 1, turned=True, deep=True),
        "_columnwise_scale_inv": ComponentGrid(16, 1, turned=True, tile=TILE, swizzled=swizzled),
        "_amax_rowwise": of_row,
        "_amax_columnwise": _SHARED,
    }
    return ComponentLayout(grids, _square(encoding))


def _grouped(_: Encoding) -> ComponentLayout:
    """One that is not quantized: a dense tensor under its own key."""
    return ComponentLayout({"": _PLAIN})


def _square(encoding: Encoding) -> tuple[int, int]:
    """Where a tensor may be cut whose scales are repeated over the rows of square blocks."""
    block = encoding.block
    return block if block is not None and block[0] == block[1] else (1, 1)


LAYOUTS = {
    "te-fp8": _float8,
    "te-mxfp8": _mxfp8,
    "te-fp8-block": _float8_block,
    "te-nvfp4": _nvfp4,
    "te-grouped": _grouped,
}
