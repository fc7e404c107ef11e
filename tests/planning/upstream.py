"""What upstream code makes of a small checkpoint, next to the rule file that must make the same of
it, in both directions.

The checkpoints hold every number once, in shapes that are seldom square, so that a tensor under
another's name or in another order is seen. The expected tensors come from upstream's own modules
where these are cheap, else from its arithmetic written out; never from the engine. An example names
the mistakes that it must see, as edits of the rule file's text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from rule_text import load_text

CASES = Path(__file__).parents[1] / "data" / "cases"
Arrays = dict[str, np.ndarray]


class Numbers:
    """Hands out float32 arrays in which no number occurs twice."""

    def __init__(self) -> None:
        self._next = 1

    def __call__(self, *shape: int) -> np.ndarray:
        first, self._next = self._next, self._next + int(np.prod(shape))
        return np.arange(first, self._next, dtype=np.float32).reshape(shape)


@dataclass(frozen=True)
class Example:
    """One checkpoint on both sides of a case.

    `back` is what a downgrade of `target` yields, the source unless said; `left_out` is a rule (of
    one line) to test without.
    """

    case: str
    source: Arrays
    target: Arrays
    params: dict[str, object] = field(default_factory=dict)
    back: Arrays | None = None
    left_out: str | None = None
    mistakes: tuple[tuple[str, str], ...] = ()

    def text(self) -> str:
        lines = (CASES / f"{self.case}.yaml").read_text().splitlines(keepends=True)
        return "".join(
            line for line in lines if self.left_out is None or f"name: {self.left_out}," not in line
        )


def differences(engine, text: str, example: Example, *, backwards: bool = False) -> list[str]:
    """The keys whose presence, dtype, shape or bits are not the expected ones; empty where the
    rules are right.
    """
    given, wanted = (
        (example.target, example.source) if backwards else (example.source, example.target)
    )
    if backwards and example.back is not None:
        wanted = example.back
    files = [load_text(text, f"{example.case}.yaml")]
    out = engine.apply(files, given, example.params, backwards=backwards, allow=("drop", "lossy"))
    specs = {key: tensor.spec for key, tensor in out.composition.graph.outputs.items()}
    found = sorted(out.keys() ^ wanted.keys())
    for key in out.keys() & wanted.keys():
        array = np.asarray(wanted[key])
        same = (specs[key].dtype, specs[key].shape, out[key].tobytes()) == (
            str(array.dtype),
            array.shape,
            array.tobytes(),
        )
        found += [] if same else [key]
    return found


def goes_there(engine, example: Example) -> None:
    assert differences(engine, example.text(), example) == []


def comes_back(engine, example: Example) -> None:
    """Backwards of the expected target, not of what the engine made of the source."""
    assert differences(engine, example.text(), example, backwards=True) == []


def are_seen(engine, example: Example) -> None:
    """The edited rules are sound in themselves and apply; what they make is not what upstream
    makes.
    """
    text = example.text()
    assert example.mistakes
    for before, after in example.mistakes:
        assert before in text, "the mistake edits nothing"
        assert differences(engine, text.replace(before, after), example), (before, after)


@functools.cache
def made(make: Callable[[], Example]) -> Example:
    return make()


def directions(
    *makers: Callable[[], Example], one_way: Collection[Callable[[], Example]] = ()
) -> tuple[pytest.MarkDecorator, pytest.MarkDecorator]:
    """What to parametrize the tests of a group with: every example, and those that go back. The
    fixture `example` makes one when the first test takes it.
    """
    both_ways = [make for make in makers if make not in one_way]
    return (
        pytest.mark.parametrize("example", makers, indirect=True, ids=lambda m: m.__name__),
        pytest.mark.parametrize("example", both_ways, indirect=True, ids=lambda m: m.__name__),
    )
