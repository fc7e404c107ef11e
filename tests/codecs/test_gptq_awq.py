"""`gptq` and `awq`: golden vectors through rule files, and what is refused."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import goldens_by_rules
import numpy as np
import pytest
from commandline import done
from commandline import rules as rule_file
from kit_layouts import FORMATS, Case, goldens

import migrate
from migrate.codecs import get
from migrate.codecs.base import OpError
from migrate.codecs.kit.samples import random_part
from migrate.core.errors import MigrateError
from migrate.core.spec import Spec
from migrate.testing import codeckit

Held = tuple[Spec, Any]
# some vectors have scales that float16 rounded to 0, or that are not finite
KEEP = {"non_finite": "keep"}
# golden format -> what a rule says beside `codec` and `dtype`
KINDS: dict[str, dict[str, Any]] = {
    **{
        f"gptq_{name} v{v}": {"form": f"v{v}", "zeros": "words", **KEEP}
        for name in (
            "4bit_g128_sym", "4bit_g32_asym", "4bit_g128_actorder", "8bit_channel_sym",
            "3bit_g128_sym",
        )
        for v in (1, 2)
    },
    "awq_gemm_g128": KEEP,
    "awq_gemm_g32": KEEP,
}  # fmt: skip


def parts_of(kind: str) -> dict[str, dict[str, Any]]:
    """case -> role -> (spec, raw elements)."""
    out = {}
    for name, held in goldens()[kind.split()[0]].items():
        maker: Any = FORMATS[kind]
        case = maker if isinstance(maker, Case) else maker(held)
        out[name] = {role: held[f"q/{stored}"] for role, stored in case.names.items()}
    return out


@pytest.mark.parametrize("codec", ["gptq", "awq"])
@pytest.mark.parametrize("number", range(4))
def test_the_codecs_pass_the_kit(codec: str, number: int) -> None:
    codeckit.check_sample(codec, number)


@pytest.mark.parametrize("codec", ["gptq", "awq"])
def test_the_codecs_are_described(codec: str) -> None:
    assert len(codeckit.cases([codec])) == 4
    codeckit.check_description(codec)


@pytest.mark.parametrize("kind", KINDS)
def test_goldens_decode_through_a_rule_file(kind: str, tmp_path: Path) -> None:
    stored, call = parts_of(kind), {"codec": kind.split("_")[0], **KINDS[kind]}
    assert goldens_by_rules.compare_numbers(tmp_path, kind, stored, call) >= len(stored)


def test_the_form_gemv_decodes_to_the_numbers_that_autoawq_meant(tmp_path: Path) -> None:
    """Nothing decodes these files on a CPU. AutoAWQ has the numbers before it rounds scales to
    float16; here scale and number are rounded, each by at most 2^-11 of itself.
    """
    (case, parts), *others = parts_of("awq_gemv_g128").items()
    assert not others
    call = {"codec": "awq", "dtype": "float16", "form": "gemv", "group": 128, **KEEP}
    made = goldens_by_rules.decoded(tmp_path / "x", {case: parts}, call, ("lossy",))[case][1]
    _, pseudo = goldens()["awq_gemv_g128"][case]["dq/awq.pseudo.f32"]
    found, meant = made.view("<f2").astype("f8"), pseudo.view("<f4").astype("f8")
    assert (abs(found - meant) <= abs(meant) * 2.0**-10 * (1 + 2.0**-11)).all()
    words, zeros = (
        parts[role][1][..., None] >> np.arange(0, 32, 4) & 15 for role in ("weight", "zero")
    )
    of = np.arange(found.shape[1]) // 128
    codes, zeros = (x.reshape(len(x), -1).astype("f4") for x in (words, zeros))
    scales = parts["scale"][1].view("<f2").astype("f4")
    assert np.array_equal(found, ((codes - zeros[:, of]) * scales[:, of]).astype("<f2"))


@pytest.mark.heavy
def test_a_folder_of_the_form_gemv_is_decoded_by_its_lineage(tmp_path: Path) -> None:
    """What AutoAWQ packed, under the names and beside the configuration that it writes."""
    import torch
    from golden_rules import tensor_of
    from safetensors.torch import load_file, save_file

    (case, parts), *_ = parts_of("awq_gemv_g128").items()
    call = {"codec": "awq", "dtype": "float16", "form": "gemv", "group": 128, **KEEP}
    wanted = goldens_by_rules.decoded(tmp_path / "x", {case: parts}, call, ("lossy",))[case][1]
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    module = "model.layers.0.mlp.down_proj"
    names = {"weight": "qweight", "zero": "qzeros", "scale": "scales"}
    save_file(
        {f"{module}.{names[r]}": tensor_of(s.dtype, a) for r, (s, a) in parts.items()},
        folder / "model.safetensors",
    )
    said = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    config = {"model_type": "llama", "quantization_config": {**said, "version": "gemv"}}
    (folder / "config.json").write_text(json.dumps(config))
    named = done("inspect", folder).out
    assert "awq (AutoAWQ), form gemv" in named
    done("apply", folder, "-o", out, "--to", "awq@fp16", "--allow", "lossy", "--set", "scales=keep")
    made = load_file(out / "model.safetensors")[f"{module}.weight"]
    assert made.shape == wanted.shape
    assert made.view(torch.int16).numpy().tobytes() == wanted.tobytes()
    assert json.loads((out / "config.json").read_text()) == {"model_type": "llama"}


GPTQ: dict[str, Any] = {
    "weight": Spec("int32", (16, 32)),
    "zero": Spec("int32", (4, 4)),
    "scale": Spec("float16", (4, 32)),
    "group": Spec("int32", (128,)),
}
AWQ: dict[str, Any] = {
    "weight": Spec("int32", (128, 4)),
    "zero": Spec("int32", (4, 4)),
    "scale": Spec("float16", (4, 32)),
}
GEMV: dict[str, Any] = {
    "weight": Spec("int32", (32, 16)),
    "zero": Spec("int32", (32, 4)),
    "scale": Spec("float16", (32, 32)),
}
WIDE: dict[str, Any] = {
    "weight": Spec("int32", (32, 128)),
    "zero": Spec("int32", (32, 1)),
    "scale": Spec("float16", (32, 8)),
}
V1 = {"form": "v1"}


def int32(*shape: int) -> Spec:
    return Spec("int32", shape)


@pytest.mark.parametrize(
    ("codec", "args", "parts", "code", "words"),
    [
        ("gptq", V1, {**GPTQ, "weight": None}, "M408", "without its weight"),
        ("gptq", V1, {**GPTQ, "zero": None}, "M408", "without its zero"),
        ("gptq", V1, {**GPTQ, "scale": None}, "M408", "without its scale"),
        ("gptq", V1, {**GPTQ, "weight": Spec("uint8", (16, 32))}, "M303", "the weight is uint8"),
        ("gptq", V1, {**GPTQ, "zero": Spec("int64", (4, 4))}, "M303", "the zero is int64"),
        ("gptq", V1, {**GPTQ, "scale": Spec("float64", (4, 32))}, "M303", "the scale is float64"),
        ("gptq", V1, {**GPTQ, "group": Spec("float32", (128,))}, "M303", "the group is float32"),
        ("gptq", V1, {**GPTQ, "weight": int32(2, 16, 32)}, "M304", "is [2, 16, 32], not of 2 axes"),
        ("gptq", V1, {**GPTQ, "scale": Spec("float16", (32,))}, "M304", "is [32], not of 2 axes"),
        ("gptq", V1, {**GPTQ, "group": int32(128, 1)}, "M310", "the group is [128, 1]"),
        ("gptq", V1, {**GPTQ, "weight": int32(16, 40)}, "M310", "the weight is [16, 40]"),
        (
            "gptq", V1, {**GPTQ, "weight": int32(32, 32)}, "M310",
            "by its shape [4, 4] the zero is of 4 bits, by its shape [32, 32] the weight is of 8",
        ),
        (
            "gptq", {**V1, "bits": 8}, GPTQ, "M310",
            "`bits` says 8, by its shape [4, 4] the zero is of 4 bits",
        ),
        (
            "gptq", V1, {**GPTQ, "zero": int32(4, 7)}, "M310",
            "by its shape [4, 7] the zero is of no known number of bits",
        ),
        # five bits, of which GPTQModel writes planes
        (
            "gptq", V1, {**GPTQ, "weight": int32(20, 32), "zero": int32(4, 5)}, "M310",
            "no known number of bits",
        ),
        ("gptq", V1, {**GPTQ, "zero": int32(2, 4)}, "M310", "the zero is of 2 groups, the scale"),
        (
            "gptq", {**V1, "group": 64}, GPTQ, "M310",
            "128 columns in groups of 64 are 2 groups, the scale has 4",
        ),
        (
            "gptq", {**V1, "group": 64}, {**GPTQ, "group": None}, "M310",
            "128 columns in groups of 64 are 2 groups, the scale has 4",
        ),
        (
            "gptq", V1,
            {**GPTQ, "group": None, "zero": int32(3, 4), "scale": Spec("float16", (3, 32))},
            "M310", "no power of two divides 128 columns into 3 groups",
        ),
        # one word of zeros for 8 rows is that of two, three or four bits
        (
            "gptq", V1,
            {"weight": int32(16, 8), "zero": int32(4, 1), "scale": Spec("float16", (4, 8)),
             "group": None},
            "M310", "the zero is of 2 or 3 or 4 bits",
        ),
        ("awq", {}, {**AWQ, "zero": None}, "M408", "without its zero"),
        ("awq", {}, {**AWQ, "scale": None}, "M408", "without its scale"),
        ("awq", {}, {**AWQ, "weight": Spec("int16", (128, 4))}, "M303", "the weight is int16"),
        ("awq", {}, {**AWQ, "zero": Spec("float16", (4, 4))}, "M303", "the zero is float16"),
        ("awq", {}, {**AWQ, "scale": Spec("int32", (4, 32))}, "M303", "the scale is int32"),
        ("awq", {}, {**AWQ, "weight": int32(128)}, "M304", "is [128], not of 2 axes"),
        ("awq", {}, {**AWQ, "weight": int32(128, 5)}, "M310", "not of the form gemm"),
        ("awq", {}, {**AWQ, "zero": int32(2, 4)}, "M310", "not of the form gemm"),
        ("awq", {}, GEMV, "M310", "not of the form gemm, they are of the form gemv"),
        ("awq", {"form": "gemv"}, AWQ, "M310", "not of the form gemv, they are of the form gemm"),
        (
            "awq", {"group": 64}, AWQ, "M310",
            "128 columns in groups of 64 are 2 groups, the scale has 4",
        ),
        (
            "awq", {}, {**AWQ, "weight": int32(96, 4)}, "M310",
            "no power of two divides 96 columns into 4 groups",
        ),
        ("awq", {"form": "gemv", "group": 128}, GEMV, "M310", "groups of 32, not of 128"),
        ("awq", {"form": "gemv"}, WIDE, "M310", "fit groups of 128 and of 256 and of 512"),
        # AutoAWQ pads zeros of groups of 32, 64, and 128 and more, and of no others
        ("awq", {"form": "gemv", "group": 16}, GEMV, "M310", "groups of 32, not of 16"),
        ("awq", {"form": "gemv", "group": 64}, GEMV, "M310", "groups of 32, not of 64"),
        ("awq", {"form": "gemv", "group": -1}, GEMV, "M310", "groups of 32, not of 128"),
        ("awq", {"form": "gemv", "group": 0}, GEMV, "M308", "it must be -1 or at least 1"),
        ("awq", {"group": -1}, AWQ, "M310", "groups of 128 are 1 groups, the scale has 4"),
        # of rows that are no multiple of 32 AutoAWQ packs too few words
        (
            "awq", {}, {**AWQ, "scale": Spec("float16", (4, 40))}, "M310",
            "not of the form gemm",
        ),
        ("awq", {}, {**AWQ, "weight": int32(2, 128, 4)}, "M304", "is [2, 128, 4], not of 2 axes"),
        ("gptq", {**V1, "group": 0}, GPTQ, "M308", "it must be -1 or at least 1"),
        ("gptq", {**V1, "group": -1}, GPTQ, "M310", "groups of 128 are 1 groups, the scale has 4"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused_from_their_specs(
    codec: str, args: dict[str, Any], parts: dict[str, Any], code: str, words: str
) -> None:
    made = get(codec)
    with pytest.raises(OpError) as caught:
        made.decoded(made.Args(**args), list(parts.values()), "float16")
    assert caught.value.code == code
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("codec", "args", "parts"),
    [("gptq", V1, GPTQ), ("awq", {}, AWQ), ("awq", {"form": "gemv"}, GEMV)],
)
def test_bits_and_groups_follow_from_the_parts(
    codec: str, args: dict[str, Any], parts: dict[str, Any]
) -> None:
    made = get(codec)
    assert made.decoded(made.Args(**args), list(parts.values()), "float16").shape == (32, 128)
    assert not made.encodes


def held(specs: dict[str, Any], **arrays: Any) -> dict[str, Any]:
    """role -> (spec, raw elements) of zeros, but for scales of 1 and the arrays given."""
    out = {}
    for role, one in specs.items():
        raw = np.full(one.shape, 0x3C00, "<u2") if role == "scale" else np.zeros(one.shape, "<u4")
        out[role] = one, arrays.get(role, raw)
    return out


def decoded(folder: Path, codec: str, parts: dict[str, Any], **args: Any) -> Any:
    call = {"codec": codec, "dtype": "float16", **args}
    return goldens_by_rules.decoded(folder, {"w": parts}, call, ("lossy",))["w"][1].view("<f2")


@pytest.mark.parametrize("form", ["gemm", "gemv"])
def test_a_group_of_minus_one_is_a_whole_row(form: str, tmp_path: Path) -> None:
    """As configurations have it; AutoAWQ pads the zero of each row to a word."""
    codes, zeros = np.arange(32)[:, None] % 16 * np.ones(1024, int), np.arange(32) % 5
    scales = (1 + np.arange(32)).astype("<f2")
    if form == "gemv":
        specs: dict[str, Any] = WIDE
        weight, zero = (codes[:, :8], zeros[:, None] * (np.arange(8) == 0))
        scale = scales[:, None] * (np.arange(8) == 0)
    else:
        specs = {
            "weight": int32(1024, 4), "zero": int32(1, 4), "scale": Spec("float16", (1, 32))
        }  # fmt: skip
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        weight, zero = (x.reshape(-1, 8)[:, order] for x in (codes.T, zeros))
        scale = scales
    words = [(x.astype("<u4") << np.arange(0, 32, 4, "u4")).sum(-1) for x in (weight, zero)]
    parts = {
        role: (specs[role], np.resize(raw, specs[role].shape).astype("<u4"))
        for role, raw in zip(("weight", "zero"), words, strict=True)
    }
    if form == "gemv":
        parts["weight"] = specs["weight"], words[0][:, None].repeat(128, 1).astype("<u4")
    parts["scale"] = specs["scale"], scale.reshape(specs["scale"].shape).astype("<f2").view("<u2")
    made = decoded(tmp_path / "x", "awq", parts, form=form, group=-1)
    assert np.array_equal(made, ((codes - zeros[:, None]) * scales[:, None]).astype("<f2"))


INDEX = np.arange(128, dtype="<u4") // 32


@pytest.mark.parametrize("number", [4, -1])
def test_an_index_beyond_the_groups_is_refused(number: int, tmp_path: Path) -> None:
    index = INDEX.astype("<i4")
    index[77] = number
    parts = held(GPTQ, group=index.view("<u4"))
    with pytest.raises(MigrateError) as caught:
        decoded(tmp_path / "x", "gptq", parts, form="v2")
    assert f"the group of column 77 is {number}" in str(caught.value)
    assert "has entries 0 to 3" in str(caught.value)
    assert not (tmp_path / "x" / "out.safetensors").exists()


@pytest.mark.parametrize("indexed", [True, False])
def test_a_zero_of_v1_that_may_be_0_or_16_is_refused(indexed: bool, tmp_path: Path) -> None:
    """All are 8 but that of row 10 and group 2, which GPTQModel stores as 15 with a borrow."""
    zeros = np.full((4, 4), 0x77777777, "<u4")
    # 0 in the third field of the second word, 1 taken off each in the word as a whole
    zeros[2, 1] = 0x88888088 - 0x11111111
    specs = GPTQ if indexed else {role: one for role, one in GPTQ.items() if role != "group"}
    parts = held(specs, zero=zeros, group=INDEX)
    with pytest.raises(MigrateError) as caught:
        decoded(tmp_path / "x", "gptq", parts, form="v1")
    (found,) = caught.value.diagnostics
    assert found.code == "M406"
    assert "is stored as 15, which less 1 can be 0 or 16" in str(found)
    place = "row 10 and group 2" if indexed else "the numbers from [10, 64] on"
    assert place in str(found)
    assert not (tmp_path / "x" / "out.safetensors").exists()
    made = decoded(tmp_path / "y", "gptq", parts, form="v1", zeros="words")
    wanted = np.full((32, 128), -8.0)
    wanted[10, 64:96] = 0
    assert (made == wanted).all()
    # stored are 7, but 15 in that row, and 6 in the next, of which it borrowed
    as_stored = decoded(tmp_path / "z", "gptq", parts, form="v2")
    assert set(as_stored[10]) == {-15, -7}
    assert set(as_stored[11]) == {-7, -6}


ODD = {"0": 0, "inf": 0x7C00, "nan": 0x7E00, "-1": 0xBC00}


def test_odd_scales_of_the_form_gemv_are_refused_and_its_padding_is_not_looked_at(
    tmp_path: Path,
) -> None:
    scales = np.full((32, 8), 0x3C00, "<u2")
    scales[:, 1:] = ODD["nan"]
    args: dict[str, Any] = {"form": "gemv", "group": -1}
    assert not decoded(tmp_path / "x", "awq", held(WIDE, scale=scales), **args).any()
    scales[7, 0] = ODD["-1"]
    with pytest.raises(MigrateError) as caught:
        decoded(tmp_path / "y", "awq", held(WIDE, scale=scales), **args)
    assert "the scale of the numbers from [7, 0] on is -1" in str(caught.value)


@pytest.mark.parametrize("word", ODD)
@pytest.mark.parametrize("codec", ["gptq", "awq"])
def test_scales_that_no_encoder_makes_are_refused(codec: str, word: str, tmp_path: Path) -> None:
    specs, raw = {"gptq": GPTQ, "awq": AWQ}[codec], ODD[word]
    args = {"form": "v2"} if codec == "gptq" else {}
    scales = np.full((4, 32), 0x3C00, "<u2")
    scales[1, 5] = raw
    ones = np.full(specs["weight"].shape, 0x11111111, "<u4")
    parts = held(specs, weight=ones, scale=scales, group=INDEX)
    with pytest.raises(MigrateError) as caught:
        decoded(tmp_path / "x", codec, parts, **args)
    place = "row 5 and group 1" if codec == "gptq" else "the numbers from [5, 32] on"
    assert f"the scale of {place} is {word}" in str(caught.value)
    made = decoded(tmp_path / "y", codec, parts, non_finite="keep", **args)
    wanted = np.full((32, 128), 1, "<f2")
    wanted[5, 32:64] = np.array(raw, "<u2").view("<f2")
    assert np.array_equal(made, wanted, equal_nan=True)


@pytest.mark.parametrize("role", ["weight", "zero", "scale"])
@pytest.mark.parametrize("codec", ["gptq", "awq"])
def test_a_part_that_is_missing_is_named(codec: str, role: str, tmp_path: Path) -> None:
    whole = held(GPTQ if codec == "gptq" else AWQ)
    cases = {"a": {r: one for r, one in whole.items() if r != role}, "whole": whole}
    call = {"codec": codec, "dtype": "float16", **({"form": "v2"} if codec == "gptq" else {})}
    with pytest.raises(MigrateError) as caught:
        goldens_by_rules.decoded(tmp_path / "x", cases, call, ("lossy",))
    assert {found.code for found in caught.value.diagnostics} == {"M207"}
    assert f"a.{role}" in str(caught.value)


def test_the_form_of_gptq_has_to_be_written(tmp_path: Path) -> None:
    with pytest.raises(MigrateError, match="form"):
        decoded(tmp_path / "x", "gptq", held(GPTQ))


def columns_of(codec: str, rows: int, columns: int) -> tuple[dict[str, Held], dict[str, Any]]:
    """The parts of numbers, which lie in columns, and what a rule says of them."""
    groups = columns // 128
    parts = {"scale": random_part("float16", groups, rows)}
    parts["zero"] = random_part("int32", groups, rows // 8)
    if codec == "awq":
        return {"weight": random_part("int32", columns, rows // 8), **parts}, {"codec": "awq"}
    words = random_part("int32", columns // 8, rows)
    return {"weight": words, **parts}, {"codec": "gptq", "form": "v2"}


@pytest.mark.parametrize(("threads", "most"), [(1, 1.1), (2, 2.2)])
@pytest.mark.parametrize("codec", ["gptq", "awq"])
def test_what_lies_in_columns_is_read_once_by_each_thread(
    codec: str, threads: int, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A box of rows is some columns of each row of the file, and what lies between two stretches
    of it is read with them: each of four boxes would read all of it again.
    """
    parts, call = columns_of(codec, 4096, 2048)
    goldens_by_rules.decoded(tmp_path / "x", {"c": parts}, {**call, "dtype": "float16"}, ("lossy",))
    source, rules = (tmp_path / "x" / name for name in ("in.safetensors", "r.yaml"))
    read, preadv = [], os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        count = preadv(fd, buffers, offset)
        if os.path.samestat(os.fstat(fd), source.stat()):
            read.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counted)
    out = tmp_path / "out.safetensors"
    how: dict[str, Any] = {"rules": rules, "allow": ("lossy",), "fsync": False}
    migrate.apply(source, out, threads=threads, **how)
    size = source.stat().st_size
    assert 0.99 * size < sum(read) < most * size


@pytest.mark.parametrize("codec", ["gptq", "awq"])
def test_numbers_of_columns_are_the_same_in_little_memory(codec: str, tmp_path: Path) -> None:
    parts, call = columns_of(codec, 1024, 2048)
    goldens_by_rules.decoded(tmp_path / "x", {"c": parts}, {**call, "dtype": "float16"}, ("lossy",))
    source, rules = (tmp_path / "x" / name for name in ("in.safetensors", "r.yaml"))
    found: Any = get(codec)
    held = [parts.get(role) for role in found.parts]
    specs, arrays = ([one and one[n] for one in held] for n in (0, 1))
    args = found.Args(**{name: said for name, said in call.items() if name != "codec"})
    wanted = found.reference(args, arrays, specs, "float16")
    for memory in (2 << 20, 16 << 20):
        out = tmp_path / f"{memory}.safetensors"
        how: dict[str, Any] = {"rules": rules, "allow": ("lossy",), "fsync": False}
        migrate.apply(source, out, threads=2, max_memory=memory, **how)
        ((spec, made),) = goldens_by_rules.read(out.read_bytes()).values()
        assert spec == Spec("float16", (1024, 2048))
        assert (made == wanted).all(), memory


RULES = """
keep: ["{k...}"]
rules:
  - name: words
    from: {weight: "{m}.qweight", zero: "{m}.qzeros", scale: "{m}.scales"%s}
    to: "{m}.weight"
    via: [{dequantize: {codec: %s, dtype: float16}}]
"""
COLUMNS, ROWS = 1024, 2048
WORDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gptq": ("gptq, form: v2", ', group: "{m}.g_idx"', {
        "qweight": (COLUMNS // 8, ROWS), "qzeros": (COLUMNS // 128, ROWS // 8),
        "scales": (COLUMNS // 128, ROWS), "g_idx": (COLUMNS,),
    }),
    "awq": ("awq", "", {
        "qweight": (COLUMNS, ROWS // 8), "qzeros": (COLUMNS // 128, ROWS // 8),
        "scales": (COLUMNS // 128, ROWS),
    }),
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("codec", WORDS)
def test_verify_compares_columns_of_words_in_little_memory(codec: str, tmp_path: Path) -> None:
    """Rows of numbers are columns of all parts."""
    save = pytest.importorskip("safetensors.numpy").save_file
    (said, more, shapes), dice = WORDS[codec], np.random.default_rng(0)
    parts: dict[str, Any] = {}
    for name, shape in shapes.items():
        parts[f"l.{name}"] = dice.integers(-(2**31), 2**31, shape, "<i4")
    parts["l.scales"] = (dice.random(shapes["scales"]) + 0.5).astype("<f2")
    if codec == "gptq":
        parts["l.g_idx"] = dice.permutation(COLUMNS).astype("<i4") // 128
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save(parts, source)
    rules = rule_file(tmp_path, RULES % (more, said))
    migrate.apply(source, out, rules=rules, allow=["lossy"], fsync=False)
    asked: dict[str, Any] = {"source": source, "rules": rules, "allow": ["lossy"], "threads": 1}
    # whole tensors would take over ten times as much
    most = 16 << 20
    tracemalloc.start()
    try:
        assert migrate.verify(out, **asked, max_memory=most).equal
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most
    raw = bytearray(out.read_bytes())
    raw[-5] ^= 1
    out.write_bytes(raw)
    (found,) = migrate.verify(out, **asked, max_memory=most).differences
    assert (found,) == migrate.verify(out, **asked).differences
