"""Golden vectors through files: parts that a library stored, decoded by a rule file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kit_layouts import goldens
from safetensors.torch import load_file, save_file

import migrate

RULE = """
id: a/b
title: t
lineage: a
edge: [one, two]
rules:
  - name: r
    from: {{{parts}}}
    to: "{{m}}.out"
    via: [{{dequantize: {{codec: {codec}, dtype: {dtype}{more}}}}}]
"""
NAN = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}
MAGNITUDE = {"float32": 0x7FFFFFFF, "bfloat16": 0x7FFF, "float16": 0x7FFF}


def vectors(kinds: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """(format, case, name) of everything that a library made of its own parts."""
    for kind in kinds:
        for case, found in sorted(goldens()[kind].items()):
            yield from ((kind, case, name) for name in sorted(found) if name.startswith("dq/"))


def tensor_of(dtype: str, raw: Any) -> torch.Tensor:
    held = torch.from_numpy(np.copy(raw).reshape(-1).view("u1"))
    return held.view(getattr(torch, dtype)).reshape(raw.shape)


def decoded(
    folder: Path,
    codec: str,
    stored: Mapping[str, torch.Tensor],
    dtype: str,
    more: str = "",
) -> torch.Tensor:
    """What a rule file makes of these parts, by role, in safetensors; `verify` has agreed."""
    source, rule, out = (folder / n for n in ("a.safetensors", "r.yaml", "b.safetensors"))
    save_file({f"l.0.{role}": tensor for role, tensor in stored.items()}, source)
    parts = ", ".join(f'{role}: "{{m...}}.{role}"' for role in stored)
    rule.write_text(RULE.format(parts=parts, codec=codec, dtype=dtype, more=more and f", {more}"))
    how: dict[str, Any] = {"rules": [rule], "allow": ["lossy"]}
    migrate.apply(source, out, **how)
    assert migrate.verify(out, source=source, **how).to_json()["differences"] == []
    return load_file(out)["l.0.out"]


def same_numbers(made: torch.Tensor, dtype: str, wanted: Any) -> bool:
    """Whether the bits are the same, any NaN being one."""
    kind = {4: torch.int32, 2: torch.int16}[made.element_size()]
    width = f"<u{made.element_size()}"
    ours = made.contiguous().view(kind).numpy().view(width)
    nan = (ours & MAGNITUDE[dtype]) > NAN[dtype]
    theirs = (wanted & MAGNITUDE[dtype]) > NAN[dtype]
    return bool((nan == theirs).all() and (ours[~nan] == wanted[~nan]).all())
