"""verify finds what is not what the program makes, and reads without views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_files import MemoryBlob, RawSource, random_raw, write_source

from migrate.core.spec import Spec
from migrate.planning.graph import Apply, Read
from migrate.running import verify
from migrate.source.index import Stored


class Ops:
    """Stand-ins for ops, so that this floor is tested alone."""

    calls = 0

    def get(self, name: str) -> Any:
        class One:
            def eager(_, args: Any, arrays: list[np.ndarray], parts: int, dtype: str) -> list[np.ndarray]:
                Ops.calls += 1
                if name == "stack":
                    return [np.stack(arrays, args)]
                return list(np.split(arrays[0], parts, args))

        return One()


@pytest.fixture(autouse=True)
def no_real_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "ops", Ops())
    Ops.calls = 0


def pair(tmp_path: Path, made: dict[str, tuple[str, np.ndarray]], dtype: str = "bfloat16") -> tuple[RawSource, RawSource, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    arrays = [random_raw(rng, dtype, (4, 6)) for _ in range(2)]
    source = write_source(tmp_path / "in", {f"k{i}": (dtype, a) for i, a in enumerate(arrays)})
    return source, write_source(tmp_path / "out", made), arrays


def stack() -> Apply:
    return Apply("stack", 0, 1, 0, (Read("k0"), Read("k1")), "bfloat16")


def test_equal_bytes_give_no_mismatch_and_a_changed_bit_is_named(tmp_path: Path) -> None:
    source, _, arrays = pair(tmp_path, {})
    right = np.stack(arrays)
    wrong = right.copy()
    wrong[1, 2, 3] ^= 1
    output = write_source(
        tmp_path / "o", {"right": ("bfloat16", right), "wrong": ("bfloat16", wrong), "flat": ("bfloat16", right.reshape(-1))}
    )
    program = {"right": stack(), "wrong": stack(), "flat": stack(), "gone": stack()}
    found = verify.recompute(program, source, output)
    assert [(m.key, m.what, m.index) for m in found] == [("wrong", "bytes", (1, 2, 3)), ("flat", "shape", None), ("gone", "missing", None)]
    assert "1 of 48 elements" in found[0].detail


def test_a_call_with_several_outputs_runs_once(tmp_path: Path) -> None:
    source, _, arrays = pair(tmp_path, {})
    halves = np.split(arrays[0], 2, 1)
    output = write_source(tmp_path / "o", {f"h{i}": ("bfloat16", h) for i, h in enumerate(halves)})
    program = {f"h{i}": Apply("split", 1, 2, i, (Read("k0"),), "bfloat16") for i in range(2)}
    assert verify.recompute(program, source, output) == []
    assert Ops.calls == 1


@pytest.mark.parametrize("dtype", ["uint8", "float32", "complex128", "float4_e2m1fn", "float6_e2m3fn"])
def test_a_stored_tensor_is_read_element_by_element(tmp_path: Path, dtype: str) -> None:
    array = random_raw(np.random.default_rng(1), dtype, (3, 4, 5))
    for blob in (MemoryBlob, None):
        source = write_source(tmp_path / f"in{blob is None}", {"k": (dtype, array)}, 1, *([blob] if blob else []))
        assert (verify.read(source, "k") == array).all()


def test_a_strided_stored_tensor_is_read_in_its_order(tmp_path: Path) -> None:
    array = random_raw(np.random.default_rng(2), "float32", (4, 6))
    source = write_source(tmp_path / "in", {"k": ("float32", array)})
    at = source.index.tensors["k"]
    source.index.tensors["t"] = Stored(Spec("float32", (6, 2)), 0, at.offset + 4 * 6, (1, 12))
    assert (verify.read(source, "t") == array[1::2].T).all()
    source.index.tensors["s"] = Stored(Spec("float32", ()), 0, at.offset, ())
    assert verify.read(source, "s").shape == ()
    source.index.tensors["e"] = Stored(Spec("float32", (0, 2)), 0, at.offset)
    assert verify.read(source, "e").shape == (0, 2)
