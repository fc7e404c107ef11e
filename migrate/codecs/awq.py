"""`awq`: integers of four bits in 32-bit words with a scale and a zero for each group of columns,
as AutoAWQ stores weights. Nothing encodes it: AWQ chooses scales by what layers are given.

A number is (code - zero) * scale of its group. Of the form gemm all is stored transposed, and the
eight codes of a word are those of columns 0, 2, 4, 6, 1, 3, 5, 7 of it; of the form gemv codes lie
in turn, and zeros and scales are padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..core.spec import Spec
from .base import Convention, Integer, Text, arg, dataclass
from .kit.arguments import scales_arg
from .kit.codec import LayoutCodec
from .kit.geometry import check_form, matrices_of
from .kit.groups import group_of, has_whole_groups, padded_group, stored_group_arg
from .kit.layout import NumberLayout, Packing
from .kit.samples import random_parts
from .kit.word_packing import of_words

PARTS = ("weight", "zero", "scale")
# how AutoAWQ stores them for each kernel
FORMS = {
    "gemm": ("qweight int32 [K, N/8]", "qzeros int32 [K/group, N/8]", "scales wide [K/group, N]"),
    "gemv": ("qweight int32 [N, K/8]", "qzeros int32 [N, Z]", "scales wide [N, 8*Z]"),
}
# the field that holds each number of a word, of the form gemm
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# by the columns of a group, at least, what rows of words of zeros are multiples of (gemv)
MULTIPLES = {32: 4, 64: 2, 128: 1}


class Awq(LayoutCodec):
    name = "awq"
    summary = "integers of 4 bits in 32-bit words with a scale and a zero for each group of columns"
    parts = PARTS
    recodes = True
    names = tuple(
        Convention(
            "AutoAWQ",
            {role: f"{{w}}.{text}" for role, text in zip(PARTS, texts, strict=True)},
            arguments={"form": form},
            accepts=has_whole_groups,
        )
        for form, texts in FORMS.items()
    )

    @dataclass(frozen=True, slots=True)
    class Args:
        form: Text = arg("for which kernel parts are stored", words=tuple(FORMS), default="gemm")
        group: Integer | None = stored_group_arg()
        non_finite: Text = scales_arg()

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        weight, zero, scale = matrices_of(self.name, specs, self.parts)
        gemm = (zero[0], 8 * zero[1], 8 * weight[1]) == (scale[0], scale[1], scale[1])
        gemv = (weight[0], zero[0], 8 * zero[1]) == (scale[0], scale[0], scale[1])
        check_form(self.name, args.form, {"gemm": gemm, "gemv": gemv}, specs)
        codes, positive = Packing(4, ("int32",)), args.non_finite != "keep"
        if args.form == "gemv":
            each, padded = padded_group(self.name, 8 * weight[1], zero[1], args.group, MULTIPLES)
            return of_words(self.name, codes, codes, (1, each), positive=positive, padded=padded)
        codes = Packing(4, ("int32",), axis=-2, order=ORDER)
        each = group_of(self.name, weight[0], scale[0], args.group)
        return of_words(self.name, codes, codes, (1, each), positive=positive, transposed=True)

    def stored(self) -> Iterable[tuple[Any, list[Any]]]:
        for args, *shapes in (
            (self.Args(), (96, 5), (3, 5), (3, 40)),
            (self.Args(group=24), (48, 2), (2, 2), (2, 16)),
            (self.Args("gemv", 128), (6, 32), (6, 1), (6, 8)),
            (self.Args("gemv"), (3, 40), (3, 4), (3, 32)),
        ):
            yield args, random_parts(("int32", "int32", "float16"), *shapes)


CODEC = Awq()
