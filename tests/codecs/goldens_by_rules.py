"""Golden vectors through rule files: parts or numbers in a safetensors file, one rule, `apply`."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from kit_layouts import DTYPES, read

import migrate
from migrate.core.spec import Spec

Held = tuple[Spec, Any]
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}

HEAD = """id: goldens/one/1
title: Goldens
lineage: goldens
edge: [one, other]
requires: ">=0.1"
rules:
"""


def decoded(
    folder: Path,
    cases: Mapping[str, Mapping[str, Held]],
    call: Mapping[str, Any],
    allow: tuple[str, ...] = (),
) -> dict[str, Held]:
    """case -> the numbers that `dequantize` with these arguments makes of its parts, by role."""
    tensors = {
        f"{case}.{role}": one for case, parts in cases.items() for role, one in parts.items()
    }
    roles = dict.fromkeys(role for parts in cases.values() for role in parts)
    names = ", ".join(f'{role}: "{{c}}.{role}"' for role in roles)
    rule = (
        f'  - {{name: all, from: {{{names}}}, to: "{{c}}", via: [{{dequantize: {_flow(call)}}}]}}'
    )
    return _run(folder, tensors, rule, allow)


def encoded(
    folder: Path, cases: Mapping[str, Held], roles: tuple[str, ...], call: Mapping[str, Any]
) -> dict[str, dict[str, Held]]:
    """case -> the parts, by role, that `quantize` with these arguments makes of its numbers."""
    names = ", ".join(f'{role}: "{{c}}.{role}"' for role in roles)
    rule = f'  - {{name: all, from: "{{c}}", to: {{{names}}}, via: [{{quantize: {_flow(call)}}}]}}'
    made = _run(folder, cases, rule, ("lossy",))
    return {case: {role: made[f"{case}.{role}"] for role in roles} for case in cases}


def _flow(call: Mapping[str, Any]) -> str:
    return json.dumps(dict(call))


def _run(
    folder: Path, tensors: Mapping[str, Held], rule: str, allow: tuple[str, ...]
) -> dict[str, Held]:
    folder.mkdir()
    source, out, rules = (folder / name for name in ("in.safetensors", "out.safetensors", "r.yaml"))
    source.write_bytes(_file(tensors))
    rules.write_text(f"{HEAD}{rule}\n")
    migrate.apply(source, out, rules=rules, allow=allow, fsync=False)
    return read(out.read_bytes())


def _file(tensors: Mapping[str, Held]) -> bytes:
    header, data = {}, b""
    # elements of wide dtypes first, so that all are aligned
    for key, (spec, raw) in sorted(tensors.items(), key=lambda t: -t[1][1].itemsize):
        held = np.ascontiguousarray(raw).tobytes()
        header[key] = {
            "dtype": TAGS[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [len(data), len(data) + len(held)],
        }
        data += held
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data
