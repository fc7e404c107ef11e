"""`verify` compares what only some numbers are stored of in rows, in memory that does not grow with
the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import goldens_by_rules
import kit_layouts
import little_memory
import numpy as np
import pytest

import migrate
from migrate import codecs
from migrate.codecs.kit import bit_masks, marlin, two_of_four
from migrate.core.spec import Spec

MOST = 12 << 20
RULE = """
id: x/a/b
title: Kept numbers
lineage: x
edge: [a, b]
rules:
  - name: rows
    from: {FROM}
    to: w
    via: [{dequantize: {codec: CODEC, dtype: bfloat16}}]
"""


def half() -> list[Any]:
    weight, mask, shape = two_of_four.random_kept("bfloat16", 6_500, 1024)
    return [mask, weight, shape, None]


def by_bits() -> list[Any]:
    return [*bit_masks.random_rows("bfloat16", (6_500, 1024)), None]


def tiles() -> list[Any]:
    return marlin.random_tiles(4, 6_528, 1024, 8)


@pytest.mark.parametrize(
    ("name", "made"), [("sparse-24", half), ("sparse-bitmask", by_bits), ("marlin-24", tiles)]
)
def test_verify_compares_large_tensors_in_rows(
    name: str, made: Callable[[], list[Any]], tmp_path: Path
) -> None:
    codec = codecs.get(name)
    there = [(role, one) for role, one in zip(codec.parts, made(), strict=True) if one is not None]
    source, out, rule = (tmp_path / end for end in ("a.safetensors", "b.safetensors", "r.yaml"))
    source.write_bytes(goldens_by_rules.safetensors({f"w.{role}": one for role, one in there}))
    parts = ", ".join(f"{role}: w.{role}" for role, _ in there)
    rule.write_text(RULE.replace("{FROM}", f"{{{parts}}}").replace("CODEC", name))
    how: dict[str, Any] = {"rules": [rule], "allow": ["lossy"]}
    migrate.apply(source, out, fsync=False, **how)

    def differences() -> list[Any]:
        found = migrate.verify(out, source=source, threads=1, max_memory=MOST, **how)
        return found.to_json()["differences"]

    peak = little_memory.peak_of_no_differences(differences)
    (spec, raw) = kit_layouts.read(out.read_bytes())["w"]
    assert spec == Spec("bfloat16", raw.shape)
    assert peak < MOST < raw.nbytes, peak
    wrong = np.array(raw)
    wrong[-1, -1] ^= 1
    out.write_bytes(goldens_by_rules.safetensors({"w": (spec, wrong)}))
    assert [one["key"] for one in differences()] == ["w"]
