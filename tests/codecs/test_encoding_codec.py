"""Codecs that encode by the kit, as short as they can be: through all that the kit for codecs
checks, through files and state dicts, and compared by `verify`.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import acme_codecs
import pytest
import torch
from marks import thorough
from safetensors.torch import load_file, save_file

import migrate
from migrate.codecs.base import Convention, OpError, Text, arg, dataclass
from migrate.codecs.kit.arguments import like_arg, non_finite_arg, rounding_bound
from migrate.codecs.kit.encoding_codec import EncodingCodec
from migrate.codecs.kit.layout import (
    ElementType,
    Grid,
    NumberLayout,
    Packing,
    Term,
    floats,
    integers,
    plain,
    times,
)
from migrate.codecs.kit.scale_rules import ScaleRule
from migrate.core.errors import CheckpointError
from migrate.core.spec import spec as spec_of
from migrate.testing import codeckit

E4M3, E2M1 = "float8_e4m3fn", "float4_e2m1fn"


class Whole(EncodingCodec):
    """One scale for a whole tensor."""

    name = "acme-fp8"
    summary = "e4m3 codes with one scale for all"
    parts = ("weight", "scale")
    names = (Convention("acme", {"weight": "{w}.codes", "scale": "{w}.codes_scale"}),)
    numbers = ("float32", "bfloat16")

    @dataclass(frozen=True, slots=True)
    class Args:
        like: Text = like_arg("modelopt", "hf")
        non_finite: Text = non_finite_arg()

    def layout(self, args, specs):
        scale = Grid("scale", (0, 0), leading=False, dtypes=("float32",))
        return NumberLayout(self.name, floats(E4M3), plain(E4M3), times(scale))

    def encoded(self, args, spec):
        weight, _ = super().encoded(args, spec)
        return [weight, spec_of("float32", ())]

    def rule(self, args, spec):
        return ScaleRule("float", args.like, region="tensor")

    def bound(self, args):
        return rounding_bound(floats(E4M3), of="amax of the tensor")

    def samples(self):
        for shape in ((40, 48), (3, 5, 70), (1, 1), (17,)):
            yield self.Args(), spec_of("bfloat16", shape)
        yield self.Args("hf", "saturate"), spec_of("float32", (9, 33))


class TwoLevels(EncodingCodec):
    """NVFP4."""

    name = "acme-nvfp4"
    summary = "e2m1 codes, an e4m3 scale for each 16 and one for all"
    parts = ("weight", "scale", "global")
    names = (Convention("acme", {r: f"{{w}}.{r}4" for r in ("weight", "scale", "global")}),)
    follow = ("scale", "global")
    numbers = ("float32", "bfloat16", "float16")

    @dataclass(frozen=True, slots=True)
    class Args:
        like: Text = like_arg("modelopt", "compressed-tensors")
        non_finite: Text = non_finite_arg()

    def layout(self, args, specs):
        how: Any = "*" if args.like == "modelopt" else "/"
        blocks = Grid("scale", (1, 16), dtypes=(E4M3,))
        whole = Grid("global", (0, 0), leading=False, dtypes=("float32",))
        terms = (Term("*", blocks), Term(how, whole))
        return NumberLayout(self.name, floats(E2M1), Packing(4), terms)

    def encoded(self, args, spec):
        if spec.shape[-1] % 16:
            raise OpError("M304", f"{self.name}: {spec.shape[-1]} columns are no multiple of 16")
        weight, scale, _ = super().encoded(args, spec)
        return [weight, scale, spec_of("float32", () if args.like == "modelopt" else (1,))]

    def rule(self, args, spec):
        return ScaleRule("nvfp4", args.like)

    def bound(self, args):
        return rounding_bound(floats(E2M1))

    def samples(self):
        for shape in ((6, 64), (2, 5, 32), (1, 48)):
            yield self.Args(), spec_of("bfloat16", shape)
        yield self.Args("compressed-tensors"), spec_of("float16", (7, 48))
        yield self.Args("compressed-tensors", "saturate"), spec_of("float32", (7, 48))


class Blocks(EncodingCodec):
    """E4M3 in blocks, scales in a dtype of choice, of matrices alone: nothing is overridden but
    what a layout does not say.
    """

    name = "acme-blocks"
    summary = "e4m3 codes with a scale for each 4 x 8"
    parts = ("weight", "scale", "zero")
    optional = ("zero",)
    names = (Convention("acme", {"weight": "{w}.codes8", "scale": "{w}.codes8_scale"}),)
    numbers = ("float32", "bfloat16")

    @dataclass(frozen=True, slots=True)
    class Args:
        scale: Text = arg("the dtype of scales", words=("float32", "bfloat16"), default="float32")
        non_finite: Text = non_finite_arg()

    def layout(self, args, specs):
        scale = Grid("scale", (4, 8), dtypes=("float32", "bfloat16"))
        return NumberLayout(self.name, floats(E4M3), plain(E4M3, "uint8"), times(scale), axes=2)

    def dtypes(self, args, spec):
        return {"scale": args.scale}

    def rule(self, args, spec):
        return ScaleRule("float", "hf", rounding={"bfloat16": "bf16"}.get(args.scale, "f32"))

    def bound(self, args):
        return rounding_bound(floats(E4M3))

    def samples(self):
        yield self.Args(), spec_of("bfloat16", (9, 30))
        yield self.Args("bfloat16", "keep"), spec_of("float32", (2, 8, 16))


CODECS, BLOCKS = (Whole(), TwoLevels()), Blocks()


@pytest.fixture(autouse=True)
def in_place() -> Iterator[None]:
    with acme_codecs.installed(*CODECS, BLOCKS):
        yield


@pytest.mark.parametrize(
    ("name", "number"),
    [(c.name, n) for c in (*CODECS, BLOCKS) for n, _ in enumerate(c.samples())],
)
def test_the_codecs_pass_the_kit(name: str, number: int) -> None:
    codeckit.check_sample(name, number)


@pytest.mark.parametrize("codec", [*CODECS, BLOCKS], ids=lambda codec: codec.name)
def test_the_codecs_are_described(codec: Any) -> None:
    codeckit.check_description(codec.name)


def test_what_is_encoded_follows_from_the_layout() -> None:
    codec = BLOCKS
    assert codec.encodes
    assert codec.encoded(codec.Args("bfloat16"), spec_of("bfloat16", (2, 9, 30))) == [
        spec_of(E4M3, (2, 9, 30)),
        spec_of("bfloat16", (2, 3, 4)),
        None,
    ]


@pytest.mark.parametrize(
    ("dtype", "shape", "code", "message"),
    [
        ("float16", (8, 8), "M303", "acme-blocks encodes float32, bfloat16, not float16"),
        ("float32", (8,), "M304", "acme-blocks is of numbers of 2 or more axes, these have 1"),
        ("float32", (), "M304", "acme-blocks is of numbers of 2 or more axes, these have none"),
    ],
)
def test_numbers_of_another_dtype_or_of_too_few_axes_are_refused(
    dtype: str, shape: tuple[int, ...], code: str, message: str
) -> None:
    codec = BLOCKS
    with pytest.raises(OpError) as caught:
        codec.encoded(codec.Args(), spec_of(dtype, shape))
    assert (caught.value.code, caught.value.message) == (code, message)
    if code == "M304":
        parts = [spec_of(E4M3, shape), spec_of("float32", (1,) * len(shape)), None]
        with pytest.raises(OpError) as caught:
            codec.decoded(codec.Args(), parts, "bfloat16")
        assert (caught.value.code, caught.value.message) == (code, message)


@pytest.mark.parametrize(
    ("elements", "said"),
    [
        (floats(E4M3), "max(|x| / 16, amax / 448 / 1024)"),
        (floats("float8_e5m2"), "max(|x| / 8, amax / 57344 / 131072)"),
        (floats("float8_e4m3fnuz"), "max(|x| / 16, amax / 240 / 2048)"),
        (floats(E2M1), "max(|x| / 4, amax / 6 / 4)"),
        (integers(4, 8), "amax / 14"),
    ],
)
def test_the_bound_of_rounding_is_half_a_step(elements: ElementType, said: str) -> None:
    assert rounding_bound(elements).startswith(f"|error| <= {said}, amax of the block: half a step")


RULE = """id: acme/encoded/1
title: Numbers become codes
lineage: acme
edge: [numbers, encoded]
requires: ">=0.1"
rules:
  - name: weights
    from: "{w}.weight"
    to: {TO}
    via: [{quantize: {codec: CODEC, from: bfloat16}}]
"""


def rule_file(folder: Path, codec: Any) -> Path:
    names = codec.names[0].parts
    to = ", ".join(f'{role}: "{name}"' for role, name in names.items())
    path = folder / "encode.yaml"
    path.write_text(RULE.replace("{TO}", f"{{{to}}}").replace("CODEC", codec.name))
    return path


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_files_state_dicts_and_verify_agree(codec: Any, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    held = {
        f"{name}.weight": (torch.randn(shape, generator=generator) * 0.02).bfloat16()
        for name, shape in (("a", (96, 64)), ("b", (2000, 1280)))
    }
    # a tensor of zeros has a scale as well
    held["c.weight"] = torch.zeros(8, 32, dtype=torch.bfloat16)
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(held, source)
    rules = rule_file(tmp_path, codec)
    migrate.apply(source, out, rules=rules, allow="lossy")
    how: dict[str, Any] = {"rules": [rules], "allow": ["lossy"]}
    assert migrate.verify(out, source=source, **how).to_json()["differences"] == []
    made, there = migrate.apply(held, rules=rules, allow="lossy"), load_file(out)
    assert made.keys() == there.keys()
    for key, tensor in there.items():
        one, other = (t.reshape(-1).view(torch.uint8) for t in (made[key], tensor))
        assert torch.equal(one, other), key
        assert torch.isfinite(tensor.float()).all()
    scale = there["b." + codec.names[0].parts[codec.parts[-1]].removeprefix("{w}.")]
    most = float(held["b.weight"].float().abs().max())
    assert float(scale) == pytest.approx(most / (448 if codec.parts[-1] == "scale" else 2688))
    # and back, by the inverse
    back = tmp_path / "back.safetensors"
    migrate.downgrade(out, back, rules=rules, allow="lossy")
    for key, tensor in load_file(back).items():
        error = (tensor.float() - held[key].float()).norm()
        assert error <= 0.12 * held[key].float().norm()


@pytest.mark.parametrize(
    ("codec", "stacked"),
    thorough(product(CODECS, [False, True])),
    ids=lambda one: getattr(one, "name", one),
)
def test_verify_compares_a_large_tensor_in_rows(codec: Any, stacked: bool, tmp_path: Path) -> None:
    shape = (60, 200, 1024) if stacked else (12_000, 1024)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({"a.weight": numbers}, source)
    rules = rule_file(tmp_path, codec)
    migrate.apply(source, out, rules=rules, allow="lossy")
    most = 16 << 20
    assert most < numbers.nbytes

    def differences(**limits: Any) -> list[Any]:
        found = migrate.verify(
            out, source=source, rules=[rules], allow=["lossy"], threads=1, **limits
        )
        return found.to_json()["differences"]

    tracemalloc.start()
    try:
        assert differences(max_memory=most) == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most
    made = load_file(out)
    for tensor in made.values():
        tensor.reshape(-1).view(torch.uint8)[-1] ^= 1
    save_file(made, out)
    wrong = differences(max_memory=most)
    assert {one["key"] for one in wrong} == set(made)
    assert wrong == differences()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_number_that_is_not_finite_stops_a_run_before_anything_is_published(
    codec: Any, tmp_path: Path
) -> None:
    numbers = torch.ones(64, 32, dtype=torch.bfloat16)
    numbers[60, 3] = float("inf")
    source = tmp_path / "in.safetensors"
    save_file({"a.weight": numbers}, source)
    with pytest.raises(CheckpointError) as caught:
        migrate.apply(
            source, tmp_path / "out.safetensors", rules=rule_file(tmp_path, codec), allow="lossy"
        )
    (found,) = caught.value.diagnostics
    assert found.code == "M406"
    assert "the number at [60, 3] is inf" in found.message
    assert not (tmp_path / "out.safetensors").exists()
