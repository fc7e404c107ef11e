"""What has to be known of all numbers first is found in boxes, once for a call, and memory follows
boxes however large a tensor is.
"""

from __future__ import annotations

import threading
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_files import MemoryBlob, describe, read_back, whole, write_and_read, write_source
from value_ops import call, install

from migrate import ops
from migrate.codecs.kit import encoding_boxes as kit
from migrate.codecs.kit.encoding import TensorEncoding
from migrate.codecs.kit.encoding_reference import reference_parts
from migrate.codecs.kit.layout import Grid, NumberLayout, Packing, Term, floats, plain, times
from migrate.codecs.kit.scale_rules import ScaleRule
from migrate.core.errors import CheckpointError
from migrate.core.spec import Spec
from migrate.ops.base import ValueOp
from migrate.planning.graph import kind_of
from migrate.planning.plan import peak_memory
from migrate.running import surveys
from migrate.running.evaluator import Evaluator
from migrate.running.geometry import ByteLayouts
from migrate.running.resources import RunOptions
from migrate.running.tiles import write_target

E4M3 = "float8_e4m3fn"
CALIBRATED = NumberLayout(
    "fp8", floats(E4M3), plain(E4M3), times(Grid("scale", (0, 0), leading=False))
)
BLOCKS = NumberLayout(
    "nvfp4",
    floats("float4_e2m1fn"),
    Packing(4),
    (
        Term("*", Grid("scale", (1, 16), dtypes=(E4M3,))),
        Term("/", Grid("global", (0, 0), leading=False)),
    ),
)


class Encoded(ValueOp):
    """An op whose outputs are the parts of a layout."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.surveyed: Counter[Any] = Counter()
        self.computed: Counter[int] = Counter()
        self.threads: set[int] = set()

    def _of(self, spec: Spec) -> TensorEncoding:
        rows, columns = spec.shape
        if self.name == "fp8":
            parts = {"weight": Spec(E4M3, spec.shape), "scale": Spec("float32", ())}
            return TensorEncoding(
                CALIBRATED, spec, parts, ScaleRule("float", "modelopt", region="tensor")
            )
        parts = {
            "weight": Spec("uint8", (rows, columns // 2)),
            "scale": Spec(E4M3, (rows, columns // 16)),
            "global": Spec("float32", (1,)),
        }
        return TensorEncoding(BLOCKS, spec, parts, ScaleRule("nvfp4", "compressed-tensors"))

    def _role(self, encoding: TensorEncoding, output: int) -> str:
        return list(encoding.parts)[output]

    def infer(self, args, specs, parts=1):
        return list(self._of(specs[0]).parts.values())

    def needs(self, args, specs, output, box):
        encoding = self._of(specs[0])
        return [encoding.needs(self._role(encoding, output), box)]

    def grain(self, args, specs, output):
        encoding = self._of(specs[0])
        return encoding.grain(self._role(encoding, output))

    def remembers(self, args, specs):
        return self._of(specs[0]).remembers()

    def follows(self, args, output):
        return output > 0

    def surveys(self, args, specs):
        return self._of(specs[0]).surveyed

    def survey(self, args, specs, box, array, known=None):
        self.surveyed[box] += 1
        self.threads.add(threading.get_ident())
        return self._of(specs[0]).survey(array, box, known)

    def recall(self, args, specs, output, box, out, memo=None, survey=None):
        encoding = self._of(specs[0])
        return encoding.recall(self._role(encoding, output), box, out, memo, survey)

    def compute(self, args, arrays, specs, output, box, out, meter=None, memo=None, survey=None):
        encoding = self._of(specs[0])
        self.computed[output] += out.size
        role = self._role(encoding, output)
        encoding.encode(arrays[0], role, box, out, meter, memo, survey)

    def eager(self, args, arrays, parts=1, dtypes=()):
        encoding = self._of(Spec(dtypes[0], arrays[0].shape))
        made = reference_parts(encoding, arrays[0])
        return [made[role] for role in encoding.parts]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = install(monkeypatch)
    found |= {name: Encoded(name) for name in ("fp8", "nvfp4")}
    get = ops.get
    monkeypatch.setattr(ops, "get", lambda name: found[name] if name in found else get(name))
    monkeypatch.setattr(kit, "TILE_MOST", 1 << 12)
    return found


class Counted(MemoryBlob):
    """Counts the bytes that are read of all blobs."""

    read = 0

    def readinto(self, offset: int, buffer: memoryview) -> None:
        Counted.read += len(buffer)
        super().readinto(offset, buffer)


def numbers(shape: tuple[int, int]) -> Any:
    """bfloat16 numbers of both signs, no two rows alike."""
    rng = np.random.default_rng(0)
    row, column = (rng.integers(0, 1 << 9, n, dtype="<u2") for n in shape)
    return (row[:, None] ^ column) + np.uint16(0x3C00) | (
        column << np.uint16(7) & np.uint16(0x8000)
    )


def outputs_of(op: Encoded, array: Any) -> dict[str, Any]:
    made = call(op, whole("a", "bfloat16", array.shape), lossy=True)
    return dict(zip(op._of(Spec("bfloat16", array.shape)).parts, made, strict=True))


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
@pytest.mark.parametrize("limit", [1 << 20, 64 << 20])
def test_parts_are_those_of_the_reference_however_small_boxes_are(
    tmp_path: Path, made: dict[str, Any], name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surveys, "STEP", 10_000)
    array = numbers((600, 320))
    source = write_source(tmp_path / "in", {"a": ("bfloat16", array)})
    outputs = outputs_of(made[name], array)
    got = write_and_read(outputs, source, tmp_path / "out", files=2, max_memory=limit)
    wanted = made[name].eager(None, [array], dtypes=["bfloat16"])
    assert [got[role] for role in outputs] == [part.tobytes() for part in wanted]
    assert set(made[name].surveyed.values()) == {1}
    assert len(made[name].threads) == 1


@pytest.mark.parametrize(("name", "reads"), [("fp8", 2), ("nvfp4", 2)])
def test_numbers_are_read_twice_and_not_for_each_part_or_box(
    tmp_path: Path, made: dict[str, Any], name: str, reads: int
) -> None:
    array = numbers((2048, 1024))
    source = write_source(tmp_path / "in", {"a": ("bfloat16", array)}, blob=Counted)
    Counted.read = 0
    outputs = outputs_of(made[name], array)
    write_and_read(outputs, source, tmp_path / "out", threads=1)
    assert Counted.read == reads * array.nbytes
    assert made[name].computed[0] == array.size // (1 if name == "fp8" else 2)


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_memory_follows_boxes_and_not_the_tensor(
    tmp_path: Path, made: dict[str, Any], name: str
) -> None:
    # what importing torch takes is not what a run holds
    pytest.importorskip("torch")
    held = []
    for rows in (512, 4096):
        array = numbers((rows, 4096))
        source = write_source(tmp_path / f"in{rows}", {"a": ("bfloat16", array)})
        outputs = outputs_of(made[name], array)
        limit = 12 << 20
        target, options = describe(outputs), RunOptions(fsync=False, threads=1, max_memory=limit)
        wanted = made[name]._of(Spec("bfloat16", array.shape))
        nbytes = array.nbytes
        del array
        tracemalloc.start()
        write_target(outputs, source, target, tmp_path / f"out{rows}", digest="d", options=options)
        held.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(read_back(tmp_path / f"out{rows}", target)) == len(wanted.parts)
    # the second tensor, of 32 MiB, is eight times the first
    assert held[1] < nbytes // 2
    assert held[1] - held[0] < 4 << 20, held


def test_what_a_plan_says_of_memory_does_not_follow_the_tensor(made: dict[str, Any]) -> None:
    def least(rows: int) -> list[int]:
        tensor = whole("a", "bfloat16", (rows, 1 << 13))
        made_here = call(made["fp8"], tensor)
        nodes = [t.sources[0] for t in made_here]
        return [kind_of(n.computation, n.output, n.spec).least for n in nodes]  # type: ignore[union-attr]

    assert least(1 << 8) == least(1 << 16)
    small, large = (
        peak_memory(dict(enumerate(call(made["fp8"], whole("a", "bfloat16", (rows, 1 << 13))))))
        for rows in (1 << 10, 1 << 16)
    )
    assert small == large


def test_what_was_found_is_forgotten_with_its_call(tmp_path: Path, made: dict[str, Any]) -> None:
    array = numbers((600, 320))
    source = write_source(tmp_path / "in", {"a": ("bfloat16", array)})
    outputs = outputs_of(made["fp8"], array)
    values = Evaluator(source, ByteLayouts(), outputs.values())
    first = values.array(outputs["scale"])
    assert values._surveys is not None
    assert len(values._surveys._found) == 1
    for tensor in outputs.values():
        values.done(tensor)
    assert not values._surveys._found
    # one who asks once more gets the same
    assert values.array(outputs["scale"]) == first


def test_a_number_that_is_refused_is_named_with_rule_and_keys(
    tmp_path: Path, made: dict[str, Any]
) -> None:
    array = numbers((600, 320))
    array[500, 7] = 0x7F80
    source = write_source(tmp_path / "in", {"a": ("bfloat16", array)})
    with pytest.raises(CheckpointError) as caught:
        write_and_read(outputs_of(made["fp8"], array), source, tmp_path / "out")
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == (
        "M406", "rule fp8 (rules.yaml:1): `fp8` of k: quantize: the number at [500, 7] is inf",
    )  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_two_runs_find_the_same_by_themselves(tmp_path: Path, made: dict[str, Any]) -> None:
    array = numbers((600, 320))
    source = write_source(tmp_path / "in", {"a": ("bfloat16", array)})
    one, other = (Evaluator(source, ByteLayouts(), ()) for _ in range(2))
    outputs = outputs_of(made["nvfp4"], array)
    for tensor in outputs.values():
        assert one.array(tensor).tobytes() == other.array(tensor).tobytes()
