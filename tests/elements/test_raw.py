"""One answer to which tensors are their bytes, and to what a DTensor is."""

from __future__ import annotations

import pytest

from migrate.elements.raw import has_plain_bytes, is_dtensor, is_plain_class

torch = pytest.importorskip("torch")


class Wrapper(torch.Tensor):
    """A subclass, which may hold more than its bytes."""


def test_torchs_own_classes_are_plain_and_have_bytes_but_on_the_meta_device() -> None:
    for value in (
        torch.zeros(2),
        torch.nn.Parameter(torch.zeros(2)),
        torch.nn.Buffer(torch.ones(1)),
    ):
        assert is_plain_class(value)
        assert has_plain_bytes(value)
        assert not is_dtensor(value)
    meta = torch.empty(2, device="meta")
    assert is_plain_class(meta)
    assert not has_plain_bytes(meta)


@pytest.mark.parametrize("value", [None, 1, [], torch.zeros(2).as_subclass(Wrapper)])
def test_other_values_are_neither(value: object) -> None:
    assert not is_plain_class(value)
    assert not has_plain_bytes(value)
    assert not is_dtensor(value)


def test_a_dtensor_is_told_by_its_class_and_by_those_that_it_is_derived_from() -> None:
    distributed = type("DTensor", (), {"__module__": "torch.distributed.tensor"})
    assert is_dtensor(distributed())
    assert is_dtensor(type("Derived", (distributed,), {})())
    assert not is_dtensor(type("DTensor", (), {"__module__": "somewhere.else"})())
