"""`bnb-4bit`: codes of four bits that look up a table, with a scale for each block of numbers in
row-major order, as bitsandbytes stores NF4 and FP4. It is decoded only.

Byte i holds number 2 * i in its high half and the next in its low one, whatever the rows. A number
is map[code] * absmax of its block. Nested, absmax is a code itself, of the number
nested_map[code] * nested_absmax + offset. The shape of the numbers, the length of blocks and the
offset are in `state`, which is JSON.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from ..core.errors import MigrateError, printable
from ..core.spec import Spec
from .base import Convention, Integer, OpError, Text, arg, dataclass
from .kit.arguments import scales_arg
from .kit.codec import LayoutCodec
from .kit.layout import Grid, NumberLayout, Packing, Term, table_of, times
from .kit.samples import bytes_part, random_part

FORMS = ("nf4", "fp4")
NESTED = ("nested_absmax", "nested_map")
# of a length or a block that `state` says, and of axes
MOST, MOST_AXES = 1 << 48, 64


class Bnb4Bit(LayoutCodec):
    name = "bnb-4bit"
    summary = "codes of 4 bits that look up a table, with a scale for each block of numbers in turn"
    parts = ("weight", "absmax", "map", "state", *NESTED)
    optional = NESTED
    planning = ("state",)
    names = tuple(
        Convention(
            "bitsandbytes",
            {
                "weight": "{w} uint8 [E/2, 1]",
                "absmax": "{w}.absmax float32|uint8 [E/blocksize]",
                "map": "{w}.quant_map float32 [16]",
                "state": f"{{w}}.quant_state.bitsandbytes__{form} uint8 [J]",
                "nested_absmax": "{w}.nested_absmax? float32 [H]",
                "nested_map": "{w}.nested_quant_map? float32 [256]",
            },
            arguments={"form": form},
        )
        for form in FORMS
    )

    @dataclass(frozen=True, slots=True)
    class Args:
        form: Text | None = arg(
            "whose codes they are, by default what `state` says", words=FORMS, default=None
        )
        blocksize: Integer | None = arg(
            "numbers that share a scale, by default what `state` says", least=1, default=None
        )
        non_finite: Text = scales_arg(zeros=True)

    @dataclass(frozen=True, slots=True)
    class Stated(Args):
        """Arguments with what the state says: the shape of the numbers, and of a nested absmax how
        many entries share a scale, and the offset.
        """

        shape: tuple[int, ...] = ()
        nested: tuple[int, float] | None = None

    def settle(self, args: Any, specs: Sequence[Any], values: Mapping[str, bytes]) -> Any:
        said, there = _object(values["state"]), self.by_role(specs)
        form, each = said.get("quant_type"), _whole(said, "blocksize")
        if form not in FORMS:
            raise _wrong("quant_type", form, " or ".join(FORMS))
        for name, wanted, found in (("form", args.form, form), ("blocksize", args.blocksize, each)):
            if wanted not in (None, found):
                raise OpError("M310", f"bnb-4bit: `{name}` is {wanted}, the state says {found}")
        nested = None
        # bitsandbytes writes all of these or none
        if any(name.startswith("nested_") for name in said):
            nested = _whole(said, "nested_blocksize"), _offset(said)
        for role in NESTED:
            if nested is not None and role not in there:
                raise OpError("M408", f"bnb-4bit: the state says that there is a {role}")
            if nested is None and role in there:
                raise OpError("M310", f"bnb-4bit: the state says nothing of the {role} beside it")
        return self.Stated(form, each, args.non_finite, _shape(said), nested)

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        if not isinstance(args, self.Stated):
            raise OpError("M408", "bnb-4bit cannot be decoded without what its state says")
        count, checked = max(prod(args.shape), 1), args.non_finite != "keep"
        block = (0, min(args.blocksize or 1, count))
        scale = times(Grid("absmax", block, dtypes=("float32",), positive=checked, zeros=True))
        if args.nested is not None:
            inner, offset = args.nested
            codes = Grid("absmax", block, dtypes=("uint8",), elements=table_of("nested_map", 8))
            block = (0, min(block[1] * inner, count))
            wide = Grid("nested_absmax", block, dtypes=("float32",), positive=checked, zeros=True)
            scale = (*times(codes, wide), Term("+", offset))
        elements, packing = table_of("map", 4), Packing(4, order=(1, 0))
        return NumberLayout(self.name, elements, packing, scale, flat=True, shape=args.shape)

    def stored(self) -> Iterable[tuple[Any, list[Any]]]:
        for shape, each, inner in (((6, 96), 64, 0), ((7, 5, 3), 32, 0), ((9, 210), 64, 8)):
            blocks = -(-prod(shape) // each)
            said: dict[str, Any] = {"quant_type": "nf4", "blocksize": each, "shape": shape}
            absmax = random_part("float32", blocks)
            more: list[Any] = [None, None]
            if inner:
                said |= {"nested_blocksize": inner, "nested_offset": 0.1}
                absmax = random_part("uint8", blocks)
                more = [random_part("float32", n) for n in (-(-blocks // inner), 256)]
            codes, state = random_part("uint8", -(-prod(shape) // 2), 1), json.dumps(said).encode()
            yield self.Args(), [codes, absmax, random_part("float32", 16), bytes_part(state), *more]


def _object(data: bytes) -> dict[str, Any]:
    from ..source.jsontext import parse

    try:
        found = parse(data, "the state", floats=True)
    except MigrateError as error:
        raise OpError("M310", f"bnb-4bit: {error.diagnostics[0].message}") from None
    if not isinstance(found, dict):
        raise OpError("M310", "bnb-4bit: the state is not a JSON object")
    return found


def _wrong(name: str, found: Any, wanted: str) -> OpError:
    text = printable(repr(found), 60)
    return OpError("M310", f"bnb-4bit: {name} of the state is {text}, not {wanted}")


def _whole(said: Mapping[str, Any], name: str) -> int:
    if not _is_length(found := said.get(name)) or not found:
        raise _wrong(name, found, f"an integer from 1 to {MOST:,}")
    return int(found)


def _shape(said: Mapping[str, Any]) -> tuple[int, ...]:
    found = said.get("shape")
    if isinstance(found, list) and len(found) <= MOST_AXES and all(map(_is_length, found)):
        return tuple(found)
    raise _wrong("shape", found, f"a list of at most {MOST_AXES} integers from 0 to {MOST:,}")


def _is_length(found: Any) -> bool:
    return type(found) is int and 0 <= found <= MOST


def _offset(said: Mapping[str, Any]) -> float:
    """The offset in float32, in which bitsandbytes adds it."""
    found = said.get("nested_offset")
    if isinstance(found, int | float) and type(found) is not bool and abs(found) < 2.0**127:
        return float(struct.unpack("<f", struct.pack("<f", found))[0])
    raise _wrong("nested_offset", found, "a finite number of float32")


CODEC = Bnb4Bit()
