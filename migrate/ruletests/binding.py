"""One test of a rule file, bound to its rules: the given tensors as a checkpoint without a file,
its graph, and, when asked for, the bytes that come out.

Which keys are taken and which are left over is settled by all files of an edge together. So a test
may give keys that another file takes: that file is then bound beside its own. A file that has
nothing to say of what is given stays away, and the rules of one that has may match nothing: a test
is about the file that it stands in.

Bytes of given tensors are made without torch and when they are first read, so a test that looks at
headers only never makes any.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..core.errors import Diagnostic, MigrateError, OpError, Report, Span, printable
from ..core.keys import Pattern
from ..core.spec import BITS, Spec, spec
from ..core.templates import group, matching, seen_by
from ..core.view import is_whole
from ..elements.codes import element_code, pack_codes
from ..ops.base import Loss, ValueOp
from ..planning.bind import DROP, BindContext, StepResult, bind
from ..planning.compose import Composition, compose
from ..planning.graph import Tensor, computations
from ..planning.pathstate import PathState, PathStep, directed
from ..planning.pipeline import Views
from ..planning.request import OPTIMIZER_PARAM
from ..planning.sides import SideFiles
from ..planning.stored import initial
from ..rules.compiled import CompiledRule, DirectedRule, compile_file
from ..rules.examples import GivenTensor, RuleTest, expand, flat, shape_of
from ..rules.files import LAYOUTS, LoadedFile, files_below, used_beside
from ..rules.loading import check_ids, read_files
from ..rules.model import RuleFile
from ..source.blobs import Blob, FilelessBlob, Stored, StoredTensor, chunk_at
from ..source.index import Index, SideFile

# what keys of parts begin with that are kept beside what comes out of an example
_KEPT = "/kept "


class GivenBlob(FilelessBlob):
    """The packed bytes of one tensor."""

    __slots__ = ("_bytes", "_make", "name", "size")

    def __init__(self, name: str, size: int, make: Callable[[], bytes | memoryview]) -> None:
        self.name, self.size, self._make = name, size, make
        self._bytes: bytes | memoryview | None = None

    def readinto(self, offset: int, buffer: memoryview) -> None:
        if self._bytes is None:
            self._bytes = self._make()
        view = memoryview(buffer).cast("B")
        view[:] = memoryview(self._bytes)[offset : offset + view.nbytes]


class GivenSource:
    """A Source over tensors that are written down or were made a moment ago."""

    path = "<given>"
    format = "given"
    history: bytes | None = None

    def __init__(
        self,
        tensors: Mapping[str, tuple[Spec, Callable[[], bytes | memoryview]]],
        side: Mapping[str, bytes],
    ) -> None:
        stored = {
            key: Stored(of, number, 0) for number, (key, (of, _)) in enumerate(tensors.items())
        }
        files = tuple(SideFile(name, len(content)) for name, content in side.items())
        self.index = Index(stored, tuple(tensors), side_files=files)
        self.blobs: Sequence[Blob] = tuple(
            GivenBlob(key, of.nbytes, make) for key, (of, make) in tensors.items()
        )
        self.sides = dict(side)

    def side_file(self, path: str) -> bytes:
        return self.sides[path]

    def read_tensor(self, key: str) -> bytes:
        """All bytes of a tensor."""
        out = bytearray(self.index.tensors[key].spec.nbytes)
        self.blobs[chunk_at(self.index.tensors, key).blob].readinto(0, memoryview(out))
        return bytes(out)

    def read_part(self, tensor: Tensor) -> bytes:
        """All bytes of a tensor of the graph that is one of these as it is; OpError M310 if not."""
        key = tensor.sources[0] if len(tensor.sources) == 1 else None
        if not (isinstance(key, str) and is_whole(tensor.view)):
            raise OpError("M310", "what a part says is known where it is a given tensor as it is")
        return self.read_tensor(key)

    def identities(self) -> None:
        """Nothing that could distinguish these bytes from others in another process."""

    def check_unchanged(self) -> None:
        """Nothing: what is written down does not change."""

    def close(self) -> None:
        """Nothing is open."""


def given_source(
    tensors: Mapping[str, GivenTensor], side: Mapping[str, Any], *, scrambled: bool = False
) -> GivenSource:
    """The tensors of a test. `scrambled`: bytes that differ from key to key and from element to
    element, in place of what is written.
    """
    found: dict[str, tuple[Spec, Callable[[], bytes | memoryview]]] = {}
    for written, tensor in tensors.items():
        of = spec(tensor.dtype, shape_of(tensor.values) if tensor.shape is None else tensor.shape)
        for key, _ in expand(written):
            found[key] = (
                of,
                _scrambler(key, of)
                if scrambled
                else partial(elements, of, tensor.fill, tensor.values),
            )
    return GivenSource(found, {name: side_bytes(content) for name, content in side.items()})


def made_source(
    specs: Mapping[str, Spec], read: Callable[[str], memoryview], side: Mapping[str, bytes]
) -> GivenSource:
    """What a run makes, as a checkpoint to read again; `read` gives a key's bytes when asked."""
    return GivenSource({key: (of, partial(read, key)) for key, of in specs.items()}, side)


def side_bytes(content: Any) -> bytes:
    """A side file: text as it is, anything else as JSON."""
    return (content if isinstance(content, str) else json.dumps(content, indent=2) + "\n").encode()


def elements(of: Spec, fill: Any, values: Any) -> bytes:
    """The packed bytes of `values` or `fill` (a number, `iota`); ValueError if they do not fit."""
    if values is not None:
        return packed(of.dtype, flat(values))
    if fill == "iota":
        return packed(of.dtype, range(of.numel))
    one = element_code(of.dtype, 0 if fill is None else fill)
    return (
        pack_codes(of.dtype, [one]) * of.numel
        if BITS[of.dtype] >= 8
        else pack_codes(of.dtype, [one] * of.numel)
    )


def packed(dtype: str, numbers: Iterable[Any]) -> bytes:
    """The packed bytes of numbers; ValueError for one that the dtype cannot hold."""
    return pack_codes(dtype, (element_code(dtype, number) for number in numbers))


def _scrambler(key: str, of: Spec) -> Callable[[], bytes]:
    def make() -> bytes:
        nbytes, spare = of.nbytes, -of.numel * BITS[of.dtype] % 8
        seed = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        blocks = (
            hashlib.blake2b(seed + n.to_bytes(8, "little")).digest()
            for n in range(-(-nbytes // 64))
        )
        out = bytearray(b"".join(blocks)[:nbytes])
        if spare:
            # below a byte the last one may not be full, and the rest is zero
            out[-1] &= 0xFF >> spare
        return bytes(out)

    return make


def first_unstorable(tensors: Mapping[str, GivenTensor]) -> tuple[str, str] | None:
    """(key as written, why) of the first tensor whose dtype cannot hold its numbers, or None."""
    for written, tensor in tensors.items():
        of = spec(tensor.dtype, shape_of(tensor.values) if tensor.shape is None else tensor.shape)
        try:
            require_held(of, tensor.fill, tensor.values)
        except ValueError as error:
            return written, str(error)
    return None


def require_held(of: Spec, fill: Any, values: Any) -> None:
    """ValueError for a number that the dtype cannot hold, without making the tensor."""
    if values is not None:
        packed(of.dtype, flat(values))
    elif fill == "iota":
        # a float that holds an odd number holds all below it
        packed(of.dtype, range(max(0, of.numel - 2), of.numel))
    else:
        element_code(of.dtype, 0 if fill is None else fill)


@dataclass(frozen=True, eq=False, slots=True)
class CompiledFile:
    """A rule file that loads, with its rules compiled."""

    loaded: LoadedFile
    rules: tuple[CompiledRule, ...]
    keep: tuple[Pattern, ...]

    @property
    def model(self) -> RuleFile:
        return self.loaded.model

    @property
    def edge(self) -> tuple[str, str, str]:
        """Lineage, start and goal."""
        start, goal = self.model.edge
        return self.model.lineage, start, goal

    def span(self, rule: CompiledRule, *path: str | int) -> Span:
        """The place of a field of the rule; of its name where nothing is said."""
        return self.loaded.span(*rule.path, *(path or ("name",)))

    def speaks_of(self, keys: Iterable[str], *, backwards: bool) -> bool:
        """Whether a pattern of the file fits one of the keys, or may once params are known."""
        sides = [rule.targets if backwards else rule.sources for rule in self.rules]
        patterns = [
            pattern for side in sides for pattern in side.values() if not pattern.has_flat
        ] + list(self.keep)
        templates = group(keys)
        return any(
            pattern.params or any(matching(pattern, seen_by(pattern, template)))
            for pattern in patterns
            for template in templates
        )


def compiled(file: LoadedFile, report: Report) -> CompiledFile:
    """The file with its rules compiled; problems go into the report."""
    rules, keep = compile_file(file, report)
    return CompiledFile(file, tuple(rules), tuple(keep))


def siblings(file: CompiledFile, known: Iterable[CompiledFile] = ()) -> list[CompiledFile]:
    """The other files of the file's edge in its lineage's folder; none outside of one. A file that
    cannot be read is left out. What is `known` by its path is not read again.
    """
    path = file.loaded.path
    folders = list(path.resolve().parents)[:3]
    home = next((folder for folder in folders if (folder / LAYOUTS).is_file()), None)
    own = path.resolve()
    others = [other for other in files_below(home) if other != own] if home is not None else []
    # the others are called as the file is: from the working directory where they lie below it
    here = Path.cwd()
    named = [
        other.relative_to(here) if not path.is_absolute() and other.is_relative_to(here) else other
        for other in others
    ]
    out = []
    edge = (file.model.lineage, file.model.edge)
    at = {other.loaded.path: other for other in known}
    read = [
        other
        for name in named
        for other in ([at[name].loaded] if name in at else read_files([name], Report()))
        if (other.model.lineage, other.model.edge) == edge
    ]
    for other in used_beside(file.loaded, read):
        report = Report()
        made = at[other.path] if other.path in at else compiled(other, report)
        if not report.has_errors():
            out.append(made)
    return out


@dataclass(frozen=True, eq=False, slots=True)
class PreparedTest:
    """A test on its edge, before anything is bound: what it gives as a checkpoint, and the rules of
    its file and of those beside it, whose rules may match nothing.
    """

    test: RuleTest
    source: GivenSource
    step: PathStep
    params: Mapping[str, Any]

    def path_state(self) -> PathState:
        """A walk whose side files go with it."""
        return path_state_over(self.source, self.params)


def prepare(file: CompiledFile, number: int, others: Sequence[CompiledFile] = ()) -> PreparedTest:
    """Test `number` of the file, beside those `others` of its edge that speak of given keys."""
    test, model = file.model.tests[number], file.model
    source = given_source(test.given, test.side)
    given = source.index.tensors
    beside = [o for o in others if o.speaks_of(given, backwards=test.backwards)]
    rules = [*file.rules, *(replace(r, spare=True) for other in beside for r in other.rules)]
    keep = (*file.keep, *(pattern for other in beside for pattern in other.keep))
    ends = model.edge[::-1] if test.backwards else model.edge
    files = (file.loaded, *(other.loaded for other in beside))
    unsettled = tuple((rule, dict[str, Any]()) for rule in rules)
    step = PathStep(model.lineage, *ends, test.backwards, unsettled, keep, files, {"params": {}})
    return PreparedTest(test, source, step, test.params)


def bind_headers(
    prepared: PreparedTest, report: Report
) -> tuple[tuple[DirectedRule, ...], dict[str, Tensor], StepResult]:
    """The rules with the test's params, the given tensors and what the rules make of them, without
    bytes but of parts that say what no header does: conditions on values count as met. Problems go
    into the report.
    """
    views, rules, bound = Views(), tuple[DirectedRule, ...](), StepResult()
    given = initial(prepared.source.index.tensors, views)
    try:
        step = prepared.path_state().enter_step(prepared.step, given)
        rules = tuple(directed(step, report))
        if not report.has_errors():
            context = BindContext(lambda *_: True, DROP, part=prepared.source.read_part)
            bound = bind(rules, step.keep, given, views, context, report)
    except MigrateError as error:
        report.diagnostics += error.diagnostics
    return rules, given, bound


@dataclass(frozen=True, slots=True)
class RefusedTest:
    """The rules do not take what the test gives them, and why."""

    test: RuleTest
    diagnostics: tuple[Diagnostic, ...]


@dataclass(eq=False, slots=True)
class BoundTest:
    """An example that binds. `allow`: what the test allows; `asked`: binding looked at values."""

    file: LoadedFile
    number: int
    source: GivenSource
    path_state: PathState
    composition: Composition
    allow: frozenset[str]
    asked: bool
    _made: dict[str, memoryview] = field(default_factory=dict)

    @property
    def test(self) -> RuleTest:
        return self.file.model.tests[self.number]

    @property
    def steps(self) -> list[PathStep]:
        """The edges that were walked, with the params that they were walked with."""
        return [step for step, _ in self.composition.steps]

    @property
    def outputs(self) -> Mapping[str, Tensor]:
        return self.composition.graph.outputs

    @property
    def kept(self) -> dict[str, Tensor]:
        """What is kept beside them, by a key that no rule takes."""
        parts = self.composition.parts or {}
        return {f"{_KEPT}{name}": part.tensor for name, part in parts.items()}

    @property
    def specs(self) -> dict[str, Spec]:
        """What comes out, without bytes."""
        return {key: tensor.spec for key, tensor in self.outputs.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all that is given and all that comes out."""
        return self.source.index.nbytes + sum(spec.nbytes for spec in self.specs.values())

    def fill(self) -> Mapping[str, memoryview]:
        """The packed bytes of each output, made once; raises what a run would (M404, M9xx)."""
        from ..running.buffers import fill_buffers

        if not self._made and self.outputs:
            every = {**self.outputs, **self.kept}
            buffers = {key: memoryview(bytearray(t.spec.nbytes)) for key, t in every.items()}
            fill_buffers(every, self.source, buffers, checks=self.composition.graph.checks)
            self._made.update(buffers)
        return self._made

    def result(self) -> GivenSource:
        """What comes out, as a checkpoint whose bytes are made when they are read."""
        specs = {**self.specs, **{key: tensor.spec for key, tensor in self.kept.items()}}
        return made_source(specs, lambda key: self.fill()[key], self.side_files())

    def side_files(self) -> dict[str, bytes]:
        """The side files that come out."""
        sides = self.path_state.sides
        return {
            path: sides.read_file(path) or b""
            for path, _ in sides.list_files(self.source.index.side_files)
        }

    def again(self, source: GivenSource, steps: Sequence[PathStep]) -> Composition:
        """The composition of these steps, with params, over a source; raises its problems."""
        return bound(source, steps, self.allow, None, prove=False)[0]

    def back(self) -> BoundTest:
        """The way back over what came out, as with its stamp; raises its problems."""
        source = self.result()
        steps = [
            replace(
                step,
                start=step.goal,
                goal=step.start,
                backwards=not step.backwards,
                memory={"files": {}, "kept": [], **memory},
            )
            for step, memory in zip(
                reversed(self.steps), reversed(self.path_state.remembered), strict=True
            )
        ]
        path_state = path_state_over(source, self.test.params)
        allow = frozenset(("lossy", "drop"))
        composition, asked = bound(source, steps, allow, path_state, prove=False)
        return BoundTest(self.file, self.number, source, path_state, composition, allow, asked)

    def scrambled(self) -> BoundTest:
        """The same over bytes that all differ, or itself where values decide or an op computes."""
        if self.asked or self.composition.graph.checks or computations(self.outputs.values()):
            return self
        return replace(
            self, source=given_source(self.test.given, self.test.side, scrambled=True), _made={}
        )


def bind_test(
    file: CompiledFile, number: int, others: Sequence[CompiledFile] = ()
) -> BoundTest | RefusedTest:
    """Test `number` of the file, bound to its given tensors like a checkpoint, or why it cannot be.

    `others` are the other files of its edge; those that speak of given keys are bound beside it.
    """
    from ..planning.path import check_params

    loaded, test = file.loaded, file.model.tests[number]
    if found := first_unstorable(test.given):
        place = loaded.span("tests", number, "given", found[0])
        return RefusedTest(test, (unwritable(test.name, *found, place),))
    # what says how state of an optimizer goes on is no param of a rule
    params = {name: value for name, value in test.params.items() if name != OPTIMIZER_PARAM}
    prepared = replace(prepare(file, number, others), params=params)
    try:
        report = Report()
        check_ids(prepared.step.files, report)
        report.check()
        check_params([prepared.step], prepared.params, ())
        allow = _losses(prepared) if test.allow is None else frozenset(test.allow)
        path_state = prepared.path_state()
        composition, asked = bound(prepared.source, [prepared.step], allow, path_state)
    except MigrateError as error:
        return RefusedTest(test, error.diagnostics)
    return BoundTest(loaded, number, prepared.source, path_state, composition, allow, asked)


def unwritable(test: str, key: str, why: str, span: Span) -> Diagnostic:
    """M710: a number of a test that cannot be stored."""
    hint = "write a number that the dtype holds, or give the tensor another dtype"
    return Diagnostic("M710", f"test {test!r}: {printable(key)}: {why}", (span,), (), hint)


def path_state_over(source: GivenSource, params: Mapping[str, Any]) -> PathState:
    """A walk whose side files go with it."""
    return PathState(params, SideFiles(source.sides.get, carried=list(source.sides)), carried=True)


def _losses(prepared: PreparedTest) -> frozenset[str]:
    """What the ops of the rules say they lose, as `--allow` names it."""
    found = set()
    tensors = initial(prepared.source.index.tensors, Views())
    for rule in directed(prepared.path_state().enter_step(prepared.step, tensors), Report()):
        for op_step in rule.steps:
            loss = op_step.op.loss(op_step.args)
            if loss is Loss.DESTRUCTIVE:
                found.add("drop")
            if loss is Loss.LOSSY or isinstance(op_step.op, ValueOp):
                found.add("lossy")
    return frozenset(found)


def bound(
    source: GivenSource,
    steps: Sequence[PathStep],
    allow: frozenset[str],
    path_state: PathState | None,
    *,
    prove: bool = True,
) -> tuple[Composition, bool]:
    """The composition over the source, and whether values were looked at; raises its problems."""
    asked = False

    def same_bytes(key: str, present: Tensor, made: Tensor) -> bool:
        nonlocal asked
        from ..running.checks import tensors_equal

        asked = True
        return tensors_equal(present, made, source)

    def payload(tensor: Tensor) -> bytes:
        nonlocal asked
        from ..running.checks import read_content

        asked = True
        return read_content(tensor, source)

    tensors, kept = dict[str, StoredTensor](), dict[str, tuple[str, StoredTensor]]()
    for key, stored in source.index.tensors.items():
        if key.startswith(_KEPT):
            kept[key.removeprefix(_KEPT)] = key, stored
        else:
            tensors[key] = stored
    report = Report()
    composition = compose(
        tensors,
        steps,
        BindContext(same_bytes, allow, payload, part=payload),
        report,
        programs=True,
        prove=prove,
        path_state=path_state,
        kept_parts=kept,
    )
    report.check()
    return composition, asked


def rule_behind(bound: BoundTest, key: str) -> Any:
    """The `Provenance` of an output, that is its rule and its keys; None for a kept key."""
    for _, found in reversed(bound.composition.steps):
        if key in found.provenance:
            return found.provenance[key]
    return None
