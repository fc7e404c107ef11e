"""The op by itself: what it decides, what it makes of what was decided, and what it says of
itself.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from migrate import ops
from migrate.core.spec import spec
from migrate.ops.base import Decided, Loss, OneWay, OpError
from migrate.ops.extra_state import Making
from migrate.testing import opkit

VECTORS = Path(__file__).resolve().parents[1] / "data" / "te"
OP = ops.get("extra_state")
ALLOWED = frozenset({"delayed-scaling"})


def vector(name: str) -> bytes:
    return (VECTORS / name).read_bytes()


def decided(name: str, allow: frozenset[str] = ALLOWED, **policies: str) -> Decided:
    payload = vector(name)
    return OP.decide(
        OP.Args(**policies), spec("uint8", (len(payload),)), payload, "layer._extra_state", allow
    )


def test_the_op_is_described() -> None:
    opkit.check_description("extra_state")


def test_it_has_no_way_back_and_is_no_loss_by_itself() -> None:
    assert isinstance(OP.invert(OP.Args()), OneWay)
    assert OP.loss(OP.Args(delayed_scaling="drop")) is Loss.LOSSLESS


def test_the_shapes_that_are_decided_are_those_that_are_made() -> None:
    for name in (
        "v0.8_linear_DelayedScaling.pkl",
        "v1.13_linear_DelayedScaling_hist1024.bytesio.pt",
        "v1.13_ops_basic_linear_DelayedScaling.pkl",
    ):
        for form in ("pickle-2.x", "tensors"):
            found = decided(name, delayed_scaling=form)
            array = np.frombuffer(vector(name), np.uint8)
            made = OP.eager(found.args, [array], len(found.outputs))
            assert OP.infer(found.args, [spec("uint8", array.shape)]) == [
                of for _, of in found.outputs
            ]
            assert [(m.shape, m.nbytes) for m in made] == [
                (of.shape, of.nbytes) for _, of in found.outputs
            ]


def test_an_empty_tensor_is_made_of_settings() -> None:
    found = decided("v2.17_linear_MXFP8BlockScaling.pkl", stateless="empty")
    (made,) = OP.eager(found.args, [np.zeros(3, np.uint8)])
    assert (made.shape, made.dtype) == ((0,), np.uint8)


def test_a_state_that_is_another_than_was_planned_is_refused_in_the_run() -> None:
    found = decided("v0.8_linear_DelayedScaling.pkl", delayed_scaling="tensors")
    with pytest.raises(OpError, match="not the one that the plan was made for"):
        OP.eager(
            found.args,
            [np.frombuffer(vector("v1.13_linear_DelayedScaling_hist1024.bytesio.pt"), np.uint8)],
            4,
        )
    shorter = Making("pickle-2.x", (spec("uint8", (7,)),))
    with pytest.raises(OpError, match="not the one that the plan was made for"):
        OP.eager(shorter, [np.frombuffer(vector("v0.8_linear_DelayedScaling.pkl"), np.uint8)])


def test_an_archive_that_holds_nothing_is_not_kept_as_bytes() -> None:
    found = decided("v1.13_linear_DelayedScaling_nofp8.bytesio.pt", stateless="keep")
    assert found.outputs == (("", spec("uint8", (0,))),)


def test_only_the_word_for_it_allows_delayed_scaling() -> None:
    for allow in (
        frozenset[str](),
        frozenset({"drop", "lossy", "opaque", "links", "delayed_scaling"}),
    ):
        with pytest.raises(OpError) as caught:
            decided("HEAD_linear_DelayedScaling.pkl", allow, delayed_scaling="tensors")
        assert caught.value.code == "M951"
    assert len(decided("HEAD_linear_DelayedScaling.pkl", delayed_scaling="tensors").outputs) == 4
