"""Random rule files of layout ops, without the rules: of a checkpoint and of what the rules make of
it relations are inferred. These do the same to other weights, and so does the file that is made of
them, or it is asked. What rules make is computed by the witness of `tests/cli`, which is written
from the documentation alone.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from naive_ops import Refused, Tensor
from naive_rules import converted
from raw_states import applied, applied_as_file, bits, opened
from rule_parts import RuleSet
from rule_sets import rule_set

from migrate.authoring.infer import infer

FEW, MANY = 200, 10_000
# what computes numbers, or makes them of nothing
COMPUTED = {"cast", "affine", "fill"}


def fresh(made: RuleSet, seed: np.random.Generator) -> dict[str, Tensor]:
    """Other weights of the same specs; tensors that are one object stay one."""
    redrawn: dict[int, Tensor] = {}
    for tensor in made.tensors.values():
        if id(tensor) not in redrawn:
            redrawn[id(tensor)] = Tensor(tensor.dtype, bits(seed, tensor.dtype, tensor.shape))
    return {key: redrawn[id(tensor)] for key, tensor in made.tensors.items()}


def outcome(number: int, folder: Path) -> str:
    """`refused`, `computed`, `large`, `asked` or `same`; AssertionError for a wrong answer."""
    made = rule_set(number)
    if COMPUTED & {
        op for rule in made.file["rules"] for call in rule.get("via", []) for op in call
    }:
        return "computed"
    if made.seen["several tiles"]:
        return "large"
    seed = np.random.default_rng(number)
    try:
        pairs = [
            (old, converted(made.file, old, made.params, made.allow))
            for old in (fresh(made, seed), fresh(made, seed))
        ]
    except Refused:
        return "refused"
    states = [
        tuple({k: (t.dtype, t.bits) for k, t in side.items()} for side in pair) for pair in pairs
    ]
    found = infer(*(opened(side) for side in states[0]))
    if found.questions or found.unexplained:
        return "asked"
    wanted = {key.removesuffix("@0"): held for key, held in states[1][1].items()}
    for told, got in (
        ("relations", applied(found.relations, states[1][0])),
        ("file", applied_as_file(found.relations, states[1][0], folder)),
    ):
        told = f"RULE_SET={number} by its {told}"
        # of several ranks the first may have the plain name
        got = {key.removesuffix("@0"): held for key, held in got.items()}
        assert set(got) == set(wanted), f"{told}: {set(got) ^ set(wanted)}"
        for key, (dtype, array) in wanted.items():
            assert got[key][0] == dtype, f"{told}: {key}"
            assert got[key][1].shape == array.shape, f"{told}: {key}"
            assert (got[key][1] == array).all(), (
                f"{told}: {key} by {[r for r in found.relations if key in r.targets]}"
            )
    return "same"


@pytest.mark.heavy
@pytest.mark.parametrize("part", range(10))
def test_what_is_inferred_of_one_pair_holds_for_others(part: int, tmp_path: Path) -> None:
    numbers = range(part * FEW // 10, (part + 1) * FEW // 10)
    seen = Counter(outcome(number, tmp_path) for number in numbers)
    assert seen["same"]


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(100))
def test_no_answer_is_wrong(part: int, tmp_path: Path) -> None:
    numbers = range(FEW + part * MANY // 100, FEW + (part + 1) * MANY // 100)
    seen = Counter(outcome(number, tmp_path) for number in numbers)
    assert seen["same"]
