"""What somebody meets who has not read the manual: files that are no weights yet, names that are no
files, families that are not known.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from commandline import Result, content, done, mixtral, rules, run, safetensors, shards

import migrate
from migrate.core.errors import MigrateError
from migrate.source.urls import how_to_fetch

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 4976698672\n".format(
    "4d7a2146" * 8
)


def pointer(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(POINTER)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "weights.pt",
        "pytorch_model.bin",
        "model.safetensors.index.json",
        "adapter.ckpt",
    ],
)
def test_a_pointer_of_git_lfs_says_how_to_fetch_the_file(tmp_path: Path, name: str) -> None:
    for given in (pointer(tmp_path / "clone" / name), tmp_path / "clone"):
        result = run("inspect", given)
        assert result.exit == 3
        assert (
            f"error[M966]: {tmp_path}/clone/{name}: a pointer of Git LFS, and not the "
            "4,976,698,672 bytes" in result.err
        )
        assert f"git -C {tmp_path}/clone lfs pull" in result.err


def test_one_shard_that_is_a_pointer_is_named_with_the_others(tmp_path: Path) -> None:
    home = shards(tmp_path / "in", [{f"k{i}": ("U8", [1])} for i in range(3)])
    for i in (2, 3):
        pointer(home / f"model-{i:05}-of-00003.safetensors")
    result = run("plan", home, "--to", "latest")
    assert result.exit == 3
    assert "model-00002-of-00003.safetensors: a pointer" in result.err
    assert "so is model-00003-of-00003.safetensors beside it" in result.err


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_side_file_that_is_a_pointer_does_not_travel(tmp_path: Path, name: str) -> None:
    safetensors(tmp_path / "in" / "model.safetensors", mixtral())
    pointer(tmp_path / "in" / name)
    result = run("apply", tmp_path / "in", "-o", tmp_path / "out", "--to", "hf-mixtral@v5")
    assert result.exit == 3
    assert f"{name}: a pointer of Git LFS" in result.err
    assert not (tmp_path / "out").exists()


def test_small_files_that_are_no_pointers_are_read(tmp_path: Path) -> None:
    safetensors(tmp_path / "in" / "model.safetensors", {"a": ("U8", [1])})
    (tmp_path / "in" / "notes.txt").write_text(
        "version https://git-lfs.github.com/spec/v1 is what a pointer begins with\n"
    )
    assert run("inspect", tmp_path / "in", "--format", "json").json["side_files"] == [
        {"path": "notes.txt", "size": 73}
    ]


ELSEWHERE = [
    ("org/model", "give hf://org/model, or download it first:  hf download org/model"),
    ("https://huggingface.co/org/model", "give hf://org/model"),
    ("https://huggingface.co/org/model/tree/main", "give hf://org/model@main"),
    ("https://hf.co/org/model/blob/dev/a/b.safetensors", "hf://org/model@dev/a/b.safetensors"),
    ("https://huggingface.co/datasets/org/data", "give hf://datasets/org/data"),
    ("file:///data/x", "give the path without `file://`"),
]


@pytest.mark.parametrize(("name", "way"), ELSEWHERE)
def test_what_lies_elsewhere_is_told_with_the_way_to_it(
    tmp_path: Path, name: str, way: str
) -> None:
    result = run("inspect", name, cwd=tmp_path)
    assert result.exit == 2
    assert "error[M917]" in result.err
    assert way in result.err


@pytest.mark.parametrize("name", ["gs://bucket/new", "hf://org/new"])
def test_no_command_writes_a_document_to_a_store(tmp_path: Path, name: str) -> None:
    source = safetensors(tmp_path / "in.safetensors", mixtral())
    for arguments in (
        ("apply", source, "-o", tmp_path / "out", "--to", "hf-mixtral@v5", "--report", name),
        ("plan", source, "-o", name, "--to", "hf-mixtral@v5"),
    ):
        result = run(*arguments, cwd=tmp_path)
        assert result.exit == 2
        assert "is in a store, and" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "a/b/c", "/abs/path", "../up", "C:/x", "org/", "/x", "a b/c"]
)
def test_a_path_that_is_not_there_is_no_name_of_the_hub(name: str) -> None:
    assert how_to_fetch(name) is None


def test_a_path_that_is_there_is_a_path(tmp_path: Path) -> None:
    safetensors(tmp_path / "org" / "model" / "model.safetensors", {"a": ("U8", [1])})
    safetensors(tmp_path / "hf:" / "org" / "model.safetensors", {"a": ("U8", [1])})
    for name in ("org/model", "hf://org"):
        assert "1 tensor" in done("inspect", name, cwd=tmp_path).out
    # what is spelled nearly like a file beside it is that file, before it is anybody's model
    assert "did you mean `model`?" in run("inspect", "org/modle", cwd=tmp_path).err


def test_a_family_that_is_not_known_is_told_what_it_comes_nearest_to(tmp_path: Path) -> None:
    odd = {**mixtral(), "model.layers.0.self_attn.q_norm.weight": ("BF16", [4])}
    source = safetensors(tmp_path / "in.safetensors", odd)
    away = (
        "model.layers.0.self_attn.q_norm.weight fits "
        "{p...}.self_attn.{w:q_norm|k_norm|qkv_proj}.weight"
    )
    for goal in ("latest", "v5", "+1"):
        result = run("plan", source, "--to", goal)
        assert result.exit == 2
        assert (
            f"error[M520]: `{goal}` refers to the lineage that the checkpoint is in" in result.err
        )
        assert f"nearest is hf-mixtral@v4, but {away}" in result.err
        assert "--to hf-mixtral@LAYOUT --from hf-mixtral@v4" in result.err
    with pytest.raises(MigrateError, match='to="hf-mixtral@LAYOUT", from_="hf-mixtral@v4"'):
        migrate.plan(source, to="latest")
    shown = run("inspect", source)
    assert "nearest  hf-mixtral@v4\n" in shown.out
    assert f"           not: {away}\n" in shown.out
    found = run("inspect", source, "--format", "json").json["nearest"]
    near = next(one for one in found if one["lineage"] == "hf-mixtral")
    assert (near["layout"], near["against"]) == ("v4", [away])
    assert near["found"][0].endswith("fits {p...}.block_sparse_moe.experts.{e:int}.w1.weight")


def test_a_goal_that_needs_an_order_names_the_lineages_that_have_none() -> None:
    source = Path(__file__).parent.parent / "data" / "genuine" / "hf-fp8-block"
    for goal in ("latest", "+1", "v5"):
        result = run("plan", source, "--to", goal)
        assert result.exit == 2
        assert "error[M520]" in result.err
        assert "nearest is fp8" not in result.err
        # a name is looked for in the lineages that have it
        assert ("it is in fp8@hf, whose layouts have no order" in result.err) == (goal != "v5")
        assert ("--to fp8@LAYOUT" in result.err) == (goal != "v5")


def test_a_layout_that_nothing_shows_is_said_to_be_one() -> None:
    source = Path(__file__).parent.parent / "data" / "genuine" / "gpt-oss"
    result = run("plan", source, "--to", "fp8@hf")
    assert "error[M504]" in result.err
    assert "bf16: cannot be detected, because a checkpoint shows no sign of it" in result.err
    assert "not bf16" not in result.err


def test_a_checkpoint_in_a_known_layout_has_nothing_nearest(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", mixtral())
    assert run("inspect", source, "--format", "json").json["nearest"] == []
    assert "nearest" not in run("inspect", source).out


def test_a_word_that_is_no_layout_is_told_as_one(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", {"a": ("U8", [1])})
    assert (
        "error[M501]: no lineage has a layout `later`" in run("plan", source, "--to", "later").err
    )


LOSSES = (
    "rules:\n  - {name: gone, from: a, via: [{drop: {why: unused}}]}\n  - {name: small, "
    "from: b, to: b, via: [{cast: {to: float16}}]}\n"
)


def test_all_permissions_that_are_missing_are_told_at_once(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from types import SimpleNamespace

    rule = rules(tmp_path, LOSSES)
    source = tmp_path / "in.pt"
    torch.save(
        {"model": {"a": torch.zeros(2), "b": torch.zeros(2)}, "args": SimpleNamespace(lr=1)},
        source,
    )
    question = ["plan", source, "--rules", rule]
    result = run(*question)
    assert result.exit == 3
    assert [code for code in ("M935", "M402", "M401") if f"error[{code}]" in result.err] == [
        "M935",
        "M402",
        "M401",
    ]
    line = next(
        line for line in result.err.splitlines() if line.startswith("to permit all of this: ")
    )
    words = line.removeprefix("to permit all of this: ").split()
    assert words == ["--allow", "opaque", "--allow", "drop", "--allow", "lossy"]
    assert run(*question, *words).exit == 0
    assert run(*question, "--format", "json").json["permits"] == ["opaque", "drop", "lossy"]
    with pytest.raises(
        MigrateError, match=re.escape('to permit all of this: allow={"opaque", "drop", "lossy"}')
    ):
        migrate.plan(source, rules=rule)
    # what is permitted already is not asked for again, and one that is missing alone stands in its
    # own help
    alone = run(*question, "--allow", "drop", "--allow", "opaque")
    assert "if that is wanted: --allow lossy" in alone.err
    assert "to permit all" not in alone.err


def test_a_link_is_not_followed_to_see_what_else_is_missing(tmp_path: Path) -> None:
    rule = rules(tmp_path, LOSSES)
    outside = safetensors(
        tmp_path / "outside.safetensors", {"a": ("F32", [2], content("a", 8)), "b": ("F32", [2])}
    )
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model.safetensors").symlink_to(outside)
    result = run("plan", tmp_path / "in", "--rules", rule, "--format", "json")
    assert result.codes == ["M907"]
    assert result.json["permits"] == []


def told(*arguments: object) -> Result:
    """What a command line that must succeed says, but for the space that is free at the moment."""
    result = done(*arguments)
    return Result(
        result.exit, re.sub(r", [\d.]+ \w+ free beside the source", "", result.out), result.err
    )


def test_a_dry_run_is_the_plan(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "old" / "model.safetensors", mixtral()).parent
    question = [source, "--to", "hf-mixtral@v5"]
    planned = told("plan", *question)
    before = sorted(tmp_path.rglob("*"))
    assert told("apply", *question, "--dry-run") == planned
    assert told("apply", *question, "--dry-run", "-o", tmp_path / "new") == planned
    assert sorted(tmp_path.rglob("*")) == before
    assert done("apply", *question, "--dry-run", "--format", "json").json["kind"] == "plan"
    one = done(
        "apply", *question, "--dry-run", "-o", tmp_path / "new.safetensors", "--format", "json"
    ).json
    assert not one["options"]["folder"]
    # and its exit status
    for wrong in (["--to", "v9"], ["--to", "v5", "--set", "nothing=1"]):
        assert run("apply", source, "--dry-run", *wrong) == run("plan", source, *wrong)
    assert run("apply", *question, "--dry-run", "-o", source).exit == 2
    assert run("apply", *question).exit == 2
    documents = (
        migrate.apply(source, to="hf-mixtral@v5", dry_run=True).to_json(),
        dict(migrate.plan(source, to="hf-mixtral@v5").document),
    )
    assert {**documents[0], "free": 0} == {**documents[1], "free": 0}


def test_a_dry_run_of_a_downgrade_and_of_a_saved_plan(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "old" / "model.safetensors", mixtral()).parent
    saved = tmp_path / "plan.json"
    planned = told("plan", source, "--to", "hf-mixtral@v5", "-o", saved)
    assert told("apply", saved, "--dry-run").out == planned.out
    done("apply", saved, "-o", tmp_path / "new")
    assert told("downgrade", tmp_path / "new", "--dry-run") == told(
        "plan", tmp_path / "new", "--downgrade"
    )
    safetensors(source / "model.safetensors", {**mixtral(), "more.weight": ("BF16", [1])})
    stale = run("apply", saved, "--dry-run")
    assert (stale.exit, "error[M" in stale.err) == (
        run("apply", saved, "-o", tmp_path / "again").exit,
        True,
    )
    assert stale.exit != 0


def test_rules_of_a_lineage_are_named_by_it_wherever_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = safetensors(tmp_path / "old.safetensors", mixtral())
    monkeypatch.chdir(tmp_path)
    planned = done("plan", source, "--to", "hf-mixtral@v5")
    assert "     rule gate-up, hf-mixtral/v5/fuse-experts.yaml:16\n" in planned.out
    wrong = run("plan", source, "--to", "hf-mixtral@v5", "--set", "num_experts=x")
    assert " --> hf-mixtral/v5/fuse-experts.yaml:9:" in wrong.err
    rows = run("plan", source, "--to", "hf-mixtral@v5", "--format", "json").json["rows"]
    assert {row["at"].partition(":")[0] for row in rows if row["at"]} == {
        "hf-mixtral/v5/fuse-experts.yaml"
    }
    assert (
        "     v4 → v5   hf-mixtral/v5/fuse-experts.yaml\n"
        in done("history", "--lineage", "hf-mixtral").out
    )
    # a file of no lineage is where it is, from here
    rule = rules(
        tmp_path / "mine",
        "keep: ['{k...}']\nrules: [{name: r, from: lm_head.weight, to: head.weight}]\n",
    )
    assert "rule r, mine/rules.yaml:6\n" in done("plan", source, "--rules", rule).out


def test_history_is_a_table_that_marks_where_the_checkpoint_stands(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "old.safetensors", mixtral())
    done("apply", source, "-o", tmp_path / "new.safetensors", "--to", "hf-mixtral@v5")
    # Megatron's lineage knows the older names
    more = {"v4": {"megatron-gpt": "mixtral"}, "v5": {}}
    for path, here, other in ((source, "v4", "v5"), (tmp_path / "new.safetensors", "v5", "v4")):
        shown = done("history", path).out
        stands = {"hf-mixtral": here, **more[here]}
        assert f"{path}   {', '.join(f'{n}@{at}' for n, at in stands.items())}\n" in shown
        assert f"\n  *  {here}      " in shown
        assert f"\n     {other}      " in shown
        document = run("history", path, "--format", "json").json
        assert document["standing"] == stands
        assert [lineage["name"] for lineage in document["lineages"]] == [*stands]
    assert (
        "\napplied, the oldest first:\n  hf-mixtral v4 → v5   migrate "
        in done("history", tmp_path / "new.safetensors").out
    )


def test_inspect_counts_parameters_and_dtypes(tmp_path: Path) -> None:
    tensors = {"a": ("BF16", [3, 4]), "b": ("F32", [2, 2]), "c": ("F32", []), "d": ("U8", [0])}
    source = safetensors(tmp_path / "in.safetensors", tensors)
    assert (
        "\nholds    17 parameters: bf16 12 in 1 tensor, f32 5 in 2 tensors, uint8 0 in 1 tensor\n"
        in done("inspect", source).out
    )
    document = run("inspect", source, "--format", "json").json
    assert document["parameters"] == 17
    assert document["dtypes"] == [
        {"dtype": "bfloat16", "tensors": 1, "parameters": 12, "bytes": 24},
        {"dtype": "float32", "tensors": 2, "parameters": 5, "bytes": 20},
        {"dtype": "uint8", "tensors": 1, "parameters": 0, "bytes": 0},
    ]
    assert (
        "\nholds    0 parameters\n"
        in done("inspect", safetensors(tmp_path / "none.safetensors", {})).out
    )


def test_windows_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from migrate.cli import main

    monkeypatch.setattr(main.os, "name", "nt")
    with pytest.raises(SystemExit) as left:
        main.main()
    assert left.value.code == 2
    assert (
        capsys.readouterr().err
        == "migrate runs on Linux and macOS, not on Windows; use WSL there\n"
    )


def test_windows_is_told_in_one_line_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert migrate.apply
    monkeypatch.delitem(vars(migrate), "apply")
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(ImportError) as caught:
        _ = migrate.apply
    assert str(caught.value) == "migrate runs on Linux and macOS, not on Windows; use WSL there"


def test_sizes_are_decimal_in_every_help_text() -> None:
    from migrate.cli.main import commands

    texts = "".join(run(name, "--help").out for name in commands())
    assert "500MB" in texts
    assert not re.search(r"[KMGT]iB", texts)
