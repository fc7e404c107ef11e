"""Codecs that encode by the kit, as short as they can be: through all that the kit for codecs
checks, through files and state dicts, and compared by `verify`.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import acme_codecs
import pytest
import torch
from safetensors.torch import load_file, save_file

import migrate
from migrate.codecs.base import NON_FINITE, Convention, OpError, Text, arg, dataclass
from migrate.codecs.kit.encoding_codec import EncodingCodec
from migrate.codecs.kit.layout import Grid, NumberLayout, Packing, Term, floats, plain, times
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
        like: Text = arg("whose arithmetic encodes", words=("modelopt", "hf"), default="modelopt")
        non_finite: Text = arg("refuse, saturate or keep", words=NON_FINITE, default="refuse")

    def layout(self, args, specs):
        scale = Grid("scale", (0, 0), leading=False, dtypes=("float32",))
        return NumberLayout(self.name, floats(E4M3), plain(E4M3), times(scale))

    def encoded(self, args, spec):
        return [spec_of(E4M3, spec.shape), spec_of("float32", ())]

    def rule(self, args, spec):
        return ScaleRule("float", args.like, region="tensor")

    def bound(self, args):
        return "|error| <= max(|x| / 16, amax / 448 / 1024)"

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
        like: Text = arg(
            "whose arithmetic encodes", words=("modelopt", "compressed-tensors"), default="modelopt"
        )
        non_finite: Text = arg("refuse, saturate or keep", words=NON_FINITE, default="refuse")

    def layout(self, args, specs):
        how: Any = "*" if args.like == "modelopt" else "/"
        blocks = Grid("scale", (1, 16), dtypes=(E4M3,))
        whole = Grid("global", (0, 0), leading=False, dtypes=("float32",))
        terms = (Term("*", blocks), Term(how, whole))
        return NumberLayout(self.name, floats(E2M1), Packing(4), terms)

    def encoded(self, args, spec):
        *lead, columns = spec.shape
        if columns % 16:
            raise OpError("M304", f"{self.name}: {columns} columns are no multiple of 16")
        whole = () if args.like == "modelopt" else (1,)
        return [
            spec_of("uint8", (*lead, columns // 2)),
            spec_of(E4M3, (*lead, columns // 16)),
            spec_of("float32", whole),
        ]

    def rule(self, args, spec):
        return ScaleRule("nvfp4", args.like)

    def bound(self, args):
        return "|error| <= amax of the block / 6"

    def samples(self):
        for shape in ((6, 64), (2, 5, 32), (1, 48)):
            yield self.Args(), spec_of("bfloat16", shape)
        yield self.Args("compressed-tensors"), spec_of("float16", (7, 48))
        yield self.Args("compressed-tensors", "saturate"), spec_of("float32", (7, 48))


CODECS = (Whole(), TwoLevels())


@pytest.fixture(autouse=True)
def in_place() -> Iterator[None]:
    with acme_codecs.installed(*CODECS):
        yield


@pytest.mark.parametrize(
    ("name", "number"), [(c.name, n) for c in CODECS for n, _ in enumerate(c.samples())]
)
def test_the_codecs_pass_the_kit(name: str, number: int) -> None:
    codeckit.check_sample(name, number)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_the_codecs_are_described(codec: Any) -> None:
    codeckit.check_description(codec.name)


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


@pytest.mark.parametrize("stacked", [False, True], ids=["matrix", "stack"])
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
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
