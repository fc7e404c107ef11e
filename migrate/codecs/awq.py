"""`awq`: integers of four bits in 32-bit words with a scale and a zero for each group of columns,
as AutoAWQ stores weights. Nothing encodes it: AWQ chooses scales by what layers are given.

A number [N, K] is (code - zero) * scale of its group. Of the form gemm all is stored transposed,
codes [K, N / 8], zeros [G, N / 8] and scales [G, N], and the eight codes of a word are those of
columns 0, 2, 4, 6, 1, 3, 5, 7 of it. Of the form gemv codes are [N, K / 8] in turn, and zeros
[N, Z] and scales [N, 8 * Z] are padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..core.spec import Spec
from .base import Convention, Integer, OpError, Text, arg, dataclass
from .kit.arguments import scales_arg
from .kit.codec import LayoutCodec
from .kit.geometry import check_axes, group_of
from .kit.layout import Grid, NumberLayout, Packing, integers, times
from .kit.samples import random_part
from .kit.word_packing import has_whole_groups

# the field that holds each number of a word
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# by the size of groups, the words that a row of zeros has a multiple of; of larger groups 1
MULTIPLES = {32: 4, 64: 2}


class Awq(LayoutCodec):
    name = "awq"
    summary = "integers of 4 bits in 32-bit words with a scale and a zero for each group of columns"
    parts = ("weight", "zero", "scale")
    recodes = True
    names = (
        Convention(
            "AutoAWQ",
            {
                "weight": "{w}.qweight int32 [K, N/8]",
                "zero": "{w}.qzeros int32 [K/group, N/8]",
                "scale": "{w}.scales wide [K/group, N]",
            },
            arguments={"form": "gemm"},
            accepts=has_whole_groups,
        ),
        Convention(
            "AutoAWQ",
            {
                "weight": "{w}.qweight int32 [N, K/8]",
                "zero": "{w}.qzeros int32 [N, Z]",
                "scale": "{w}.scales wide [N, 8*Z]",
            },
            arguments={"form": "gemv"},
        ),
    )

    @dataclass(frozen=True, slots=True)
    class Args:
        form: Text = arg(
            "which kernel the parts are stored for", words=("gemm", "gemv"), default="gemm"
        )
        group: Integer | None = arg(
            "columns that share a scale, by default those that the shapes show",
            least=1,
            default=None,
        )
        non_finite: Text = scales_arg()

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        check_axes(self.name, specs, dict.fromkeys(self.parts, 2))
        weight, zero, scale = (specs[role].shape for role in self.parts)
        fits = {
            "gemm": (zero[0], 8 * zero[1], 8 * weight[1]) == (scale[0], scale[1], scale[1]),
            "gemv": (weight[0], zero[0], 8 * zero[1]) == (scale[0], scale[0], scale[1]),
        }
        if not fits[args.form]:
            other = next((f", they are of the form {form}" for form in fits if fits[form]), "")
            raise OpError(
                "M310",
                f"awq: a weight {list(weight)}, a zero {list(zero)} and a scale {list(scale)} are "
                f"not of the form {args.form}{other}",
            )
        gemm, positive = args.form == "gemm", args.non_finite != "keep"
        if gemm:
            each, multiple = group_of(self.name, weight[0], scale[0], args.group), 1
        else:
            each = args.group or self._group(8 * weight[1], zero[1])
            multiple = 8 * MULTIPLES.get(each, 1)
        block, axis = (1, each), -2 if gemm else -1
        packing = Packing(4, ("int32",), axis=axis, order=ORDER if gemm else ())
        entries: dict[str, Any] = {"transposed": gemm, "padded": (1, multiple)}
        factor = Grid("scale", block, positive=positive, **entries)
        less = Grid("zero", block, elements=integers(4), packing=packing, **entries)
        codes = replace(packing, transposed=gemm)
        return NumberLayout(self.name, integers(4), codes, times(factor), zero=less)

    def _group(self, columns: int, words: int) -> int:
        """The columns of a group of the form gemv. OpError M310 where several sizes fit."""
        sizes = dict.fromkeys([*(1 << i for i in range(5, columns.bit_length())), columns])
        fitting = []
        for each in (size for size in sizes if size in MULTIPLES or size >= 128):
            multiple = MULTIPLES.get(each, 1)
            if columns % each == 0 and -(-columns // each // (8 * multiple)) * multiple == words:
                fitting.append(each)
        if len(fitting) == 1:
            return fitting[0]
        said = " and of ".join(map(str, fitting)) or "no known size"
        raise OpError(
            "M310",
            f"awq: {words} words of zeros for {columns} columns fit groups of {said}",
            help="write `group`, the columns that share a scale: it is in the checkpoint's "
            "quantization config",
        )

    def stored(self) -> Iterable[tuple[Any, list[Any]]]:
        for args, *shapes in (
            (self.Args(), (96, 5), (3, 5), (3, 40)),
            (self.Args(group=24), (48, 2), (2, 2), (2, 16)),
            (self.Args("gemv", 128), (6, 32), (6, 1), (6, 8)),
            (self.Args("gemv"), (3, 40), (3, 4), (3, 32)),
        ):
            dtypes = ("int32", "int32", "float16")
            yield args, [random_part(d, *s) for d, s in zip(dtypes, shapes, strict=True)]


CODEC = Awq()
