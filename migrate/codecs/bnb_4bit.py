"""`bnb-4bit`: codes of four bits that look up a table, with a scale for each block of numbers in
row-major order, as bitsandbytes stores NF4 and FP4.

Byte i holds number 2 * i in its high half and the next in its low one, whatever the rows. A number
is map[code] * absmax of its block. Nested, absmax is a code itself, of the number
nested_map[code] * nested_absmax + offset. The shape of the numbers, the length of blocks and the
offset are in `state`, which is JSON.

What is encoded is what bitsandbytes encodes on a CPU, but for nested scales. Their offset is a mean
that torch sums up in an order which depends on the processor and the number of threads, and its
digits decide how long `state` is, which a plan has to know.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

from ..core.spec import Spec
from .base import Convention, Integer, OpError, Text, arg, dataclass
from .kit.arguments import non_finite_arg
from .kit.encoding_codec import EncodingCodec
from .kit.layout import FLOATS, Grid, NumberLayout, Packing, Term, table, table_of, times
from .kit.quant_state import BLOCKSIZES, NESTED, TABLES, read_state, state_bytes, state_parts
from .kit.scale_rules import ScaleRule

NOT_NESTED = "bnb-4bit does not encode nested scales: their offset depends on the number of threads"


class Bnb4Bit(EncodingCodec):
    name = "bnb-4bit"
    summary = "codes of 4 bits that look up a table, with a scale for each block of numbers in turn"
    parts = ("weight", "absmax", "map", "state", *NESTED)
    optional = unmade = NESTED
    planning = ("state",)
    follow = ("absmax",)
    numbers = FLOATS
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
        for form in TABLES
    )

    @dataclass(frozen=True, slots=True)
    class Args:
        form: Text | None = arg(
            "whose codes they are, by default what `state` says, to encode nf4",
            words=tuple(TABLES),
            default=None,
        )
        blocksize: Integer | None = arg(
            "numbers that share a scale, by default what `state` says, to encode 64",
            least=1,
            default=None,
        )
        non_finite: Text = non_finite_arg()

    @dataclass(frozen=True, slots=True)
    class Stated(Args):
        """Arguments with what the state says: the shape of the numbers, and of a nested absmax how
        many entries share a scale, and the offset.
        """

        shape: tuple[int, ...] = ()
        nested: tuple[int, float] | None = None

    def validate(self, args: Any, encoding: bool) -> None:
        super().validate(args, encoding)
        if encoding and args.blocksize not in (None, *BLOCKSIZES):
            known = ", ".join(map(str, BLOCKSIZES))
            raise OpError("M308", f"bnb-4bit encodes blocks of {known}, not of {args.blocksize}")

    def settle(self, args: Any, specs: Sequence[Any], values: Mapping[str, bytes]) -> Any:
        said = read_state(self.name, values["state"])
        said.check(self.name, {"form": args.form, "blocksize": args.blocksize}, self.by_role(specs))
        return self.Stated(said.form, said.blocksize, args.non_finite, said.shape, said.nested)

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        if not isinstance(args, self.Stated):
            raise OpError("M308", "bnb-4bit: only its state says how its parts are stored")
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

    def written(self, args: Any, spec: Spec) -> NumberLayout:
        scale = times(Grid("absmax", (0, args.blocksize or 64), dtypes=("float32",)))
        elements, packing = table(TABLES[args.form or "nf4"]), Packing(4, order=(1, 0))
        return NumberLayout(self.name, elements, packing, scale, flat=True, shape=spec.shape)

    def foreseen(self, args: Any, spec: Spec) -> Mapping[str, bytes]:
        return state_bytes(args.form or "nf4", args.blocksize or 64, spec)

    def encoded(self, args: Any, spec: Spec) -> Sequence[Spec | None]:
        if len(spec.shape) != 2:
            raise OpError("M304", f"bnb-4bit encodes rows and columns, as layers have; not {spec}")
        weight, *_ = super().encoded(args, spec)
        blocks, state = -(-spec.numel // (args.blocksize or 64)), self.foreseen(args, spec)["state"]
        absmax, known = Spec("float32", (blocks,)), Spec("float32", (16,))
        return [weight, absmax, known, Spec("uint8", (len(state),)), None, None]

    def making(self, args: Any, roles: Collection[str]) -> Any:
        if any(role in NESTED for role in roles):
            raise OpError("M408", NOT_NESTED, help="leave out the names of nested parts")
        return args

    def rule(self, args: Any, spec: Spec) -> ScaleRule:
        return ScaleRule("table", "bitsandbytes")

    def returns(self, args: Any, spec: Spec) -> str:
        codes = {"nf4": "codes", "fp4": "codes but 8, which is 0 as well"}[args.form or "nf4"]
        return f"{codes}, and scales that {spec.dtype} holds, of what bitsandbytes encoded"

    def bound(self, args: Any) -> str:
        steps = [high - low for low, high in pairwise(sorted(TABLES[args.form or "nf4"]))]
        return f"|error| <= {max(steps) / 2:.7f} * absmax of the block: half of the widest step"

    def samples(self) -> Iterable[tuple[Any, Spec]]:
        yield self.Args(), Spec("bfloat16", (6, 96))
        yield self.Args(form="fp4", blocksize=32), Spec("float32", (7, 15))
        yield self.Args(blocksize=256, non_finite="saturate"), Spec("float16", (9, 210))

    def stored(self) -> Iterable[tuple[Any, list[Any]]]:
        yield self.Args(), state_parts((7, 5, 3), 48)
        yield self.Args(), state_parts((9, 210), 64, 8)


CODEC = Bnb4Bit()
