"""Views counted in bytes, against numpy: whole elements, groups of sub-byte elements, fills."""

import numpy as np
import pytest
from view_oracle import PAD, layout, programs, run

from migrate.core import view as V
from migrate.core.pieces import normalise
from migrate.core.view import Fill, SubByte, View
from migrate.elements.codes import encode


def bytes_of(v, data, unit):
    """The bytes a consumer writes for the byte view `v`; `unit` encodes a fill's value."""
    out = np.full(v.shape, 99, np.uint8)
    for p in v.pieces:
        if isinstance(p.leaf, Fill):
            assert p.src == 0
            assert not any(p.src_strides)
            raw = np.frombuffer(unit(p.leaf.value), np.uint8)
            to = layout(p, out, p.dst, p.dst_strides)
            at = layout(p, np.arange(v.shape[0]), p.dst, p.dst_strides)
            to[...] = raw[at % len(raw)]
        else:
            layout(p, out, p.dst, p.dst_strides)[...] = layout(
                p, data[p.leaf], p.src, p.src_strides
            )
    return out


@programs
def test_a_byte_view_moves_the_bytes_of_the_elements(r):
    name = r.choice(["int8", "int16", "int32", "int64"])

    def each(v, a, data):
        dtype = np.dtype(name)
        raw = [x.astype(dtype).view(np.uint8) for x in data]
        b = V.to_bytes(v, 1, dtype.itemsize)
        assert (
            bytes_of(b, raw, lambda value: encode(name, value))
            == np.ascontiguousarray(a).astype(dtype).reshape(-1).view(np.uint8)
        ).all()
        assert V.covers(b)
        assert all(p == normalise(p) for p in b.pieces)

    run(r, 5, each=each)


def packed(values, elements, size):
    """Integers below 2**bits packed least significant first, `elements` of them in `size` bytes."""
    bits = 8 * size // elements
    groups = np.asarray(values, np.int64).reshape(-1, elements)
    words = sum(groups[:, i] << (bits * i) for i in range(elements))
    return (
        np.stack([(words >> (8 * i)) & 255 for i in range(size)], -1).astype(np.uint8).reshape(-1)
    )


@programs
def test_a_sub_byte_view_moves_whole_groups_or_says_that_it_cannot(r):
    elements, size = r.choice([(2, 1), (4, 3)])
    bits = 8 * size // elements
    pool, data = run(r, 4, (1, 2, 4, 8, 12))
    # stored bytes are whole, so every leaf is cut to whole groups; what lies beyond is never read
    # by a whole-group view
    values = [x[: x.size // elements * elements] % 2**bits for x in data]
    raw = [packed(x, elements, size) for x in values]
    for v, a in pool:
        if (a == PAD).any():
            continue
        try:
            b = V.to_bytes(v, elements, size)
        except SubByte:
            assert a.size % elements or any(
                not p.counts
                or any(
                    x % elements
                    for x in (p.src, p.dst, p.counts[-1], *p.dst_strides[:-1], *p.src_strides[:-1])
                )
                or (p.dst_strides[-1], p.src_strides[-1]) != (1, 1)
                for p in v.pieces
            )
        else:
            assert (bytes_of(b, raw, None) == packed(a % 2**bits, elements, size)).all()


def test_fills_of_a_sub_byte_dtype_are_whole_groups():
    v = V.pad(V.stored(0, (3, 4)), 1, 0, 4, 1.0)
    data = [np.arange(6, dtype=np.uint8)]
    got = bytes_of(V.to_bytes(v, 2, 1), data, lambda value: encode("float4_e2m1fn", value))
    assert got.reshape(3, 4).tolist() == [
        [0, 1, 0x22, 0x22],
        [2, 3, 0x22, 0x22],
        [4, 5, 0x22, 0x22],
    ]
    with pytest.raises(SubByte, match="15 elements are not a multiple of 2"):
        V.to_bytes(V.pad(V.stored(0, (3, 4)), 1, 0, 1, 1.0), 2, 1)


def test_a_clipped_fill_keeps_its_place_inside_the_unit():
    v = V.to_bytes(V.pad(V.stored(0, (2,)), 0, 1, 2, 1.0), 1, 4)
    data, unit = [np.arange(8, dtype=np.uint8)], encode("float32", 1.0)
    whole = bytes_of(v, data, lambda _: unit)
    for tile in range(1, 8):
        parts = [p for at in range(0, 20, tile) for p in V.clip(v, at, min(20, at + tile))]
        assert (bytes_of(View(v.shape, tuple(parts)), data, lambda _: unit) == whole).all()
