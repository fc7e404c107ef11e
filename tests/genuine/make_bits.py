"""Makes the tiny checkpoint of integers that do not fill words.

    python tests/genuine/make_bits.py

writes tests/data/genuine/ct-w567a16, in the environment of `make genuine`.
"""

from __future__ import annotations

from pathlib import Path

from make_genuine import FOLDER, SMALL, Tensors, compressed, llama, make, maker, preset


@maker("ct-w567a16", "transformers", "compressed-tensors")
def _(folder: Path) -> Tensors:
    groups = {
        "group_0": preset("W4A16", r"re:.*self_attn\.(q|k)_proj$", num_bits=5, group_size=32),
        "group_1": preset("W4A16", r"re:.*self_attn\.v_proj$", num_bits=6, group_size=32),
        "group_2": preset("W4A16_ASYM", r"re:.*mlp\.gate_proj$", num_bits=6, group_size=32),
        "group_3": preset("W4A16", r"re:.*mlp\.up_proj$", num_bits=7, group_size=32),
        # of 32 columns five bits within words are as many as six across them
        "group_4": preset("W8A16", r"re:.*(o|down)_proj$", group_size=32),
    }
    return compressed(folder, llama(**SMALL), groups, ("lm_head",))


if __name__ == "__main__":
    make("ct-w567a16", FOLDER)
