"""The shipped rules that only move elements, inferred again: of random tensors and what the rules
make of them, without the rules. What is found does the same to other tensors.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from raw_states import State, applied, bits, opened

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from compactness import moving_tests, used_rules

from migrate.authoring.compact import compact
from migrate.authoring.infer import infer
from migrate.core.errors import Report
from migrate.rules.families import families
from migrate.rules.files import files_below, shipped_folder
from migrate.rules.loading import load_files
from migrate.ruletests.binding import BoundTest, compiled
from migrate.running.eager import evaluated

pytestmark = pytest.mark.libraries


def states(bound: BoundTest, seed: int) -> tuple[State, State]:
    """Random tensors for those of a test, and what the rules of the test make of them."""
    dice = np.random.default_rng(seed)
    specs = {key: at.spec for key, at in bound.source.index.tensors.items()}
    old = {key: (s.dtype, bits(dice, s.dtype, s.shape)) for key, s in specs.items()}
    source = opened(old)
    outputs = bound.composition.graph.outputs
    return old, {key: (t.spec.dtype, evaluated(source, t, {})) for key, t in outputs.items()}


def inferred_again() -> dict[str, str]:
    """By file, of the test that takes the most rules: how many by hand and made, or what
    is open.
    """
    out = {}
    for path in files_below(shipped_folder()):
        file = compiled(load_files([path])[0], Report())
        bound = max(moving_tests(file), key=lambda b: len(used_rules(b)), default=None)
        if bound is None:
            continue
        name = path.relative_to(shipped_folder()).as_posix()
        (old, new), (other, wanted) = states(bound, 1), states(bound, 2)
        found = infer(opened(old), opened(new))
        if found.questions or found.unexplained:
            out[name] = "open: " + "; ".join(
                [q.target for q in found.questions] + [u.key for u in found.unexplained]
            )
            continue
        got = applied(found.relations, other)
        assert got.keys() == wanted.keys(), name
        for key, (dtype, array) in wanted.items():
            assert got[key][0] == dtype, (name, key)
            assert np.array_equal(got[key][1], array), (name, key)
        made = sum(not draft.keep for draft in compact(found.relations))
        out[name] = f"{len(used_rules(bound))} rules by hand, {made} made"
    return out


# where something is asked or left open; all others are found. The example of gpt-oss has heads of
# one element, so the biases of k and v have two, and a part of so few has no run to be found by
OPEN = {"gpt-oss/mxfp4/hf-names.yaml"}


def test_joined_biases_as_those_of_gpt_oss_are_found_from_parts_of_four_elements() -> None:
    def left(head: int) -> list[str]:
        dice = np.random.default_rng(1)
        leaves = {"weight": (8 * head, 8), "bias": (8 * head,)}
        old = {
            f"block.0.qkv.{k}": ("bfloat16", bits(dice, "bfloat16", s)) for k, s in leaves.items()
        }
        new = {
            f"layers.0.{name}_proj.{leaf}": (
                "bfloat16", old[f"block.0.qkv.{leaf}"][1][start * head : stop * head].copy(),
            )
            for leaf in leaves for name, start, stop in (("q", 0, 4), ("k", 4, 6), ("v", 6, 8))
        }  # fmt: skip
        found = infer(opened(old), opened(new))
        return [q.target for q in found.questions] + [u.key for u in found.unexplained]

    assert [left(head) for head in (2, 4, 64)] == [[], [], []]
    assert left(1) == ["layers.0.k_proj.bias", "layers.0.v_proj.bias"]


def test_shipped_rules_are_found_again_and_none_is_found_wrong() -> None:
    found = inferred_again()
    print("\n".join(f"{name}: {said}" for name, said in found.items()))
    assert {name for name, said in found.items() if said.startswith("open")} <= OPEN
    by_hand = [name for name in found if name.split("/")[0] not in families()]
    assert len(by_hand) >= 23
    assert len(found) - len(by_hand) >= 125
