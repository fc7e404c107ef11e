"""From every kind of checkpoint to every other, with rules and without, and back.

Sources are written and outputs are read by the libraries that own the formats, and what must come
out of the rules is written down in torch's words (`resharding.new_tensors`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from built import module
from commandline import done
from dcp_folders import rows, save
from marks import covering
from resharding import BESIDE, RULE, Tensors, bits, new_tensors, old_tensors, same_bits
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch_compare import same as compare

import migrate
from migrate.core.errors import CheckpointError

HEAD = 'id: demo/2/x\ntitle: x\nwhy: x\nlineage: demo\nedge: ["1", "2"]\n'
INDEX = "model.safetensors.index.json"


class Form(NamedTuple):
    """One kind of checkpoint: `write` makes it below a folder, by the library that owns it, and
    `read` gives what a checkpoint at a path holds. `name` and `options` are for `apply`, and
    `nested` says whether values can stand beside the tensors.
    """

    format: str
    name: str
    options: Mapping[str, Any]
    write: Callable[[Path, Tensors], Any]
    read: Callable[[Path], Any]
    nested: bool


def cut(tensors: Tensors) -> dict[str, Any]:
    """Chunks as ranks have them, by rows or by columns, the second of three without any."""
    boxes = {}
    for number, (key, tensor) in enumerate(tensors.items()):
        if tensor.ndim:
            dim = number % tensor.ndim
            first = (tensor.shape[dim] + 1) // 2
            counts = (first, 0, tensor.shape[dim] - first)
            boxes[f"model.{key}"] = [
                box for box in rows(tensor.shape, counts, dim) if 0 not in box[1]
            ]
    return boxes


def write_dcp(folder: Path, tensors: Tensors) -> Path:
    return save(folder / "in", {"model": tensors, **BESIDE}, cut(tensors), files=2)


def read_dcp(path: Path) -> Any:
    dcp_to_torch_save(path, path.with_name(f"{path.name}.read.pt"))
    return torch.load(path.with_name(f"{path.name}.read.pt"), weights_only=True)


def write_flat(folder: Path, tensors: Tensors) -> Path:
    boxes = {key.removeprefix("model."): one for key, one in cut(tensors).items()}
    return save(folder / "in", tensors, boxes)


def write_shards(folder: Path, tensors: Tensors) -> Path:
    out = folder / "in"
    out.mkdir()
    keys = list(tensors)
    names = {}
    for number in (1, 2):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file({key: tensors[key] for key in keys[number - 1 :: 2]}, out / name)
        names |= dict.fromkeys(keys[number - 1 :: 2], name)
    (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return out


def read_folder(path: Path) -> Any:
    found: Tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def write_file(folder: Path, tensors: Tensors) -> Path:
    save_file(tensors, folder / "in.safetensors")
    return folder / "in.safetensors"


def write_pt(folder: Path, tensors: Tensors) -> Path:
    torch.save({"model": tensors, **BESIDE}, folder / "in.pt")
    return folder / "in.pt"


def write_bin(folder: Path, tensors: Tensors) -> Path:
    (folder / "in").mkdir()
    torch.save({"model": tensors, **BESIDE}, folder / "in" / "pytorch_model.bin")
    return folder / "in"


def read_pt(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def read_bin(path: Path) -> Any:
    (file,) = path.glob("*.bin")
    return read_pt(file)


DCP = {"output_format": "dcp"}
ST = {"output_format": "safetensors"}
PT = {"output_format": "torch"}
FILES = {
    "dcp": Form("dcp", "out", DCP, write_dcp, read_dcp, True),
    "dcp cut": Form("dcp", "out", {**DCP, "chunks": 3}, write_flat, read_dcp, False),
    "safetensors folder": Form("safetensors", "out", ST, write_shards, read_folder, False),
    "safetensors file": Form("safetensors", "out.safetensors", ST, write_file, load_file, False),
    "torch file": Form("torch", "out.pt", PT, write_pt, read_pt, True),
    "torch folder": Form("torch", "out", PT, write_bin, read_bin, True),
}
LIVE = {"state dict": dict, "module": module}


@pytest.fixture
def rule(tmp_path: Path) -> Path:
    (tmp_path / "rule.yaml").write_text(RULE)
    return tmp_path / "rule.yaml"


def assert_holds(found: Any, tensors: Tensors, *, nested: bool) -> None:
    """The tensors bit for bit and, where the source had them, the values beside them."""
    if nested:
        assert {key: value for key, value in found.items() if key != "model"} == BESIDE
    held = found["model"] if nested else found
    assert held.keys() == tensors.keys()
    assert [key for key in tensors if not same_bits(held[key], tensors[key])] == []


@pytest.mark.parametrize(
    ("source", "target", "ruled"), covering(list(FILES), list(FILES), [False, True], rounds=3)
)
def test_from_files_to_files_and_back(
    source: str, target: str, ruled: bool, rule: Path, tmp_path: Path
) -> None:
    one, other = FILES[source], FILES[target]
    old, new = old_tensors(), new_tensors() if ruled else old_tensors()
    path, out = one.write(tmp_path, old), tmp_path / other.name
    rules = {"rules": rule} if ruled else {}
    answer = migrate.apply(path, out, **other.options, **rules, fsync=False)
    assert answer.downgrade.exact, answer.downgrade
    # safetensors hold values in a file beside them
    assert_holds(other.read(out), new, nested=one.nested and other.format != "safetensors")
    assert migrate.verify(out, source=path, **rules).equal
    if not ruled:
        assert migrate.diff(path, out).equal

    report = migrate.inspect(out)
    assert (report.format, report.tensors) == (other.format, len(new))
    assert report.at == ("model" if one.nested else "")
    told = migrate.history(out)
    edges = [(edge.lineage, edge.from_, edge.to) for edge in told.applied]
    assert edges == [("demo", "1", "2")] * ruled
    if other.format == "dcp":
        stamp = json.loads((out / "migrate.history.json").read_text())
        assert len(stamp["applied"]) == len(edges)
        assert (out / ".metadata").exists()

    back = tmp_path / ("back" + path.suffix)
    plain = {key: value for key, value in one.options.items() if key != "chunks"}
    if ruled:
        answer = migrate.downgrade(out, back, **rules, **plain, fsync=False)
    else:
        answer = migrate.apply(out, back, **plain, fsync=False)
    assert_holds(one.read(back), old, nested=one.nested)
    assert migrate.diff(path, back).equal
    assert migrate.verify(back, source=out, **rules).equal


@pytest.mark.parametrize(
    ("target", "source", "ruled"), covering(list(FILES), list(LIVE), [False, True], rounds=2)
)
def test_from_memory_to_files_and_into_modules(
    source: str, target: str, ruled: bool, rule: Path, tmp_path: Path
) -> None:
    other = FILES[target]
    old, new = old_tensors(), new_tensors() if ruled else old_tensors()
    held: Any = LIVE[source](old)
    if source == "module":
        held.load_state_dict(old)
    rules = {"rules": rule} if ruled else {}
    out = tmp_path / other.name
    migrate.apply(held, out, **other.options, **rules, fsync=False)
    assert_holds(other.read(out), new, nested=False)
    assert len(migrate.history(out).applied) == ruled
    assert migrate.inspect(out).tensors == len(new)
    assert migrate.verify(out, source=held, **rules).equal
    # undone while it is loaded, and as it is
    for wanted, how in ((new, {}), (old, rules)):
        if how:
            migrate.downgrade(out, tmp_path / f"back{out.suffix}", **how, fsync=False)
        filled = module(wanted)
        migrate.load(filled, tmp_path / f"back{out.suffix}" if how else out)
        assert_holds(filled.state_dict(), wanted, nested=False)


@pytest.mark.parametrize("ruled", [False, True], ids=["as it is", "by rules"])
@pytest.mark.parametrize("source", FILES)
def test_from_files_into_modules(source: str, ruled: bool, rule: Path, tmp_path: Path) -> None:
    one = FILES[source]
    path, wanted = one.write(tmp_path, old_tensors()), new_tensors() if ruled else old_tensors()
    for device in ("cpu", "meta"):
        filled = module(wanted, device)
        migrate.load(
            filled,
            path,
            **({"rules": rule} if ruled else {}),
            **({"device": "cpu"} if device == "meta" else {}),
        )
        assert_holds(filled.state_dict(), wanted, nested=False)


JOIN = (
    HEAD
    + """
rules:
  - {name: n, from: "norm@{r:int}", to: norm, via: [{same: {over: r, count: 2}}]}
  - name: rows
    from: "{k:up|embed}.weight@{r:int}"
    to: "{k}.weight"
    via: [{concat: {over: r, dim: 0, count: 2}}]
  - name: columns
    from: "down.weight@{r:int}"
    to: down.weight
    via: [{concat: {over: r, dim: 1, count: 2}}]
"""
)
CUT = (
    HEAD
    + """
rules:
  - {name: n, from: norm, to: "norm@{r:int}", via: [{copy: {into: r, count: 2}}]}
  - name: rows
    from: "{k:up|embed}.weight"
    to: "{k}.weight@{r:int}"
    via: [{split: {into: r, dim: 0, count: 2}}]
  - name: columns
    from: down.weight
    to: "down.weight@{r:int}"
    via: [{split: {into: r, dim: 1, count: 2}}]
"""
)


def joined() -> Tensors:
    return {
        "norm": bits(torch.float32, 5, seed=1),
        "up.weight": bits(torch.bfloat16, 6, 5, seed=2),
        "embed.weight": bits(torch.float32, 4, 5, seed=3),
        "down.weight": bits(torch.bfloat16, 5, 6, seed=4),
    }


def of_rank(rank: int) -> Tensors:
    """The part of `joined` that a rank of two holds."""
    whole = joined()
    return {
        "norm": whole["norm"],
        "up.weight": whole["up.weight"].chunk(2)[rank],
        "embed.weight": whole["embed.weight"].chunk(2)[rank],
        "down.weight": whole["down.weight"].chunk(2, 1)[rank].contiguous(),
    }


def write_ranks(folder: Path, ending: str) -> Path:
    for rank in range(2):
        home = folder / "in" / f"mp_rank_{rank:02}"
        home.mkdir(parents=True)
        if ending == "pt":
            part = {key: one.clone() for key, one in of_rank(rank).items()}
            torch.save({"model": part, **BESIDE}, home / "model_optim_rng.pt")
        else:
            save_file(of_rank(rank), home / "model.safetensors")
    return folder / "in"


def read_ranks(path: Path, ending: str) -> list[Any]:
    read = read_pt if ending.startswith("pt") else load_file
    return [read(file) for file in sorted(path.rglob(f"*.{ending}"))]


@pytest.mark.parametrize(("target", "ending"), covering(list(FILES), ["pt", "safetensors"]))
def test_ranks_are_joined_and_cut_again(ending: str, target: str, tmp_path: Path) -> None:
    other, rule = FILES[target], tmp_path / "rule.yaml"
    rule.write_text(JOIN)
    path, out, back = write_ranks(tmp_path, ending), tmp_path / other.name, tmp_path / "back"
    nested = ending == "pt"
    answer = migrate.apply(path, out, rules=rule, **other.options, fsync=False)
    assert answer.downgrade.exact, answer.downgrade
    assert_holds(other.read(out), joined(), nested=nested and other.format != "safetensors")
    assert migrate.verify(out, source=path, rules=rule).equal
    assert len(migrate.history(out).applied) == 1
    assert migrate.inspect(out).tensors == 4
    form = {"output_format": "torch" if nested else "safetensors"}
    migrate.downgrade(out, back, rules=rule, **form, fsync=False)
    found = read_ranks(back, ending)
    assert len(found) == 2
    for rank, held in enumerate(found):
        assert_holds(held, of_rank(rank), nested=nested)
    assert migrate.diff(path, back).equal
    assert migrate.verify(back, source=out, rules=rule).equal


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_ranks_are_joined_into_modules(ending: str, tmp_path: Path) -> None:
    (tmp_path / "rule.yaml").write_text(JOIN)
    filled = module(joined())
    migrate.load(filled, write_ranks(tmp_path, ending), rules=tmp_path / "rule.yaml")
    assert_holds(filled.state_dict(), joined(), nested=False)


@pytest.mark.parametrize(("source", "form"), covering(list(FILES), ["torch", "safetensors"]))
def test_checkpoints_are_cut_for_ranks_and_joined_again(
    source: str, form: str, tmp_path: Path
) -> None:
    one, rule = FILES[source], tmp_path / "rule.yaml"
    rule.write_text(CUT)
    path, out, back = one.write(tmp_path, joined()), tmp_path / "out", tmp_path / "back"
    migrate.apply(path, out, rules=rule, output_format=form, fsync=False)
    found = read_ranks(out, "pth" if form == "torch" else form)
    assert len(found) == 2
    for rank, held in enumerate(found):
        assert_holds(held, of_rank(rank), nested=one.nested and form == "torch")
    assert migrate.verify(out, source=path, rules=rule).equal
    assert len(migrate.history(out).applied) == 1
    assert migrate.inspect(out).tensors == 8
    back = back.with_suffix(path.suffix)
    plain = {key: value for key, value in one.options.items() if key != "chunks"}
    migrate.downgrade(out, back, rules=rule, **plain, fsync=False)
    assert_holds(one.read(back), joined(), nested=one.nested)
    assert migrate.diff(path, back).equal


def test_parts_of_ranks_are_refused_where_one_tree_is_written(tmp_path: Path) -> None:
    rule = tmp_path / "rule.yaml"
    rule.write_text(CUT)
    for name in ("dcp", "dcp cut"):
        (tmp_path / name).mkdir()
        path = FILES[name].write(tmp_path / name, joined())
        with pytest.raises(CheckpointError, match=r"M916.*@0"):
            migrate.apply(path, tmp_path / "out", rules=rule)
    with pytest.raises(CheckpointError, match=r"M916.*@0"):
        migrate.apply(write_ranks(tmp_path, "pt"), tmp_path / "out", output_format="dcp")
    assert not (tmp_path / "out").exists()


def test_tied_tensors_of_memory_are_written_each(tmp_path: Path) -> None:
    shared = bits(torch.float32, 4, 3, seed=1)
    held = {"embed": shared, "head": shared}
    migrate.apply(held, tmp_path / "out", output_format="dcp", fsync=False)
    assert_holds(read_dcp(tmp_path / "out"), held, nested=False)
    assert migrate.verify(tmp_path / "out", source=held).equal


BARE = HEAD + 'keep: ["{k...}"]\nrules: [{name: r, from: a, to: c}]\n'
PLACES = ("dcp", "torch file", "safetensors folder")


@pytest.mark.parametrize("target", PLACES)
@pytest.mark.parametrize("source", PLACES[:2])
def test_rules_work_on_a_dict_in_a_list_that_is_named_by_its_place(
    source: str, target: str, tmp_path: Path
) -> None:
    one, other, rule = FILES[source], FILES[target], tmp_path / "rule.yaml"
    rule.write_text(BARE)
    a, b, c = (bits(torch.float32, 4, 3, seed=seed) for seed in range(3))
    made = {"models": [{"a": a}, {"inner": [{"b": b}], "b": b + 1, "a": c}], "step": 3}
    path = tmp_path / f"in{'' if source == 'dcp' else '.pt'}"
    save(path, made) if source == "dcp" else torch.save(made, path)
    for at in ("models", "models.2", "models.01", "models.-1", "models.1.b"):
        with pytest.raises(CheckpointError, match="M945"):
            migrate.inspect(path, at=at)
    with pytest.raises(CheckpointError, match=r"it is a list: .*models\.0"):
        migrate.inspect(path, at="models")
    deeper = migrate.inspect(path, at="models.1.inner.0")
    assert (deeper.at, deeper.tensors) == ("models.1.inner.0", 1)
    out, options = tmp_path / other.name, {"rules": rule, "at": "models.0"}
    answer = migrate.apply(path, out, **options, **other.options)
    assert answer.downgrade.exact, answer.downgrade
    at = {} if target == "safetensors folder" else {"at": "models.0"}
    assert migrate.inspect(out, **at).at == "models.0"
    wanted = {**made, "models": [{"c": a}, made["models"][1]]}
    if target != "safetensors folder":
        compare(other.read(out), wanted)
    assert migrate.verify(out, source=path, **options).equal
    back = tmp_path / f"back{path.suffix}"
    migrate.downgrade(out, back, **options, **one.options)
    compare(one.read(back), made)
    assert migrate.diff(path, back, at="models.0").equal


@pytest.mark.parametrize("target", FILES)
def test_the_command_line_says_of_a_distributed_checkpoint_what_it_says_of_others(
    target: str, rule: Path, tmp_path: Path
) -> None:
    other = FILES[target]
    path, out, back = write_dcp(tmp_path, old_tensors()), tmp_path / other.name, tmp_path / "back"
    form = other.options["output_format"]
    said = ["--rules", rule, "--no-fsync"]
    cut = ["--chunks", other.options["chunks"]] if "chunks" in other.options else []
    done("apply", path, "-o", out, "--output-format", form, *cut, *said)
    shown = done("inspect", out, "--format", "json").json
    assert (shown["format"], shown["at"], shown["tensors"]) == (
        other.format,
        "model",
        len(new_tensors()),
    )
    assert {"path": "step", "value": 7} in shown["items"]
    told = done("history", out, "--format", "json").json["applied"]
    assert [(one["from"], one["to"]) for one in told] == [("1", "2")]
    assert done("verify", out, "--source", path, "--rules", rule, "--format", "json").json["equal"]
    done("diff", path, out, exit=1)
    done("downgrade", out, "-o", back, "--output-format", "dcp", *said)
    done("diff", path, back)
    assert_holds(read_dcp(back), old_tensors(), nested=True)
