"""Grids out: runs of megatron-core cut for other grids equal its own, what is remembered of a grid
leads back to it, and what does not fit is refused before a tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import done, run
from cut_runs import TRACKER, WEIGHTS, Stages, part_name, whole_model, write_run
from disks import mounted
from marks import thorough
from megatron_files import differences, parts, read_as_data
from megatron_runs import checkpoint, family, run_folder, runs
from test_documents import check

TO = ("--to", "megatron-gpt@mcore", "--no-fsync")
# of processes: which of them a part was written by, and its random states
OF_PROCESSES = ("rng_state",)


@pytest.fixture(autouse=True)
def _read_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    read_as_data(monkeypatch)


def gpt(layers: int, experts: int = 0) -> dict[str, torch.Tensor]:
    """A model of which the layout can tell that it is one."""
    key = "decoder.layers.{}.self_attention.linear_proj.weight"
    return whole_model(layers, experts) | {key.format(n): torch.ones(4, 4) for n in range(layers)}


def models(root: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in root.items() if key.startswith("model")}


# of each: what it is made of, what megatron-core made, and what is asked for
GRIDS = [
    ("llama", "1", "pp2", ("pp=2",)),
    ("llama", "pp2", "1", ("pp=1",)),
    ("llama", "1", "pp2-vpp2", ("pp=2", "vpp=2")),
    ("llama", "pp2-vpp2", "pp2", ("vpp=1",)),
    ("llama", "pp2-vpp2", "1", ("pp=1",)),
    ("llama", "tp2", "tp2-pp2", ("pp=2",)),
    ("llama", "tp2-pp2", "tp2", ("pp=1",)),
    ("llama", "1", "pp2-uneven", ("pp=2", "first_layers=1")),
    ("llama", "1", "pp2-uneven", ("pp=2", "last_layers=3")),
    ("llama", "1", "pp2-uneven", ("pp=2", "pipeline=Et|(t)*3L")),
    ("llama", "pp2-uneven", "pp2-vpp2", ("vpp=2",)),
    ("qwen2", "1", "pp2", ("pp=2",)),
    ("qwen2", "pp2", "pp2-vpp2", ("vpp=2",)),
    ("qwen2", "tp2-pp2", "tp2", ("pp=1",)),
    ("mixtral", "1", "ep2", ("ep=2",)),
    ("mixtral", "ep2", "1", ("ep=1",)),
    ("mixtral", "tp2", "tp2-ep2", ("ep=2",)),
    ("mixtral", "ep2", "pp2-ep2", ("pp=2",)),
    ("mixtral", "pp2-ep2", "pp2-vpp2", ("ep=1", "vpp=2")),
    ("qwen3-moe", "ep2", "pp2", ("ep=1", "pp=2")),
    ("mixtral", "1-grouped", "ep2-grouped", ("ep=2",)),
    ("mixtral", "ep2-grouped", "1-grouped", ("ep=1",)),
]


@pytest.mark.parametrize(("name", "source", "goal", "sizes"), GRIDS)
def test_a_run_is_cut_as_megatron_core_cuts_it(
    tmp_path: Path, name: str, source: str, goal: str, sizes: tuple[str, ...]
) -> None:
    out, asked = tmp_path / "out", [word for size in sizes for word in ("--set", size)]
    done("apply", run_folder(name, "legacy", source), "-o", out, *TO, *asked, "--allow", "drop")
    made, due = parts(out / "iter_0000010"), parts(checkpoint(name, "legacy", goal))
    assert made.keys() == due.keys()
    assert (out / TRACKER).read_text() == (run_folder(name, "legacy", goal) / TRACKER).read_text()
    for called in due:
        assert differences(models(due[called]), models(made[called])) == []
        said = vars(made[called]["args"])
        for field, value in vars(due[called]["args"]).items():
            # three ways to say one grid, and what is not known of other processes
            if field not in ("local_rank", "rank") and not field.startswith(("decoder_", "pipe")):
                assert repr(said[field]) == repr(value), field
    again = done("inspect", out).out
    assert f"grid     {str_of(goal)}" in again
    done("verify", out, "--source", run_folder(name, "legacy", source))


def str_of(grid: str) -> str:
    sizes = {"tp": 1, "pp": 1, "vpp": 1, "ep": 1}
    for word in grid.split("-"):
        axis = word.rstrip("0123456789")
        if axis in sizes:
            sizes[axis] = int(word[len(axis) :])
    shown = [f"{axis.upper()} {n}" for axis, n in sizes.items() if axis != "vpp" or n > 1]
    return f"{' x '.join(shown)}, 4 layers"


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("grid", ["1", "tp2", "pp2", "tp2-pp2", "pp2-vpp2"])
def test_written_as_it_was_it_is_the_same_to_the_bit(tmp_path: Path, name: str, grid: str) -> None:
    out = tmp_path / "out"
    done("apply", run_folder(name, "legacy", grid), "-o", out, "--output-format", "torch")
    assert differences(parts(checkpoint(name, "legacy", grid)), parts(out / "iter_0000010")) == []


COME_BACK = [
    ("llama", "1"),
    ("llama", "tp2-pp2"),
    ("llama", "pp2-vpp2"),
    ("llama", "pp2-uneven"),
    ("qwen2", "tp2-pp2"),
    ("qwen3", "pp2-vpp2"),
    ("mixtral", "tp2-ep2"),
    ("mixtral", "pp2-ep2"),
    ("mixtral", "ep2-grouped"),
    ("qwen3-moe", "tp2"),
]
OTHERS = [
    (name, grid) for name, grid in runs()
    if (name, grid) not in COME_BACK and not grid.endswith("optimizer")
]  # fmt: skip


@pytest.mark.parametrize(("name", "grid"), thorough([*COME_BACK, *OTHERS], default=len(COME_BACK)))
def test_the_way_back_from_transformers_needs_nothing(tmp_path: Path, name: str, grid: str) -> None:
    hf, back = tmp_path / "hf", tmp_path / "back"
    source = run_folder(name, "legacy", grid)
    to = ("--to", f"megatron-gpt@{name}", "--set", "vocab=20")
    assert "downgrade: exact" in done("apply", source, "-o", hf, *to, "--no-fsync").out
    assert (hf / "model.safetensors").is_file()
    done("downgrade", hf, "-o", back, "--no-fsync")
    # states that are None, versions of modules without tensors and the order of all among it
    made, was = parts(back / "iter_0000010"), parts(checkpoint(name, "legacy", grid))
    assert differences(was, made) == []
    done("verify", back, "--source", hf)
    # both runs at once, of which the second undoes the first
    done("verify", back, "--source", source)
    assert done("diff", source, back).exit == 0


@pytest.mark.parametrize(("name", "grid"), [("llama", "tp2-pp2"), ("mixtral", "tp2-ep2")])
def test_the_way_back_from_torch_dist_needs_nothing(tmp_path: Path, name: str, grid: str) -> None:
    dist, back = tmp_path / "dist", tmp_path / "back"
    source = run_folder(name, "legacy", grid)
    said = done("apply", source, "-o", dist, *TO, "--output-format", "torch_dist")
    assert "downgrade: exact" in said.out
    done("downgrade", dist, "-o", back, "--no-fsync")
    # without `content_metadata`, which is no value of this format
    made, was = parts(back / "iter_0000010"), parts(checkpoint(name, "legacy", grid))
    assert differences(was, made) == []
    done("verify", back, "--source", dist)


# of each: a run, what it is written as without a rule, and what cuts that as the run was
AGAIN = [
    ("llama", "pp2-vpp2", "torch_dist", ("pp=2", "vpp=2")),
    ("mixtral", "pp2-ep2", "torch_dist", ("pp=2", "ep=2")),
    ("llama", "1", "torch_dist", ("pp=1",)),
    ("llama", "pp2-uneven", "safetensors", ("pp=2", "first_layers=1")),
    ("llama", "tp2-pp2", "safetensors", ()),
]


@pytest.mark.parametrize(("name", "grid", "form", "sizes"), AGAIN)
def test_the_way_back_from_another_format_alone_needs_nothing(
    tmp_path: Path, name: str, grid: str, form: str, sizes: tuple[str, ...]
) -> None:
    joined, back, again = tmp_path / "joined", tmp_path / "back", tmp_path / "again"
    source = run_folder(name, "legacy", grid)
    said = done("apply", source, "-o", joined, "--output-format", form, "--no-fsync").out
    assert "downgrade: exact" in said
    done("downgrade", joined, "-o", back, "--no-fsync")
    was = parts(checkpoint(name, "legacy", grid))
    assert differences(was, parts(back / "iter_0000010")) == []
    done("verify", back, "--source", joined)
    if form != "torch_dist":
        return
    # asked for the same grid, the parts are those that something is kept of
    done("apply", joined, "-o", again, *TO, *[word for one in sizes for word in ("--set", one)])
    assert differences(was, parts(again / "iter_0000010")) == []
    done("verify", again, "--source", joined)


def test_what_is_written_of_a_grid_fits_its_schemas(tmp_path: Path) -> None:
    joined, hf, source = tmp_path / "joined", tmp_path / "hf", run_folder("llama", "legacy", "pp2")
    words = ("--no-fsync", "--format", "json")
    there = ("-o", joined, "--output-format", "torch_dist", *words)
    check(done("apply", source, *there).json, "published")
    to = ("--to", "megatron-gpt@llama")
    check(done("plan", source, *to, "--format", "json").json, "plan")
    check(done("apply", source, "-o", hf, *to, *words).json, "published")
    for folder in (source, joined, hf):
        check(done("inspect", folder, "--format", "json").json, "inspection")
        check(done("history", folder, "--format", "json").json, "history")
    for folder in (joined / "iter_0000010", hf):
        check(json.loads((folder / "migrate.history.json").read_text()), "history")


def test_states_without_their_modules_are_not_put_back(tmp_path: Path) -> None:
    hf, out = tmp_path / "hf", tmp_path / "out"
    said = ("--to", "megatron-gpt@mixtral", "--set", "vocab=20", "--no-fsync")
    done("apply", run_folder("mixtral", "legacy", "1"), "-o", hf, *said)
    done("apply", hf, "-o", out, *TO, "--set", "experts=te", "--set", "tp=2", "--allow", "drop")
    made = parts(out / "iter_0000010")
    states = [
        [key for key in root["model"] if key.endswith("_extra_state")] for root in made.values()
    ]
    assert states[0] == states[1]
    assert "decoder.layers.3.self_attention.linear_qkv._extra_state" in states[0]
    # experts are no modules of their own any more
    assert not any("experts" in key for key in states[0])


def test_keys_in_another_order_come_back_in_theirs(tmp_path: Path) -> None:
    def change(name: str, root: dict[str, Any]) -> None:
        layers = [key for key in root["model"] if ".layers." in key]
        order = [key for key in root["model"] if key not in layers]
        backwards = sorted(layers, key=lambda key: (int(key.split(".")[2]), key[::-1]))
        root["model"] = {key: root["model"][key] for key in [*order, *backwards]}

    folder = write_run(tmp_path / "run", gpt(4), EVEN, args={}, change=change)
    out = tmp_path / "out"
    done("apply", tmp_path / "run", "-o", out, *TO, "--set", "pp=1")
    made = list(parts(out / folder.name)["mp_rank_00"]["model"])
    first = [key for key in parts(folder)[part_name(0, 0)]["model"] if ".layers.0." in key]
    assert [key for key in made if ".layers.0." in key] == first
    assert [key for key in made if ".layers.3." in key] == [
        key.replace(".0.", ".3.", 1) for key in first
    ]


EVEN: Stages = (((0, 1),), ((2, 3),))
REFUSED = [
    (4, 0, ("pp=3",), "M929", "4 layers do not divide by 3 stages", "1, 2, 4"),
    (4, 0, ("pp=2", "vpp=4"), "M929", "do not divide by 2 stages of 4 virtual stages", "vpp"),
    (4, 0, ("vpp=2",), "M929", "2 virtual stages of a single pipeline stage", "vpp=2 out"),
    (4, 0, ("ep=2",), "M929", "2 expert groups of a model without experts", "ep=2 out"),
    (4, 4, ("ep=3",), "M929", "4 experts do not divide by 3 groups", "1, 2, 4"),
    (4, 0, ("first_layers=1",), "M929", "--set first_layers of a single pipeline stage", "pp"),
    (4, 0, ("pp=2", "first_layers=5"), "M929", "5 in the first", "pp"),
    (4, 0, ("pp=2", "pipeline=Ett|t"), "M929", "not one embedding `E` and one loss `L`", "Ett|t"),
    (4, 0, ("pp=2", "pipeline=t|EttL"), "M929", "in another stage than the first", "t|EttL"),
    (4, 0, ("pp=2", "pipeline=Ett|tmtL"), "M929", "has m, which is not dealt out", "tmtL"),
    (4, 0, ("pp=2", "pipeline=Ett|tL"), "M929", "is not one of 4 layers in 2 stages", "pp"),
    (4, 0, ("pp=2", "pipeline=Ett|ttL", "last_layers=1"), "M929", "say the same", "one of them"),
    (4, 0, ("pp=x",), "M114", "'x' is not an integer", "pipeline stages"),
    (4, 0, ("pp=0",), "M114", "0", "from 1"),
    (4, 0, ("pp=2", "size=2"), "M115", "--set pp, size", "leave --set out"),
]


@pytest.mark.parametrize(("layers", "experts", "sizes", "code", "why", "help"), REFUSED)
def test_a_grid_that_does_not_fit_is_refused_by_the_plan(
    tmp_path: Path,
    layers: int,
    experts: int,
    sizes: tuple[str, ...],
    code: str,
    why: str,
    help: str,
) -> None:
    write_run(tmp_path / "run", gpt(layers, experts), args={})
    asked = [word for size in sizes for word in ("--set", size)]
    found = run("plan", tmp_path / "run", *TO[:2], *asked)
    assert found.exit == 2, found.err
    assert f"[{code}]" in found.err
    assert why in found.err
    assert help in found.err


# of each family what its configuration does not say
HF = [
    ("llama", "tp2-pp2", ("tp=2", "pp=2")),
    ("llama", "pp2-vpp2", ("pp=2", "vpp=2")),
    ("llama", "pp2-uneven", ("pp=2", "first_layers=1")),
    ("qwen2", "tp2-pp2", ("tp=2", "pp=2", "head_dim=4")),
    ("mixtral", "ep2", ("ep=2", "head_dim=4", "experts=local")),
    ("mixtral", "tp2-ep2", ("tp=2", "ep=2", "head_dim=4", "experts=local")),
    ("mixtral", "ep2-grouped", ("ep=2", "head_dim=4", "experts=grouped")),
]


@pytest.mark.parametrize(("name", "grid", "sizes"), HF)
def test_a_folder_of_transformers_becomes_a_run(
    tmp_path: Path, name: str, grid: str, sizes: tuple[str, ...]
) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    asked = [word for size in (*sizes, "impl=local") for word in ("--set", size)]
    source = family(name) / "hf"
    done("apply", source, "-o", out, *TO, "--from", f"megatron-gpt@{name}", *asked)
    assert (out / TRACKER).read_text() == "release"
    made, due = parts(out / "release"), parts(checkpoint(name, "legacy", grid))
    assert made.keys() == due.keys()
    for called, root in due.items():
        assert made[called]["args"].pipeline_model_parallel_size == int("pp2" in grid) + 1
        for key, model in models(root).items():
            own = {k: v for k, v in model.items() if v is not None}
            assert list(own) == list(made[called][key])
            for name_of, tensor in own.items():
                # rows of padding are zeros here, and were trained there
                if not name_of.startswith(("embedding.", "output_layer.")):
                    assert torch.equal(tensor, made[called][key][name_of]), name_of
    done("verify", out, "--source", source)
    done("downgrade", out, "-o", back, "--no-fsync")
    assert (back / "model.safetensors").is_file()
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_an_output_that_exists_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "iter_0000010").mkdir(parents=True)
    found = run("apply", run_folder("llama", "legacy", "1"), "-o", out, *TO, "--set", "pp=2")
    assert found.exit == 2
    assert "[M904]" in found.err
    assert [path.name for path in out.rglob("*")] == ["iter_0000010"]


def test_the_grid_that_is_there_is_nothing_to_do(tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = run_folder("llama", "legacy", "pp2")
    assert "nothing to do" in run("apply", source, "-o", out, *TO, "--set", "pp=2").out
    assert not out.exists()


def test_sizes_of_a_grid_need_a_folder_of_parts(tmp_path: Path) -> None:
    source = run_folder("llama", "legacy", "1")
    for more in (("--output-format", "safetensors"), ("-o", tmp_path / "one.pt", "--no-fsync")):
        command = "apply" if "-o" in more else "plan"
        found = run(command, source, *TO[:2], "--set", "pp=2", *more)
        assert "[M115]" in found.err
        assert "--set pp=2: the output is no folder of parts" in found.err


def test_state_of_an_optimizer_is_that_of_the_parts_that_were_read(tmp_path: Path) -> None:
    source, out = run_folder("llama", "legacy", "1-optimizer"), tmp_path / "out"
    found = run("plan", source, *TO[:2], "--set", "pp=2", "--allow", "drop")
    assert "[M410]" in found.err
    assert "of each part of the grid that was read" in found.err
    left = ("--set", "optimizer=drop", "--allow", "drop")
    done("apply", source, "-o", out, *TO, "--set", "pp=2", *left)
    assert all("optimizer" not in root for root in parts(out / "iter_0000010").values())


def test_on_a_disk_that_is_full_nothing_appears(tmp_path: Path) -> None:
    key = "decoder.layers.{}.self_attention.linear_proj.weight"
    model = gpt(8) | {key.format(n): torch.ones(512, 512) for n in range(8)}
    write_run(tmp_path / "run", model, (((*range(8),),),), args={})
    with mounted(tmp_path / "small", "3m") as small:
        found = run("apply", tmp_path / "run", "-o", small / "out", *TO, "--set", "pp=8")
        assert "[M909]" in found.err
        assert not (small / "out").exists()


def test_a_disk_that_fills_up_in_the_third_of_eight_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from migrate.running import publish

    key = "decoder.layers.{}.self_attention.linear_proj.weight"
    model = gpt(8) | {key.format(n): torch.ones(512, 512) for n in range(8)}
    write_run(tmp_path / "run", model, (((*range(8),),),), args={})
    # two threads would be in two parts
    command = ("apply", tmp_path / "run", *TO, "--set", "pp=8", "--threads", "1", "-o")
    done(*command, tmp_path / "whole")
    with mounted(tmp_path / "small", "12m") as small:
        out, filler = small / "out", small / "filler"
        looked = publish.Partial.require

        def then_fills(self: Any, *args: Any, **words: Any) -> None:
            looked(self, *args, **words)
            # somebody else's, after room was looked for: two parts of 1 MiB and a half are left
            filler.write_bytes(bytes(19 << 19))

        with monkeypatch.context() as patched:
            patched.setattr(publish.Partial, "require", then_fills)
            # a file system without fallocate, where a full disk shows when it is written to
            patched.setattr(publish, "_allocate", lambda descriptor, start, size: None)
            found = run(*command, out)
        assert (found.exit, "[M909]" in found.err, "--resume" in found.err) == (4, True, True)
        assert not out.exists()
        left = small / "out.migrate-partial"
        written = [path.stat().st_blocks * 512 for path in sorted(left.rglob(WEIGHTS))]
        assert len(written) == 8
        assert sum(held >= 1 << 20 for held in written) == 2
        filler.unlink()
        done(*command, out, "--resume")
        assert contents_of(out) == contents_of(tmp_path / "whole")


def contents_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


WRONG: list[dict[str, Any]] = [
    {"folder": "../../elsewhere"},
    {"folder": "iter_0000010/.."},
    {"file": "../model_optim_rng.pt"},
    {"table": "another"},
    {"sizes": {"TP": 1, "PP": 2, "VPP": 1}},
    {"sizes": {"TP": 1, "PP": 3, "VPP": 1, "EP": 1}},
    {"layers": [[2, 2], [2, 2]]},
]


@pytest.mark.parametrize("rules", [True, False], ids=["an edge", "a format"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_stamp_says_of_a_grid_is_not_believed(
    tmp_path: Path, wrong: dict[str, Any], rules: bool
) -> None:
    hf, back = tmp_path / "hf", tmp_path / "back"
    said = ("--to", "megatron-gpt@llama") if rules else ("--output-format", "safetensors")
    source = run_folder("llama", "legacy", "pp2")
    done("apply", source, "-o", hf, *said, "--allow", "drop", "--no-fsync")
    stamp = json.loads((hf / "migrate.history.json").read_text())
    (stamp["applied"][0] if rules else stamp)["grid"].update(wrong)
    (hf / "migrate.history.json").write_text(json.dumps(stamp))
    found = run("downgrade", hf, "-o", back, "--allow", "drop", "--no-fsync")
    assert "[M929]" in found.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize("wrong", [{"sizes": {"TP": 0}}, {"layers": [["2"]]}, {"folder": "a\nb"}])
def test_a_stamp_whose_grid_is_none_is_ignored(tmp_path: Path, wrong: dict[str, Any]) -> None:
    hf = tmp_path / "hf"
    said = ("--to", "megatron-gpt@llama", "--allow", "drop", "--no-fsync")
    done("apply", run_folder("llama", "legacy", "pp2"), "-o", hf, *said)
    stamp = json.loads((hf / "migrate.history.json").read_text())
    stamp["applied"][0]["grid"].update(wrong)
    (hf / "migrate.history.json").write_text(json.dumps(stamp))
    found = run("downgrade", hf, "-o", tmp_path / "back", "--no-fsync")
    assert "the stamp cannot be read and is ignored" in found.err


@pytest.mark.parametrize(
    ("router", "columns", "why"),
    [
        (None, 8, "has all experts in one tensor, and no router tells how many"),
        (3, 6, "3 experts of decoder.layers.0.mlp.experts.weight1 do not divide by 2 groups"),
        (4, 9, "decoder.layers.0.mlp.experts.weight1, float32 [4, 9], does not divide by 2 groups"),
    ],
)
def test_experts_in_one_tensor_that_do_not_divide(
    tmp_path: Path, router: int | None, columns: int, why: str
) -> None:
    block = "decoder.layers.0.mlp"
    model = gpt(1) | {f"{block}.experts.weight1": torch.ones(4, columns)}
    if router is not None:
        model[f"{block}.router.weight"] = torch.ones(router, 4)
    write_run(tmp_path / "run", model, (((0,),),), args={})
    found = run("plan", tmp_path / "run", *TO[:2], "--set", "ep=2")
    assert (found.exit, "[M929]" in found.err, why in found.err) == (2, True, True), found.err


def test_what_stands_in_no_stage_that_is_known_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "run", gpt(4) | {"lm_head.dense.weight": torch.ones(4)}, args={})
    found = run("plan", tmp_path / "run", *TO[:2], "--set", "pp=2")
    assert "[M929]" in found.err
    assert "in which pipeline stage lm_head.dense.weight stands" in found.err
    done("plan", tmp_path / "run", "--output-format", "torch")


# of each: what it is made of, and what is asked for
CHANGED = [
    ("tp2-pp2", ("padded=48",)),
    ("tp2-pp2", ("tp=1", "pp=4", "vocab=20", "impl=te")),
    ("1", ("tp=4", "vocab=20", "padded=48")),
    ("hf", ("tp=4", "pp=1", "padded=40")),
    ("hf", ("tp=1", "divisible=4")),
]


@pytest.mark.parametrize(("source", "asked"), CHANGED)
def test_an_output_with_other_ranks_or_padding_is_verified(
    tmp_path: Path, source: str, asked: tuple[str, ...]
) -> None:
    run, out, again = tmp_path / "run", tmp_path / "out", tmp_path / "again"
    if source == "hf":
        made = run_folder("llama", "legacy", "tp2-pp2")
        done("apply", made, "-o", run, "--to", "megatron-gpt@llama", "--set", "vocab=20")
    else:
        run = run_folder("llama", "legacy", source)
    words = [word for one in asked for word in ("--set", one)]
    done("apply", run, "-o", out, *TO, *words, "--allow", "drop")
    done("verify", out, "--source", run)
    # a run later its own params are not those of the first
    done("apply", out, "-o", again, *TO, "--set", "tp=2", "--set", "padded=64", "--allow", "drop")
    done("verify", again, "--source", out)
    if source != "hf" and "impl=te" not in asked:
        done("verify", again, "--source", run)


def test_what_is_kept_stands_in_the_first_part_alone(tmp_path: Path) -> None:
    run, hf, out = run_folder("llama", "legacy", "tp2-pp2"), tmp_path / "hf", tmp_path / "out"
    done("apply", run, "-o", hf, "--to", "megatron-gpt@llama", "--set", "vocab=20")
    asked = ("--set", "tp=1", "--set", "pp=4", "--set", "divisible=1", "--allow", "drop")
    done("apply", hf, "-o", out, *TO, *asked)
    first, *others = parts(out / "iter_0000010").values()
    assert first["migrate.kept"]
    assert not any("migrate.kept" in root or "parts" in root for root in others)
    done("verify", out, "--source", hf)
    done("diff", out, out)
