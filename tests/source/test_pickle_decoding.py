"""Storages and the bounds of views: what is accepted here is what torch can hold in that
storage.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_streams import dense, reduce, storage

from migrate.core.errors import CheckpointError
from migrate.source.pickle import policy
from migrate.source.pickle.decoding import (
    LARGEST,
    ContradictionError,
    Decoding,
    ForeignError,
    integers,
)
from migrate.source.pickle.nodes import Call, Dict, Global, Persistent
from migrate.source.pickle.tree import ITEMSIZE, Storage


def fits(
    held: int, dtype: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> bool:
    """Whether the view is accepted in a storage of `held` bytes."""
    decoding = Decoding("x")
    try:
        decoding.check_view(
            Storage("0", None, "cpu", held, 1), dtype, offset, decoding.geometry(shape, strides)
        )
    except ContradictionError:
        return False
    return True


AXES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=4)


@given(
    axes=AXES,
    offset=st.integers(0, 20),
    held=st.integers(0, 200),
    dtype=st.sampled_from(["uint8", "float16", "float32", "complex128"]),
)
def test_a_view_is_accepted_if_and_only_if_torch_can_make_it(
    axes: list[tuple[int, int]], offset: int, held: int, dtype: str
) -> None:
    shape, strides = tuple(size for size, _ in axes), tuple(stride for _, stride in axes)
    empty = torch.empty(0, dtype=getattr(torch, dtype))
    bytes_held = torch.UntypedStorage(held)
    try:
        view = empty.set_(bytes_held, offset, shape, strides)
        # torch lets a storage grow when it may
        possible = view.untyped_storage().nbytes() == held
    except RuntimeError:
        possible = False
    if 0 in shape:
        # no element lies anywhere, and torch is stricter about where
        possible = True
    assert fits(held, dtype, offset, shape, strides) is possible


def test_numbers_do_not_wrap_at_64_bits() -> None:
    assert not fits(64, "float32", 0, (2, 2), (LARGEST, LARGEST))
    assert not fits(64, "float32", LARGEST, (1,), (1,))
    assert not fits(64, "float32", 0, (2**32, 2**32), (1, 1))
    assert not fits(64, "float32", 0, (2**40, 2**40), (0, 0))
    assert fits(64, "float32", 0, (LARGEST, 0), (LARGEST, LARGEST))


def test_a_dtype_that_is_not_the_storages_counts_in_its_own_elements() -> None:
    decoding = Decoding("x")
    floats = Storage("0", "float32", "cpu", 6, 4)
    decoding.check_view(floats, "float64", 0, decoding.geometry((3,), (1,)))
    with pytest.raises(
        ContradictionError, match="reaches to element 3 of storage 0, which has 3 of float64"
    ):
        decoding.check_view(floats, "float64", 0, decoding.geometry((4,), (1,)))


def test_itemsizes_are_those_of_torch() -> None:
    for name, size in ITEMSIZE.items():
        assert getattr(torch, name).itemsize == size, name


IDENTITIES: list[Any] = [
    "0", None, (), ("storage",), ("module", Global("m", "f"), "0", "cpu", 1),
    ("storage", Global("torch", "FloatStorage"), "0", "cpu", 1, ("1", 0, 1)),
    ("storage", Global("os", "system"), "0", "cpu", 1), (("storage",), 1, 2, 3, 4),
]  # fmt: skip


@pytest.mark.parametrize("identity", IDENTITIES, ids=range(len(IDENTITIES)))
def test_other_persistent_ids_are_foreign(identity: Any) -> None:
    with pytest.raises(ForeignError):
        Decoding("x").storage(Persistent(identity))


def test_a_storage_is_one_object_by_its_key() -> None:
    decoding = Decoding("x")
    first = decoding.storage(storage("7"))
    assert decoding.storage(storage("7")) is first
    assert decoding.storage(storage("8")) is not first
    with pytest.raises(ContradictionError, match="described twice"):
        decoding.storage(storage("7", location="cuda:0"))


def test_integers_are_a_tuple_a_list_or_a_size_and_nothing_else() -> None:
    assert (
        integers((1, 2)) == integers([1, 2]) == integers(reduce("torch", "Size", (1, 2))) == (1, 2)
    )
    for node in (
        "12",
        (True,),
        (1.0,),
        None,
        reduce("torch", "Size", "12"),
        Call("reduce", Global("os", "Size"), ((1,),)),
    ):
        with pytest.raises(ContradictionError):
            integers(node)


def test_the_path_of_a_problem_leads_to_its_key() -> None:
    ordered = reduce("collections", "OrderedDict")
    ordered.pairs = [("w", dense(offset=99))]
    root = Dict([("model", Dict([("layers", [1, (2, ordered)])]))])
    with pytest.raises(CheckpointError, match=r"M936.*x: model\.layers\.1\.1\.w: "):
        policy.decode(root, "x")
