"""The kit for ops that compute must be able to fail."""

from __future__ import annotations

import pytest

from migrate import ops
from migrate.core.spec import spec
from migrate.ops.affine import Affine
from migrate.ops.base import Loss, Number, OpCall, OpError, ValueOp, arg, dataclass, step
from migrate.testing import valuekit


def check(monkeypatch, op):
    real = ops.get
    monkeypatch.setattr(ops, "get", lambda name: op if name == op.name else real(name))
    return valuekit.check(op.name)


class Turn(Affine):
    """Turns signs; what each test breaks is a method of a subclass."""

    name = "turn"

    @dataclass(frozen=True, slots=True)
    class Args(Affine.Args):
        mul: Number = arg("the factor", default=-1)

    def invert(self, args, enumerated=False):
        return OpCall("turn", args)

    def samples(self):
        yield {}, [(3, 4)]


@pytest.mark.heavy
def test_an_op_that_keeps_its_word_passes(monkeypatch):
    assert check(monkeypatch, Turn()) == 4


class Shifted(Turn):
    def compute(self, args, arrays, specs, output, box, out, meter=None):
        super().compute(args, arrays, specs, output, box, out, meter)
        out ^= out.dtype.type(1) if hasattr(out, "flags") else 1


class BoxBlind(Turn):
    def compute(self, args, arrays, specs, output, box, out, meter=None):
        super().compute(args, arrays, specs, output, box, out, meter)
        if box[0][0]:
            out[...] = 0


class Careless(Turn):
    def compute(self, args, arrays, specs, output, box, out, meter=None):
        super().compute(args, arrays, specs, output, box, out, meter)
        arrays[0][...] = 0


class Greedy(Turn):
    def needs(self, args, specs, output, box):
        return [tuple((a, b + 1) for a, b in box)]


class Grainless(Turn):
    def grain(self, args, specs, output):
        return (1,)


class Misled(Turn):
    def infer(self, args, specs, parts=1):
        super().infer(args, specs, parts)
        return [spec(s.dtype, (*s.shape, 1)) for s in specs]


class Silent(Turn):
    def loss(self, args):
        return Loss.LOSSY


class Chatty(Turn):
    def chunk(self, args, raw, spec, out, meter):
        if meter is not None:
            meter.add(out, out)
        return super().chunk(args, raw, spec, out, meter)


class Irreversible(Turn):
    def invert(self, args, enumerated=False):
        return step("affine", mul=1, add=0, exact=True)


class Picky(Turn):
    def compute(self, args, arrays, specs, output, box, out, meter=None):
        raise OpError("M406", "no number pleases")


class Stacked(Turn):
    """Gives torch tensors other bits."""

    def _whole(self, args, array, spec, box, out, meter):
        out.zero_()


class NoDtype(Turn):
    def infer(self, args, specs, parts=1):
        raise OpError("M309", "takes nothing")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("op", "words"),
    [
        (Shifted, "compute and eager differ"), (BoxBlind, "differs from the whole"),
        (Careless, "writes into its inputs"),
        (Greedy, "of an input of shape"), (Grainless, "the grain is"),
        (Misled, "eager twin makes|of an input of shape"),
        (Silent, "receives nothing"),
        (Chatty, "is lossless, yet tells"), (Irreversible, "does not bring back|goes on"),
        (Picky, "refuses small whole numbers"),
        (Stacked, "torch tensors give other bits"), (NoDtype, "takes none of the dtypes"),
    ],
)  # fmt: skip
def test_the_kit_sees_an_op_that(monkeypatch, op, words):
    with pytest.raises(AssertionError, match=words):
        check(monkeypatch, op())


def test_a_layout_op_is_not_for_this_kit():
    assert not isinstance(ops.get("stack"), ValueOp)
    with pytest.raises(AssertionError, match="does not compute"):
        valuekit.check("stack")
