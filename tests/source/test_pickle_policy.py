"""The allow-list and the walk: everything outside is named with its places, everything
contradictory is raised at once.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
import torch
from torch_streams import decoded, dense, reduce, storage, tree
from work import steps

from migrate.core.errors import CheckpointError
from migrate.source.pickle import machine, nodes, policy
from migrate.source.pickle.decoding import FREE_EXPANSION
from migrate.source.pickle.nodes import METHOD, Call, Dict, Global
from migrate.source.pickle.tree import Opaque


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("never-made",)


class Plain:
    """A class of some program."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def test_every_name_outside_is_reported_with_the_keys_it_sits_under() -> None:
    value = {
        "model": {"a.b": torch.ones(2), "bad": Evil()},
        "callbacks": [Plain(x=1), {"deep": (Evil(), 3)}],
        ("tuple", 1): Plain(),
        7: Plain(),
    }
    found = decoded(value)
    rows = {o.name: o for o in found.outside}
    assert rows["posix.mkdir"].paths == ("model.bad", "callbacks.1.deep.0")
    assert rows[f"{__name__}.Plain"].paths == ("callbacks.0", "<tuple>", "7")
    assert rows[f"{__name__}.Plain"].count == 3
    assert len(rows) == 2
    assert found.tree.get("model").get("a.b").shape == (2,)


def test_names_inside_of_opaque_values_are_reported_too() -> None:
    found = decoded(
        {"outer": Plain(inner=[{"x": Evil()}], weight=torch.ones(3)), "w": torch.ones(1)}
    )
    assert {o.name: o.paths for o in found.outside} == {
        f"{__name__}.Plain": ("outer",),
        "posix.mkdir": ("outer",),
    }
    assert len(found.hidden) == 1
    assert found.hidden.isdisjoint({found.tree.get("w").storage.key})


def test_a_name_used_as_a_value_is_outside() -> None:
    found = decoded({"fn": os.mkdir, "cls": dict})
    assert [(o.name, o.paths) for o in found.outside] == [
        ("posix.mkdir", ("fn",)),
        ("builtins.dict", ("cls",)),
    ]


def test_the_refusal_names_everything_and_says_that_nothing_ran() -> None:
    found = decoded({f"k{i}": Evil() for i in range(5)})
    shown = policy.refusal(found.outside, "model.pt").render()
    assert (
        "error[M935]: model.pt: a name outside the allow-list: posix.mkdir; nothing was executed"
        in shown
    )
    assert "posix.mkdir (not on the allow-list) at k0, k1, k2 and 2 more" in shown
    assert 'allow={"opaque"}' in shown


def test_places_and_names_are_counted_when_they_are_too_many() -> None:
    root = Dict([(f"k{i}", reduce("m", f"f{i}")) for i in range(1500)])
    found = policy.decode(root, "x")
    assert len(found.outside) == policy.MOST_NAMES + 1
    assert sum(o.count for o in found.outside) == 1500
    assert found.outside[-1].name == "others"
    many = policy.decode(Dict([(i, reduce("m", "f")) for i in range(500)]), "x")
    assert [(o.count, len(o.paths)) for o in many.outside] == [(500, policy.MOST_PATHS)]
    assert len(policy.refusal(found.outside, "x").render()) < 10_000


def test_more_opaque_values_than_anybody_has_are_refused_with_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy, "MOST_OPAQUE", 50)
    assert policy.decode([reduce("m", "f") for _ in range(50)], "x").outside[0].count == 50
    with pytest.raises(CheckpointError, match=r"M935.*: m\.f; nothing was executed"):
        policy.decode([reduce("m", "f") for _ in range(51)], "x")


def test_hostile_names_and_keys_are_escaped_in_paths_and_messages() -> None:
    root = Dict([("\x1b[31m\u202ekey" * 100, reduce("m", "f"))])
    found = policy.decode(root, "\x1b]0;x\x07")
    shown = policy.refusal(found.outside, "\x1b]0;x\x07").render()
    assert shown.replace("\n", "").isprintable()
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert max(map(len, shown.splitlines())) < 400


PAIRS = [
    ("torch.storage", "_load_from_bytes"), ("torch", "load"), ("torch.serialization", "load"),
    ("builtins", "getattr"),
    ("builtins", "eval"), ("os", "system"), ("numpy", "load"),
    ("torch._utils", "_rebuild_tensor_v4"), ("torch._utils", "__builtins__"),
    ("torch.nn.parameter", "Parameter"), ("_codecs", "decode"), ("collections", "namedtuple"),
    ("torch.jit", "load"),
    ("torch._utils", "_rebuild_tensor_v2.__globals__"), ("numpy._core.multiarray", "fromfile"),
    ("pathlib", "PosixPath"),
]  # fmt: skip


@pytest.mark.parametrize("name", PAIRS, ids=".".join)
@pytest.mark.parametrize("how", ["reduce", "newobj"])
@pytest.mark.parametrize("arity", range(9))
def test_a_module_on_the_list_allows_nothing_else_of_it(
    name: tuple[str, str], how: str, arity: int
) -> None:
    call = Call(how, Global(*name), ("a",) * arity)
    found = policy.decode([call], "x")
    assert type(found.tree.items[0]) is Opaque
    assert [o.name for o in found.outside] == [".".join(name)]


def test_every_entry_of_the_list_is_an_exact_pair_of_plain_names() -> None:
    for module, name, how, arity in policy.DECODERS:
        assert all(part.isidentifier() for part in module.split("."))
        # one class method is read as a name of its own
        assert name.removesuffix(f".{METHOD}").isidentifier()
        assert how in ("reduce", "newobj")
        assert 0 <= arity <= 14


def codes_of(root: Any) -> set[str]:
    """The codes of what is wrong; none when it is read."""
    try:
        policy.decode(root, "x")
    except CheckpointError as error:
        return {d.code for d in error.diagnostics}
    return set()


def test_every_decoder_answers_nonsense_with_a_refusal_and_never_with_a_crash() -> None:
    nonsense: list[Any] = [
        None, True, -1, 2**100, 1.5, "x", b"x", bytearray(b"x"), (), ((),), [], [[]], Dict(),
        Global("os", "system"), storage(),
        reduce("os", "system"), dense(), reduce("collections", "OrderedDict"), (None, Dict()),
        reduce("torch", "Size", (1,)),
    ]  # fmt: skip
    for module, name, how, arity in policy.DECODERS:
        for value in nonsense:
            for state in (None, value):
                call = Call(how, Global(module, name), (value,) * arity)
                if state is not None:
                    call.state = state
                for items, pairs in ((None, None), ([value], None), (None, [("k", value)])):
                    call.items, call.pairs = items, pairs
                    assert codes_of(Dict([("key", call)])) <= {"M936"}


def test_all_contradictions_are_raised_together_and_counted_when_many() -> None:
    root = Dict([(f"layers.{i}", dense(offset=i + 1)) for i in range(50)])
    with pytest.raises(CheckpointError) as caught:
        policy.decode(root, "x.pt")
    messages = [d.message for d in caught.value.diagnostics]
    assert len(messages) == 21
    assert (
        messages[0]
        == "x.pt: layers.0: a tensor that reaches to element 6 of storage 0, which has 6 of float32"
    )
    assert messages[-1] == "x.pt: 30 more contradictions like these"
    assert caught.value.exit_code == 3


def test_expanded_tensors_are_read_until_they_are_a_bomb() -> None:
    small = tree({"mask": torch.ones(1, 1).expand(1000, 1000)})
    assert small.get("mask").strides == (0, 0)
    most = FREE_EXPANSION // 4 + 1 + 4
    fits = dense(storage(numel=1), 0, (most,), (0,))
    assert policy.decode(fits, "x").tree.shape == (most,)
    with pytest.raises(CheckpointError, match=r"M914.*the largest is mask"):
        policy.decode(
            Dict([("w", dense()), ("mask", dense(storage("1", 1), 0, (most + 25,), (0,)))]), "x"
        )
    # many that are each allowed
    each = [dense(storage(numel=1), 0, (most // 4 + i,), (0,)) for i in range(5)]
    with pytest.raises(CheckpointError, match="M914"):
        policy.decode(each, "x")
    overlapping = dense(storage(numel=10**5), 0, (10**5 - 10**4, 10**4), (1, 1))
    with pytest.raises(CheckpointError, match="M914"):
        policy.decode(overlapping, "x")


def test_values_that_share_each_other_are_decoded_once() -> None:
    value: Any = ("leaf",)
    for _ in range(60):
        value = (value, value)
    made: list[Any] = []
    assert steps(lambda: made.append(policy.decode(value, "x").tree)) < 1000 * 60
    (found,) = made
    assert found.items[0] is found.items[1]
    bomb: Any = reduce("m", "f", value)
    assert [o.name for o in policy.decode([bomb, bomb], "x").outside] == ["m.f"]


def test_depth_is_no_recursion() -> None:
    value: Any = 5
    for _ in range(100_000):
        value = [value]
    deep = policy.decode([value, reduce("m", "f", value)], "x")
    assert deep.outside[0].name == "m.f"
    while deep is not None and type(value) is list:
        value = value[0] if value else None
    assert value == 5


def test_a_plain_pickle_of_every_protocol_is_read() -> None:
    value = {"a": [1, (2.5, "x", None)], "b": {3}}
    for protocol in (2, 3, 4, 5):
        root = machine.read_pickle(pickle.dumps(value, protocol), nodes.ARCHIVE, name="x")
        found = policy.decode(root, "x").tree
        assert found.get("a").items[1].items == (2.5, "x", None)
        assert found.get("b").kind == "set"
