"""Checkpoints whose runs are sampled: what is found is the same, and how little is read for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from raw_states import State, applied, bits, counted, opened
from safetensors.numpy import save_file

from migrate import formats
from migrate.authoring.infer import blocks, compared, infer, proof, reading, samples
from migrate.core.spec import Spec
from migrate.formats.memory import MemorySource

Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def little_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of some thousand elements are sampled, in stretches of some hundred."""
    for name, value in {"DENSE": 1 << 14, "SPARSE": 1 << 12, "SMALL": 1 << 8}.items():
        monkeypatch.setattr(samples, name, value)
    monkeypatch.setattr(compared, "STRETCH", 1 << 11)
    monkeypatch.setattr(blocks, "LEAST", 8)


def old_weights(seed: int, dtype: str) -> Arrays:
    dice = np.random.default_rng(seed)
    out = {"embed": bits(dice, dtype, (300, 64)), "norm": bits(dice, dtype, (64,))}
    for n in range(2):
        out[f"l.{n}.rope"] = bits(dice, dtype, (256, 64))
        for e in range(4):
            for w in ("gate", "up"):
                out[f"l.{n}.e.{e}.{w}"] = bits(dice, dtype, (96, 64))
    return out


def new_weights(old: Arrays) -> Arrays:
    out = {"tok": old["embed"], "norm": old["norm"]}
    for n in range(2):
        heads = old[f"l.{n}.rope"].reshape(4, 2, 32, 64)
        out[f"b.{n}.rope"] = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(256, 64)
        both = [np.concatenate([old[f"l.{n}.e.{e}.{w}"] for w in ("gate", "up")]) for e in range(4)]
        out[f"b.{n}.gate_up"] = np.ascontiguousarray(np.stack([one.T for one in both]))
    return out


def typed(arrays: Arrays, dtype: str) -> State:
    return {key: (dtype, array) for key, array in arrays.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sampled_runs_say_the_same_and_each_side_is_read_little_more_than_twice(dtype: str) -> None:
    old = old_weights(1, dtype)
    new = new_weights(old)
    sides = counted(typed(old, dtype)), counted(typed(new, dtype))
    found = infer(*sides)
    assert (found.questions, found.unexplained) == ((), ())
    # once to sample and hash all, once to compare what moved
    for side in sides:
        assert sum(blob.read for blob in side.blobs) <= 2.5 * side.index.nbytes
    other = old_weights(2, dtype)
    got = applied(found.relations, {k: (dtype, a) for k, a in other.items()})
    wanted = new_weights(other)
    assert got.keys() == wanted.keys()
    assert all(np.array_equal(got[key][1], array) for key, array in wanted.items())


@pytest.mark.heavy
def test_other_weights_match_nothing_however_closely_one_looks() -> None:
    old, new = ({"a": bits(np.random.default_rng(n), "bfloat16", (512, 128))} for n in range(2))
    sides = (opened({k: ("bfloat16", a) for k, a in side.items()}) for side in (old, new))
    found = infer(*sides)
    assert (found.matched, [u.key for u in found.unexplained]) == (0, ["a"])


def test_padding_and_what_a_slice_leaves_are_seen_in_stretches() -> None:
    dice = np.random.default_rng(3)
    table = bits(dice, "bfloat16", (500, 64))
    padded = np.concatenate([table, np.zeros((12, 64), "<u2")])
    for old, new, op in ((table, padded, "pad"), (padded, table, "slice")):
        (relation,) = infer(
            opened({"a": ("bfloat16", old)}), opened({"b": ("bfloat16", new)})
        ).relations
        ((name, given),) = relation.ops[0].items()
        assert (name, given["value"]) == (op, 0)


def stacked(old: Arrays) -> Arrays:
    """Gate above up of all experts in one tensor, whose rows stay whole."""
    out = {"tok": old["embed"], "norm": old["norm"]}
    for n in range(2):
        out[f"b.{n}.rope"] = old[f"l.{n}.rope"]
        both = [np.concatenate([old[f"l.{n}.e.{e}.{w}"] for w in ("gate", "up")]) for e in range(4)]
        out[f"b.{n}.gate_up"] = np.stack(both)
    return out


def shares_read(*sides: MemorySource) -> list[float]:
    return [sum(blob.read for blob in side.blobs) / side.index.nbytes for side in sides]


def test_whole_blocks_that_move_are_compared_without_being_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = old_weights(4, "bfloat16")

    def read() -> tuple[object, list[float]]:
        sides = counted(typed(old, "bfloat16")), counted(typed(stacked(old), "bfloat16"))
        found = infer(*sides)
        assert (found.questions, found.unexplained) == ((), ())
        return found, shares_read(*sides)

    found, once = read()
    assert once == [1.0, 1.0]
    with monkeypatch.context() as without:
        without.setattr(proof, "equal_by_blocks", lambda *of: False)
        again, more = read()
    assert again == found
    assert min(more) > 1.5

    # digests that are wrong say nothing: what they are of is read
    kept = blocks.BlockDigests.keep

    def changed(self: blocks.BlockDigests, key: str, digests: bytes) -> None:
        wrong = key == "l.1.e.2.up"
        kept(self, key, bytes([digests[0] ^ 1]) + digests[1:] if wrong else digests)

    monkeypatch.setattr(blocks.BlockDigests, "keep", changed)
    again, more = read()
    assert again == found
    assert min(more) > 1.2


def test_of_files_only_what_does_not_begin_as_another_tensor_is_sampled_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = old_weights(6, "float16")
    old["turned"] = bits(np.random.default_rng(7), "float16", (128, 32))
    new = stacked(old) | {"turned.T": np.ascontiguousarray(old["turned"].T)}
    # begins as the old one, and is not made of its blocks alone
    new["tok"] = np.concatenate([old["embed"], np.zeros((20, 64), "<u2")])
    sides = []
    for name, state in (("old", old), ("new", new)):
        save_file({k: a.view("<f2") for k, a in state.items()}, tmp_path / f"{name}.safetensors")
        sides.append(formats.open(tmp_path / f"{name}.safetensors"))
    sampled: list[tuple[int, ...]] = []

    class Counted(samples.RunSampler):
        def __init__(self, spec: Spec, bits: int) -> None:
            sampled.append(spec.shape)
            super().__init__(spec, bits)

    monkeypatch.setattr(reading, "RunSampler", Counted)
    found = infer(*sides)
    assert sorted(sampled) == [(32, 128), (128, 32)]
    assert (found.questions, found.unexplained) == ((), ())
    # of tensors in memory all are
    held = infer(*(opened({k: ("float16", a) for k, a in s.items()}) for s in (old, new)))
    assert len(sampled) > 20
    assert {*map(repr, found.relations)} == {*map(repr, held.relations)}


@pytest.mark.heavy
@pytest.mark.parametrize("place", [0, 12_345, 49_151])
def test_one_element_that_differs_in_a_block_is_named(place: int) -> None:
    old = old_weights(5, "bfloat16")
    new = stacked(old)
    new["b.1.gate_up"].reshape(-1)[place] ^= 1
    found = infer(*(opened({k: ("bfloat16", a) for k, a in s.items()}) for s in (old, new)))
    (rest,) = found.unexplained
    index = [int(i) for i in np.unravel_index(place, (4, 192, 64))]
    assert rest.key == "b.1.gate_up"
    assert f"in 1 of 49152 elements, the first at {index}" in rest.why
