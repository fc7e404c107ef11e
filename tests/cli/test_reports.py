"""What a run that changes values says of them: a line for each op of a rule, and a document with
all tensors.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from commandline import ROOT, content, contents, done, rules, run, safetensors
from test_imports import loaded

from migrate import api

SCHEMAS = {
    kind: json.loads((ROOT / "schemas" / f"{kind}.schema.json").read_text())
    for kind in ("report", "published", "plan", "verification")
}
UP = (
    "rules:\n  - {name: up, from: 'a.{i:int}', to: 'a.{i}', via: [{cast: {from: bfloat16, to: "
    "float32}}]}\n"
)
DOWN = (
    "rules:\n  - {name: down, from: 'a.{i:int}', to: 'a.{i}', via: [{cast: {from: float32, to: "
    "bfloat16}}]}\n"
)


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def checked(document: Any, kind: str) -> Any:
    jsonschema.Draft202012Validator(SCHEMAS[kind]).validate(document)
    assert list(document)[:2] == ["format_version", "kind"]
    assert document["kind"] == kind
    return document


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """Two float32 tensors, of which the second fits bfloat16."""
    first = floats(1.0, 1.0 + 2**-9, -2.0, 1e-45, *[0.5] * 4)
    return safetensors(
        tmp_path / "wide.safetensors",
        {"a.0": ("F32", [2, 4], first), "a.1": ("F32", [2], floats(1.5, -3.0))},
    )


def test_a_rounding_run_prints_a_line_and_saves_every_tensor(tmp_path: Path, wide: Path) -> None:
    question = ["--rules", rules(tmp_path, DOWN), "--allow", "lossy"]
    saved = tmp_path / "report.json"
    said = done(
        "apply", wide, "-o", tmp_path / "out.safetensors", *question, "--report", saved, "-q"
    ).out.splitlines()
    (line,) = [text for text in said if text.startswith("values:")]
    assert ": cast of 2 tensors: max error 0.00195, 0.000977 of the tensor's amax, SQNR " in line
    # the second tensor fits, so that nothing was to be measured in it
    assert line.endswith(" dB (measured on 8 of 10 elements), 0 saturated, 1 underflowed")
    assert line.startswith("values: rule down (")
    report = checked(json.loads(saved.read_text()), "report")
    assert report["complete"] is True
    first, second = report["tensors"]
    assert (first["keys"], first["from"], first["op"], first["exact"]) == (
        ["a.0"],
        ["a.0"],
        "cast",
        False,
    )
    assert first["max_abs_error"] == 2**-9
    assert first["sqnr_db"] == pytest.approx(
        10 * math.log10((1 + (1 + 2**-9) ** 2 + 4 + 1) / 2**-18), abs=1e-6
    )
    assert (first["underflowed"], first["saturated"], first["non_finite"]) == (1, 0, 0)
    assert second["exact"] is True
    assert second["sqnr_db"] is None
    published = done(
        "apply", wide, "-o", tmp_path / "json.safetensors", *question, "--format", "json"
    ).json
    assert checked(published, "published")["report"] == {
        name: report[name] for name in ("complete", "rules", "tensors")
    }
    again = done(
        "apply",
        wide,
        "-o",
        tmp_path / "more.safetensors",
        *question,
        "--report",
        saved,
        "--threads",
        "1",
    )
    assert json.loads(saved.read_text())["tensors"] == report["tensors"]
    assert again.exit == 0


def test_a_widening_run_is_exact_loads_no_torch_and_comes_back(tmp_path: Path) -> None:
    narrow = safetensors(
        tmp_path / "narrow.safetensors", {f"a.{i}": ("BF16", [64, 300]) for i in range(3)}
    )
    question = ["--rules", rules(tmp_path, UP)]
    out, back = tmp_path / "out.safetensors", tmp_path / "back.safetensors"
    assert "torch" not in loaded("plan", narrow, *question)
    assert "torch" not in loaded("apply", narrow, "-o", out, *question)
    assert "torch" not in loaded("downgrade", out, "-o", back, *question)
    assert contents(back) == contents(narrow)
    assert content("a.0", 2 * 64 * 300) != b""
    said = done("apply", narrow, "-o", tmp_path / "out2.safetensors", *question).out
    assert said.splitlines()[1].startswith("values: rule up (")
    assert said.splitlines()[1].endswith(": cast of 3 tensors: exact")
    assert done("verify", out, "--source", narrow, *question).out.startswith("verified: 3 tensors")


def test_verify_finds_a_changed_bit_in_what_was_computed(tmp_path: Path) -> None:
    narrow = safetensors(tmp_path / "narrow.safetensors", {"a.0": ("BF16", [64, 300])})
    question, out = ["--rules", rules(tmp_path, UP)], tmp_path / "out.safetensors"
    done("apply", narrow, "-o", out, *question)
    raw = bytearray(out.read_bytes())
    raw[-3] ^= 1
    out.write_bytes(raw)
    assert "a.0" in done("verify", out, "--source", narrow, *question, exit=1).out


def test_a_plan_says_what_is_computed_and_what_rounds(tmp_path: Path, wide: Path) -> None:
    question = ["--rules", rules(tmp_path, DOWN), "--allow", "lossy"]
    rows = checked(done("plan", wide, *question, "--format", "json").json, "plan")["rows"]
    assert [(row["to"], row["change"], row["ops"], row["lossy"]) for row in rows] == [
        (k, "computed", ["cast"], True) for k in ("a.0", "a.1")
    ]
    assert "cast of a.0  (rounds)" in done("plan", wide, *question).out
    narrow = safetensors(
        tmp_path / "narrow.safetensors", {"a.0": ("BF16", [4096, 4096], bytes(1 << 25))}
    )
    document = done(
        "plan", narrow, "--rules", rules(tmp_path, UP, "up.yaml"), "--format", "json"
    ).json
    assert document["rows"][0]["lossy"] is False
    # neither torch nor a tensor is held
    assert document["peak_memory"] < 64 << 20


def test_a_run_that_only_moves_says_nothing_of_values(tmp_path: Path, wide: Path) -> None:
    saved = tmp_path / "report.json"
    rule = rules(tmp_path, "rules: [{name: r, from: 'a.{i:int}', to: 'b.{i}'}]\n")
    said = done(
        "apply", wide, "-o", tmp_path / "out.safetensors", "--rules", rule, "--report", saved
    ).out
    assert "values:" not in said
    assert checked(json.loads(saved.read_text()), "report")["tensors"] == []


@pytest.mark.parametrize("where", ["taken.txt", "nowhere/report.json", "wide.safetensors", "."])
def test_a_report_has_its_place_before_the_run_begins(
    tmp_path: Path, wide: Path, where: str
) -> None:
    (tmp_path / "taken.txt").write_text("mine")
    before = wide.read_bytes()
    question = ["--rules", rules(tmp_path, DOWN), "--allow", "lossy"]
    result = run(
        "apply",
        wide,
        "-o",
        tmp_path / "out.safetensors",
        *question,
        "--report",
        tmp_path / where,
        "--format",
        "json",
    )
    assert (result.exit, result.codes) == (2, ["M115"])
    assert not (tmp_path / "out.safetensors").exists()
    assert (tmp_path / "taken.txt").read_text() == "mine"
    assert wide.read_bytes() == before


def test_a_device_that_is_not_there_is_refused_before_the_run_begins(
    tmp_path: Path, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    question = ["--rules", rules(tmp_path, DOWN), "--allow", "lossy", "--device", "cuda"]
    result = run("apply", wide, "-o", tmp_path / "out.safetensors", *question, "--format", "json")
    assert (result.exit, result.codes) == (2, ["M407"])
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".safetensors", ".yaml"]


def test_numbers_that_an_op_refuses_stop_the_run_with_the_checkpoints_status(
    tmp_path: Path, wide: Path
) -> None:
    exact = DOWN.replace("to: bfloat16", "to: bfloat16, exact: true")
    result = run(
        "apply",
        wide,
        "-o",
        tmp_path / "out.safetensors",
        "--rules",
        rules(tmp_path, exact),
        "--format",
        "json",
    )
    assert (result.exit, result.codes) == (3, ["M406"])
    (found,) = result.json["diagnostics"]
    assert found["message"].startswith("rule down (")
    assert "`cast` of a.0" in found["message"]
    assert "[0, 1]" in found["message"]
    assert not list(tmp_path.glob("out*"))


def test_in_memory_the_same_values_come_out(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {"a.0": torch.arange(-40, 40, dtype=torch.float32).reshape(8, 10).bfloat16()}
    made = api.apply(state, rules=[rules(tmp_path, UP)])
    assert made["a.0"].dtype is torch.float32
    assert torch.equal(made["a.0"], state["a.0"].float())


@pytest.mark.parametrize(("units", "status"), [(1, 0), (2, 1)])
def test_verify_names_what_is_only_near_and_refuses_what_is_further_off(
    tmp_path: Path, units: int, status: int
) -> None:
    source = safetensors(
        tmp_path / "in.safetensors", {"A_log": ("F32", [3], floats(0.0, 0.0, 0.0))}
    )
    rule = rules(tmp_path, "rules:\n  - {name: a, from: A_log, to: A, via: [neg_exp]}\n")
    # bits of -1, which every library makes of 0
    one = 0xBF800000
    made = safetensors(
        tmp_path / "out.safetensors", {"A": ("F32", [3], struct.pack("<3I", one, one + units, one))}
    )
    asked = ("verify", made, "--source", source, "--rules", rule)
    said = (
        "near: A: 1 of 3 elements differ, by no more"
        if units == 1
        else "differs: A: 1 of 3 elements differ, by more"
    )
    out = done(*asked, exit=status).out
    assert f"{said} than neg_exp may, first at [1]" in out
    assert ("every byte equal except in 1 tensor\n" in out) is (units == 1)
    document = checked(done(*asked, "--format", "json", exit=status).json, "verification")
    assert (document["equal"], len(document["near"])) == (units == 1, int(units == 1))


def test_a_sample_of_everything_is_none(tmp_path: Path, wide: Path) -> None:
    out = tmp_path / "out.safetensors"
    done("apply", wide, "-o", out, "--output-format", "safetensors", "-q")
    whole = done("verify", out, "--source", wide)
    for share in ("100%", "1", "1.0"):
        told = done("verify", out, "--source", wide, "--sample", share)
        assert told.out == whole.out
        assert told.out.startswith("verified: ")
    found = done(
        "verify", out, "--source", wide, "--sample", "100%", "--seed", "3", "--format", "json"
    ).json
    assert (found["sample"], found["not_compared"]) == (None, [])
    part = done("verify", out, "--source", wide, "--sample", "50%").out
    assert part.startswith("verified in part: ")
