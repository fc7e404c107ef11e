"""The conventions of number formats without a codec, by the name that their codec will have, and of
forms that a codec does not have yet.

They are here so that `inspect` names these formats and no plan strands one of their parts. A new
codec takes its entry into its own file, and this table shrinks until it is gone.

Evidence: what ModelOpt 0.47 and torchao 0.18 write.
"""

from __future__ import annotations

from ..core.part_names import Convention

# as unpacked experts, but in one tensor, whose name is not `weight`
_STACKED = {"input_scale": "{w}_input_scale"}
_STACKED_GLOBAL = "{w}_weight_scale_2 float32 [] | [*] | [*, 1] | [*, 1, 1]"
_STACKED_NVFP4 = tuple(
    Convention(
        producer,
        {
            "weight": f"{{w}} uint8 {codes}",
            "scale": f"{{w}}_weight_scale float8_e4m3fn {scales}",
            "global": _STACKED_GLOBAL,
        },
        beside=_STACKED,
        arguments={"form": "modelopt", **said},
    )
    for producer, codes, scales, said in (
        ("ModelOpt, stacked experts", "[*, N, K/2]", "[*, N, K/16]", {}),
        (
            "ModelOpt, stacked experts with groups along rows",
            "[*, K/2, N]",
            "[*, K/16, N]",
            {"transposed": True},
        ),
    )
)
_TINYGEMM = tuple(
    Convention(
        "torchao",
        {
            "weight": f"{{w}}.{codes} int32|uint8",
            "scale": f"{{w}}.{prefix}scale_and_zero wide [G, N, 2]",
        },
    )
    for codes, prefix in (
        ("_weight_qdata", "_weight_"),
        ("qdata", ""),
        ("packed_weight", ""),
    )
)
# formats that no codec decodes, and why
UNDECODABLE = {
    "tinygemm": (
        "codes lie as the kernel of one device wants them, and kernels compute their numbers in "
        "bfloat16, each in its own order, so that no formula gives them to the bit"
    ),
}

FORMATS: tuple[tuple[str, Convention], ...] = (
    *(("nvfp4", convention) for convention in _STACKED_NVFP4),
    *(("tinygemm", convention) for convention in _TINYGEMM),
)
