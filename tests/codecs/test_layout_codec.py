"""Codecs that are layouts, as short as they can be, through all that the kit for codecs checks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import acme_codecs
import kit_layouts
import numpy as np
import pytest
import torch
from kit_layouts import Case, goldens
from safetensors.torch import load_file, save_file

import migrate
from migrate.codecs.base import Convention, Flag, Integer, OpError, arg, dataclass
from migrate.codecs.kit.codec import LayoutCodec
from migrate.codecs.kit.layout import Grid, NumberLayout, Packing, floats, integers, times
from migrate.core.spec import Spec
from migrate.elements.raw import unpack
from migrate.running import evaluator
from migrate.testing import codeckit

FP4 = "float4_e2m1fn"


def stored(kind: str, case: str, names: dict[str, str]) -> list[Any]:
    """The parts of a golden, in the order of `names`."""
    found = goldens()[kind][case]
    return [found.get(f"q/{name}") for name in names.values()]


class Fours(LayoutCodec):
    """MXFP4, of any number of axes, and as [.., K / 32, 16] bytes."""

    name = "acme-mxfp4"
    summary = "e2m1 codes with a power of two for each 32"
    parts = ("weight", "scale")
    names = (Convention("acme", {"weight": "{w}_blocks", "scale": "{w}_scales"}),)

    def layout(self, args, specs):
        apart = len(specs["weight"].shape) > len(specs["scale"].shape)
        return NumberLayout(
            self.name,
            floats(FP4),
            Packing(4, ("uint8", "int8", FP4), run=16 if apart else 0),
            times(Grid("scale", (1, 32), dtypes=("uint8", "float8_e8m0fnu"))),
        )

    def stored(self):
        plain = {"weight": "weight", "scale": "weight_scale"}
        yield self.Args(), stored("modelopt_mxfp4", "moe3d_2x8x64_bf16", plain)
        for case in ("moe3d_2x8x64_bf16", "normal_bf16"):
            (spec, raw), scale = stored("modelopt_mxfp4", case, plain)
            codes = Spec(FP4, (*spec.shape[:-1], 2 * spec.shape[-1]))
            yield self.Args(), [(codes, unpack(raw.tobytes(), codes)), scale]
        apart = {"weight": "w_blocks", "scale": "w_scales"}
        yield self.Args(), stored("gptoss_mxfp4", "raw_all_bytes", apart)


class Words(LayoutCodec):
    """compressed-tensors' integers in 32-bit words, whose shape is a part."""

    name = "acme-words"
    summary = "integers of a few bits packed in words"
    parts = ("weight", "scale", "shape", "zero")
    optional = ("zero",)
    planning = ("shape",)
    names = (
        Convention(
            "acme",
            {
                "weight": "{w}.weight_packed",
                "scale": "{w}.weight_scale",
                "shape": "{w}.weight_shape",
                "zero": "{w}.weight_zero_point?",
            },
        ),
    )

    @dataclass(frozen=True, slots=True)
    class Args:
        bits: Integer = arg("bits of a code", values=(2, 3, 4, 8))
        dense: Flag = arg("codes go on across the borders of words", default=True)

    @dataclass(frozen=True, slots=True)
    class Read:
        args: Any
        shape: tuple[int, ...]

    def settle(self, args, specs, values):
        shape = tuple(int(n) for n in np.frombuffer(values["shape"], "<i8"))
        if len(shape) != 2:
            raise OpError("M310", f"`shape` says {list(shape)}, the codes are {specs[0]}")
        return self.Read(args, shape)

    def layout(self, args, specs):
        (rows, columns), bits = args.shape, args.args.bits
        scale = specs["scale"].shape
        if len(scale) != 2 or not scale[1] or columns % scale[1]:
            raise OpError("M310", f"{columns} columns are no {scale} groups")
        block, zero = (1, columns // scale[1]), None
        if "zero" in specs:
            packing = Packing(bits, ("int32",), axis=-2, dense=args.args.dense)
            zero = Grid("zero", block, elements=integers(bits), packing=packing)
        return NumberLayout(
            self.name,
            integers(bits, 0 if zero else 1 << (bits - 1)),
            Packing(bits, ("int32",), dense=args.args.dense),
            times(Grid("scale", block)),
            zero=zero,
            shape=(rows, columns),
        )

    def stored(self):
        names = {
            "weight": "weight_packed",
            "scale": "weight_scale",
            "shape": "weight_shape",
            "zero": "weight_zero_point",
        }
        for kind, bits in (
            ("ct_w3a16_dense", 3),
            ("ct_w4a16_g128_sym", 4),
            ("ct_w4a16_g128_asym", 4),
            ("ct_w8a16_pack", 8),
        ):
            case = min(goldens()[kind])
            yield self.Args(bits), stored(kind, case, names)


class Turned(LayoutCodec):
    """GPTQ's 4 bits: words along K, stored [K / 8, N], with a group for each column."""

    name = "acme-turned"
    summary = "integers packed along K, with a group for each column"
    parts = ("weight", "scale", "zero", "group")
    names = (
        Convention(
            "acme",
            {
                "weight": "{w}.qweight",
                "scale": "{w}.scales",
                "zero": "{w}.qzeros",
                "group": "{w}.g_idx",
            },
        ),
    )

    def layout(self, args, specs):
        if len(specs["scale"].shape) != 2 or len(specs["group"].shape) != 1:
            raise OpError("M304", f"{specs['scale']} are no scales of groups")
        found = {f"q/{n}": (specs[r], None) for r, n in (("scale", "scales"), ("group", "g_idx"))}
        made = kit_layouts.gptq(4, False)(found)
        assert isinstance(made, Case)
        return made.layout

    def stored(self):
        names = {
            "weight": "qweight", "scale": "scales", "zero": "qzeros(gptq_v2)", "group": "g_idx"
        }  # fmt: skip
        yield self.Args(), stored("gptq_4bit_g128_actorder", "int4_32x512_bf16", names)
        yield self.Args(), stored("gptq_4bit_g32_asym", "normal_f32", names)


CODECS = (Fours(), Words(), Turned())
CASES = [(codec, n) for codec in CODECS for n, _ in enumerate(codec.stored())]


@pytest.mark.parametrize(("codec", "number"), CASES, ids=lambda x: getattr(x, "name", x))
def test_a_codec_that_is_a_layout_passes_the_kit(codec: LayoutCodec, number: int) -> None:
    with acme_codecs.installed(codec):
        codeckit.check_sample(codec.name, number)


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
def test_a_codec_that_is_a_layout_is_described(codec: LayoutCodec) -> None:
    with acme_codecs.installed(codec):
        codeckit.check_description(codec.name)
    assert not codec.encodes


RULE = """
id: a/b
title: t
lineage: a
edge: [one, two]
rules:
  - name: r
    from: {{{parts}}}
    to: "{{m}}.out"
    {optional}
    via: [{{dequantize: {{codec: {codec}, dtype: {dtype}{more}}}}}{then}]
"""


@pytest.mark.parametrize("then", ["", ", {transpose: {dims: [0, 1]}}"])
@pytest.mark.parametrize(
    ("codec", "kind", "case", "of", "more"),
    [
        (Words(), "ct_w4a16_g128_asym", "normal_f32", "dq/ct.decompress", ", bits: 4"),
        (Words(), "ct_w3a16_dense", "int4_32x512_bf16", "dq/ct.decompress", ", bits: 3"),
        (
            Turned(),
            "gptq_4bit_g128_actorder",
            "int4_32x512_bf16",
            "dq/gptqmodel.TorchLinear.dequantize_weight.T",
            "",
        ),
    ],
    ids=["words", "dense words", "turned"],
)
def test_a_rule_decodes_by_a_layout(
    codec: LayoutCodec, kind: str, case: str, of: str, more: str, then: str, tmp_path: Path
) -> None:
    found = goldens()[kind][case]
    source, rule, out = (tmp_path / n for n in ("a.safetensors", "r.yaml", "b.safetensors"))
    state, said = {}, []
    (convention,) = codec.names
    for role, text in convention.parts.items():
        name = text.replace("{w}.", "").rstrip("?")
        key = f"q/{name}" if f"q/{name}" in found else f"q/{name}(gptq_v2)"
        if key in found:
            spec, raw = found[key]
            state[f"l.0.{name}"] = tensor_of(spec.dtype, raw)
        said.append(f'{role}: "{{m...}}.{name}"')
    save_file(state, source)
    spec, wanted = found[of]
    optional = f"optional: [{', '.join(codec.optional)}]" if codec.optional else ""
    rule.write_text(
        RULE.format(
            parts=", ".join(said), optional=optional, codec=codec.name, dtype=spec.dtype,
            more=more, then=then,
        )
    )  # fmt: skip
    with acme_codecs.installed(codec):
        how: dict[str, Any] = {"rules": [rule], "allow": ["lossy"]}
        migrate.apply(source, out, **how)
        assert migrate.verify(out, source=source, **how).to_json()["differences"] == []
    made = load_file(out)["l.0.out"]
    got = (made.t() if then else made).contiguous()
    assert torch.equal(got.view(torch.uint8), tensor_of(spec.dtype, wanted).view(torch.uint8))


class Watched(Fours):
    """Keeps what it is given to decode."""

    name = "acme-watched"
    given: ClassVar[list[Any]] = []

    def decode(self, args, arrays, specs, dtype, box, out, meter=None):
        self.given.append((arrays[0].dtype, arrays[0].size))
        super().decode(args, arrays, specs, dtype, box, out, meter)


def write_fours(path: Path, codes: Any, scale: Any) -> None:
    """A file with a tensor of the dtype F4, whose elements are the nibbles of `codes`."""
    rows, columns = codes.shape
    held = {
        "l.blocks": {"dtype": "F4", "shape": [rows, 2 * columns]},
        "l.scales": {"dtype": "U8", "shape": list(scale.shape)},
    }
    at = 0
    for one, array in zip(held.values(), (codes, scale), strict=True):
        one["data_offsets"] = [at, at := at + array.nbytes]
    text = json.dumps(held).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + codes.tobytes() + scale.tobytes())


@pytest.mark.parametrize("columns", [4096, 96])
def test_codes_of_the_dtype_f4_are_read_as_their_bytes(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, (4099, columns // 2), dtype="u1")
    scale = rng.integers(110, 130, (4099, columns // 32), dtype="u1")
    fours, bytes_, rule = (tmp_path / n for n in ("a.safetensors", "b.safetensors", "r.yaml"))
    write_fours(fours, codes, scale)
    save_file({"l.blocks": torch.from_numpy(codes), "l.scales": torch.from_numpy(scale)}, bytes_)
    rule.write_text(
        RULE.format(
            parts='weight: "{m...}.blocks", scale: "{m...}.scales"', optional="",
            codec=Watched.name, dtype="bfloat16", more="", then="",
        )
    )  # fmt: skip
    codec, how = Watched(), {"rules": [rule]}

    def refuse(packed: Any, spec: Spec) -> Any:
        assert spec.dtype != FP4, "codes of four bits, one to a byte"
        return unpack(packed, spec)

    made = {}
    with acme_codecs.installed(codec):
        for source in (bytes_, fours):
            out = tmp_path / f"out-{source.name}"
            if source is fours:
                monkeypatch.setattr(evaluator, "unpack", refuse)
            migrate.apply(source, out, **how)
            made[source] = load_file(out)["l.out"], sorted(codec.given)
            codec.given.clear()
        assert migrate.verify(out, source=fours, **how).to_json()["differences"] == []
    assert torch.equal(*(numbers for numbers, _ in made.values()))
    one, other = (given for _, given in made.values())
    # boxes of the same bytes
    assert one == other
    assert sum(size for _, size in other) == codes.size


def test_codes_of_the_dtype_f4_that_are_turned_first_are_packed_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 256, (64, 40), dtype="u1")
    scale = rng.integers(110, 130, (80, 2), dtype="u1")
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_fours(source, codes, scale)
    turn, decode = tmp_path / "1.yaml", tmp_path / "2.yaml"
    turn.write_text(
        """
id: a/1
title: t
lineage: a
edge: [one, two]
keep: ["{m...}.scales"]
rules:
  - {name: r, from: "{m...}.blocks", to: "{m}.turned", via: [{transpose: {dims: [0, 1]}}]}
"""
    )
    decode.write_text(
        """
id: a/2
title: t
lineage: a
edge: [two, three]
rules:
  - name: r
    from: {weight: "{m...}.turned", scale: "{m...}.scales"}
    to: "{m}.out"
    via: [{dequantize: {codec: acme-mxfp4, dtype: float32}}]
"""
    )
    with acme_codecs.installed(Fours()):
        migrate.apply(source, out, rules=[turn, decode])
    made = load_file(out)["l.out"].numpy()
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], "f4")
    each = np.stack([codes & 15, codes >> 4], -1).reshape(64, 80).T
    wanted = np.where(each & 8, -table[each & 7], table[each & 7])
    powers = np.repeat(2.0 ** (scale.astype("f4") - 127), 32, axis=1)
    assert (made == wanted * powers).all()


def tensor_of(dtype: str, raw: Any) -> torch.Tensor:
    return torch.from_numpy(np.copy(raw).view("u1")).view(getattr(torch, dtype)).reshape(raw.shape)


@pytest.mark.parametrize("base", ["LayoutCodec", "EncodingCodec"])
def test_the_layout_that_the_docs_show_passes_the_kit(base: str) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "codecs.md"
    (code,) = (
        code
        for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        if f"({base}):" in code
    )
    shown: dict[str, Any] = {}
    exec(compile(code, str(page), "exec", dont_inherit=True), shown)
    codec = shown["CODEC"]
    with acme_codecs.installed(codec):
        for name, number in codeckit.cases([codec.name]):
            codeckit.check_sample(name, number)
        codeckit.check_description(codec.name)
        assert codeckit.check_axes(codec.name) or not codec.encodes
