"""The table of docs/staging.md: what torch's stager and ours make of each kind of input.

Both are run, and what they do is compared with the page. That of torch is compared with torch 2.13
alone, of which the page speaks; ours with every torch.
"""

from __future__ import annotations

import gc
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commandline import ROOT
from inputs import INPUTS, Input, bits, look

from migrate import MigrateError
from migrate.staging.stager import Stager

PAGE = ROOT / "docs" / "staging.md"
Stage = Callable[[Any], Any]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """One rank, for DTensor."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def of_torch() -> Any:
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    return StateDictStager()


class Ours:
    """`Stager` as the other one is called."""

    def __init__(self) -> None:
        self.stager = Stager()

    def stage(self, state: Any) -> Any:
        return self.stager.stage(state).state

    def close(self) -> None:
        self.stager.close()


class Sent(Ours):
    """What arrives where multiprocessing sends a snapshot."""

    def __init__(self) -> None:
        self.stager = Stager(share_memory=True)

    def stage(self, state: Any) -> Any:
        # sent and read by this process: both ends are the same code in two
        return pickle.loads(ForkingPickler.dumps(self.stager.stage(state))).state


def tensors(state: Any) -> list[Any]:
    """The tensors of a list or of a dict, in their order."""
    found = list(state.values()) if isinstance(state, dict) else state
    return [x for x in found if isinstance(x, torch.Tensor)]


def verdict(kind: Input, stager: Any) -> str:
    """What a stager makes of this input, in the words of the table."""
    state = kind.make()
    try:
        staged = stager.stage(state)
    except MigrateError as error:
        named = re.search(r"\[|the state itself", str(error))
        return "refused" if named else f"refused without a path: {error}"
    except Exception as error:  # noqa: BLE001 - what it raises is the finding
        return f"error: {type(error).__name__}"
    lost: list[str] = []
    for before, after in zip(tensors(state), tensors(staged), strict=True):
        if after is before:
            return "not copied"
        try:
            old = look(before)
        except RuntimeError:
            return "as it was"
        try:
            new = look(after)
        except Exception as error:  # noqa: BLE001
            return f"unusable: {type(error).__name__}"
        lost += [name for name, value in old.items() if new.get(name) != value]
    if "values" in lost:
        return "**wrong values**"
    if lost:
        return "lost: " + ", ".join(sorted(set(lost)))
    wrong = kind.check(state, staged) if kind.check else ""
    return wrong or "kept"


def second_stage(stager: Any) -> str:
    """What becomes of a staged state when the next one is staged."""
    state = {"x": torch.ones(64)}
    first = stager.stage(state)
    state["x"].zero_()
    stager.stage(state)
    return "kept" if bits(first["x"]) == bits(torch.ones(64)) else "**overwritten**"


def grown(stager: Any) -> str:
    """A storage that grows between two stages."""
    x = torch.ones(4)
    stager.stage({"x": x})
    gc.collect()
    x.resize_(64).fill_(2)
    try:
        return "kept" if bits(stager.stage({"x": x})["x"]) == bits(x) else "**wrong values**"
    except AssertionError:
        return "error: AssertionError"


def closed(stager: Any) -> str:
    stager.stage({"x": torch.ones(4)})
    stager.close()
    try:
        stager.stage({"x": torch.ones(4)})
    except KeyError:
        return "error: KeyError"
    return "kept"


def transformed(stager: Any) -> str:
    """A tensor inside of `torch.func.vmap`."""
    said: list[str] = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        said.append(verdict(Input(lambda: [x]), stager))
        return x

    torch.func.vmap(inside)(torch.ones(2, 3))
    return said[0]


SEVERAL: dict[str, Callable[[Any], str]] = {
    "a tensor inside of `vmap`": transformed,
    "a snapshot, after the next `stage`": second_stage,
    "a storage that grows between two stages": grown,
    "`stage` after `close()`": closed,
}


def row(name: str, stager: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SEVERAL[name](stager) if name in SEVERAL else verdict(INPUTS[name], stager)


def table() -> dict[str, tuple[str, str]]:
    """The rows of the page: what torch's stager does, and ours."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    return {name: (theirs, ours) for name, theirs, ours in rows if name in {*INPUTS, *SEVERAL}}


ROWS = [*INPUTS, *SEVERAL]


def test_the_page_has_each_row_and_in_this_order() -> None:
    assert list(table()) == ROWS


@pytest.mark.parametrize("name", ROWS)
def test_ours_does_what_the_page_says(name: str) -> None:
    assert row(name, Ours()) == table()[name][1]


@pytest.mark.parametrize("name", INPUTS)
def test_a_snapshot_that_was_sent_is_the_same(name: str) -> None:
    """A mesh is another in every process, and a Python module is not sent."""
    expected = {"DTensor": "another mesh", "Python modules": "error: TypeError"}
    assert row(name, Sent()) == expected.get(name, table()[name][1])


def test_ours_keeps_or_refuses() -> None:
    assert {ours for _, ours in table().values()} == {"kept", "refused"}


def test_gradients_hooks_and_history_are_no_part_of_a_snapshot() -> None:
    x = torch.ones(3, requires_grad=True)
    fired: list[torch.Tensor] = []
    x.register_hook(fired.append)
    y = x * 2
    y.sum().backward()
    assert x.grad is not None
    assert len(fired) == 1
    staged = Stager().stage({"x": x, "y": y, "grad": x.grad})
    assert staged["x"].grad is None
    assert bits(staged["grad"]) == bits(x.grad)
    assert (staged["y"].requires_grad, staged["y"].is_leaf) == (True, True)
    staged["x"].sum().backward()
    assert len(fired) == 1


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the page speaks of the stager of torch 2.13"
)
@pytest.mark.parametrize("name", ROWS)
def test_that_of_torch_does_what_the_page_says(name: str) -> None:
    assert row(name, of_torch()) == table()[name][0]
