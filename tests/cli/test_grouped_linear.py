"""Transformer Engine's GroupedLinear: one parameter per GEMM or one for all, as its own loader maps
them onto each other.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commandline import content, contents, done, fingerprint, run, safetensors

import migrate

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
    found = {
        f"{prefix}weight": ("BF16", [GEMMS, OUT, IN], weight),
        "other.weight": ("BF16", [2, 2, 2]),
        "norm.weight": ("BF16", [2]),
    }
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
    return [
        "--to",
        f"te-grouped-weight@{to}",
        "--to",
        f"te-grouped-bias@{to}",
        "--set",
        f"modules={module}",
    ]


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
    done(
        "apply",
        source,
        "-o",
        tmp_path / "single.safetensors",
        "--to",
        "te-grouped-weight@single",
        "--set",
        "modules=fc",
    )
    done("downgrade", tmp_path / "single.safetensors", "-o", tmp_path / "back.safetensors")
    assert contents(tmp_path / "back.safetensors") == contents(source)


def test_weight_and_bias_are_independent(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "multi.safetensors", multi("fc."))
    done(
        "apply",
        source,
        "-o",
        tmp_path / "new.safetensors",
        "--to",
        "te-grouped-weight@single",
        "--set",
        "modules=fc",
    )
    keys = contents(tmp_path / "new.safetensors").keys()
    assert "fc.weight" in keys
    assert {f"fc.bias{i}" for i in range(GEMMS)} <= keys


def test_only_the_named_modules_are_touched(tmp_path: Path) -> None:
    source = safetensors(
        tmp_path / "multi.safetensors", {**multi("a."), **multi("b."), **multi("c.")}
    )
    done("apply", source, "-o", tmp_path / "new.safetensors", *both("single", "a,c"))
    keys = contents(tmp_path / "new.safetensors").keys()
    assert {"a.weight", "c.weight", "b.weight0", "a.bias", "c.bias", "b.bias0"} <= keys
    assert not {"b.weight", "b.bias", "a.weight0", "c.weight0"} & keys


def test_a_bias_of_three_axes_is_accepted_on_the_way_in(
    place: tuple[str, str], tmp_path: Path
) -> None:
    prefix, module = place
    source = safetensors(tmp_path / "single.safetensors", single(prefix, bias=3))
    planned = done("plan", source, *both("multi", module), "--format", "json").json
    assert planned["downgrade"]["exact"] is False
    assert "bias" in " ".join(planned["downgrade"]["because"])
    done("apply", source, "-o", tmp_path / "multi.safetensors", *both("multi", module))
    assert contents(tmp_path / "multi.safetensors") == read(multi(prefix), tmp_path)
    done(
        "apply",
        tmp_path / "multi.safetensors",
        "-o",
        tmp_path / "back.safetensors",
        *both("single", module),
    )
    assert contents(tmp_path / "back.safetensors") == read(single(prefix), tmp_path)


@pytest.mark.parametrize("to", ["multi", "single"])
def test_the_redundant_layout_goes_when_both_are_there_and_equal(
    place: tuple[str, str], tmp_path: Path, to: str
) -> None:
    prefix, module = place
    source = safetensors(tmp_path / "both.safetensors", {**single(prefix), **multi(prefix)})
    start = {"multi": "single", "single": "multi"}[to]
    said = ["--from", f"te-grouped-weight@{start}", "--from", f"te-grouped-bias@{start}"]
    done("apply", source, "-o", tmp_path / "new.safetensors", *both(to, module), *said)
    assert contents(tmp_path / "new.safetensors") == read(
        {"multi": multi, "single": single}[to](prefix), tmp_path
    )


@pytest.mark.parametrize("to", ["multi", "single"])
def test_both_layouts_and_unequal_is_refused_and_names_what_differs(
    tmp_path: Path, to: str
) -> None:
    parts = multi("fc.")
    parts["fc.weight1"] = ("BF16", [OUT, IN], content("something else", EACH))
    source = safetensors(tmp_path / "both.safetensors", {**single("fc."), **parts})
    before = fingerprint(source)
    start = {"multi": "single", "single": "multi"}[to]
    question = [
        "--to",
        f"te-grouped-weight@{to}",
        "--from",
        f"te-grouped-weight@{start}",
        "--set",
        "modules=fc",
    ]
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
    assert {k: v for k, v in kept.items() if k in contents(source)} == kept, (
        "the target's own spelling is the one that counts"
    )


@pytest.mark.parametrize(("count", "status"), [(GEMMS, 0), (GEMMS + 1, 3), (GEMMS - 1, 3)])
@pytest.mark.parametrize("to", ["multi", "single"])
def test_the_count_of_gemms_is_checked_when_it_is_said(
    tmp_path: Path, to: str, count: int, status: int
) -> None:
    source = safetensors(tmp_path / "in.safetensors", (single if to == "multi" else multi)("fc."))
    result = run(
        "apply",
        source,
        "-o",
        tmp_path / "out.safetensors",
        *both(to, "fc"),
        "--set",
        f"gemms={count}",
        "--format",
        "json",
    )
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
        "apply",
        source,
        "-o",
        tmp_path / "out.safetensors",
        "--to",
        "te-grouped-weight@single",
        "--set",
        "modules=fc",
        "--format",
        "json",
    )
    assert (result.exit, result.codes) == (3, ["M207"])
    assert "{i} = 1" in result.json["diagnostics"][0]["message"]


def test_the_modules_of_a_single_weight_are_asked_for(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", single("fc."))
    result = run(
        "apply", source, "-o", tmp_path / "out.safetensors", "--to", "te-grouped-weight@multi"
    )
    assert (result.exit, "M509" in result.err) == (2, True)
    assert (
        "no tensors that are read here fit {m...}.weight{i:int}, so they do not determine it"
        in result.err
    )
    assert "--set modules=…, a list of names: the GroupedLinear modules" in result.err


def test_numbered_tensors_tell_their_modules_and_the_way_back_remembers_them(
    place: tuple[str, str], tmp_path: Path
) -> None:
    prefix, module = place
    source = safetensors(tmp_path / "multi.safetensors", {**multi(prefix), **multi("other.fc2.")})
    question = ["--to", "te-grouped-weight@single", "--to", "te-grouped-bias@single"]
    planned = done("plan", source, *question, "--format", "json").json
    assert planned["params"] == {"modules": [module, "other.fc2"]}
    assert (
        sum(
            "`modules` of te-grouped-" in note and "and is read from the tensors: " in note
            for note in planned["notes"]
        )
        == 2
    )
    assert planned["downgrade"]["exact"]
    done("apply", source, "-o", tmp_path / "single.safetensors", *question)
    assert contents(tmp_path / "single.safetensors") == read(
        {**single(prefix), **single("other.fc2.")}, tmp_path
    )
    done("downgrade", tmp_path / "single.safetensors", "-o", tmp_path / "back.safetensors")
    assert contents(tmp_path / "back.safetensors") == contents(source)
    # what is said counts, and may be fewer
    said = done("plan", source, *question, "--set", "modules=other.fc2", "--format", "json").json
    assert said["params"] == {"modules": ["other.fc2"]}


ODD = {
    "a gap": {"odd.weight0": ("BF16", [2, 2]), "odd.weight2": ("BF16", [2, 2])},
    "from one": {"odd.weight1": ("BF16", [2, 2]), "odd.weight2": ("BF16", [2, 2])},
    "one alone": {"odd.weight0": ("BF16", [2, 2])},
    "two shapes": {"odd.weight0": ("BF16", [2, 2]), "odd.weight1": ("BF16", [2, 4])},
    "two dtypes": {"odd.weight0": ("BF16", [2, 2]), "odd.weight1": ("F32", [2, 2])},
    "one axis": {"odd.weight0": ("BF16", [2]), "odd.weight1": ("BF16", [2])},
}


@pytest.mark.parametrize("odd", ODD)
def test_numbered_tensors_of_another_kind_make_it_a_question(tmp_path: Path, odd: str) -> None:
    source = safetensors(tmp_path / "in.safetensors", {**multi("fc."), **ODD[odd]})
    found = run("plan", source, "--to", "te-grouped-weight@single", "--format", "json")
    assert (found.exit, found.codes) == (2, ["M509"])
    (note,) = found.json["diagnostics"][0]["notes"]
    assert "do not determine it, because not all are numbered from 0 without a gap" in note
    assert "odd has" in note
    assert "fc has" not in note
    assert note.endswith("; these are: fc")
    done("plan", source, "--to", "te-grouped-weight@single", "--set", "modules=fc")


def test_modules_are_named_by_patterns_and_files_as_well(tmp_path: Path) -> None:
    experts = [f"decoder.layers.{n}.mlp.experts.linear_fc{k}" for n in range(11) for k in (1, 2)]
    source = safetensors(
        tmp_path / "in.safetensors",
        {k: t for m in experts for k, t in single(f"{m}.").items() if k.startswith("decoder")},
    )
    pattern = "decoder.layers.{n:int}.mlp.experts.linear_fc{k:1|2}"
    patterns = [f"decoder.layers.{{n:int}}.mlp.experts.linear_fc{k}" for k in (1, 2)]
    names = tmp_path / "names.txt"
    names.write_text(f"# the experts\n\n  {pattern}  \r\n")
    question = ("--to", "te-grouped-weight@multi", "--format", "json")
    plans = [
        done("plan", source, *question, "--set", f"modules={given}").json
        for given in (
            ",".join(experts),
            pattern,
            f'["{pattern}"]',
            f"@{names}",
            "decoder.{k...}.linear_fc1,decoder.{k...}.linear_fc2",
        )
    ]
    assert [set(plan["params"]["modules"]) for plan in plans] == [set(experts)] * len(plans)
    assert [plan["rows"] for plan in plans] == [plans[0]["rows"]] * len(plans)
    made = migrate.plan(
        source, to="te-grouped-weight@multi", params={"modules": [pattern]}
    ).document
    assert set(made["params"]["modules"]) == set(experts)
    assert migrate.plan(
        source, to="te-grouped-weight@multi", params={"modules": f"@{names}"}
    ).document["question"]["params"] == {"modules": [pattern]}
    listed = tmp_path / "names.json"
    listed.write_text(json.dumps(experts))
    assert set(
        done("plan", source, *question, "--set", f"modules=@{listed}").json["params"]["modules"]
    ) == set(experts)
    # the stamp holds names, and a pattern that means the same ones, in whatever order, agrees with
    # it
    done(
        "apply",
        source,
        "-o",
        tmp_path / "out.safetensors",
        *question[:2],
        "--set",
        f"modules=@{names}",
    )
    done(
        "plan",
        tmp_path / "out.safetensors",
        "--to",
        "te-grouped-weight@single",
        "--set",
        f"modules={','.join(reversed(patterns))}",
    )
    done("downgrade", tmp_path / "out.safetensors", "-o", tmp_path / "back.safetensors")
    assert contents(tmp_path / "back.safetensors") == contents(source)


def test_a_pattern_that_no_name_fits_is_refused_with_the_nearest(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", single("decoder.layers.0.fc1."))
    for given, note, advice in (
        (
            "decoder.layers.{n:int}.fc{k:2|3}",
            "nearest name: decoder.layers.0.fc1; it fails at 'fc1'",
            "`migrate inspect` shows them",
        ),
        (
            "decoder.layers.*.{k}",
            "nearest name: decoder.layers.0",
            "neither globs nor regular expressions",
        ),
    ):
        found = run(
            "plan",
            source,
            "--to",
            "te-grouped-weight@multi",
            "--set",
            f"modules=decoder.layers.0.fc1,{given}",
            "--format",
            "json",
        )
        assert (found.exit, found.codes) == (2, ["M213"])
        (said,) = found.json["diagnostics"]
        assert said["message"] == f"param `modules`: no name of the checkpoint fits {given}"
        assert said["notes"][0].startswith(note)
        assert advice in said["help"]
    open_list = run(
        "plan",
        source,
        "--to",
        "te-grouped-weight@multi",
        "--set",
        "modules=[{n:int}",
        "--format",
        "json",
    )
    assert (open_list.exit, open_list.codes) == (2, ["M114"])
    broken = run(
        "plan",
        source,
        "--to",
        "te-grouped-weight@multi",
        "--set",
        "modules=fc{k",
        "--format",
        "json",
    )
    assert (broken.exit, broken.codes) == (2, ["M114"])
    assert "fc{k is not a pattern: `{` is never closed" in broken.out


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (None, "No such file"),
        (b"", "no entry"),
        (b"# a\n \n", "no entry"),
        (b"\xff", "not text in UTF-8"),
    ],
)
def test_a_file_of_entries_that_cannot_be_read_is_named(
    tmp_path: Path, written: bytes | None, says: str
) -> None:
    source = safetensors(tmp_path / "in.safetensors", single("fc."))
    if written is not None:
        (tmp_path / "names.txt").write_bytes(written)
    found = run(
        "plan",
        source,
        "--to",
        "te-grouped-weight@multi",
        "--set",
        f"modules=@{tmp_path / 'names.txt'}",
        "--format",
        "json",
    )
    assert (found.exit, found.codes) == (2, ["M115"])
    assert says in found.out
    assert "names.txt" in found.out


def test_a_file_of_entries_may_name_the_root(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", single(""))
    (tmp_path / "names.txt").write_text('""\n')
    planned = done(
        "plan",
        source,
        "--to",
        "te-grouped-weight@multi",
        "--set",
        f"modules=@{tmp_path / 'names.txt'}",
        "--format",
        "json",
    ).json
    assert planned["params"] == {"modules": [""]}


def test_inspect_says_what_detection_cannot_tell(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", single("fc."))
    text = done("inspect", source).out
    assert "te-grouped-weight@single" in text
    assert "which modules are meant is the param `modules`" in text


def test_a_misspelt_module_is_named(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "single.safetensors", single("fc."))
    planned = done(
        "plan",
        source,
        "--to",
        "te-grouped-weight@multi",
        "--set",
        "modules=fc,fd",
        "--format",
        "json",
    ).json
    assert "no key has {m} = fd, which `where` names" in planned["notes"]
    refused = run(
        "plan", source, "--to", "te-grouped-weight@multi", "--set", "modules=fd", "--format", "json"
    )
    assert (refused.exit, refused.codes) == (3, ["M206"])
    assert refused.json["diagnostics"][0]["notes"] == ["`$modules` is fd"]
    glob = run(
        "plan", source, "--to", "te-grouped-weight@multi", "--set", "modules=f*", "--format", "json"
    )
    assert "neither globs nor regular expressions" in glob.json["diagnostics"][0]["help"]


def test_params_that_would_change_nothing_are_refused_with_what_detection_cannot_tell(
    tmp_path: Path,
) -> None:
    both_spellings = safetensors(tmp_path / "both.safetensors", {**single("fc."), **multi("fc.")})
    refused = run("plan", both_spellings, "--to", "te-grouped-weight@multi", "--set", "modules=fc")
    assert refused.exit == 2
    assert "would change nothing" in refused.err
    assert "say --from single" in refused.err
