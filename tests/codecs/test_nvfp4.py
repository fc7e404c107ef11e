"""`nvfp4`: golden vectors through rule files, what is refused, and the memory of encoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import goldens_by_rules
import numpy as np
import pytest
from kit_layouts import FORMATS, goldens
from test_kit_encoding import FAULTS as ENCODING_FAULTS
from test_kit_goldens import BITS, UNSIGNED_ZERO, equal, fault

from migrate.codecs import get
from migrate.core.spec import Spec
from migrate.testing import codeckit

CT = "compressed-tensors"
CODEC: Any = get("nvfp4")
E4M3 = "float8_e4m3fn"

# golden format -> what a rule says to decode, and beside it to encode; None: nothing encodes it
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "modelopt_nvfp4": ({}, {"like": "modelopt"}),
    "mxfp4_to_nvfp4_exact nvfp4": ({}, None),
    "ao_nvfp4_two_level": ({}, {"like": "torchao"}),
    "ao_nvfp4_two_level_swizzled": ({"swizzled": True}, {"like": "torchao"}),
    "ao_nvfp4_single_level": ({}, {"like": "torchao"}),
    "ct_nvfp4": ({"form": CT}, {"like": CT}),
    "te_nvfp4_1x16": ({"form": "te"}, {"like": "te"}),
    "te_nvfp4_16x16": ({"form": "te"}, None),
    "te_nvfp4_4over6": ({"form": "te", "e4m3_max": 256}, None),
}
ENCODED = [kind for kind, (_, said) in KINDS.items() if said is not None]


def parts_of(kind: str) -> dict[str, dict[str, Any]]:
    """case -> role -> (spec, raw elements)."""
    case: Any = FORMATS[kind]
    found = goldens()[kind.split()[0]]
    return {
        name: {role: held[f"q/{stored}"] for role, stored in case.names.items()}
        for name, held in found.items()
    }


@pytest.mark.parametrize("number", range(len(list(CODEC.samples()))))
def test_the_codec_passes_the_kit(number: int) -> None:
    codeckit.check_sample("nvfp4", number)


def test_the_codec_is_described_and_takes_any_axes() -> None:
    codeckit.check_description("nvfp4")
    assert codeckit.check_axes("nvfp4") > 0


@pytest.mark.parametrize("kind", KINDS)
def test_goldens_decode_through_a_rule_file(kind: str, tmp_path: Path) -> None:
    stored, seen = parts_of(kind), dict[str, Any]()
    for dtype in BITS:
        wanted = {
            (case, name): raw
            for case, held in goldens()[kind.split()[0]].items()
            for name, (one, raw) in held.items()
            if name.startswith("dq/") and one.dtype == dtype and not fault(kind, case, name)
        }
        parts = {case: stored[case] for case, _ in wanted}
        call = {"codec": "nvfp4", "dtype": dtype, **KINDS[kind][0]}
        made = goldens_by_rules.decoded(tmp_path / dtype, parts, call, ("lossy",)) if parts else {}
        for (case, name), one in wanted.items():
            a, b = equal(made[case][1], dtype), equal(one, dtype)
            if name.endswith(UNSIGNED_ZERO):
                a, b = (np.where(x & BITS[dtype][2], x, 0) for x in (a, b))
            assert (a == b).all(), f"{case} {name}: {(a != b).sum()} of {a.size} differ"
        seen |= parts
    # what no function of a library decoded are its faults alone
    assert all(
        fault(kind, case, name) for case in stored.keys() - seen for name in names_of(kind, case)
    )


def names_of(kind: str, case: str) -> list[str]:
    return [name for name in goldens()[kind.split()[0]][case] if name.startswith("dq/")]


@pytest.mark.parametrize("kind", ENCODED)
def test_goldens_encode_through_a_rule_file(kind: str, tmp_path: Path) -> None:
    stored = parts_of(kind)
    decoding, encoding = KINDS[kind]
    for dtype in ("float32", "bfloat16"):
        cases = {
            case: held["input"]
            for case, held in goldens()[kind].items()
            if held["input"][0].dtype == dtype
        }
        if not cases:
            continue
        roles = tuple(stored[next(iter(cases))])
        call = {
            "codec": "nvfp4",
            "from": dtype,
            "non_finite": "keep",
            **decoding,
            **(encoding or {}),
        }
        made = goldens_by_rules.encoded(tmp_path / dtype, cases, roles, call)
        for case in cases:
            same = all(
                as_stored(*made[case][role], one) == (one, raw.tobytes())
                for role, (one, raw) in stored[case].items()
            )
            # a fault that is one no more is to be taken off the list
            assert same == ((kind, case) not in ENCODING_FAULTS), case


def as_stored(made: Spec, raw: Any, wanted: Spec) -> tuple[Spec, bytes]:
    """A part as the vectors have it: without the padding of Transformer Engine's scales, of which
    they have the bytes as e4m3.
    """
    if made.shape != wanted.shape and len(made.shape) == 2:
        place = tuple(slice(0, n) for n in wanted.shape)
        assert not np.delete(raw, np.s_[: wanted.shape[0]], 0).any()
        assert not np.delete(raw, np.s_[: wanted.shape[1]], 1).any()
        made, raw = Spec(made.dtype, wanted.shape), np.ascontiguousarray(raw[place])
    return made, raw.tobytes()
