"""A rule file applied to numpy arrays: through the binder's views, and through the eager programs
as the oracle.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rule_text import load_text
from upstream import Example, made

from migrate import ops
from migrate.core.errors import MigrateError, Report
from migrate.core.spec import spec
from migrate.core.view import Fill
from migrate.elements.codes import encode
from migrate.planning.bind import BindContext
from migrate.planning.compose import Composition, compose
from migrate.planning.graph import ComputedTensor, ReadKey, Tensor
from migrate.planning.pathstate import PathStep
from migrate.planning.unchanged import fold_keys
from migrate.rules import params as parameters
from migrate.rules.compiled import compile_file
from migrate.rules.loading import load_files
from migrate.source.blobs import Stored

CASES = Path(__file__).parent.parent / "data" / "cases"
DTYPES = {
    "float32": "<u4",
    "float16": "<u2",
    "bfloat16": "<u2",
    "int64": "<u8",
    "uint8": "u1",
    "float8_e4m3fn": "u1",
}


class Checkpoint(dict):
    """key -> numpy array of float32, int64 or uint8; its specs, and its elements as raw
    integers.
    """

    def specs(self):
        names = {
            "float32": "float32",
            "int64": "int64",
            "uint8": "uint8",
            "uint16": "bfloat16",
            "float16": "float16",
        }
        return {k: spec(names[str(a.dtype)], a.shape) for k, a in self.items()}

    def raw(self, key):
        a = np.asarray(self[key], order="C")
        return a.view(f"u{a.dtype.itemsize}").reshape(a.shape)


def realise(tensor: Tensor, ckpt: Checkpoint) -> np.ndarray:
    """The elements of a graph tensor, by walking its pieces one element at a time group."""
    out = np.zeros(tensor.spec.numel, dtype=DTYPES[tensor.spec.dtype])
    flats = {}
    for piece in tensor.view.pieces:
        index_dst, index_src = np.array(piece.dst), np.array(piece.src)
        for n, d, s in zip(piece.counts, piece.dst_strides, piece.src_strides, strict=True):
            index_dst = index_dst[..., None] + np.arange(n) * d
            index_src = index_src[..., None] + np.arange(n) * s
        if isinstance(piece.leaf, Fill):
            out[index_dst] = np.frombuffer(encode(tensor.spec.dtype, piece.leaf.value), out.dtype)[
                0
            ]
        else:
            source = tensor.sources[piece.leaf]
            if source not in flats:
                flats[source] = (
                    eager_value(source, ckpt).ravel()
                    if isinstance(source, ComputedTensor)
                    else ckpt.raw(source).ravel()
                )
            out[index_dst] = flats[source][index_src]
    return out.reshape(tensor.spec.shape)


def eager_value(value: ComputedTensor, ckpt: Checkpoint) -> np.ndarray:
    arrays = [realise(t, ckpt) for t in value.computation.inputs]
    step = value.computation.op_call
    return ops.get(step.op).eager(
        step.args, arrays, value.computation.parts, [t.spec.dtype for t in value.computation.inputs]
    )[value.output]


def run_program(expr, ckpt: Checkpoint) -> np.ndarray:
    if isinstance(expr, ReadKey):
        return ckpt.raw(expr.key)
    arrays = [run_program(e, ckpt) for e in expr.inputs]
    return ops.get(expr.op).eager(expr.args, arrays, expr.parts, dtypes=expr.dtypes)[expr.output]


class Applied(dict):
    composition: Composition


class Engine:
    """Loads rule files and applies them; `apply` returns raw arrays and raises what the tool would
    raise.
    """

    def step(self, files, params=None, backwards=False):
        report = Report()
        rules, keep, known = [], [], dict(params or {})
        for file in files:
            given = {n: v for n, v in known.items() if n in file.model.params}
            values = parameters.resolve(file.model.params, given, [])
            compiled, patterns = compile_file(file, report)
            rules += [(c, values) for c in compiled]
            keep += patterns
        report.check()
        model = files[0].model
        return PathStep(model.lineage, *model.edge, backwards, tuple(rules), tuple(keep))

    def text(self, text, name="rule.yaml"):
        return [load_text(text, name)]

    def case(self, *names):
        return load_files([CASES / f"{n}.yaml" for n in names])

    def apply(
        self, files, ckpt, params=None, *, backwards=False, allow=("drop",), prove=False, kept=None
    ):
        ckpt = Checkpoint(ckpt)
        report = Report()
        step = replace(
            self.step(files, params, backwards),
            memory={"kept": None if kept is None else fold_keys(kept)},
        )
        stored = {k: Stored(s, 0, 0) for k, s in ckpt.specs().items()}

        def same(key, present, made):
            return realise(present, ckpt).tobytes() == realise(made, ckpt).tobytes()

        done = compose(
            stored, [step], BindContext(same, frozenset(allow)), report, programs=True, prove=prove
        )
        report.check()
        out = Applied()
        for key, tensor in done.graph.outputs.items():
            out[key] = realise(tensor, ckpt)
            again = run_program(done.programs[key], ckpt)
            assert again.shape == out[key].shape, key
            assert again.tobytes() == out[key].tobytes(), f"{key}: views and eager twin differ"
        for check in done.graph.checks:
            arrays = [realise(t, ckpt) for t in check.tensors]
            if check.kind == "equal":
                assert all(a.tobytes() == arrays[0].tobytes() for a in arrays), check.message
            else:
                for array, tensor in zip(arrays, check.tensors, strict=True):
                    element = np.frombuffer(encode(tensor.spec.dtype, check.value), array.dtype)[0]
                    assert (array == element).all(), check.message
        out.composition = done
        return out

    def walk(self, steps, ckpt):
        """The composition of all the legs, proved, and its outputs as float32 arrays."""
        ckpt = Checkpoint(ckpt)
        report = Report()
        stored = {k: Stored(s, 0, 0) for k, s in ckpt.specs().items()}
        done = compose(stored, steps, BindContext(lambda *_: True), report)
        report.check()
        return done, {
            key: realise(tensor, ckpt).view(np.float32)
            for key, tensor in done.graph.outputs.items()
        }

    def rules(self, *rules, keep=(), params="", name="rule.yaml", edge="[v1, v2]"):
        """A loaded rule file of these rules, each the inside of a flow mapping without its name
        (r0, r1, …).
        """
        body = "".join(f"  - {{name: r{n}, {rule}}}\n" for n, rule in enumerate(rules))
        kept = "".join(f"  - '{pattern}'\n" for pattern in keep)
        text = f"id: t/{name.partition('.')[0]}\ntitle: t\nlineage: t\nedge: {edge}\n"
        text += (
            f"params: {{{params}}}\n" * bool(params)
            + f"keep:\n{kept}" * bool(keep)
            + f"rules:\n{body}"
        )
        return [load_text(text, name)]

    def refusals(self, files, ckpt, params=None, **kwargs):
        """What is said against applying the files: the diagnostics, at least one."""
        with pytest.raises(MigrateError) as caught:
            self.apply(files, ckpt, params, **kwargs)
        return caught.value.diagnostics

    def moves(self, files, keys, params=None, **kwargs):
        """source key -> the key its one element arrives at, for rules that only rename and drop."""
        out = self.apply(
            files, {key: np.float32([n]) for n, key in enumerate(keys)}, params, **kwargs
        )
        where = {int(array.view(np.float32)[0]): key for key, array in out.items()}
        assert len(where) == len(out)
        return {key: where[n] for n, key in enumerate(keys) if n in where}


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def example(request: pytest.FixtureRequest) -> Example:
    """What upstream makes of a checkpoint, made once for all tests of the example."""
    return made(request.param)
