"""Every hostile stream dressed as extra state: refused by the op, whatever a rule asks for and a
person allows, and nothing is run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import opcodes as o
import pytest
from hostile_streams import STREAMS, Stream

from migrate import ops
from migrate.core.errors import OpError
from migrate.core.spec import spec
from migrate.source.pickle.nodes import EXTRA_STATE

EVERYTHING = frozenset({"drop", "lossy", "opaque", "links", "delayed-scaling"})
RECIPE = o.new("transformer_engine.common.recipe", "MXFP8BlockScaling", {"margin": 0})


def dressings(stream: Stream, canary: str) -> list[bytes]:
    """The stream itself, and its value wherever a state has values."""
    if stream.whole:
        return [stream.pickle(canary)]
    body = stream.build(canary)
    states = [
        {"recipe": body},
        {"recipe": RECIPE, "extra_fp8_variables": {"x": body}},
        {"recipe": RECIPE, "scale_fwd": body},
        {"forward": body},
    ]
    states += [
        {"recipe": o.new("transformer_engine.common.recipe", "DelayedScaling", {"margin": body})},
        {"global_fp8_buffer": body},
    ]
    return [stream.pickle(canary), *(o.stream(o.value(state)) for state in states)]


@pytest.mark.parametrize("stream", STREAMS, ids=lambda s: s.name)
def test_a_hostile_stream_is_refused_by_the_op(stream: Stream, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    op = ops.get("extra_state")
    before = set(sys.modules)
    accepted, codes = [], set()
    for number, payload in enumerate(dressings(stream, str(canary))):
        if len(payload) > EXTRA_STATE.size:
            continue
        for form in ("pickle-2.x", "tensors", "drop"):
            try:
                decided = op.decide(
                    op.Args(delayed_scaling=form),
                    spec("uint8", (len(payload),)),
                    payload,
                    "x",
                    EVERYTHING,
                )
            except OpError as error:
                codes.add(error.code)
            else:
                accepted.append((number, form, decided))
    assert codes <= {"M914", "M930", "M931", "M932", "M940", "M941", "M950", "M952"}
    assert not canary.exists()
    assert not {m for m in set(sys.modules) - before if not m.startswith(("migrate.", "numpy"))}
    if stream.live:
        assert not accepted
    # no bytes at all are what TE writes where there is nothing; whatever else does nothing never
    # goes silently
    assert stream.name == "no-bytes" or all(
        decided.outputs or decided.loses for _, _, decided in accepted
    )
