"""Checkpoints that transformers 4 saved and transformers 5 loaded: the shipped rules give what
transformers gives, and take it back.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from commandline import DATA, contents, done, fingerprint, run, shards
from commandline import safetensors as write

import migrate

PAIRS = {"hf-mixtral": DATA / "mixtral__v4", "hf-qwen2-moe": DATA / "qwen2_moe__v4"}


@pytest.fixture(params=PAIRS)
def lineage(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def hub(lineage: str) -> Path:
    return PAIRS[lineage] / "hub"


def assert_equal(made: Path, wanted: Path) -> None:
    """Bit for bit, as the safetensors library reads the two files."""
    one, other = (
        safetensors.torch.load_file(path / "model.safetensors") for path in (made, wanted)
    )
    assert one.keys() == other.keys()
    for key in other:
        assert one[key].dtype == other[key].dtype
        assert one[key].shape == other[key].shape
        assert torch.equal(one[key].view(torch.uint8), other[key].view(torch.uint8)), key


def test_the_new_layout_is_what_transformers_5_makes_and_the_way_back_is_exact(
    lineage: str, hub: Path, tmp_path: Path
) -> None:
    before = fingerprint(hub)
    new, back, named = tmp_path / "new", tmp_path / "back", tmp_path / "named"
    done("apply", hub, "-o", new, "--to", f"{lineage}@v5")
    assert_equal(new, PAIRS[lineage] / "v5")
    assert (new / "config.json").read_bytes() == (hub / "config.json").read_bytes()

    verified = done("verify", new, "--source", hub, "--format", "json").json
    assert verified["equal"] is True
    assert verified["tensors"] == len(contents(new))

    done("downgrade", new, "-o", back)
    assert_equal(back, hub)
    done("downgrade", new, "-o", named, "--to", f"{lineage}@v4")
    assert_equal(named, hub)
    done("diff", back, hub)
    done("verify", back, "--source", new)
    assert fingerprint(hub) == before


def test_the_file_of_transformers_5_goes_back_to_the_file_of_transformers_4(
    lineage: str, hub: Path, tmp_path: Path
) -> None:
    v5 = tmp_path / "v5"
    shutil.copytree(PAIRS[lineage] / "v5", v5)
    shutil.copy(hub / "config.json", v5)
    done("downgrade", v5, "-o", tmp_path / "back", "--to", f"{lineage}@v4")
    assert_equal(tmp_path / "back", hub)


def test_history_tells_what_was_applied(lineage: str, hub: Path, tmp_path: Path) -> None:
    new, back = tmp_path / "new", tmp_path / "back"
    assert done("history", hub, "--format", "json").json["applied"] == []
    done("apply", hub, "-o", new, "--to", lineage)
    done("downgrade", new, "-o", back)
    told = done("history", new, "--format", "json").json
    assert told["layouts"] == {lineage: "v5"}
    assert [(e["lineage"], e["from"], e["to"]) for e in told["applied"]] == [(lineage, "v4", "v5")]
    assert told["applied"][0]["rules"][0]["id"] == f"{lineage}/v5/fuse-experts"
    stamp = json.loads((new / "migrate.history.json").read_text())
    assert {k: told[k] for k in stamp} == stamp
    assert [
        (e["from"], e["to"]) for e in done("history", back, "--format", "json").json["applied"]
    ] == [("v4", "v5"), ("v5", "v4")]
    assert str(tmp_path) not in (new / "migrate.history.json").read_text()


@pytest.mark.parametrize("goal", ["{}@v5", "{}", "v5", "latest", "+1", "{}@latest", "{}@+1"])
def test_a_goal_may_be_written_in_many_ways(
    lineage: str, hub: Path, tmp_path: Path, goal: str
) -> None:
    done("apply", hub, "-o", tmp_path / "new", "--to", goal.format(lineage))
    assert_equal(tmp_path / "new", PAIRS[lineage] / "v5")


@pytest.mark.parametrize("goal", ["-1", "{}@-1", "v4"])
def test_a_step_back_is_a_downgrade(lineage: str, hub: Path, tmp_path: Path, goal: str) -> None:
    done("apply", hub, "-o", tmp_path / "new", "--to", lineage)
    refused = run(
        "apply",
        tmp_path / "new",
        "-o",
        tmp_path / "back",
        "--to",
        goal.format(lineage),
        "--format",
        "json",
    )
    assert (refused.exit, refused.codes) == (2, ["M502"])
    done("downgrade", tmp_path / "new", "-o", tmp_path / "back", "--to", goal.format(lineage))
    assert_equal(tmp_path / "back", hub)


def test_a_second_apply_is_nothing_to_do(lineage: str, hub: Path, tmp_path: Path) -> None:
    done("apply", hub, "-o", tmp_path / "new", "--to", lineage)
    asked = ("apply", tmp_path / "new", "-o", tmp_path / "again", "--to", lineage)
    again = done(*asked, "--format", "json", exit=1).json
    assert again["path"] is None
    assert again["layouts"] == {lineage: "v5"}
    assert not (tmp_path / "again").exists()
    assert "nothing to do: the checkpoint is already in" in done(*asked, exit=1).out
    assert done(*asked, "--if-needed", "--format", "json").json == again
    assert migrate.apply(tmp_path / "new", tmp_path / "again", to=lineage).path is None
    assert not (tmp_path / "again").exists()
    done("plan", tmp_path / "new", "--to", lineage, "--check")
    assert run("plan", hub, "--to", lineage, "--check").exit == 1


def test_a_downgrade_is_not_undone_by_another(lineage: str, hub: Path, tmp_path: Path) -> None:
    done("apply", hub, "-o", tmp_path / "new", "--to", lineage)
    done("downgrade", tmp_path / "new", "-o", tmp_path / "back")
    refused = done("downgrade", tmp_path / "back", "-o", tmp_path / "back2", exit=2)
    assert "already downgraded" in refused.err
    assert not (tmp_path / "back2").exists()


def test_a_planned_downgrade_runs_as_it_was_planned(
    lineage: str, hub: Path, tmp_path: Path
) -> None:
    done("apply", hub, "-o", tmp_path / "new", "--to", lineage)
    done("plan", tmp_path / "new", "--downgrade", "-o", tmp_path / "plan.json")
    done("apply", tmp_path / "plan.json", "-o", tmp_path / "back")
    assert_equal(tmp_path / "back", hub)


def test_shards_and_single_files_hold_the_same(lineage: str, hub: Path, tmp_path: Path) -> None:
    done("apply", hub, "-o", tmp_path / "one.safetensors", "--to", lineage)
    done("apply", hub, "-o", tmp_path / "many", "--to", lineage, "--max-shard-size", "10kB")
    assert (
        contents(tmp_path / "many")
        == contents(PAIRS[lineage] / "v5")
        == contents(tmp_path / "one.safetensors")
    )
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(
        len(raw) for _, _, raw in contents(tmp_path / "many").values()
    )
    assert index["weight_map"] == {
        key: f.name for f in files for key in safetensors.torch.load_file(f)
    }
    done("verify", tmp_path / "one.safetensors", "--source", hub)
    done("downgrade", tmp_path / "one.safetensors", "-o", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(hub)


def test_several_lineages_are_walked_at_once(tmp_path: Path) -> None:
    hub = PAIRS["hf-mixtral"] / "hub"
    local = tmp_path / "rules"
    for name, start, end in (("alpha", "model.norm", "model.final"), ("beta", "lm_head", "head")):
        (local / name / "v2").mkdir(parents=True)
        signs = [
            f"  v{i}: {{title: t, status: current, detect: {{present: '{key}.weight'}}}}"
            for i, key in ((1, start), (2, end))
        ]
        (local / name / "layouts.yaml").write_text(
            f"lineage: {name}\ntitle: {name}\nordered: true\nlayouts:\n" + "\n".join(signs) + "\n"
        )
        (local / name / "v2" / "rename.yaml").write_text(
            f"id: {name}/v2/rename\ntitle: t\nlineage: {name}\nedge: [v1, v2]\nkeep: ['{{k...}}']\n"
            f"rules: [{{name: r, from: {start}.weight, to: {end}.weight}}]\n"
        )
    goals = ["--to", "beta", "--to", "hf-mixtral@v5", "--to", "alpha@v2"]
    refused = run(
        "apply", hub, "-o", tmp_path / "new", "--rules", local, *goals, "--format", "json"
    )
    assert refused.codes == ["M211"], "hf-mixtral does not know the name that beta gave"
    planned = done(
        "plan",
        hub,
        "--rules",
        local,
        "--to",
        "hf-mixtral@v5",
        "--to",
        "beta",
        "--to",
        "alpha",
        "--format",
        "json",
    ).json
    assert [step["lineage"] for step in planned["path"]] == ["hf-mixtral", "beta", "alpha"]
    done(
        "apply",
        hub,
        "-o",
        tmp_path / "new",
        "--rules",
        local,
        "--to",
        "hf-mixtral@v5",
        "--to",
        "beta",
        "--to",
        "alpha",
    )
    made, wanted = contents(tmp_path / "new"), contents(PAIRS["hf-mixtral"] / "v5")
    wanted["model.final.weight"], wanted["head.weight"] = (
        wanted.pop("model.norm.weight"),
        wanted.pop("lm_head.weight"),
    )
    assert made == wanted
    told = done("history", tmp_path / "new", "--format", "json").json
    assert told["layouts"] == {"alpha": "v2", "beta": "v2", "hf-mixtral": "v5"}
    done("downgrade", tmp_path / "new", "-o", tmp_path / "back", "--rules", local)
    assert contents(tmp_path / "back") == contents(hub), "what one run did is undone as one"


def expert(layer: int, number: int, name: str, part: str) -> str:
    modules = {"hf-mixtral": "block_sparse_moe", "hf-qwen2-moe": "mlp"}
    return f"model.layers.{layer}.{modules[name]}.experts.{number}.{part}.weight"


@pytest.mark.parametrize(
    ("change", "code", "culprit"),
    [
        ("wrong number", "M207", "experts"),
        ("gap", "M207", "{e} = 1"),
        ("mixed dtypes", "M303", "experts.1"),
        ("unequal shapes", "M301", "experts.1"),
        ("two keys for one target", "M211", "model.layers.0.mlp.experts.gate_up_proj"),
        ("a key that nobody knows", "M211", "rotary"),
    ],
)
def test_what_transformers_lets_through_is_refused_by_name(
    lineage: str, hub: Path, tmp_path: Path, change: str, code: str, culprit: str
) -> None:
    found = contents(hub)
    part = {"hf-mixtral": "w1", "hf-qwen2-moe": "gate_proj"}[lineage]
    one = expert(0, 1, lineage, part)
    dtype, shape, raw = found[one]
    if change == "wrong number":
        found[expert(0, 9, lineage, part)] = found.pop(one)
    elif change == "gap":
        for key in [k for k in found if ".layers.0." in k and ".experts.1." in k]:
            del found[key]
    elif change == "mixed dtypes":
        found[one] = ("BF16", shape, raw[: len(raw) // 2])
    elif change == "unequal shapes":
        found[one] = (
            dtype,
            (shape[0] - 1, *shape[1:]),
            raw[: len(raw) // shape[0] * (shape[0] - 1)],
        )
    elif change == "two keys for one target":
        found["model.layers.0.mlp.experts.gate_up_proj"] = (dtype, shape, raw)
    else:
        found["model.layers.0.rotary.inv_freq"] = (dtype, shape, raw)
    write(tmp_path / "ckpt" / "model.safetensors", found)
    shutil.copy(hub / "config.json", tmp_path / "ckpt")
    start = ["--from", f"{lineage}@v4"]
    result = run(
        "apply",
        tmp_path / "ckpt",
        "-o",
        tmp_path / "new",
        "--to",
        f"{lineage}@v5",
        *start,
        "--format",
        "json",
    )
    assert result.exit == 3
    assert code in result.codes
    said = [
        d["message"] + " ".join(d["notes"]) for d in result.json["diagnostics"] if d["code"] == code
    ]
    assert any(culprit in text for text in said), said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt"]


def test_a_cache_snapshot_of_links_is_read_as_a_folder(
    lineage: str, hub: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "models--x--y"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(hub.iterdir())):
        shutil.copy(file, repository / "blobs" / f"{number:064}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064}")
    done("apply", snapshot, "-o", tmp_path / "new", "--to", lineage)
    assert_equal(tmp_path / "new", PAIRS[lineage] / "v5")
    assert not (tmp_path / "new" / "config.json").is_symlink()


def test_an_index_of_shards_is_a_checkpoint_too(lineage: str, hub: Path, tmp_path: Path) -> None:
    items = list(contents(hub).items())
    folder = shards(tmp_path / "sharded", [dict(items[::2]), dict(items[1::2])])
    shutil.copy(hub / "config.json", folder)
    done(
        "apply",
        folder / "model.safetensors.index.json",
        "-o",
        tmp_path / "new",
        "--to",
        f"{lineage}@v5",
        "--from",
        f"{lineage}@v4",
    )
    assert contents(tmp_path / "new") == contents(PAIRS[lineage] / "v5")
