"""`gguf`: blocks of 32 or 256 numbers that hold codes and scales together, as llama.cpp stores
weights. Numbers are decoded only.

A type is a line of `_layouts`: which bits are codes, which scales, and what is taken off. A number
is code * scale, of K types code * (d * s) - dmin * m, each step in float32 as in gguf-py. The type
is what the file says, or the argument: bytes per row fit several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ..core.spec import Spec
from ..source.ggml_types import NAMED, type_name
from .base import NON_FINITE, Convention, OpError, Text, arg, dataclass
from .kit.codec import LayoutCodec
from .kit.geometry import codes_shape
from .kit.layout import (
    BitPiece,
    ElementType,
    Field,
    Grid,
    NumberLayout,
    Record,
    bit_plane,
    integers,
    signed,
    table,
    times,
)
from .kit.samples import number_part, random_records

DECODED = (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4",
    "f16", "bf16",
)  # fmt: skip
ON_DISK = {"data": "{w} uint8", "type": "{w}_type int32 []"}
# the numbers of e2m1, of which that of -0 is 0 here
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Gguf(LayoutCodec):
    name = "gguf"
    summary = "blocks of 32 or 256 numbers that hold codes and scales together"
    parts = ("data", "type")
    optional = planning = ("type",)
    recodes = True
    names = (Convention("llama.cpp", ON_DISK, says={"type": ("type", type_name)}),)

    @dataclass(frozen=True, slots=True)
    class Args:
        type: Text | None = arg(
            "what blocks are, by default what the part `type` says", words=DECODED, default=None
        )
        non_finite: Text = arg(
            "refuse or keep infinite and NaN scales", words=NON_FINITE[::2], default="refuse"
        )

    def settle(self, args: Any, specs: Sequence[Any], values: Mapping[str, bytes]) -> Any:
        if (said := values.get("type")) is None:
            return args
        if specs[1].dtype not in ("int32", "uint32") or specs[1].numel != 1:
            raise OpError("M310", f"gguf: the type is {specs[1]}, not one integer of 32 bits")
        found = type_name(int.from_bytes(said, "little"))
        if found not in DECODED:
            raise OpError("M310", f"gguf: the type is {found}, and not {', '.join(DECODED)}")
        if args.type not in (None, found):
            raise OpError("M310", f"gguf: `type` is {args.type}, the file says {found}")
        return replace(args, type=found)

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        if args.type is None:
            raise OpError(
                "M408",
                "gguf: nothing says of which type blocks are, and bytes per row fit several",
                help="name the part `type` in the rule, or write the argument `type`",
            )
        return _layouts(args.non_finite != "keep")[args.type]

    def recoded(self, args: Any, numbers: Spec) -> Mapping[str, Spec]:
        shape = codes_shape(self.layout(args, {}), numbers.shape, "uint8")
        return {"data": Spec("uint8", shape), "type": Spec("int32", ())}

    def foreseen(self, args: Any, spec: Spec) -> Mapping[str, bytes]:
        return {"type": NAMED[args.type].number.to_bytes(4, "little")}

    def stored(self) -> Iterable[tuple[Any, list[Any]]]:
        for name, layout in _layouts(True).items():
            yield self.Args(), [random_records(layout, 3, 2), number_part(NAMED[name].number)]
        yield self.Args("q4_0"), [random_records(_layouts(True)["q4_0"], 5, 1), None]


def _codes(elements: ElementType, *pieces: BitPiece) -> Grid:
    return Grid("data", elements=elements, field=Field(pieces))


def _sixes(least: int) -> Grid:
    """Of the twelve bytes from byte 4 on the eight scales of 6 bits, or the eight minima."""
    low = tuple(4 + j + 4 * least if j < 4 else 8 + j for j in range(8))
    high = tuple(j + 4 * least + 4 * (j < 4) for j in range(8))
    one, other = (0,) * 4 + (4 * least,) * 4, (4,) * 4 + (6,) * 4
    return _codes(integers(6), BitPiece(low, one, 4), BitPiece(high, other, 2, 4))


@cache
def _layouts(finite: bool) -> dict[str, NumberLayout]:
    """Type -> layout; `finite`: scales that are not are refused."""

    def at(byte: int, *more: Grid | float, dtype: str = "float16", finite: bool = finite) -> Any:
        return times(Grid("data", field=Field(dtype=dtype, at=byte), finite=finite), *more)

    plane, one, none = bit_plane, table((1.0,)), BitPiece((0,), (0,), 0)
    low, high = (_codes(integers(4), BitPiece(tuple(range(16)), (s,) * 16, 4)) for s in (0, 4))
    sixes = _codes(integers(6, 32), plane(16, 4, 96, 8), plane(16, 2, 104, 4, 4))
    eights = _codes(signed(8), plane(16, 8, 192, 16))
    scales, minima = at(0, _sixes(0)), at(2, _sixes(1))
    # what codes stand for, scales, what is taken off, and the bits of codes
    made: dict[str, tuple[ElementType, Any, Any, tuple[BitPiece, ...]]] = {
        "q4_0": (integers(4, 8), at(0), (), (plane(32, 4, 2, 16),)),
        "q4_1": (integers(4), at(0), at(2, -1.0), (plane(32, 4, 4, 16),)),
        "q5_0": (integers(5, 16), at(0), (), (plane(32, 4, 6, 16), plane(32, 1, 2, 1, 4))),
        "q5_1": (integers(5), at(0), at(2, -1.0), (plane(32, 4, 8, 16), plane(32, 1, 4, 1, 4))),
        "q8_0": (signed(8), at(0), (), (plane(32, 8, 2, 32),)),
        "q2_k": (integers(2), at(80, low), at(82, high), (plane(256, 2, 16, 32),)),
        "q3_k": (
            integers(3, 4), at(108, sixes), (), (plane(256, 2, 32, 32), plane(256, 1, 0, 32, 2))
        ),
        "q4_k": (integers(4), scales, minima, (plane(256, 4, 16, 32),)),
        "q5_k": (integers(5), scales, minima, (plane(256, 4, 48, 32), plane(256, 1, 16, 32, 4))),
        "q6_k": (
            integers(6, 32), at(208, eights), (), (plane(256, 4, 0, 64), plane(256, 2, 128, 32, 4))
        ),
        "mxfp4": (table(E2M1), at(0, dtype="float8_e8m0fnu"), (), (plane(32, 4, 1, 16),)),
        # each number is the scale of a block of one
        "f16": (one, at(0, finite=False), (), (none,)),
        "bf16": (one, at(0, dtype="bfloat16", finite=False), (), (none,)),
    }  # fmt: skip
    return {
        name: NumberLayout(
            f"gguf {name}", elements, Field(pieces), scale, less=less, role="data",
            record=Record(NAMED[name].elements, NAMED[name].nbytes),
        )
        for name, (elements, scale, less, pieces) in made.items()
    }  # fmt: skip


CODEC = Gguf()
