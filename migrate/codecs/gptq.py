"""`gptq`: integers in 32-bit words with a scale and a zero for each group of columns, as GPTQModel
and AutoGPTQ store weights. Nothing encodes it: GPTQ chooses codes by what layers are given.

Of numbers [N, K] codes lie along K in words [K * bits / 32, N], scales are [G, N], and zeros lie
along N in words [G, N * bits / 32]. A number is (code - zero) * scale of the group that `group`
(`g_idx`) names for its column; without it groups are of columns in turn. The form v1 has zeros
less 1. Codes of three bits go on across the borders of words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..core.spec import Spec
from .base import Convention, Integer, OpError, Text, arg, dataclass
from .kit.arguments import scales_arg
from .kit.codec import LayoutCodec
from .kit.geometry import check_axes, group_of
from .kit.layout import Grid, NumberLayout, Packing, integers, times
from .kit.samples import index_part, random_part

BITS = (2, 3, 4, 8)


class Gptq(LayoutCodec):
    name = "gptq"
    summary = "integers in 32-bit words with a scale and a zero for each group of columns"
    parts = ("weight", "zero", "scale", "group")
    optional = ("group",)
    recodes = True
    names = (
        Convention(
            "GPTQModel, AutoGPTQ",
            {
                "weight": "{w}.qweight int32 [K*bits/32, N]",
                "zero": "{w}.qzeros int32 [K/group, N*bits/32]",
                "scale": "{w}.scales wide [K/group, N]",
                "group": "{w}.g_idx? int32 [K]",
            },
            either={"form": ("v1", "v2")},
        ),
    )

    @dataclass(frozen=True, slots=True)
    class Args:
        form: Text = arg(
            "how zeros are stored: less 1 (v1; `checkpoint_format: gptq`) or as they are (v2)",
            words=("v1", "v2"),
        )
        bits: Integer | None = arg(
            "bits of a code, by default those that the shapes show", values=BITS, default=None
        )
        group: Integer | None = arg(
            "columns that share a scale, by default those that the shapes show",
            least=1,
            default=None,
        )
        zeros: Text = arg(
            "of the form v1, refuse a zero that is stored as the largest code, because it can be 0 "
            "or 2^bits, or take 1 off whole words, as GPTQModel does: then it is 0",
            words=("refuse", "words"),
            default="refuse",
        )
        non_finite: Text = scales_arg()

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        check_axes(self.name, specs, {"weight": 2, "zero": 2, "scale": 2})
        (words, _), (groups, rows) = specs["weight"].shape, specs["scale"].shape
        index, bits = "group" if "group" in specs else "", self._bits(args, specs)
        columns = specs[index].numel if index else words * 32 // bits
        if (found := specs["zero"].shape[0]) != groups:
            raise OpError("M310", f"gptq: the zero is of {found} groups, the scale of {groups}")
        each = 1
        if args.group or not index:
            each = group_of(self.name, columns, groups, args.group)
        block, dense = (1, 1 if index else each), bits == 3
        less = int(args.form == "v1")
        codes = Packing(bits, ("int32",), dense=dense, transposed=True)
        packing = Packing(bits, ("int32",), axis=-2, dense=dense, plus=less)
        positive, nonzero = args.non_finite != "keep", bool(less) and args.zeros == "refuse"
        scale = Grid("scale", block, transposed=True, index=index, positive=positive)
        zero = Grid(
            "zero", block, elements=integers(bits), packing=packing, transposed=True, index=index,
            nonzero=nonzero,
        )  # fmt: skip
        shape = (rows, columns)
        return NumberLayout(self.name, integers(bits), codes, times(scale), zero=zero, shape=shape)

    def _bits(self, args: Any, specs: Mapping[str, Spec]) -> int:
        """The bits of a code by the shapes of all parts. OpError M310 with what each part shows."""
        lengths = {"zero": (specs["scale"].shape[1], specs["zero"].shape[1])}
        if "group" in specs:
            lengths["weight"] = specs["group"].numel, specs["weight"].shape[0]
        shown = {r: [b for b in BITS if -(-n * b // 32) == w] for r, (n, w) in lengths.items()}
        fitting = [b for b in BITS if all(b in known for known in shown.values())]
        if args.bits in fitting or (args.bits is None and len(fitting) == 1):
            return int(args.bits or fitting[0])
        said = [f"`bits` says {args.bits}"] if args.bits else []
        for role, known in shown.items():
            several = " or ".join(map(str, known)) or "no known number of"
            said.append(f"by its shape {list(specs[role].shape)} the {role} is of {several} bits")
        raise OpError("M310", f"gptq: {', '.join(said)}", help="write `bits` as the parts are")

    def stored(self) -> Iterable[tuple[Any, list[Any]]]:
        for args, words, groups, rows, index in (
            (self.Args("v1", zeros="words"), (12, 8), 3, 64, index_part(96, 3, shuffled=True)),
            (self.Args("v1", 8, zeros="words"), (2, 13), 1, 50, index_part(7, 1)),
            (self.Args("v2", 3), (6, 3), 2, 32, None),
            (self.Args("v2", 2, 32), (4, 3), 2, 48, index_part(64, 2)),
        ):
            weight, zero = (
                random_part("int32", *s) for s in ((words[0], rows), (groups, words[1]))
            )
            yield args, [weight, zero, random_part("float16", groups, rows), index]


CODEC = Gptq()
