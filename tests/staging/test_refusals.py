"""What cannot be staged: each path and reason, at once; nothing is held, and the stager goes on."""

from __future__ import annotations

import copyreg
import functools
import gc
import pathlib
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_structure import Attributes, Own, Plain
from torch.testing._internal.two_tensor import TwoTensor

import migrate


def refused(stager: migrate.Stager, state: Any) -> str:
    """What is said when the state is staged."""
    with pytest.raises(migrate.MigrateError, match="M975") as caught:
        stager.stage(state)
    return str(caught.value)


class Raising:
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError("never")


class RaisingCopy:
    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError("no copy of this")


def test_methods_that_raise_are_refused_by_path() -> None:
    stager = migrate.Stager()
    with pytest.raises(
        migrate.MigrateError, match=r"\['a'\]\[0\]: a Raising cannot be copied: never"
    ):
        stager.stage({"a": [Raising()]})
    with pytest.raises(migrate.MigrateError, match=r"\['b'\]: .*RaisingCopy .*no copy of this"):
        stager.stage({"a": torch.ones(3), "b": RaisingCopy()})
    stager.trim()
    assert stager.nbytes == 0
    assert stager.stage([1]).state == [1]


class OnAnother(torch.Tensor):
    """Says that it is on another device, which needs none."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (2,), device="cuda")  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


class Elsewhere:
    def __deepcopy__(self, memo: Any) -> Any:
        return Attributes([OnAnother()])


def test_a_copy_on_another_device_is_refused_by_path() -> None:
    stager = migrate.Stager()
    with pytest.raises(migrate.MigrateError) as caught:
        stager.stage({"ok": torch.ones(2), "a": [Elsewhere()]})
    said = "['a'][0]: the __deepcopy__ of Elsewhere answers with a tensor on cuda"
    assert said in str(caught.value)
    assert "['a']: the __deepcopy__ of ElsewhereInside" in refused(stager, {"a": ElsewhereInside()})
    stager.trim()
    assert stager.nbytes == 0


class ElsewhereInside:
    def __deepcopy__(self, memo: Any) -> Any:
        return Own([OnAnother()])


class RaisingState:
    def __init__(self) -> None:
        self.a = 1

    def __setstate__(self, state: Any) -> None:
        raise ValueError("never back")


def raising() -> None:
    raise ValueError("never made")


class RaisingFunction:
    def __reduce__(self) -> Any:
        return raising, ()


class RaisingInit:
    def __init__(self, *values: Any) -> None:
        if values:
            raise ValueError("never begun")

    def __reduce__(self) -> Any:
        return RaisingInit, (1,)


class RaisingUnflatten(TwoTensor):
    @staticmethod
    def __tensor_unflatten__(*parts: Any) -> Any:
        raise ValueError("never a wrapper")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (RaisingState, "a RaisingState cannot be built: ValueError: never back"),
        (RaisingFunction, "a RaisingFunction cannot be built: ValueError: never made"),
        (RaisingInit, "a RaisingInit cannot be built: ValueError: never begun"),
        (
            lambda: RaisingUnflatten(torch.ones(2), torch.ones(2)),
            "a RaisingUnflatten cannot be built: ValueError: never a wrapper",
        ),
    ],
    ids=["state", "function", "init", "wrapper"],
)
def test_what_cannot_be_built_again_is_refused_by_path(make: Callable[[], Any], said: str) -> None:
    stager = migrate.Stager()
    with pytest.raises(migrate.MigrateError) as caught:
        stager.stage({"ok": [torch.ones(2), Attributes(1)], "a": [{"b": make()}]})
    assert "M975" in str(caught.value)
    assert f"['a'][0]['b']: {said}" in str(caught.value)
    assert "['ok']" not in str(caught.value)


def test_all_objects_that_fail_to_copy_themselves_are_named() -> None:
    state = {"a": RaisingCopy(), "b": {"c": [RaisingCopy()]}, "sum": [RaisingState()]}
    for order in (state, dict(reversed(state.items()))):
        text = refused(migrate.Stager(), order)
        for path in ("['a']: the __deepcopy__", "['b']['c'][0]: the __deepcopy__"):
            assert path in text
    # where that comes first
    assert "['sum'][0]: a RaisingState cannot be built" in text


class Refusing(Own):
    def __deepcopy__(self, memo: dict[int, Any]) -> Own:
        raise ValueError("not this one")


def freed() -> torch.Tensor:
    x = torch.ones(4)
    x.untyped_storage().resize_(8)
    return x


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "a lock": (threading.Lock, "a lock cannot be copied"),
    "a tensor": (freed, "its storage was freed"),
    "fake": (
        lambda: torch._subclasses.FakeTensorMode().from_tensor(torch.ones(1)),
        "a FakeTensor has a shape and no bytes",
    ),
    "deep": (lambda: functools.reduce(lambda x, _: [x], range(402), 1), "nested deeper than 400"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_the_walk_finds_hides_no_object_that_fails_to_copy_itself(kind: str) -> None:
    """Of those that copy themselves it is the one at this path, and none that succeeds."""
    make, said = OTHERS[kind]
    state = {
        "own": [RaisingCopy(), Own(torch.ones(2)), {"b": Refusing(1)}],
        "deeper": Own([RaisingCopy()]),
        "late": Own([RaisingState()]),
        "tensor": [Own(freed()), Own([torch.ones(2)])],
        "fake": Own(torch._subclasses.FakeTensorMode().from_tensor(torch.ones(1))),
        "other": make(),
    }
    stager = migrate.Stager()
    text = refused(stager, state)
    for path, reason in {
        "['own'][0]": "the __deepcopy__ of RaisingCopy raises ValueError: no copy of this",
        "['own'][2]['b']": "the __deepcopy__ of Refusing raises ValueError: not this one",
        "['deeper']": "the __deepcopy__ of RaisingCopy raises ValueError: no copy of this",
        "['late']": "a Own cannot be copied: never back",
        "['tensor'][0]": "its storage was freed",
        "['fake']": "a FakeTensor has a shape and no bytes",
        "['other']": said,
    }.items():
        assert re.search(rf"{re.escape(path)}(\[0[^:]*)?: {re.escape(reason)}", text), path
    assert not any(f"{path}:" in text for path in ("['own'][1]", "['tensor'][1]"))
    # what a fake tensor's mode remembers is no part of the state
    assert "fake_mode" not in text
    assert stager.nbytes == 0
    del state["other"]
    assert "['own'][0]: the" in refused(stager, state)


def test_a_trial_of_what_copies_itself_obeys_the_limit() -> None:
    """What it would take more memory to find out than there may be is not found out."""
    held = torch.ones(1 << 20)
    state = {"lock": threading.Lock(), "own": [Refusing([held]), Refusing([torch.ones(1)])]}
    text = refused(migrate.Stager(), state)
    assert text.count("not this one") == 2
    text = refused(migrate.Stager(max_memory="1MiB"), state)
    assert "['lock']: a lock" in text
    assert "['own'][0]" not in text
    assert "['own'][1]: the __deepcopy__ of Refusing raises ValueError: not this one" in text


def test_what_copies_itself_and_is_part_of_its_own_tensor() -> None:
    """Refused by its path where it comes before the tensor, whose copy it would have to be in."""
    x = torch.ones(2)
    own = Own([x])
    x.owner = own  # type: ignore[attr-defined]
    said = "['a']['o']: a Own copies itself and is reached from one of its own tensors"
    assert said in refused(migrate.Stager(), {"a": {"o": own}, "x": x})
    made = migrate.Stager().stage({"x": x, "a": {"o": own}}).state
    assert made["x"].owner is made["a"]["o"]
    assert made["a"]["o"].value[0] is made["x"]
    assert made["x"] is not x


class Named:
    """Is a global of its module, which is not copied."""

    def __reduce__(self) -> str:
        return "NAMED_ONE"


NAMED_ONE = Named()


class Cornered:
    """Is taken apart by copyreg alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("not by this")


copyreg.pickle(Cornered, lambda x: (Cornered, (x.value,)))  # type: ignore[arg-type, return-value]


def test_only_what_cannot_be_staged_is_named() -> None:
    state = {"named": NAMED_ONE, "cornered": Cornered([1]), "l": threading.Lock()}
    assert refused(migrate.Stager(), state).count("cannot be copied") == 1
    state = {"cornered": Cornered([threading.Lock()])}
    assert re.search(r"\['cornered'\]\S+\[0\]: a lock", refused(migrate.Stager(), state))


@pytest.mark.parametrize(("count", "more"), [(20, None), (23, "… and 3 more")])
def test_twenty_are_named(count: int, more: str | None) -> None:
    text = refused(migrate.Stager(), [threading.Lock() for _ in range(count)])
    assert text.count(": a lock") == 20
    assert (" more" in text) is (more is not None)
    assert more is None or more in text


class Stopping:
    def __deepcopy__(self, memo: Any) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize("bad", [RaisingCopy, RaisingState, Stopping])
def test_an_error_that_is_kept_keeps_no_memory(bad: Callable[[], Any]) -> None:
    """As in a notebook, which keeps the last error with all its frames."""
    stager = migrate.Stager()
    gc.collect()
    gc.disable()
    try:
        with pytest.raises((migrate.MigrateError, KeyboardInterrupt)) as caught:
            stager.stage([torch.ones(1 << 19), {"t": torch.ones(3)}, bad()])
        stager.trim()
        assert stager.nbytes == 0
    finally:
        gc.enable()
    del caught


def test_locks_files_and_generators_are_refused_all_at_once(tmp_path: pathlib.Path) -> None:
    with (tmp_path / "f").open("w") as file:
        state = {"l": threading.Lock(), "d": [{"f": file}, Plain(i for i in ())], "ok": 1}
        with pytest.raises(migrate.MigrateError) as caught:
            migrate.Stager().stage(state)
    for path in ("['l']: ", "['d'][0]['f']: ", "['d'][1].value: "):
        assert path in str(caught.value)
    assert "ok" not in str(caught.value)
