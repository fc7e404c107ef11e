"""Golden vectors through rule files: parts or numbers in a safetensors file, one rule, `apply`."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from kit_layouts import DTYPES, goldens, read
from test_kit_goldens import BITS, equal, fault

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


def compare_numbers(
    folder: Path, kind: str, stored: Mapping[str, Mapping[str, Held]], call: Mapping[str, Any]
) -> int:
    """How many results of a library, of the parts of a golden format, `dequantize` makes to the
    bit; AssertionError for one that it does not. What the library made wrong is left out (`fault`).
    """
    compared = 0
    for dtype in BITS:
        wanted = {
            (case, name): raw
            for case, found in goldens()[kind.split()[0]].items()
            for name, (one, raw) in found.items()
            if name.startswith("dq/") and one.dtype == dtype and not fault(kind, case, name)
        }
        if not wanted:
            continue
        parts = {case: stored[case] for case, _ in wanted}
        made = decoded(folder / dtype, parts, {**call, "dtype": dtype}, ("lossy",))
        for (case, name), one in wanted.items():
            one = one.swapaxes(-1, -2) if "transposed" in name else one
            ours, theirs = equal(made[case][1], dtype), equal(one, dtype)
            assert ours.shape == theirs.shape, (case, name)
            differ = int((ours != theirs).sum())
            assert not differ, f"{case} {name}: {differ} of {ours.size} differ"
            compared += 1
    return compared


def compare_parts(
    folder: Path, kind: str, stored: Mapping[str, Mapping[str, Held]], call: Mapping[str, Any]
) -> int:
    """How many inputs of a golden format `quantize` makes the parts of that its library stored;
    AssertionError for one that differs.
    """
    compared = 0
    for dtype in BITS:
        found = goldens()[kind].items()
        cases = {case: one["input"] for case, one in found if one["input"][0].dtype == dtype}
        if not cases:
            continue
        roles = tuple(stored[next(iter(cases))])
        made = encoded(folder / dtype, cases, roles, {**call, "from": dtype})
        for case in cases:
            for role, (spec, raw) in stored[case].items():
                assert made[case][role][0] == spec, (case, role)
                assert made[case][role][1].tobytes() == raw.tobytes(), (case, role)
            compared += 1
    return compared


def _flow(call: Mapping[str, Any]) -> str:
    return json.dumps(dict(call))


def _run(
    folder: Path, tensors: Mapping[str, Held], rule: str, allow: tuple[str, ...]
) -> dict[str, Held]:
    folder.mkdir(parents=True)
    source, out, rules = (folder / name for name in ("in.safetensors", "out.safetensors", "r.yaml"))
    source.write_bytes(safetensors(tensors))
    rules.write_text(f"{HEAD}{rule}\n")
    migrate.apply(source, out, rules=rules, allow=allow, fsync=False)
    return read(out.read_bytes())


def safetensors(tensors: Mapping[str, Held]) -> bytes:
    """The bytes of a file that holds these."""
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
