"""The grids of torchao's quantized tensors, 0.18: attributes and shapes are those of the classes'
`__tensor_flatten__`, and of `hp_data_dims_to_swizzled_scale_dims_mx` and `_nvfp4` where scales are
swizzled.
"""

from __future__ import annotations

from .component_grids import ALL, TILE, ComponentGrid, ComponentLayout
from .pickle.tree import Encoding

_PLAIN, _PAIRS = ComponentGrid(deep=True), ComponentGrid(1, 2, deep=True)
_SHARED = ComponentGrid(ALL, ALL)
# of activations, one for all of them
_ACTIVATIONS = dict.fromkeys(
    ("act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale"), _SHARED
)


def _by_block(encoding: Encoding) -> ComponentLayout:
    """Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor: scales of blocks of any size."""
    grids = {"qdata": _PLAIN, **_ACTIVATIONS}
    if encoding.block is not None:
        rows, columns = encoding.block
        if encoding.block == encoding.shape:
            scale = _SHARED
        else:
            # a row's scale, if a block is as wide as the tensor: where shards have some of the
            # columns, the scale of a row of the whole tensor cannot be told from a block's
            wide = ALL if rows == 1 and columns == encoding.shape[-1] else columns
            scale = ComponentGrid(rows, wide, deep=True)
        grids |= {"scale": scale, "zero_point": scale}
    return ComponentLayout(grids)


def _int4(encoding: Encoding) -> ComponentLayout:
    grids = {"qdata": _PAIRS}
    if encoding.block is not None and encoding.block[0] == 1 and len(encoding.shape) == 2:
        scale = ComponentGrid(1, encoding.block[1], turned=True)
        grids |= {"scale": scale, "zero_point": scale}
    return ComponentLayout(grids)


def _mx(encoding: Encoding) -> ComponentLayout:
    data = _PAIRS if encoding.number == "float4_e2m1fn" else _PLAIN
    return ComponentLayout({"qdata": data, "scale": _of_rows(encoding)})


def _nvfp4(encoding: Encoding) -> ComponentLayout:
    grids = {"qdata": _PAIRS, "scale": _of_rows(encoding), "per_tensor_scale": _SHARED}
    return ComponentLayout({**grids, **_ACTIVATIONS})


def _of_rows(encoding: Encoding) -> ComponentGrid:
    """One scale for so many columns of a row."""
    columns = encoding.block[1] if encoding.block else ALL
    if (encoding.options or {}).get("is_swizzled_scales"):
        return ComponentGrid(1, columns, tile=TILE, swizzled="rows", folded=True)
    return ComponentGrid(1, columns, deep=True)


LAYOUTS = {
    "ao-fp8": _by_block,
    "ao-int8": _by_block,
    "ao-intx": _by_block,
    "ao-int4": _int4,
    "ao-mx": _mx,
    "ao-nvfp4": _nvfp4,
}
