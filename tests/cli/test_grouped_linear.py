"""Transformer Engine's GroupedLinear: one parameter per GEMM or one for all, as its own loader maps them onto each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import content, contents, done, fingerprint, run, safetensors

GEMMS, OUT, IN = 3, 4, 2
EACH, ROW = OUT * IN * 2, OUT * 2

PLACES = {"root": ("", ""), "nested": ("decoder.layers.0.mlp.fc1.", "decoder.layers.0.mlp.fc1")}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """What stands before `weight`, and the module's name."""
    return PLACES[request.param]


def single(prefix: str, *, bias: int = 2) -> dict:
    shape = [GEMMS, OUT] if bias == 2 else [GEMMS, 1, OUT]
    weight = content("weight", GEMMS * EACH)
    found = {f"{prefix}weight": ("BF16", [GEMMS, OUT, IN], weight), "other.weight": ("BF16", [2, 2, 2]), "norm.weight": ("BF16", [2])}
    return {**found, f"{prefix}bias": ("BF16", shape, content("bias", GEMMS * ROW))}


def multi(prefix: str) -> dict:
    weight, bias = content("weight", GEMMS * EACH), content("bias", GEMMS * ROW)
    found: dict = {}
    for i in range(GEMMS):
        found[f"{prefix}weight{i}"] = ("BF16", [OUT, IN], weight[i * EACH : (i + 1) * EACH])
        found[f"{prefix}bias{i}"] = ("BF16", [OUT], bias[i * ROW : (i + 1) * ROW])
    return {**found, "other.weight": ("BF16", [2, 2, 2]), "norm.weight": ("BF16", [2])}


def read(tensors: dict, folder: Path) -> dict:
    return contents(safetensors(folder / "wanted.safetensors", tensors))


def both(to: str, module: str) -> list[str]:
    return ["--to", f"te-grouped-weight@{to}", "--to", f"te-grouped-bias@{to}", "--set", f"modules={module}"]


def test_single_becomes_multi_and_multi_single(place: tuple[str, str], tmp_path: Path) -> None:
    prefix, module = place
    one = safetensors(tmp_path / "single.safetensors", single(prefix))
    there, back = tmp_path / "multi.safetensors", tmp_path / "back.safetensors"
    done("apply", one, "-o", there, *both("multi", module))
    assert contents(there) == read(multi(prefix), tmp_path)
    done("verify", there, "--source", one)
    done("apply", there, "-o", back, *both("single", module))
    assert contents(back) == contents(one)
    done("diff", back, one)
    fresh = safetensors(tmp_path / "fresh.safetensors", multi(prefix))
    done("apply", fresh, "-o", tmp_path / "fused.safetensors", *both("single", module))
    assert contents(tmp_path / "fused.safetensors") == contents(one)


def test_a_lineage_without_order_is_undone_by_its_stamp(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "multi.safetensors", multi("fc."))
    done("apply", source, "-o", tmp_path / "single.safetensors", "--to", "te-grouped-weight@single", "--set", "modules=fc")
    done("downgrade", tmp_path / "single.safetensors", "-o", tmp_path / "back.safetensors")
    assert contents(tmp_path / "back.safetensors") == contents(source)


def test_weight_and_bias_are_independent(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "multi.safetensors", multi("fc."))
    done("apply", source, "-o", tmp_path / "new.safetensors", "--to", "te-grouped-weight@single", "--set", "modules=fc")
    keys = contents(tmp_path / "new.safetensors").keys()
    assert "fc.weight" in keys
    assert {f"fc.bias{i}" for i in range(GEMMS)} <= keys


def test_only_the_named_modules_are_touched(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "multi.safetensors", {**multi("a."), **multi("b."), **multi("c.")})
    done("apply", source, "-o", tmp_path / "new.safetensors", *both("single", "a,c"))
    keys = contents(tmp_path / "new.safetensors").keys()
    assert {"a.weight", "c.weight", "b.weight0", "a.bias", "c.bias", "b.bias0"} <= keys
    assert not {"b.weight", "b.bias", "a.weight0", "c.weight0"} & keys


def test_a_bias_of_three_axes_is_accepted_on_the_way_in(place: tuple[str, str], tmp_path: Path) -> None:
    prefix, module = place
    source = safetensors(tmp_path / "single.safetensors", single(prefix, bias=3))
    planned = done("plan", source, *both("multi", module), "--format", "json").json
    assert planned["downgrade"]["exact"] is False
    assert "bias" in " ".join(planned["downgrade"]["because"])
    done("apply", source, "-o", tmp_path / "multi.safetensors", *both("multi", module))
    assert contents(tmp_path / "multi.safetensors") == read(multi(prefix), tmp_path)
    done("apply", tmp_path / "multi.safetensors", "-o", tmp_path / "back.safetensors", *both("single", module))
    assert contents(tmp_path / "back.safetensors") == read(single(prefix), tmp_path)


@pytest.mark.parametrize("to", ["multi", "single"])
def test_the_redundant_layout_goes_when_both_are_there_and_equal(place: tuple[str, str], tmp_path: Path, to: str) -> None:
    prefix, module = place
    source = safetensors(tmp_path / "both.safetensors", {**single(prefix), **multi(prefix)})
    start = {"multi": "single", "single": "multi"}[to]
    said = ["--from", f"te-grouped-weight@{start}", "--from", f"te-grouped-bias@{start}"]
    done("apply", source, "-o", tmp_path / "new.safetensors", *both(to, module), *said)
    assert contents(tmp_path / "new.safetensors") == read({"multi": multi, "single": single}[to](prefix), tmp_path)


@pytest.mark.parametrize("to", ["multi", "single"])
def test_both_layouts_and_unequal_is_refused_and_names_what_differs(tmp_path: Path, to: str) -> None:
    parts = multi("fc.")
    parts["fc.weight1"] = ("BF16", [OUT, IN], content("something else", EACH))
    source = safetensors(tmp_path / "both.safetensors", {**single("fc."), **parts})
    before = fingerprint(source)
    start = {"multi": "single", "single": "multi"}[to]
    question = ["--to", f"te-grouped-weight@{to}", "--from", f"te-grouped-weight@{start}", "--set", "modules=fc"]
    result = run("apply", source, "-o", tmp_path / "new.safetensors", *question, "--format", "json")
    assert result.exit == 3
    assert "fc.weight" in result.out
    assert fingerprint(source) == before
    assert [p.name for p in tmp_path.iterdir()] == ["both.safetensors"]
    allowed = [*question, "--allow", "drop"]
    planned = done("plan", source, *allowed).out
    assert "fc.weight" in planned
    done("apply", source, "-o", tmp_path / "new.safetensors", *allowed)
    kept = contents(tmp_path / "new.safetensors")
    assert {k: v for k, v in kept.items() if k in contents(source)} == kept, "the target's own spelling is the one that counts"


@pytest.mark.parametrize(("count", "status"), [(GEMMS, 0), (GEMMS + 1, 3), (GEMMS - 1, 3)])
@pytest.mark.parametrize("to", ["multi", "single"])
def test_the_count_of_gemms_is_checked_when_it_is_said(tmp_path: Path, to: str, count: int, status: int) -> None:
    source = safetensors(tmp_path / "in.safetensors", (single if to == "multi" else multi)("fc."))
    result = run("apply", source, "-o", tmp_path / "out.safetensors", *both(to, "fc"), "--set", f"gemms={count}", "--format", "json")
    assert result.exit == status
    if status:
        assert set(result.codes) <= {"M305", "M207"}
        assert "fc" in result.out
        assert str(count) in result.out
    assert (tmp_path / "out.safetensors").exists() == (status == 0)


def test_a_missing_gemm_is_named(tmp_path: Path) -> None:
    parts = multi("fc.")
    del parts["fc.weight1"]
    source = safetensors(tmp_path / "in.safetensors", parts)
    result = run(
        "apply", source, "-o", tmp_path / "out.safetensors", "--to", "te-grouped-weight@single", "--set", "modules=fc", "--format", "json"
    )
    assert (result.exit, result.codes) == (3, ["M207"])
    assert "{i} = 1" in result.json["diagnostics"][0]["message"]


def test_without_the_modules_it_says_how_to_name_them(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", multi("fc."))
    result = run("apply", source, "-o", tmp_path / "out.safetensors", "--to", "te-grouped-weight@single")
    assert result.exit == 2
    assert "M509" in result.err
    assert "--set modules=" in result.err


def test_inspect_says_what_detection_cannot_tell(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", single("fc."))
    text = done("inspect", source).out
    assert "te-grouped-weight@single" in text
    assert "which modules are meant is the param `modules`" in text


def test_a_misspelt_module_is_named(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "single.safetensors", single("fc."))
    planned = done("plan", source, "--to", "te-grouped-weight@multi", "--set", "modules=fc,fd", "--format", "json").json
    assert "no key has {m} = fd, which `where` names" in planned["notes"]
    refused = run("plan", source, "--to", "te-grouped-weight@multi", "--set", "modules=fd", "--format", "json")
    assert (refused.exit, refused.codes) == (3, ["M206"])


def test_params_that_would_change_nothing_are_refused_with_what_detection_cannot_tell(tmp_path: Path) -> None:
    both_spellings = safetensors(tmp_path / "both.safetensors", {**single("fc."), **multi("fc.")})
    refused = run("plan", both_spellings, "--to", "te-grouped-weight@multi", "--set", "modules=fc")
    assert refused.exit == 2
    assert "would change nothing" in refused.err
    assert "say --from single" in refused.err
