"""What is not decoded is compared all the same, and what is not compared is said."""

from __future__ import annotations

import dataclasses
import enum
import io
import json
import pickle
import zipfile
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import migrate
from migrate.cli.main import run
from migrate.source import unread
from migrate.source.pickle.machine import read_pickle
from migrate.source.pickle.nodes import ARCHIVE
from migrate.source.unread import Canonical, TooManyError


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Settings:
    rate: float
    names: list[str]
    extra: Any = None


class Text(str):
    __slots__ = ()


def saved(path: Path, value: Any, **options: Any) -> Path:
    torch.save(
        {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "args": value, "epoch": 3},
        path,
        **options,
    )
    return path


def difference(a: Path, b: Path, **options: Any) -> dict[str, Any]:
    return migrate.diff(a, b, **options)


def namespace(**changed: Any) -> SimpleNamespace:
    inside = {
        "rate": 0.1,
        "seen": {"b", "a", "c"},
        "raw": b"\x00\xff",
        "colour": Colour.RED,
        "t": torch.arange(4.0),
        "n": (1, (2, "x")),
    }
    return SimpleNamespace(**{**inside, **changed})


OTHERS: dict[str, Any] = {
    "a number": {"rate": 0.2}, "the sign of zero": {"rate": -0.0}, "a type": {"rate": 1},
    "a member": {"seen": {"b", "a", "d"}},
    "a byte": {"raw": b"\x00\xfe"}, "another enum": {"colour": Colour.BLUE},
    "in a tuple": {"n": (1, (3, "x"))},
    "inside a storage": {"t": torch.tensor([0.0, 1.0, 2.0, 4.0])},
    "the dtype": {"t": torch.arange(4, dtype=torch.int32)},
    "the view": {"t": torch.arange(4.0).reshape(2, 2)}, "one more": {"more": None},
    "None": {"t": None},
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_a_namespace_that_differs_in_one_thing_is_another(what: str, tmp_path: Path) -> None:
    a, b = (
        saved(tmp_path / "a.pt", namespace()),
        saved(tmp_path / "b.pt", namespace(**OTHERS[what])),
    )
    found = difference(a, b)
    assert not found.equal
    assert found.tensors_equal
    assert [
        text
        for text in found.to_json()["others"]
        if text.startswith("value args (types.SimpleNamespace, not decoded) differs")
    ]


VALUES: dict[str, Any] = {
    "namespace": namespace(), "enum": [Colour.RED, {Colour.BLUE: 1}],
    "dataclass": Settings(0.5, ["a", "b"], OrderedDict(z=1, y=[2])),
    "in a list": [1, [Settings(0.5, [])]], "a subclass of str": Text("x"),
    "nested": SimpleNamespace(a=SimpleNamespace(b={1: 2})),
    "complex and bytearray": SimpleNamespace(a=1j, b=bytearray(b"xy"), c=frozenset({1, (2, 3)}),
    d=2**80, e=b""),
}  # fmt: skip


@pytest.mark.parametrize("what", VALUES)
def test_the_same_value_is_equal_by_its_stream_and_that_is_said(what: str, tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a.pt", VALUES[what]), saved(tmp_path / "b.pt", VALUES[what])
    found = difference(a, b)
    assert found.equal
    (note,) = found.to_json()["notes"]
    assert note.startswith(
        "not decoded, and equal by its canonical pickle stream and the bytes of its storages: args"
    )
    lost = tmp_path / "lost.pt"
    torch.save({"model": {"w": torch.arange(6.0).reshape(2, 3)}, "epoch": 3}, lost)
    for one, other, side in ((a, lost, "A"), (lost, a, "B")):
        found = difference(one, other)
        assert not found.equal
        assert found.to_json()["others"][0].endswith(f"not decoded) is only in {side}")


@pytest.mark.parametrize(
    "options",
    [{"pickle_protocol": 4}, {"pickle_protocol": 5}, {"_use_new_zipfile_serialization": False}],
)
@pytest.mark.parametrize("what", VALUES)
def test_protocol_and_container_do_not_count(
    what: str, options: dict[str, Any], tmp_path: Path
) -> None:
    a, b = saved(tmp_path / "a.pt", VALUES[what]), saved(tmp_path / "b.pt", VALUES[what], **options)
    assert difference(a, b).equal


def test_texts_that_are_one_object_or_two_are_the_same_and_lists_are_not(tmp_path: Path) -> None:
    text, one = "".join(["a", "b"]), [1]
    a = saved(tmp_path / "a.pt", SimpleNamespace(x=text, y=text, l=one, m=one))
    b = saved(tmp_path / "b.pt", SimpleNamespace(x=text, y="".join(["a", "b"]), l=one, m=one))
    c = saved(tmp_path / "c.pt", SimpleNamespace(x=text, y=text, l=one, m=[1]))
    assert difference(a, b).equal
    assert not difference(a, c).equal


def test_a_stream_whose_memo_is_numbered_otherwise_is_the_same(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.pt", SimpleNamespace(x="one", y=["two"]))
    stream = zipfile.ZipFile(a).read("a/data.pkl")
    value = SimpleNamespace(x="one", y=["two"])
    plain = pickle.dumps(value, 2)
    padded = pickle.dumps(("unused", value), 2)
    # the pickler without a memo: each PUT is left out, and nothing is read from it
    fast = io.BytesIO()
    pickler = pickle.Pickler(fast, 2)
    pickler.fast = True
    pickler.dump(value)
    digests = {
        Canonical(lambda key: None).digest(node)
        for node in (
            read_pickle(plain, ARCHIVE, name="s"),
            read_pickle(padded, ARCHIVE, name="s")[1],
            read_pickle(fast.getvalue(), ARCHIVE, name="s"),
        )
    }
    assert len(digests) == 1
    assert b"SimpleNamespace" in stream


def test_two_tensors_of_one_storage_are_not_two_storages(tmp_path: Path) -> None:
    base = torch.arange(4.0)
    a = saved(tmp_path / "a.pt", SimpleNamespace(x=base, y=base[:]))
    b = saved(tmp_path / "b.pt", SimpleNamespace(x=base, y=base.clone()))
    again = saved(tmp_path / "again.pt", SimpleNamespace(x=base, y=base[:]))
    assert difference(a, again).equal
    assert not difference(a, b).equal


def test_the_attributes_of_a_dict_and_a_whole_file_count_too(tmp_path: Path) -> None:
    paths = []
    for number in (1, 2):
        state = OrderedDict(w=torch.ones(2))
        state.args = SimpleNamespace(a=number)  # type: ignore[attr-defined]
        torch.save(state, tmp_path / f"state{number}.pt")
        torch.save([torch.ones(2), SimpleNamespace(a=number)], tmp_path / f"list{number}.pt")
        paths.append((tmp_path / f"state{number}.pt", tmp_path / f"list{number}.pt"))
    for a, b in zip(*paths, strict=True):
        assert not difference(a, b).equal
        assert difference(a, a).equal
        assert difference(a, a).to_json()["notes"]


def with_attributes(value: Any, **attributes: Any) -> Any:
    value.__dict__.update(attributes)
    return value


def weight(**attributes: Any) -> Any:
    return with_attributes(torch.arange(3.0), **attributes)


DECODED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "an attribute of a dict": (
        lambda: with_attributes(OrderedDict(a=1), z=1),
        lambda: with_attributes(OrderedDict(a=1), z=2),
    ),
    "an attribute that only one dict has": (
        lambda: with_attributes(OrderedDict(a=1), z=1),
        lambda: OrderedDict(a=1),
    ),
    "what a defaultdict calls": (
        lambda: defaultdict(list, a=[1]),
        lambda: defaultdict(int, a=[1]),
    ),
    "how long a deque may be": (lambda: deque([1], 3), lambda: deque([1], 5)),
    "an attribute of a tensor": (lambda: [weight(z=1)], lambda: [weight(z=2)]),
    "an attribute that only one tensor has": (lambda: [weight(z=1)], lambda: [weight()]),
    "a parameter": (lambda: [torch.nn.Parameter(weight())], lambda: [weight()]),
    "a tensor that wants gradients": (lambda: [weight().requires_grad_()], lambda: [weight()]),
}


@pytest.mark.parametrize("what", DECODED)
def test_what_is_decoded_beside_the_weights_counts_with_its_attributes(
    what: str, tmp_path: Path
) -> None:
    one, other = (saved(tmp_path / f"{n}.pt", make()) for n, make in enumerate(DECODED[what]))
    again = saved(tmp_path / "again.pt", DECODED[what][0]())
    assert not difference(one, other).equal
    assert not difference(other, one).equal
    assert difference(one, again).equal


def test_attributes_of_weights_and_of_a_whole_file_count(tmp_path: Path) -> None:
    paths = []
    for number in (1, 2):
        torch.save({"model": {"w": weight(z=number)}}, tmp_path / f"weight{number}.pt")
        root = with_attributes(OrderedDict(model={"w": weight()}), z=number)
        torch.save(root, tmp_path / f"root{number}.pt")
        torch.save([torch.nn.Parameter(weight(), number == 1)], tmp_path / f"list{number}.pt")
        paths.append([tmp_path / f"{name}{number}.pt" for name in ("weight", "root", "list")])
    for a, b in zip(*paths, strict=True):
        assert not difference(a, b).equal
        assert difference(a, a).equal


def test_what_has_too_many_values_is_compared_by_its_bytes_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Canonical.__init__
    monkeypatch.setattr(Canonical, "__init__", lambda self, content: kept(self, content, 50))
    many = SimpleNamespace(x=[[number] for number in range(100)], t=torch.ones(3))
    a, b = saved(tmp_path / "a.pt", many), saved(tmp_path / "b.pt", many)
    other = saved(
        tmp_path / "c.pt",
        SimpleNamespace(x=[[number] for number in range(100)], t=torch.zeros(3)),
    )
    assert difference(a, b).to_json()["notes"] == [
        "not decoded, and equal by the bytes of the whole pickle: args"
    ]
    assert (
        "too large to be compared but by the bytes" in difference(a, other).to_json()["others"][0]
    )
    assert not difference(a, saved(tmp_path / "d.pt", 1)).equal


def test_a_stream_that_shares_what_it_holds_takes_as_many_steps_as_it_has_nodes() -> None:
    node: Any = (1,)
    shared: Any = [1]
    for _ in range(40):
        node, shared = (node, node), [shared, shared]
    canonical = Canonical(lambda key: None, 1000)
    assert canonical.digest(node) != canonical.digest(shared)
    with pytest.raises(TooManyError):
        Canonical(lambda key: None, 1000).digest([[number] for number in range(1000)])


def test_storages_are_read_once_whatever_refers_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = torch.arange(1000.0)
    a = saved(tmp_path / "a.pt", [SimpleNamespace(t=big[i:]) for i in range(50)])
    reads: list[int] = []
    one = unread._File._read
    monkeypatch.setattr(
        unread._File,
        "_read",
        lambda self, offset, size: reads.append(size) or one(self, offset, size),
    )
    assert difference(a, a).equal
    assert reads == [4000, 4000]


def test_verify_says_what_was_left_out_and_wants_it_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = saved(tmp_path / "a.pt", namespace())
    migrate.apply(a, tmp_path / "out.pt", output_format="torch", allow=["opaque"])
    found = migrate.verify(tmp_path / "out.pt", source=a)
    assert not found.equal
    assert found.to_json()["differences"][0]["key"] == "args"
    assert (
        "is only in the source; if it was left out with allow="
        in found.to_json()["differences"][0]["what"]
    )
    found = migrate.verify(tmp_path / "out.pt", source=a, allow=["opaque"])
    assert found.equal
    assert found.to_json()["not_compared"] == [
        {
            "what": "what is not decoded and was left out of the output: args",
            "why": 'allow={"opaque"}',
        }
    ]
    assert (
        run(["verify", str(tmp_path / "out.pt"), "--source", str(a), "--allow", "opaque", "-q"])
        == 0
    )
    assert (
        "not compared: what is not decoded and was left out of the output: args (--allow opaque)"
        in capsys.readouterr().out
    )
    assert run(["verify", str(tmp_path / "out.pt"), "--source", str(a), "-q"]) == 1


def test_what_is_not_looked_at_is_listed_and_tensors_can_be_compared_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    weights = {"w": torch.ones(2)}
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt", "mine": "1"})
    (folder / "config.json").write_text("{}")
    (folder / "other.bin").write_bytes(b"x")
    save_file(weights, tmp_path / "one.safetensors")
    found = difference(folder, tmp_path / "one.safetensors")
    assert found.equal
    whats = [one["what"] for one in found.to_json()["not_compared"]]
    assert "side files of A: config.json" in whats
    assert any("other.bin" in what for what in whats)
    assert any("mine" in what for what in whats)
    twin = tmp_path / "twin"
    twin.mkdir()
    save_file(weights, twin / "model.safetensors")
    (twin / "config.json").write_text('{"a": 1}')
    found = difference(folder, twin)
    assert (found.equal, found.tensors_equal, found.to_json()["side_files"]) == (
        False,
        True,
        ["side file config.json differs"],
    )
    assert run(["diff", str(folder), str(twin), "-q"]) == 1
    assert "tensors equal (1 tensor, 8 B); 1 side files" in capsys.readouterr().out
    assert run(["diff", str(folder), str(twin), "--tensors-only", "-q", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["what"] for one in document["not_compared"]][:2] == [
        "side files",
        "values that are not tensors",
    ]
    save_file({"w": torch.zeros(2)}, twin / "model.safetensors")
    assert run(["diff", str(folder), str(twin), "--tensors-only", "-q"]) == 1
