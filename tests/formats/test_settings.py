"""The arguments of a training script beside the weights: through every format, through rules, in
`inspect` and in `diff`.
"""

from __future__ import annotations

import argparse
import json
import signal
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commandline import done, run

import migrate
from migrate.core.errors import MigrateError

RULE = """\
id: demo/2/x
title: x
lineage: demo
edge: ['1', '2']
rules:
  - {name: r, from: w, to: v}
"""


def arguments(**more: Any) -> argparse.Namespace:
    inside = {
        "num_layers": 4,
        "lr": 1e-4,
        "seed": 0.0,
        "params_dtype": torch.bfloat16,
        "exit_signal": signal.SIGTERM,
        "data_path": ["a", ("b", 2)],
        "inner": argparse.Namespace(x=None, empty=argparse.Namespace()),
    }
    return argparse.Namespace(**{**inside, **more})


def saved(path: Path, args: Any) -> Path:
    torch.save({"args": args, "iteration": 10, "model": {"w": torch.arange(3.0)}}, path)
    return path


def stream(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        return archive.read(name)


@pytest.fixture
def rule(tmp_path: Path) -> list[Path]:
    (tmp_path / "r.yaml").write_text(RULE)
    return [tmp_path / "r.yaml"]


@pytest.mark.parametrize("between", ["out.pt", "out.safetensors", "out"])
def test_arguments_come_back_as_they_were_through(
    between: str, tmp_path: Path, rule: list[Path]
) -> None:
    source, middle = saved(tmp_path / "in.pt", arguments()), tmp_path / between
    form = "torch" if between.endswith(".pt") else "safetensors"
    answer = migrate.apply(source, middle, rules=rule, output_format=form)
    assert answer.to_json()["downgrade"]["exact"] is True
    back = tmp_path / "back.pt"
    migrate.downgrade(middle, back, rules=rule, output_format="torch")
    # equal to the type and the sign of zero, and in order
    assert repr(torch.load(back, weights_only=False)["args"]) == repr(arguments())
    assert migrate.diff(source, back).equal
    assert migrate.verify(middle, source=source, rules=rule).equal


def test_a_distributed_checkpoint_has_them_as_one_entry(tmp_path: Path) -> None:
    source, folder = saved(tmp_path / "in.pt", arguments()), tmp_path / "dcp"
    migrate.apply(source, folder, output_format="dcp")
    found = migrate.inspect(folder).to_json()
    assert {"path": "args.num_layers", "value": 4} in found["items"]
    assert not found["outside"]
    migrate.apply(folder, tmp_path / "back.pt", output_format="torch")
    assert torch.load(tmp_path / "back.pt", weights_only=False)["args"] == arguments()


def test_a_file_that_is_a_namespace_has_no_dict_for_rules(tmp_path: Path) -> None:
    torch.save(argparse.Namespace(a=1), tmp_path / "in.pt")
    with pytest.raises(MigrateError) as caught:
        migrate.inspect(tmp_path / "in.pt", at=".")
    assert caught.value.diagnostics[0].code == "M945"
    torch.save({"a": argparse.Namespace(w=1)}, tmp_path / "b.pt")
    with pytest.raises(MigrateError) as caught:
        migrate.inspect(tmp_path / "b.pt", at="a")
    assert caught.value.diagnostics[0].code == "M945"


def test_inspect_shows_them_and_diff_compares_them(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a.pt", arguments()), saved(tmp_path / "b.pt", arguments())
    shown = done("inspect", a).out
    assert "args.num_layers = 4" in shown
    assert "args.exit_signal = signal.Signals(15)" in shown
    assert migrate.diff(a, b).equal
    for more, place in (
        ({"num_layers": 5}, "args.num_layers"),
        ({"seed": -0.0}, "args.seed"),
        ({"exit_signal": signal.SIGINT}, "args.exit_signal"),
        ({"exit_signal": 15}, "args.exit_signal"),
        ({"more": 1}, "args.more"),
    ):
        other = migrate.diff(a, saved(tmp_path / "c.pt", arguments(**more))).to_json()["others"]
        assert [line for line in other if f"value {place} " in line]
    plain = saved(tmp_path / "d.pt", vars(arguments()))
    assert [
        line
        for line in migrate.diff(a, plain).to_json()["others"]
        if line.startswith("value args@0 is made of other containers")
    ]


def test_code_in_them_is_refused_with_its_place_and_dropped_alone(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            import os

            return os.mkdir, (str(tmp_path / "made"),)

    source = saved(tmp_path / "in.pt", arguments(evil=Evil()))
    failed = run("apply", source, "-o", tmp_path / "no.pt", "--output-format", "torch")
    assert failed.exit == 3
    assert "posix.mkdir (not on the allow-list) at args.evil" in failed.err
    migrate.apply(source, tmp_path / "out.pt", output_format="torch", allow=["opaque"])
    assert torch.load(tmp_path / "out.pt", weights_only=False)["args"] == arguments()
    assert not (tmp_path / "made").exists()


def test_a_side_file_cannot_make_a_namespace_the_dict_of_rules(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    migrate.apply(saved(tmp_path / "in.pt", arguments()), folder, output_format="safetensors")
    items = folder / "migrate.items.json"
    document = json.loads(items.read_text())
    document["parts"][0]["at"] = ["args"]
    items.write_text(json.dumps(document))
    with pytest.raises(MigrateError) as caught:
        migrate.inspect(folder)
    assert caught.value.diagnostics[0].code == "M906"


def test_many_fields_are_listed_in_part_and_kept_whole(tmp_path: Path) -> None:
    many = argparse.Namespace(**{f"field_{number}": number for number in range(100_001)})
    source = saved(tmp_path / "in.pt", many)
    assert len(done("inspect", source).out.splitlines()) < 60
    migrate.apply(source, tmp_path / "out.pt", output_format="torch")
    assert stream(tmp_path / "out.pt")[: 2 << 20] == stream(source)[: 2 << 20]
    assert torch.load(tmp_path / "out.pt", weights_only=False)["args"] == many


def test_inspect_lists_all_values_alike_ones_in_one_line(tmp_path: Path) -> None:
    for rank in range(3):
        args = arguments(rank=rank, sizes=list(range(9)), same=[7] * 9)
        torch.save(
            {"args": args, "model": {"w": torch.ones(1), "w._extra_state": None}},
            tmp_path / f"consolidated.{rank:02}.pth",
        )
    document = migrate.inspect(tmp_path, values=True).to_json()
    assert migrate.inspect(tmp_path).to_json()["values"] == {}
    rows = document["values"]
    assert rows["args.num_layers@{0..2}"] == {"count": 3, "value": 4, "distinct": 1}
    assert [rows[f"args.rank@{rank}"]["value"] for rank in range(3)] == [0, 1, 2]
    assert rows["args.sizes.{0..8}@{0..2}"] == {"count": 27, "value": 0, "distinct": 9}
    assert rows["args.same.{0..8}@{0..2}"] == {"count": 27, "value": 7, "distinct": 1}
    assert sum(row["count"] for row in rows.values()) == (
        len(document["items"]) + document["items_more"]
    )
    shown = done("inspect", tmp_path, "--values").out
    assert "  args.sizes.{0..8}@{0..2} = 0 and 8 more" in shown
    assert "  args.exit_signal@{0..2} = signal.Signals(15)" in shown
    assert "  model.w._extra_state@{0..2} = null" in shown


def test_the_list_of_values_is_bounded(tmp_path: Path) -> None:
    many = argparse.Namespace(**{f"f{n:05}x": [n] * 3 for n in range(12_000)})
    document = migrate.inspect(saved(tmp_path / "in.pt", many), values=True).to_json()
    assert len(document["values"]) == 10_000
    assert any("more lines of values are not listed" in note for note in document["notes"])
    long = saved(tmp_path / "long.pt", argparse.Namespace(text="x" * 100_000, **{"n" * 5000: 1}))
    assert max(map(len, done("inspect", long, "--values").out.splitlines())) < 400


def test_what_every_rank_repeats_is_told_once_with_all_names(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for rank in range(8):
        held = arguments(odd=SimpleNamespace(rank=rank), more=Version())
        torch.save({"args": held, "model": {"w": torch.ones(1)}}, saved_in(tmp_path / "in", rank))
    found = migrate.inspect(tmp_path / "in").to_json()["outside"]
    assert [(one["name"], one["count"], one["paths"]) for one in found] == [
        ("types.SimpleNamespace", 8, ["args.odd"]),
        (f"{__name__}.Version", 8, ["args.more"]),
    ]
    failed = run("apply", tmp_path / "in", "-o", tmp_path / "out", "--output-format", "safetensors")
    assert failed.exit == 3
    assert failed.err.count("types.SimpleNamespace (") == 1
    assert "at args.odd and 7 more" in failed.err


class Version:
    """A class of the program."""


def saved_in(folder: Path, rank: int) -> Path:
    return folder / f"consolidated.{rank:02}.pth"
