"""What is outside the allow-list, written again where that is allowed: nothing runs here, no call
comes or goes, and what is no stream for the reader is none for the writer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import ATTACKS, Attack
from hypothesis import given
from hypothesis import strategies as st
from test_refused import Acts, harmless, refused, run

import migrate
from migrate.core.errors import CheckpointError
from migrate.source.carrying import carry, walk_nodes
from migrate.source.pickle import machine, nodes, policy
from migrate.source.pickle.emit import emit
from migrate.source.pickle.nodes import Call, Dict, Global, Persistent, Set
from migrate.source.pickle.tree import to_nodes
from migrate.source.unread import Canonical

FILES = [attack for attack in ATTACKS if attack.kind in ("pt", "legacy", "dcp")]
# what is written, and its format
WAYS = {"made.pt": "torch", "made": "safetensors", "made-dcp": "dcp"}


@pytest.fixture(scope="module")
def acts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Acts]]:
    """Every hostile file, carried into each format that can carry."""
    where = tmp_path_factory.mktemp("carried")
    out: dict[str, tuple[Path, Acts]] = {}
    for attack in FILES:
        folder = where / attack.name
        folder.mkdir()
        one = Acts(str(where / f"{attack.name}.canary"), folder)
        path = attack.build(folder, one.canary)
        out[attack.name] = path, one
        for name, form in WAYS.items():
            words = ["--output-format", form, "--allow", "carry", "--allow", "drop"]
            one.command("apply", path, "-o", folder / name, "-q", *words)
    run({name: one for name, (_, one) in out.items()}, where)
    return out


def names_in(path: Path) -> set[str]:
    return {one["name"] for one in migrate.inspect(path).to_json()["outside"]}


@pytest.mark.parametrize("attack", FILES, ids=lambda attack: attack.name)
def test_a_hostile_file_is_carried_without_effect_or_refused(
    attack: Attack, acts: dict[str, tuple[Path, Acts]]
) -> None:
    path, one = acts[attack.name]
    for job, answer in zip(one.jobs, one.answers, strict=True):
        if answer["exit"] != 0:
            refused(job, answer, {3})
            continue
        assert attack.carried, answer
        harmless(job, answer)
        made = Path(job["arguments"][0][3])
        assert names_in(made) == names_in(path)
        found = migrate.diff(path, made).to_json()
        assert [line for line in found["others"] if "not decoded" in line] == []


def test_what_the_machine_refuses_is_not_carried() -> None:
    assert [attack.name for attack in FILES if not attack.carried]


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from([Global("os", "system"), Global("builtins", "eval"), Global("a.b", "C")]),
    st.sampled_from([Persistent(("storage", Global("torch", "FloatStorage"), "0", "cuda:0", 3))]),
)


def _call(drawn: tuple[Any, ...]) -> Call:
    how, arguments, state, items, pairs = drawn
    made = Call(how, Global("posix", "mknod"), tuple(arguments))
    made.items, made.pairs = items or None, [(str(n), held) for n, held in enumerate(pairs)] or None
    if state:
        made.state = state[0]
    return made


def _held(inner: Any) -> Any:
    several = st.lists(inner, max_size=3)
    return st.one_of(
        several,
        several.map(tuple),
        several.map(lambda held: Dict([(f"k{n}", one) for n, one in enumerate(held)])),
        st.booleans().map(lambda frozen: Set(frozen, ["a", "b"])),
        st.tuples(
            st.sampled_from(["reduce", "newobj"]), several, st.lists(inner, max_size=1), several,
            several,
        ).map(_call),
    )  # fmt: skip


@given(st.recursive(LEAVES, _held, max_leaves=20))
def test_a_carried_stream_reads_to_the_same_nodes_again(inner: Any) -> None:
    root = Dict([("x", Call("reduce", Global("posix", "mknod"), (inner, inner)))])
    sizes = {"0": 12}
    digest = Canonical(lambda key: key.encode()).digest
    found = policy.decode(machine_read(emit(root, name="x")), "x", sizes if stored(root) else {})
    kept = carry(found.tree, {}, sizes)

    def tensor(record: Any) -> Call:
        storage = Persistent(("storage", Global("torch", "ByteStorage"), "0", "cpu", 12))
        return Call("reduce", Global("torch._utils", "_rebuild_tensor_v2"), (storage,))

    again = machine_read(emit(to_nodes(kept, tensor), name="x"))
    assert digest(again) == digest(machine_read(emit(root, name="x")))
    assert names_of(again) == names_of(root)


def machine_read(stream: bytes) -> Any:
    return machine.read_pickle(stream, nodes.ARCHIVE, name="x", persistent=True)


def stored(root: Any) -> bool:
    return any(type(node) is Persistent for node in walk_nodes(root))


def names_of(root: Any) -> set[tuple[str, str]]:
    spelled = {("_codecs", "encode"), ("builtins", "set"), ("builtins", "frozenset")}
    return {(node.module, node.name) for node in walk_nodes(root) if type(node) is Global} - spelled


@pytest.mark.parametrize("name", ["__builtin__.eval", "builtins.xrange", "a-b.c", "a.b.<locals>"])
def test_a_name_that_would_be_read_as_another_is_not_written(name: str) -> None:
    module, _, last = name.rpartition(".")
    with pytest.raises(CheckpointError) as caught:
        emit(Call("reduce", Global(module, last), ()), name="x")
    assert caught.value.diagnostics[0].code == "M933"


class Odd:
    """A class of the program."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def test_carried_values_stand_in_every_account_and_keep_their_storages(tmp_path: Path) -> None:
    odd = Odd(t=torch.arange(6.0)[2:4], n=1)
    held = {"model": {"w": torch.ones(3), "odd": odd}, "args": Odd(inner=odd), "epoch": 3}
    torch.save(held, tmp_path / "in.pt")
    name = f"{__name__}.Odd"
    plan = json.loads(
        migrate.plan(tmp_path / "in.pt", output_format="torch", allow=["carry"]).to_json()
    )
    assert any("carried without being read" in note and name in note for note in plan["notes"])
    for form, out in (("torch", "out.pt"), ("safetensors", "st"), ("dcp", "dcp")):
        answer = migrate.apply(
            tmp_path / "in.pt", tmp_path / out, output_format=form, allow=["carry"]
        )
        assert any(name in note for note in answer.to_json()["notes"])
        assert name in names_in(tmp_path / out)
        assert migrate.verify(tmp_path / out, source=tmp_path / "in.pt", allow=["carry"]).equal
    stamp = json.loads((tmp_path / "st" / "migrate.history.json").read_text())
    assert stamp["carried"] == [name]
    assert migrate.history(tmp_path / "st").to_json()["carried"] == [name]
    with pytest.raises(CheckpointError, match="M935"):
        migrate.apply(tmp_path / "st", tmp_path / "no.pt", output_format="torch")
    migrate.apply(tmp_path / "st", tmp_path / "back.pt", output_format="torch", allow=["carry"])
    assert migrate.diff(tmp_path / "in.pt", tmp_path / "back.pt").equal
    with torch.serialization.safe_globals([Odd]):
        found = torch.load(tmp_path / "back.pt", weights_only=True)
    assert found["args"].inner is found["model"]["odd"]
    assert torch.equal(found["args"].inner.t, odd.t)
    # one byte of a storage is enough to differ, in each format
    odd.t[0] = 7
    torch.save(held, tmp_path / "other.pt")
    migrate.apply(
        tmp_path / "other.pt", tmp_path / "st2", output_format="safetensors", allow=["carry"]
    )
    assert not migrate.diff(tmp_path / "st", tmp_path / "st2").equal
    assert not migrate.diff(tmp_path / "in.pt", tmp_path / "other.pt").equal
    migrate.apply(tmp_path / "dcp", tmp_path / "again.pt", output_format="torch", allow=["carry"])
    assert migrate.diff(tmp_path / "in.pt", tmp_path / "again.pt", tensors_only=True).equal
    with torch.serialization.safe_globals([Odd]):
        found = torch.load(tmp_path / "again.pt", weights_only=True)
    assert (found["args"].inner.n, found["model"]["odd"].t.tolist()) == (1, [2.0, 3.0])
    with pytest.raises(CheckpointError, match="M935"):
        migrate.apply(tmp_path / "dcp", tmp_path / "no.pt", output_format="torch")
