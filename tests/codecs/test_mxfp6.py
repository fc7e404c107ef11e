"""`mxfp6`: all codes by the formula of the specification and by compressed-tensors, and what is
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import goldens_by_rules
import numpy as np
import pytest

from migrate.codecs import get
from migrate.codecs.base import OpError
from migrate.core.spec import Spec
from migrate.testing import codeckit

CODEC: Any = get("mxfp6")


@pytest.mark.parametrize(("name", "number"), codeckit.cases(["mxfp6"]))
def test_the_codec_passes_the_kit(name: str, number: int) -> None:
    codeckit.check_sample(name, number)


def test_the_codec_is_described_and_decodes_only() -> None:
    codeckit.check_description("mxfp6")
    assert not CODEC.encodes


def every_code(scales: Any) -> dict[str, Any]:
    """A row for each scale, of the codes 0 to 63: a stream of bits, the lowest first."""
    stream = (np.arange(64)[:, None] >> np.arange(6) & 1).astype("u1").reshape(-1)
    row = np.packbits(stream, bitorder="little")
    codes = np.tile(row, (len(scales), 1))
    grid = np.repeat(np.asarray(scales, "u1")[:, None], 2, 1)
    return {
        "weight": (Spec("uint8", codes.shape), codes),
        "scale": (Spec("uint8", grid.shape), grid),
    }


def e2m3() -> Any:
    """OCP Microscaling Formats 1.0, 5.3.2: a sign, two bits of exponent with bias 1, three of
    mantissa, neither infinity nor NaN.
    """
    found = []
    for code in range(64):
        exponent, mantissa = code >> 3 & 3, code & 7
        size = (1 + mantissa / 8) * 2.0 ** (exponent - 1) if exponent else mantissa / 8
        found.append(-size if code & 32 else size)
    return np.array(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_code_with_every_scale_through_a_rule_file(dtype: str, tmp_path: Path) -> None:
    scales = np.arange(3, 252)
    call = {"codec": "mxfp6", "dtype": dtype}
    spec, raw = goldens_by_rules.decoded(tmp_path / "x", {"w": every_code(scales)}, call, ())["w"]
    assert spec == Spec(dtype, (len(scales), 64))
    wide = raw if dtype == "float32" else raw.astype("<u4") << 16
    wanted = e2m3() * 2.0 ** (scales[:, None] - 127.0)
    made = wide.view("<f4")
    assert (made == wanted).all()
    assert (np.signbit(made) == np.signbit(wanted)).all()


def test_the_scale_255_is_nan(tmp_path: Path) -> None:
    call = {"codec": "mxfp6", "dtype": "float32"}
    made = goldens_by_rules.decoded(tmp_path / "x", {"w": every_code([255, 127])}, call, ())["w"][1]
    assert np.isnan(made.view("<f4")).all(1).tolist() == [True, False]


@pytest.mark.libraries
@pytest.mark.heavy
def test_compressed_tensors_decodes_every_code_to_the_same(tmp_path: Path) -> None:
    import torch

    packed = pytest.importorskip("compressed_tensors.compressors.mxfp6.base")
    schemes = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    parts = every_code(np.arange(8, 247))
    state = {
        f"weight_{name}": torch.from_numpy(parts[role][1].copy())
        for role, name in (("weight", "packed"), ("scale", "scale"))
    }
    scheme = schemes.preset_name_to_scheme("MXFP6A16", ["Linear"])
    wanted = packed.MXFP6PackedCompressor.decompress(state, scheme)["weight"]
    call = {"codec": "mxfp6", "dtype": "bfloat16"}
    made = goldens_by_rules.decoded(tmp_path / "x", {"w": parts}, call, ())["w"][1]
    assert (wanted.view(torch.uint16).numpy() == made).all()


@pytest.mark.parametrize(
    ("weight", "scale", "bits", "code", "words"),
    [
        (Spec("uint8", (4, 48)), Spec("uint8", (4, 3)), 6, "M310", "24 bytes of codes"),
        (Spec("uint8", (4, 48)), Spec("uint8", (4, 2)), 4, "M310", "16 bytes of codes"),
        (Spec("uint8", (4, 16)), Spec("uint8", (4, 1)), 6, "M310", "[4, 16]"),
        (Spec("uint8", (4, 47)), Spec("uint8", (4, 2)), None, "M310", "[4, 47]"),
        (Spec("uint8", (4, 48)), Spec("uint8", (5, 2)), None, "M310", "[5, 2]"),
        (Spec("uint8", (4, 48)), Spec("uint8", (2,)), None, "M310", "[2]"),
        (Spec("int8", (4, 48)), Spec("uint8", (4, 2)), None, "M303", "int8"),
        (Spec("uint8", (4, 48)), Spec("bfloat16", (4, 2)), None, "M303", "bfloat16"),
        (Spec("uint8", ()), Spec("uint8", ()), None, "M304", "axes"),
        (Spec("uint8", (4, 48)), None, None, "M408", "scale"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused_from_their_specs(
    weight: Spec, scale: Spec | None, bits: int | None, code: str, words: str
) -> None:
    with pytest.raises(OpError) as caught:
        CODEC.decoded(CODEC.Args(bits), (weight, scale), "bfloat16")
    assert caught.value.code == code
    assert words in str(caught.value)


def test_of_how_many_bits_codes_are_the_shapes_tell() -> None:
    scale = Spec("uint8", (4, 2))
    for width, bits in ((48, 6), (32, 4)):
        made = CODEC.decoded(CODEC.Args(), (Spec("uint8", (4, width)), scale), "bfloat16")
        assert made == Spec("bfloat16", (4, 64)), bits
