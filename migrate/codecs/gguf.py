"""`gguf`: blocks of 32 or 256 numbers that hold codes and scales together, as llama.cpp stores
weights (`kit.ggml_blocks`). Numbers are decoded only.

The type of blocks is what the file says, or the argument: bytes per row fit several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.spec import Spec
from ..source.ggml_types import NAMED, type_name
from .base import NON_FINITE, Convention, OpError, Text, arg, dataclass
from .kit.codec import LayoutCodec
from .kit.geometry import codes_shape
from .kit.ggml_blocks import block_layouts
from .kit.layout import NumberLayout
from .kit.samples import number_part, random_records

DECODED = (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4",
    "f16", "bf16",
)  # fmt: skip
ON_DISK = {"data": "{w} uint8", "type": "{w}_type int32 []"}


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
        return block_layouts(args.non_finite != "keep")[args.type]

    def recoded(self, args: Any, numbers: Spec) -> Mapping[str, Spec]:
        shape = codes_shape(self.layout(args, {}), numbers.shape, "uint8")
        return {"data": Spec("uint8", shape), "type": Spec("int32", ())}

    def foreseen(self, args: Any, spec: Spec) -> Mapping[str, bytes]:
        return {"type": NAMED[args.type].number.to_bytes(4, "little")}

    def stored(self) -> Iterable[tuple[Any, list[Any]]]:
        for name, layout in block_layouts(True).items():
            yield self.Args(), [random_records(layout, 3, 2), number_part(NAMED[name].number)]
        yield self.Args("q4_0"), [random_records(block_layouts(True)["q4_0"], 5, 1), None]


CODEC = Gguf()
