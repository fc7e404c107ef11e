"""`gguf`: golden vectors of gguf-py through rule files, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf_files
import goldens_by_rules
import numpy as np
import pytest
from kit_layouts import goldens

import migrate
from migrate.codecs import get
from migrate.codecs.base import OpError
from migrate.codecs.gguf import DECODED
from migrate.codecs.kit.samples import random_records
from migrate.core.errors import MigrateError
from migrate.core.spec import Spec
from migrate.source.ggml_types import TYPES
from migrate.testing import codeckit

CODEC: Any = get("gguf")
NUMBERS = {known.name: number for number, known in TYPES.items()}
NAN = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}
Held = tuple[Spec, Any]


@pytest.mark.parametrize(("name", "number"), codeckit.cases(["gguf"]))
def test_the_codec_passes_the_kit(name: str, number: int) -> None:
    codeckit.check_sample(name, number)


def test_the_codec_is_described() -> None:
    assert len(codeckit.cases(["gguf"])) == len(DECODED) + 1
    codeckit.check_description("gguf")


def number(value: int, dtype: str = "int32", shape: tuple[int, ...] = ()) -> Held:
    return Spec(dtype, shape), np.full(shape, value, "<u4")


def blocks(kind: str, *shape: int) -> Held:
    """Blocks of zeros."""
    found = TYPES[NUMBERS[kind]]
    shape = (*shape[:-1], shape[-1] * found.nbytes)
    return Spec("uint8", shape), np.zeros(shape, "u1")


def decoded(folder: Path, parts: dict[str, Held], dtype: str = "float32", **said: Any) -> Any:
    call = {"codec": "gguf", "dtype": dtype, **said}
    spec, raw = goldens_by_rules.decoded(folder, {"w": parts}, call, ("lossy",))["w"]
    assert spec.dtype == dtype
    return raw


def refused(folder: Path, parts: dict[str, Held], dtype: str = "float32", **said: Any) -> Any:
    """What the one finding of a plan says, of which nothing was published."""
    with pytest.raises(MigrateError) as caught:
        decoded(folder, parts, dtype, **said)
    (found,) = caught.value.diagnostics
    assert not (folder / "out.safetensors").exists()
    return found


def rounded(numbers: Any, dtype: str) -> Any:
    """float32 numbers, rounded once to raw elements, half to even."""
    if dtype == "float32":
        return numbers
    if dtype == "float16":
        return numbers.view("<f4").astype("<f2").view("<u2")
    return (numbers + np.uint32(0x7FFF) + (numbers >> 16 & 1) >> 16).astype("<u2")


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("by", ["argument", "part"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", DECODED)
def test_goldens_decode_through_a_rule_file(kind: str, dtype: str, by: str, tmp_path: Path) -> None:
    held = goldens()[f"gguf_{kind}"]
    parts = {case: {"data": found["q/data"]} for case, found in held.items()}
    call: dict[str, Any] = {"codec": "gguf", "dtype": dtype}
    if by == "argument":
        call["type"] = kind
    else:
        parts = {case: {**one, "type": number(NUMBERS[kind])} for case, one in parts.items()}
    # what is beyond a dtype that all else fits exactly is refused
    parts = {case: one for case, one in parts.items() if kind != "mxfp4" or case != "random"}
    made = goldens_by_rules.decoded(tmp_path / "x", parts, call, ("lossy",))
    for case in parts:
        (spec, wanted), (found, got) = held[case]["dq/gguf.f32"], made[case]
        assert found == Spec(dtype, spec.shape)
        nan = np.isnan(wanted.view("<f4"))
        assert (got == rounded(wanted, dtype))[~nan].all(), case
        assert (got == NAN[dtype])[nan].all(), case


def test_all_powers_of_mxfp4_are_those_of_gguf_py_as_far_as_they_are_numbers(
    tmp_path: Path,
) -> None:
    """Its vectors go up to 2^127, six times which no float32 holds."""
    held = goldens()["gguf_mxfp4"]["random"]
    spec, raw = held["q/data"]
    rows = raw.reshape(-1, 17)
    wanted = held["dq/gguf.f32"][1].reshape(-1, 32)
    finite = np.isfinite(wanted.view("<f4")).all(1)
    assert 0 < (~finite).sum() < 4
    parts = {"data": (Spec("uint8", rows[finite].shape), rows[finite])}
    made = decoded(tmp_path / "x", parts, type="mxfp4")
    assert (made == wanted[finite]).all()
    found = refused(tmp_path / "y", {"data": (spec, raw)}, type="mxfp4")
    assert found.code == "M406"


RULES = f"""{goldens_by_rules.HEAD}
  - {{name: blocks, from: {{data: "{{k}}", type: "{{k}}_type"}}, to: "{{k}}",
      when: {{data: {{dtype: [uint8]}}}}, via: [{{dequantize: {{codec: gguf, dtype: float32}}}}]}}
  - {{name: halves, from: "{{k}}", to: "{{k}}", when: {{dtype: [float16, bfloat16]}},
      via: [{{cast: {{to: float32}}}}]}}
"""


def test_a_file_of_all_types_is_decoded_by_one_rule(tmp_path: Path) -> None:
    """As files of llama.cpp mix them; what is no block is a tensor as any other."""
    wanted, tensors = {}, {}
    for kind in DECODED:
        held = goldens()[f"gguf_{kind}"]["random"]
        (spec, raw), known = held["q/data"], TYPES[NUMBERS[kind]]
        # but for powers whose products no float32 holds
        raw = raw[:1, :2] if kind == "mxfp4" else raw
        shape = (*raw.shape[:-1], raw.shape[-1] // known.nbytes * known.elements)
        tensors[kind] = gguf_files.Tensor(shape[::-1], known.number, raw.tobytes())
        wanted[kind] = held["dq/gguf.f32"][1][tuple(map(slice, shape))]
    source, rules, out = (tmp_path / name for name in ("m.gguf", "r.yaml", "out.safetensors"))
    source.write_bytes(gguf_files.gguf(tensors))
    rules.write_text(RULES)
    migrate.apply(source, out, rules=rules, allow=("lossy",), fsync=False)
    made = goldens_by_rules.read(out.read_bytes())
    assert made.keys() == wanted.keys()
    for kind, (spec, raw) in made.items():
        assert spec == Spec("float32", wanted[kind].shape)
        nan = np.isnan(wanted[kind].view("<f4"))
        assert (raw == wanted[kind])[~nan].all(), kind
        assert np.isnan(raw.view("<f4"))[nan].all()


@pytest.mark.parametrize(
    ("kind", "said", "code", "words"),
    [
        (None, {}, "M408", "nothing says of which type blocks are"),
        (NUMBERS["q4_k"], {"type": "q4_0"}, "M310", "`type` is q4_0, the file says q4_k"),
        (NUMBERS["iq4_nl"], {}, "M310", "the type is iq4_nl, and not q4_0, q4_1"),
        (NUMBERS["q8_k"], {"type": "q8_0"}, "M310", "the type is q8_k, and not q4_0"),
        (NUMBERS["f32"], {}, "M310", "the type is f32, and not q4_0"),
        (4, {}, "M310", "the type is type 4, which is unknown"),
        (2**32 - 1, {}, "M310", "the type is type 4294967295, which is unknown"),
    ],
)
def test_a_type_that_is_not_said_contradicted_or_not_decoded_is_refused(
    kind: int | None, said: dict[str, str], code: str, words: str, tmp_path: Path
) -> None:
    # 144 bytes are one block of q4_k, and eight of q4_0 and of iq4_nl
    parts = {"data": blocks("q4_k", 2, 1)}
    if kind is not None:
        parts["type"] = number(kind)
    found = refused(tmp_path / "x", parts, **said)
    assert found.code == code
    assert words in found.message


@pytest.mark.parametrize(
    "held",
    [
        number(12, shape=(1, 2)),
        number(12, shape=(0,)),
        (Spec("uint8", (4,)), np.array([12, 0, 0, 0], "u1")),
        (Spec("int64", ()), np.array(12, "<u8")),
        (Spec("float32", ()), np.array(12, "<u4")),
    ],
)
def test_a_type_that_is_not_one_integer_of_32_bits_is_refused(held: Held, tmp_path: Path) -> None:
    found = refused(tmp_path / "x", {"data": blocks("q4_k", 2, 1), "type": held})
    assert found.code == "M310"
    assert f"the type is {held[0]}, not one integer of 32 bits" in found.message


@pytest.mark.parametrize("kind", [k for k in DECODED if TYPES[NUMBERS[k]].nbytes > 2])
@pytest.mark.parametrize("more", [1, -1])
def test_bytes_that_are_not_whole_blocks_are_refused_with_the_shape(kind: str, more: int) -> None:
    each = TYPES[NUMBERS[kind]].nbytes
    with pytest.raises(OpError) as caught:
        CODEC.decoded(CODEC.Args(kind), [Spec("uint8", (2, 3 * each + more)), None], "float32")
    assert caught.value.code == "M310"
    said = f"gguf {kind}: the data is [2, {3 * each + more}], not rows of records of {each} bytes"
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("spec", "code", "words"),
    [
        (Spec("uint8", ()), "M310", "the data is []"),
        (Spec("int8", (2, 144)), "M303", "the data is int8, not uint8"),
        (Spec("float16", (2, 144)), "M303", "the data is float16, not uint8"),
        (None, "M408", "without its data"),
    ],
)
def test_other_data_is_refused_from_its_spec(spec: Spec | None, code: str, words: str) -> None:
    with pytest.raises(OpError) as caught:
        CODEC.decoded(CODEC.Args("q4_k"), [spec, None], "float32")
    assert caught.value.code == code
    assert words in caught.value.message


def test_a_tensor_may_have_any_number_of_rows_and_no_block(tmp_path: Path) -> None:
    for lead in ((), (3,), (2, 3), (2, 1, 3), (2, 0, 3)):
        for count in (0, 1, 2):
            spec, raw = blocks("q5_k", *lead, count)
            made = decoded(
                tmp_path / f"{lead} {count}", {"data": (spec, raw)}, "bfloat16", type="q5_k"
            )
            assert made.shape == (*lead, 256 * count)
            assert not made.any()


# where a block of each type holds its first scale and its last, as bytes low first
ODD = {"inf": b"\x00\x7c", "-inf": b"\x00\xfc", "nan": b"\x01\x7e"}
SCALES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82),
    "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(("kind", "at"), [(k, at) for k, many in SCALES.items() for at in many])
def test_a_scale_that_is_no_number_is_refused_with_its_place(
    kind: str, at: int, odd: str, tmp_path: Path
) -> None:
    spec, raw = blocks(kind, 2, 3, 2)
    known = TYPES[NUMBERS[kind]]
    raw[1, 2, known.nbytes + at : known.nbytes + at + 2] = np.frombuffer(ODD[odd], "u1")
    found = refused(tmp_path / "x", {"data": (spec, raw)}, type=kind)
    assert found.code == "M406"
    said = f"a scale in the data of the numbers from [1, 2, {known.elements}] on is"
    assert f"{said} {odd}" in str(found)
    made = decoded(tmp_path / "y", {"data": (spec, raw)}, type=kind, non_finite="keep")
    numbers = made.view("<f4")
    assert not np.isfinite(numbers[1, 2, known.elements :]).all()
    assert np.isfinite(numbers[1, 2, : known.elements]).all()
    assert np.isfinite(numbers[0]).all()


def test_the_power_of_mxfp4_that_is_nan_is_refused_where_gguf_py_makes_it_a_number(
    tmp_path: Path,
) -> None:
    spec, raw = blocks("mxfp4", 2, 2)
    raw[1, 17] = 255
    raw[1, 18] = 0x11
    found = refused(tmp_path / "x", {"data": (spec, raw)}, "bfloat16", type="mxfp4")
    assert found.code == "M406"
    assert "a scale in the data of the numbers from [1, 32] on is nan" in str(found)
    made = decoded(tmp_path / "y", {"data": (spec, raw)}, type="mxfp4", non_finite="keep")
    assert np.isnan(made.view("<f4")[1, 32:]).all()


def test_scales_may_be_negative_and_zero(tmp_path: Path) -> None:
    spec, raw = blocks("q8_0", 1, 3)
    for block, scale in enumerate((-0.5, 0.0, 2.0)):
        raw[0, block * 34 : block * 34 + 2] = np.array([scale], "<f2").view("u1")
        raw[0, block * 34 + 2] = 3
    made = decoded(tmp_path / "x", {"data": (spec, raw)}, type="q8_0").view("<f4")
    assert made[0, ::32].tolist() == [-1.5, 0, 6]


def test_a_large_tensor_is_decoded_in_boxes(tmp_path: Path) -> None:
    """Of 16 MiB of numbers in 4 MiB of memory, to the same bits."""
    layout = CODEC.layout(CODEC.Args("q6_k"), {})
    spec, raw = random_records(layout, 1024, 16)
    decoded(tmp_path / "x", {"data": (spec, raw)}, "float32", type="q6_k")
    files = [tmp_path / "x" / name for name in ("in.safetensors", "r.yaml")]
    out = tmp_path / "out.safetensors"
    how: dict[str, Any] = {"rules": files[1], "allow": ("lossy",), "fsync": False}
    migrate.apply(files[0], out, max_memory=4 << 20, threads=1, **how)
    ((_, made),) = goldens_by_rules.read(out.read_bytes()).values()
    assert made.nbytes == 16 << 20
    wanted = CODEC.reference(CODEC.Args("q6_k"), [raw, None], [spec, None], "float32")
    assert (made == wanted).all()
    with pytest.raises(MigrateError, match="max_memory"):
        migrate.apply(files[0], tmp_path / "y.safetensors", max_memory=1 << 10, threads=1, **how)


def test_only_mxfp4_is_exact_and_what_it_cannot_hold_refused(tmp_path: Path) -> None:
    for kind in DECODED:
        specs = [blocks(kind, 2, 2)[0], None]
        for dtype in ("float32", "bfloat16", "float16"):
            exact = kind == "mxfp4" and dtype != "float16"
            assert CODEC.exact(CODEC.Args(kind), specs, dtype) is exact
    spec, raw = blocks("mxfp4", 2, 2)
    # 6 * 2^127
    raw[1, 0], raw[1, 1] = 254, 0x70
    found = refused(tmp_path / "x", {"data": (spec, raw)}, type="mxfp4")
    assert found.code == "M406"
    assert "the number at [1, 16] is 6 times 1.70141e+38" in str(found)


def test_a_rule_with_it_is_one_way(tmp_path: Path) -> None:
    assert not CODEC.encodes
    with pytest.raises(MigrateError) as caught:
        goldens_by_rules.encoded(
            tmp_path / "x",
            {"w": (Spec("float32", (2, 256)), np.zeros((2, 256), "<u4"))},
            ("data",),
            {"codec": "gguf", "from": "float32", "type": "q4_k"},
        )
    (found,) = caught.value.diagnostics
    assert found.code == "M308"
    assert "gguf is only decoded, nothing encodes it" in found.message


def test_an_unknown_type_in_a_rule_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(MigrateError) as caught:
        decoded(tmp_path / "x", {"data": blocks("q4_k", 2, 1)}, type="q4_K_M")
    assert "q4_k" in str(caught.value)


RUN = """
import sys
import migrate
migrate.apply(sys.argv[1], sys.argv[2], rules=sys.argv[3], allow=("lossy",), fsync=False)
print("torch" in sys.modules)
"""


@pytest.mark.heavy
def test_decoding_does_not_import_torch(tmp_path: Path) -> None:
    """The same bits as with it."""
    held = goldens()["gguf_q6_k"]["random"]["q/data"]
    made = decoded(tmp_path / "x", {"data": held}, "bfloat16", type="q6_k")
    out = tmp_path / "out.safetensors"
    folder = tmp_path / "x"
    said = subprocess.run(
        [sys.executable, "-c", RUN, folder / "in.safetensors", out, folder / "r.yaml"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == ["False"]
    ((_, raw),) = goldens_by_rules.read(out.read_bytes()).values()
    assert (raw == made).all()


@pytest.mark.heavy
def test_blocks_are_loaded_into_a_live_module(tmp_path: Path) -> None:
    import torch

    held = goldens()["gguf_q4_k"]["random"]
    folder = tmp_path / "x"
    decoded(folder, {"data": held["q/data"], "type": number(NUMBERS["q4_k"])})
    module = torch.nn.Module()
    shape = held["dq/gguf.f32"][0].shape
    module.w = torch.nn.Parameter(torch.empty(shape, dtype=torch.float32))
    migrate.load(module, folder / "in.safetensors", rules=folder / "r.yaml", allow=("lossy",))
    got = module.w.detach().view(torch.int32).numpy().view("<u4")
    assert (got == held["dq/gguf.f32"][1]).all()
