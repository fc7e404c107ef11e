"""`gptq`: integers in 32-bit words with a scale and a zero for each group of columns, as GPTQModel
and AutoGPTQ store weights. GPTQ chooses codes by what layers are given, so that nothing encodes it.

Codes lie along columns, zeros along rows; three bits go on across the borders of words. A number is
(code - zero) * scale of the group that `group` (`g_idx`) names for its column, or of its turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..core.spec import Spec
from .base import Convention, Flag, Integer, Text, arg, dataclass
from .kit.arguments import scales_arg
from .kit.codec import LayoutCodec
from .kit.geometry import matrices_of
from .kit.groups import block_of, stored_group_arg
from .kit.layout import NumberLayout, Packing
from .kit.samples import index_part, random_parts
from .kit.word_packing import bits_shown, of_words, stored_bits_arg, symmetric_arg

PARTS = {
    "weight": "{w}.qweight int32 [K*bits/32, N]",
    "zero": "{w}.qzeros int32 [K/group, N*bits/32]",
    "scale": "{w}.scales wide [K/group, N]",
    "group": "{w}.g_idx? int32 [K]",
}


class Gptq(LayoutCodec):
    name = "gptq"
    summary = "integers in 32-bit words with a scale and a zero for each group of columns"
    parts = tuple(PARTS)
    optional = ("group",)
    recodes = True
    names = (Convention("GPTQModel, AutoGPTQ", PARTS, either={"form": ("v1", "v2")}),)

    @dataclass(frozen=True, slots=True)
    class Args:
        form: Text = arg(
            "how zeros are stored: less 1 (v1; `checkpoint_format: gptq`) or as they are (v2)",
            words=("v1", "v2"),
        )
        bits: Integer | None = stored_bits_arg()
        group: Integer | None = stored_group_arg()
        zeros: Text = arg(
            "of the form v1, refuse a zero that is stored as the largest code, because it can be 0 "
            "or 2^bits, or take 1 off whole words, as GPTQModel does: then it is 0",
            words=("refuse", "words"), default="refuse",
        )  # fmt: skip
        symmetric: Flag = symmetric_arg()
        non_finite: Text = scales_arg()

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        weight, zero, (groups, rows) = matrices_of(self.name, specs, self.parts[:3])
        index, lengths = "group" if "group" in specs else "", {"zero": (rows, zero[1])}
        if index:
            lengths["weight"] = specs[index].numel, weight[0]
        bits = bits_shown(self.name, args.bits, specs, lengths)
        columns = specs[index].numel if index else weight[0] * 32 // bits
        codes = Packing(bits, ("int32",), dense=bits == 3)
        zeros = Packing(bits, ("int32",), axis=-2, dense=bits == 3, plus=int(args.form == "v1"))
        return of_words(
            self.name, codes, zeros, block_of(self.name, columns, groups, args.group, index),
            (rows, columns), transposed=True, index=index, symmetric=args.symmetric,
            positive=args.non_finite != "keep", nonzero=zeros.plus > 0 and args.zeros == "refuse",
        )  # fmt: skip

    def stored(self) -> Iterable[tuple[Any, list[Any]]]:
        for args, index, *shapes in (
            (self.Args("v1", zeros="words"), index_part(96, 3), (12, 64), (3, 8), (3, 64)),
            (self.Args("v1", 8, zeros="words"), index_part(7, 1), (2, 50), (1, 13), (1, 50)),
            (self.Args("v2", 3), None, (6, 32), (2, 3), (2, 32)),
            (self.Args("v2", 2, 32), index_part(64, 2, ordered=True), (4, 48), (2, 3), (2, 48)),
        ):
            yield args, [*random_parts(("int32", "int32", "float16"), *shapes), index]


CODEC = Gptq()
