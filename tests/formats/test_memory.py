"""State dicts in memory: described where they lie, read bit for bit, refused by name."""

import numpy as np
import pytest
import torch

from migrate.core.errors import CheckpointError
from migrate.core.spec import BITS, Spec, spec
from migrate.formats import memory

PACKED = torch.float4_e2m1fn_x2


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()) if tensor.numel() else b""


def gathered(source, key: str) -> bytes:
    """The tensor's elements in row-major order, taken from its storage by offset and strides
    alone.
    """
    stored = source.index.tensors[key]
    blob = source.blobs[stored.blob]
    whole = bytearray(blob.size)
    blob.readinto(0, memoryview(whole))
    size = BITS[stored.spec.dtype] // 8
    strides = stored.strides
    if strides is None:
        return bytes(whole[stored.offset : stored.offset + stored.spec.nbytes])
    out = b""
    for where in np.ndindex(stored.spec.shape):
        at = stored.offset + size * sum(i * s for i, s in zip(where, strides, strict=True))
        out += whole[at : at + size]
    return out


BASE = torch.arange(24, dtype=torch.int16).view(4, 6)
VIEWS = {
    "whole": BASE, "transposed": BASE.t(), "part": BASE[1:3, 2:5], "steps": BASE[::2, ::3],
    "row": BASE[2], "one": BASE[3, 3],
    "wide": BASE[:, :1].expand(4, 5), "reshaped": BASE.view(2, 2, 6).permute(2, 0, 1),
    "parameter": torch.nn.Parameter(BASE, False),
    "buffer": torch.nn.Buffer(BASE),
}  # fmt: skip


def test_views_of_one_storage_share_a_blob_and_say_where_they_lie():
    source = memory.open(VIEWS)
    assert len(source.blobs) == 1
    assert {t.storage for t in source.index.tensors.values()} == {0}
    for key, tensor in VIEWS.items():
        assert source.index.tensors[key].spec == Spec("int16", tuple(tensor.shape))
        assert gathered(source, key) == raw(tensor), key
    assert source.index.tensors["whole"].strides is None
    assert source.index.tensors["row"].strides is None
    assert source.index.tensors["transposed"].strides == (1, 6)
    source.check_unchanged()
    source.close()


@pytest.mark.parametrize("dtype", [d for d in BITS if hasattr(torch, d)])
def test_every_dtype_of_torch_is_read_bit_for_bit(dtype):
    bits = torch.randint(
        0, 2 if dtype == "bool" else 256, (3, 4 * getattr(torch, dtype).itemsize), dtype=torch.uint8
    )
    source = memory.open({"x": bits.view(getattr(torch, dtype))})
    assert source.index.tensors["x"].spec == Spec(dtype, (3, 4))
    assert gathered(source, "x") == raw(bits)


def test_packed_floats_have_their_logical_shape():
    bits = torch.arange(32, dtype=torch.uint8).view(4, 8)
    source = memory.open({"x": bits.view(PACKED), "rows": bits.view(PACKED)[::2]})
    assert source.index.tensors["x"].spec == Spec("float4_e2m1fn", (4, 16))
    assert source.index.tensors["x"].strides is None
    assert source.index.tensors["rows"].strides == (32, 1)
    assert gathered(source, "x") == raw(bits)
    with pytest.raises(CheckpointError, match="pairs beside each other: t"):
        memory.open({"t": bits.view(PACKED).t()})


def test_zero_byte_storages_and_empty_views_are_never_ties():
    source = memory.open(
        {
            "a": torch.empty(0),
            "b": torch.empty(0, 3),
            "c": BASE[:0],
            "d": BASE[:0],
            "e": np.empty(0),
            "f": np.empty(0),
        }
    )
    assert all(t.storage is None for t in source.index.tensors.values())
    assert all(gathered(source, k) == b"" for k in source.index.tensors)


def test_ties_are_seen_and_equal_copies_are_none():
    source = memory.open({"a": BASE, "b": BASE, "c": BASE.clone()})
    a, b, c = (source.index.tensors[k] for k in "abc")
    assert (a.storage, a.offset) == (b.storage, b.offset)
    assert a.storage != c.storage


ARRAY = np.arange(24, dtype=np.int16).reshape(4, 6)
ARRAYS = {
    "whole": ARRAY, "part": ARRAY[1:, 2:4], "t": ARRAY.T, "fortran": np.asfortranarray(ARRAY),
    "back": ARRAY[::-1],
    "big": ARRAY.astype(">i2"),
    "zero_d": np.array(7, np.int16), "big_zero_d": np.array(7, ">i2"),
    "wide": np.broadcast_to(ARRAY[0], (3, 6)),
    "torch": torch.arange(4, dtype=torch.int16).numpy(),
    "bytes": np.frombuffer(b"abcdef", np.int16),
    "window": np.lib.stride_tricks.sliding_window_view(ARRAY[0], 3),
}  # fmt: skip


def test_arrays_are_read_bit_for_bit_whatever_their_layout():
    source = memory.open(ARRAYS)
    for key, array in ARRAYS.items():
        assert source.index.tensors[key].spec == Spec("int16", array.shape), key
        assert gathered(source, key) == np.ascontiguousarray(array, "<i2").tobytes(), key
    tensors = source.index.tensors
    assert tensors["whole"].storage == tensors["part"].storage == tensors["t"].storage
    assert tensors["back"].storage != tensors["whole"].storage


def test_everything_else_is_an_item():
    state = {"step": 3, "nested": {"w": BASE}, "none": None, "text": "x", "w": BASE}
    source = memory.open(state)
    assert source.index.items == {"step": 3, "nested": {"w": BASE}, "none": None, "text": "x"}
    assert list(source.index.tensors) == ["w"]


class Fancy(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_all_that_bytes_cannot_tell_is_refused_by_name():
    state = {
        "fine": BASE,
        "sparse.a": torch.eye(2).to_sparse(),
        "sparse.b": torch.eye(2).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
        "conj": torch.zeros(2, dtype=torch.complex64).conj(),
        "neg": torch.zeros(2, dtype=torch.complex64).conj().imag,
        "fancy": torch.zeros(2).as_subclass(Fancy),
        "lazy": torch.nn.UninitializedParameter(),
        "objects": np.array([None]),
        "words": np.array(["a"]),
        "masked": np.ma.array([1]),
        "dates": np.array(["2020-01-01"], "datetime64[D]"),
    }
    with pytest.raises(CheckpointError) as caught:
        memory.open(state)
    text = str(caught.value)
    assert {d.code for d in caught.value.diagnostics} == {"M916"}
    assert "sparse.a, sparse.b" in text
    assert all(key in text for key in state if key != "fine")
    assert "fine" not in text


def test_a_storage_that_shrank_is_noticed():
    tensor = torch.arange(100)
    source = memory.open({"x": tensor})
    tensor.untyped_storage().resize_(8)
    with pytest.raises(CheckpointError) as caught:
        source.blobs[0].readinto(0, memoryview(bytearray(800)))
    assert caught.value.diagnostics[0].code == "M905"


@pytest.mark.parametrize("dtype", [d for d in BITS if not d.startswith("float6")])
def test_new_tensors_are_written_through_their_buffers(dtype):
    specs = {
        "x": spec(dtype, (2, 6)),
        "empty": spec(dtype, (0, 2)),
        **({} if "float4" in dtype else {"one": spec(dtype, ())}),
    }
    tensors, buffers = memory.allocate(specs)
    for key, wanted in specs.items():
        assert len(buffers[key]) == wanted.nbytes
        buffers[key][:] = bytes(i % 2 for i in range(wanted.nbytes))
        assert tensors[key].dtype == (PACKED if "float4" in dtype else getattr(torch, dtype))
        assert raw(tensors[key]) == bytes(buffers[key])
        assert tensors[key]._base is None or dtype == "complex32"
        assert tuple(tensors[key].shape) == (
            (*wanted.shape[:-1], wanted.shape[-1] // 2) if "float4" in dtype else wanted.shape
        )
    again = memory.open(tensors)
    assert {k: t.spec for k, t in again.index.tensors.items()} == specs


def test_a_buffer_keeps_its_tensor_s_memory():
    buffers = memory.allocate({"x": spec("uint8", (1000,))})[1]
    buffers["x"][:] = bytes(1000)
    assert bytes(buffers["x"]) == bytes(1000)


def test_what_torch_has_no_tensor_for_is_named():
    with pytest.raises(CheckpointError) as caught:
        memory.allocate(
            {
                "six": spec("float6_e2m3fn", (4,)),
                "odd": spec("float4_e2m1fn", (2, 3)),
                "fine": spec("int8", (1,)),
            }
        )
    assert "six" in str(caught.value)
    assert "odd" in str(caught.value)
    assert "fine" not in str(caught.value)


def test_a_key_that_is_no_text_is_refused_by_name():
    with pytest.raises(CheckpointError, match="not 1, None") as caught:
        memory.open({1: torch.zeros(1), "a": torch.zeros(1), None: 2})
    assert [d.code for d in caught.value.diagnostics] == ["M916"]
