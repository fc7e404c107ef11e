"""What parts of a grid hold beside the model: read as data, kept by part and given back, and what
is wrong in one of many parts.
"""

from __future__ import annotations

import enum
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import megatron_runs
import pytest
import torch
from cut_runs import part_name, whole_model, write_run
from marks import thorough
from work import steps

import migrate
from migrate import formats
from migrate.core.errors import MigrateError
from migrate.source.by_part import names_of, of_part
from migrate.source.index import Source
from migrate.source.pickle.alike import StreamsAlike
from migrate.source.pickle.jsonform import Ref, to_json
from migrate.source.pickle.tree import DictNode, to_nodes

EVEN = (((0, 1),), ((2, 3),))
LAST = part_name(0, 1)


def run_with(folder: Path, value: Callable[[str], Any], **cut: Any) -> Path:
    """A run whose parts have a field `x` in their arguments."""

    def change(name: str, root: dict[str, Any]) -> None:
        root["args"].x = value(name)

    return write_run(
        folder, whole_model(4, experts=cut.get("ep", 0)), EVEN, args={}, change=change, **cut
    )


def problems(folder: Path) -> set[str]:
    with pytest.raises(MigrateError) as caught:
        formats.open(folder)
    return {d.code for d in caught.value.diagnostics}


class Evil:
    def __reduce__(self) -> Any:
        import os

        return os.mkdir, ("/nowhere",)


def test_code_in_one_part_is_refused_with_its_place_and_nothing_runs(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", lambda name: Evil() if name == LAST else 1)
    with formats.open(folder) as source:
        ((name, count, paths),) = [(o.name, o.count, o.paths) for o in source.index.outside]
        assert (name, count, paths) == ("posix.mkdir", 1, ("args.x",))
    with pytest.raises(MigrateError) as caught:
        migrate.plan(folder, output_format="safetensors")
    assert {d.code for d in caught.value.diagnostics} == {"M935"}


def test_what_every_part_repeats_is_named_once(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", lambda name: Evil(), tp=2)
    with formats.open(folder) as source:
        ((name, count),) = [(one.name, one.count) for one in source.index.outside]
    assert (name, count) == ("posix.mkdir", 4)


def test_what_one_part_carries_is_kept_of_it(tmp_path: Path) -> None:
    """Into safetensors and out of it, without a word of it being read."""
    folder = run_with(tmp_path / "run", lambda name: Evil() if name == LAST else 1)
    out, back = tmp_path / "out", tmp_path / "back.pt"
    migrate.apply(folder, out, output_format="safetensors", allow=["carry"])
    migrate.apply(out, back, output_format="torch", allow=["carry"])
    for path in (out, back):
        with formats.open(path, carry=True) as source:
            assert [one.name for one in source.index.carried] == ["posix.mkdir"]
            (tree,) = source.index.tree.parts
            assert tree.root.get("args").get("x") == 1
            assert of_part(tree.root, LAST).get("args").get("x").name == "posix.mkdir"


class Color(enum.Enum):
    RED = 1


def test_an_enum_that_is_not_known_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("megatron.core.enums")
    ModelType = enum.Enum("ModelType", {"unheard_of": 9}, module="megatron.core.enums")
    module.ModelType = ModelType  # type: ignore[attr-defined]
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "megatron.core.enums", module)
    other = run_with(tmp_path / "run", lambda name: Color.RED)
    member = run_with(tmp_path / "member", lambda name: ModelType.unheard_of)
    for folder, named in (
        (other, f"{Color.__module__}.Color"),
        (member, "megatron.core.enums.ModelType"),
    ):
        with formats.open(folder) as source:
            ((name, count, paths),) = [(o.name, o.count, o.paths) for o in source.index.outside]
        assert (name, count, paths) == (named, 2, ("args.x",))


def test_arguments_that_hold_themselves_are_refused(tmp_path: Path) -> None:
    def change(name: str, root: dict[str, Any]) -> None:
        if name == LAST:
            root["args"].me = root["args"]

    write_run(tmp_path / "run", whole_model(4), EVEN, args={}, change=change)
    assert problems(tmp_path / "run") <= {"M931", "M932"}


def test_arguments_inside_of_each_other_are_compared_field_by_field(tmp_path: Path) -> None:
    folder = run_with(
        tmp_path / "run", lambda name: Namespace(same=[1], inner=Namespace(name=name, same=2.0))
    )
    with formats.open(folder) as source:
        (tree,) = source.index.tree.parts
        kept = tree.root.get("parts").get(LAST).get("args").get("x")
        assert [key for key, _ in kept.pairs] == ["inner"]
        assert [key for key, _ in kept.get("inner").pairs] == ["name"]
        found = of_part(tree.root, LAST).get("args").get("x")
        assert (found.kind, found.get("inner").kind) == ("Namespace", "Namespace")
        assert found.get("inner").get("name") == LAST


def test_one_dict_in_many_places_is_compared_and_put_back_once(tmp_path: Path) -> None:
    """Each dict stands in the next one twice: as a tree there are more of them than can be looked
    at.
    """

    def change(name: str, root: dict[str, Any]) -> None:
        held: dict[str, Any] = {"leaf": name}
        for _ in range(60):
            held = {"a": held, "b": held}
        root["note"] = held
        root["args"].note = held

    write_run(tmp_path, whole_model(4), (((0, 1),), ((2, 3),)), args={}, change=change)
    with formats.open(tmp_path) as source:
        assert source.index.tree is not None
        root = of_part(source.index.tree.parts[0].root, part_name(0, 1))
    assert root is not None
    found = root.get("note")
    for _ in range(60):
        assert found.get("a") is found.get("b")
        found = found.get("a")
    assert found.get("leaf") == part_name(0, 1)


def test_arguments_of_another_kind_in_one_part_are_that_part_s(tmp_path: Path) -> None:
    def change(name: str, root: dict[str, Any]) -> None:
        if name == LAST:
            root["args"] = vars(root["args"])

    write_run(tmp_path / "run", whole_model(4), EVEN, args={}, change=change)
    with formats.open(tmp_path / "run") as source:
        (tree,) = source.index.tree.parts
        assert tree.root.get("args").kind == "Namespace"
        assert of_part(tree.root, LAST).get("args").kind == "dict"


def test_arguments_of_very_many_fields_cost_work_in_proportion(tmp_path: Path) -> None:
    def work(count: int) -> int:
        def change(name: str, root: dict[str, Any]) -> None:
            for number in range(count):
                setattr(root["args"], f"field_{number}", number)

        folder = tmp_path / str(count)
        write_run(folder, whole_model(4), EVEN, args={}, change=change)
        # what is loaded once is loaded before
        formats.open(folder).close()
        return steps(lambda: formats.open(folder).close())

    assert work(8000) < 10 * work(1000)


@pytest.mark.thorough
def test_a_million_fields_are_read(tmp_path: Path) -> None:
    """As many as no script has: read, and kept of a part only where they differ."""

    def change(name: str, root: dict[str, Any]) -> None:
        for number in range(500_000):
            setattr(root["args"], f"f{number}", number if number != 7 else name)

    write_run(tmp_path / "run", whole_model(4), EVEN, args={}, change=change)
    with formats.open(tmp_path / "run") as source:
        (tree,) = source.index.tree.parts
        kept = tree.root.get("parts").get(LAST).get("args")
        assert [key for key, _ in kept.pairs] == ["rank", "f7"]


def spelled(source: Source, root: DictNode, tensors: dict[int, Any]) -> str:
    """All that a root says beside its model, with the bytes of its tensors."""

    def tensor(record: Any) -> Ref:
        stored = tensors[id(record)]
        content = bytearray(stored.spec.nbytes)
        if content:
            source.blobs[stored.blob].readinto(stored.offset, memoryview(content))
        return Ref(f"{stored.spec} {content.hex()}")

    pairs = tuple(pair for pair in root.pairs if not str(pair[0]).startswith("model"))
    return repr(to_json(to_nodes(DictNode("dict", pairs, None), tensor)))


def of_parts(source: Source) -> dict[str, str]:
    """What each part has beside its model, from the trees of a checkpoint."""
    index = source.index
    tree = index.tree
    tensors = {
        number: index.passed_through[key]
        for number, key in tree.names.items()
        if key in index.passed_through
    }
    grid = [] if index.grid is None else [name.partition("/")[0] for name in index.grid.parts]
    found: dict[str, str] = {}
    for rank, part in enumerate(tree.parts):
        for name in names_of(part.root) or grid[rank : rank + 1]:
            root = of_part(part.root, name) or part.root
            found[name] = spelled(source, root, tensors)
    return found


RUNS = [run for run in megatron_runs.runs() if run[1] in ("tp2-pp2", "tp2-ep2", "pp2-vpp2", "ep2")]


@pytest.mark.parametrize(("family", "grid"), thorough(RUNS, default=2))
def test_every_part_of_a_genuine_run_comes_out_of_what_its_parts_became(
    family: str, grid: str, tmp_path: Path
) -> None:
    """`args`, generators and all else, to the bit, through transformers' layout in safetensors, in
    one .pt file, and from one into the other.
    """
    run = megatron_runs.run_folder(family, "legacy", grid)
    wanted: dict[str, str] = {}
    for folder in sorted(megatron_runs.checkpoint(family, "legacy", grid).iterdir()):
        if folder.is_dir():
            with formats.open(folder) as source:
                wanted |= {
                    folder.name: spelled(source, source.index.tree.parts[0].root, _tensors(source))
                }
    to = {"to": f"megatron-gpt@{family}"}
    migrate.apply(run, tmp_path / "hf", output_format="safetensors", **to)
    migrate.apply(run, tmp_path / "one.pt", output_format="torch", **to)
    migrate.apply(tmp_path / "hf", tmp_path / "again.pt", output_format="torch")
    migrate.apply(tmp_path / "one.pt", tmp_path / "again", output_format="safetensors")
    for name in ("hf", "one.pt", "again.pt", "again"):
        with formats.open(tmp_path / name) as source:
            found = of_parts(source)
        assert found.keys() == wanted.keys()
        for part, text in wanted.items():
            assert found[part] == text, (name, part)


def _tensors(source: Source) -> dict[int, Any]:
    index = source.index
    return {
        number: {**index.tensors, **index.passed_through}[key]
        for number, key in index.tree.names.items()
    }


def test_parts_read_as_one_form_are_what_each_is_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(name: str, root: dict[str, Any]) -> None:
        root["args"].x = name
        root["rng_state"] = [{"numbers": (3, (1, 2, len(name), hash(name))), "w": torch.ones(3)}]
        root["model"]["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None

    cut = {"tp": 4, "ep": 2}
    folder = write_run(
        tmp_path / "run", whole_model(4, experts=2), EVEN, args={}, change=change, **cut
    )

    def told() -> Any:
        with formats.open(folder) as source:
            index = source.index
            order = [list(held) for held in (index.tensors, index.items, index.grid.replicas)]
            return (
                order,
                dict(index.tensors),
                repr(index.items),
                dict(index.passed_through),
                dict(index.grid.replicas),
                index.notes,
                of_parts(source),
            )

    known = told()
    assert len(known[-1]) == 16
    monkeypatch.setattr(StreamsAlike, "_known", lambda *_: None)
    assert told() == known


def test_a_run_that_becomes_transformers_needs_no_permission(tmp_path: Path) -> None:
    run = megatron_runs.run_folder("llama", "legacy", "tp2-pp2")
    plan = migrate.plan(run, to="megatron-gpt@llama")
    assert plan.document["allow"] == []
    assert not plan.document["losses"]


def test_parts_of_which_one_lacks_a_value_get_back_what_each_had(tmp_path: Path) -> None:
    def change(name: str, root: dict[str, Any]) -> None:
        if name == LAST:
            del root["iteration"]
            root["more"] = (name, {"a": torch.ones(2)})
            root["iteration"] = 10

    write_run(tmp_path / "run", whole_model(4), EVEN, args={}, change=change)
    with formats.open(tmp_path / "run") as source:
        (tree,) = source.index.tree.parts
        keys = [key for key, _ in of_part(tree.root, LAST).pairs]
    assert keys == ["args", "checkpoint_version", "model", "more", "iteration"]
