"""What an op is: one verb, one file, ignorant of keys, files and YAML.

A file `ops/<name>.py` defines `OP = SomeOp()`, an instance of a subclass of `Op`; its name is the
file's. The binder resolves captures into positions: a *join* op gets the views of one group in the
order of its capture's values, a *part* op answers with one view per value. An op never sees a key.

Kinds
    join   n -> 1   stack, concat, same      (has `over`)
    part   1 -> n   unbind, split, copy, tie (has `into`)
    each   1 -> 1   the axes family          (may have `only`)
    make   1 -> 1   fill: reads nothing of its input but that it exists
    end    n -> 0   drop
    decide 1 -> n   extra_state: the tensor's bytes say how many, which is settled while planning
    exchange n -> m recode: the tensors of some roles for those of others

A `ValueOp` computes instead of moving: `cast`, `affine`, `dequantize`. It may be of any of the
first three kinds, or exchange roles.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

from ..core.declaration import (
    Axes,
    Capture,
    CodecArgs,
    Dtype,
    Flag,
    Formatted,
    Integer,
    Integers,
    Number,
    Only,
    Sizes,
    Text,
    Written,
    arg,
    check_limits,
)
from ..core.errors import OpError as OpError
from ..source.registry import Registry

if TYPE_CHECKING:
    import numpy as np

    from ..core.spec import Spec
    from ..core.view import View


def _call_label(op: str, args: Any) -> str:
    """The op with the capture that it joins or makes, as messages name it."""
    for name in ("over", "into"):
        capture = getattr(args, name, None)
        if capture is not None:
            return f"{op} {name} {{{capture}}}"
    return op


def require_least(label: str, name: str, value: int | None, least: int) -> None:
    """OpError M308 if the argument `name` is given and below what other arguments make `least`."""
    if value is not None and value < least:
        raise OpError("M308", f"{label}: `{name}` is {value}, it must be at least {least}")


class Loss(Enum):
    LOSSLESS = "lossless"
    LOSSY = "lossy"
    DESTRUCTIVE = "destructive"


class OpCall(NamedTuple):
    """A call of an op by name: what an inverse is."""

    op: str
    args: Any


registry: Registry[Op] = Registry("migrate.ops", "migrate.ops", "OP")


def get(name: str) -> Op:
    """The op called `name`. KeyError without one, BrokenEntryError if it does not load."""
    return registry.get(name)


def names() -> list[str]:
    """The names of all ops, built-in and third-party, sorted; imports none of them."""
    return registry.names()


def step(op: str, **args: Any) -> OpCall:
    """The call of the op called `op` with these Args; how an op names another as its inverse."""
    return OpCall(op, get(op).Args(**args))


@dataclass(frozen=True, slots=True)
class OneWay:
    """There is no exact inverse, `because`; `help` names the argument that would make one."""

    because: str
    help: str | None = None


class Check(NamedTuple):
    """A condition on values. kind "equal": all `views` hold the same bytes; kind "filled": every
    element of each view equals `value`.
    """

    kind: str
    views: tuple[View, ...]
    value: float | None
    message: str


class Decided(NamedTuple):
    """What becomes of one tensor: `outputs` are (what is put behind the output's key, spec), none
    where it goes.

    `args` are those of the call that computes them; None: the tensor goes on as it is. `loses`:
    something is lost that needs permission. `notes` say what is odd about what goes on.
    """

    outputs: tuple[tuple[str, Spec], ...]
    args: Any = None
    loses: bool = False
    notes: tuple[str, ...] = ()


class Op:
    """Base of all ops. `Args` is a frozen dataclass whose fields have descriptions (`arg`)."""

    name: ClassVar[str]
    kind: ClassVar[str] = "each"
    Args: ClassVar[type]
    summary: ClassVar[str]

    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:
            cls.name = cls.__module__.rpartition(".")[2]

    def validate(self, args: Any) -> None:
        """OpError M308 for arguments that no tensor could satisfy. A loader may call it before any
        checkpoint is open.

        What `arg` says of each is checked here; an op with more to say calls this first.
        """
        check_limits(args, lambda: _call_label(self.name, args))

    def parts(self, args: Any, shape: tuple[int, ...], values: int | None) -> int:
        """For part ops: how many outputs one input of `shape` has; `values` is how many values the
        capture lists, None for an int.
        """
        raise NotImplementedError

    def trace(self, args: Any, views: Sequence[View], parts: int = 1) -> list[View]:
        """The output views. Raises OpError naming axis and sizes when the shapes do not fit."""
        raise NotImplementedError

    def decide(
        self, args: Any, spec: Spec, payload: bytes, name: str, allow: frozenset[str]
    ) -> Decided:
        """For ops of the kind `decide`: what becomes of a tensor that holds `payload`. `name` is
        its key, `allow` what a person permits.

        OpError for what the op refuses. A call with the answer's `args` makes the outputs, by
        `infer` and `eager`.
        """
        raise NotImplementedError

    def infer(self, args: Any, specs: Sequence[Spec], parts: int = 1) -> list[Spec] | None:
        """The output specs where they do not follow from the views (an op that makes or changes a
        dtype); else None.

        OpError M303 where the dtypes of the inputs do not fit the op or each other; layout ops are
        asked for this too.
        """
        return None

    def eager(
        self, args: Any, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        """The same on numpy arrays of raw elements, written without the view algebra. `verify` and
        the kit call it.

        `dtypes` are torch's names of the inputs' dtypes. A raw element is an unsigned integer of
        the element's width (`elements.raw.carrier`): uint8 to uint64, `V16` for complex128, and one
        uint8 per element below a byte.
        """
        raise NotImplementedError

    # whether what the op cuts off is kept beside the tensors, see `planning.kept`
    keeps: ClassVar[bool] = False
    # whether what `eager` makes has memory of its own, and is not its input's
    copies: ClassVar[bool] = True
    # whether `rows` reads less than all of the inputs
    by_rows: ClassVar[bool] = False

    def rows(
        self,
        args: Any,
        part: Callable[..., Array],
        specs: Sequence[Spec],
        parts: int,
        output: int,
        start: int,
        stop: int,
    ) -> Array:
        """Rows `start` to `stop` along the first axis of what `eager` makes as output `output`: for
        spot checks of large tensors.

        `part(number, low, high)` gives these rows of an input, and `part(number, low, high,
        columns)` of them the columns from one to another. `specs` are those of the whole inputs.
        An op that needs all of its inputs for any row leaves this as it is.
        """
        whole = [
            part(number, 0, spec.shape[0] if spec.shape else 0) for number, spec in enumerate(specs)
        ]
        made: Array = self.eager(args, whole, parts, [s.dtype for s in specs])[output][start:stop]
        return made

    def checks(self, args: Any, views: Sequence[View], parts: int = 1) -> list[Check]:
        """The conditions on values that must hold for the op to be what it says."""
        return []

    def loss(self, args: Any) -> Loss:
        return Loss.LOSSLESS

    def invert(self, args: Any, enumerated: bool = False) -> OpCall | OneWay:
        """The inverse as a call with the same capture names, or why there is none.

        `enumerated`: the capture of `over` or `into` lists its values, so that their number is
        known without `count`.
        """
        raise NotImplementedError

    def samples(self) -> Iterable[tuple[dict[str, Any], list[tuple[int, ...]]]]:
        """(arguments as authors write them, input shapes) for the kit, the docs and the schema."""
        raise NotImplementedError


# raw elements of one tensor (`elements.raw.carrier`)
Array: TypeAlias = "np.ndarray[Any, Any]"
# [start, stop) on each axis; empty for a scalar
Box: TypeAlias = "tuple[tuple[int, int], ...]"


def needed_columns(box: Box, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Where some rows of what is made are columns of an input, these columns: all of its rows are
    needed then. Empty for other boxes.
    """
    if len(box) < 2 or box[0] != (0, shape[0]) or box[-1] == (0, shape[-1]):
        return ()
    return (box[-1],)


class Meter(Protocol):
    """What an op that changes values reports of its error by chunks; sums are of float64."""

    def add(
        self,
        wanted: Any,
        got: Any,
        amax: Any = None,
        *,
        saturated: int = 0,
        underflowed: int = 0,
        non_finite: int | None = None,
        sure: bool = True,
    ) -> None:
        """`wanted` and `got`: float32 or float64 tensors or arrays of one shape, empty where only
        counts are known. `amax`: what relative errors refer to, of a shape that broadcasts (a
        block's largest magnitude); None: the largest of `wanted`. `non_finite`: elements that
        became infinite or NaN and were not, given where not all of them are among these. `sure`:
        that these differ nowhere means that nothing was rounded; not so for a sample, and where
        `wanted` is itself rounded."""


class ValueOp(Op):
    """An op that computes elements. A graph has a `ComputedTensor` where a layout op leaves a view.

    Arrays are of raw elements (`Op.eager`): numpy on the CPU, torch tensors of the same integers on
    another device; `elements.raw.typed` makes either a torch tensor of the real dtype without a
    copy. A box of the result is computed from boxes of the inputs, so that memory follows boxes and
    not tensors, and so that a reader can ask for a slice.
    """

    # CPU and GPU give the same bits; where not, the op runs on the CPU unless a person asks for the
    # other, and declares `slack`
    same_bits: ClassVar[bool] = True
    # False: it is computed by numpy wherever the run computes
    on_device: ClassVar[bool] = True

    def trace(self, args: Any, views: Sequence[View], parts: int = 1) -> list[View]:
        raise NotImplementedError(f"{self.name} computes")

    def roles(self, codec: str = "") -> tuple[str, ...]:
        """The roles that a join takes or a part makes, in order; empty: an op without roles."""
        return ()

    def takes(self, args: Any) -> tuple[str, ...]:
        """The roles that a join or an exchange takes, in order."""
        return self.roles(getattr(args, "codec", ""))

    def naming(self, args: Any, takes: Sequence[str] = (), gives: Sequence[str] = ()) -> Any:
        """The arguments of an exchange in a rule that has names for these roles of either side."""
        return args

    def gives(self, args: Any) -> tuple[str, ...]:
        """The roles that an exchange makes, in order."""
        return ()

    def inputs(self, args: Any) -> tuple[str, ...]:
        """The roles that a settled exchange takes, in the order of its inputs."""
        return self.takes(args)

    def copied(self, args: Any, specs: Sequence[Spec], output: int) -> tuple[int, Any] | None:
        """Of an exchange, which input an output copies, and what leads to its places; None where it
        is computed.
        """
        return None

    def moved(self, of: View, moves: Any, dtype: str) -> View:
        """The view of an input, to be stored as `dtype`, in the places that `moves` lead to."""
        raise NotImplementedError

    def may_lack(self, codec: str) -> tuple[str, ...]:
        """Those of the roles that a tensor can be without."""
        return ()

    def unmade(self, codec: str) -> tuple[str, ...]:
        """Those of them that are never made, also where a tensor had them."""
        return ()

    def unused(self, codec: str) -> Mapping[str, str]:
        """Those of the roles that a join drops, and why."""
        return {}

    def settles(self, args: Any, named: Collection[str]) -> bool:
        """Whether calls depend on which roles are there or on what the bytes of some say. `named`
        are the roles that the rule has names for.
        """
        return False

    def reads(self, args: Any) -> Mapping[str, int]:
        """The roles of a join whose bytes `settle` is given, while planning, and how many bytes
        each may have.
        """
        return {}

    def settle(
        self, args: Any, roles: Sequence[str], specs: Sequence[Spec], values: Mapping[str, bytes]
    ) -> Any:
        """The arguments of the call that takes or makes these roles and no others. `specs` are
        those of the inputs, `values` the bytes of those that `reads` names and that are there.

        OpError for roles that do not go together, or whose bytes and shapes disagree.
        """
        raise NotImplementedError

    def makes(self, args: Any, spec: Spec) -> tuple[str, ...]:
        """The roles that a part makes of a tensor, as far as the arguments say."""
        return ()

    def turns(self, args: Any, specs: Sequence[Spec], output: int) -> bool:
        """Whether `compute` also fills an array whose last axis but one is contiguous in memory,
        and not its last, and takes no longer for it than transposing would.
        """
        return False

    def foreseen(self, args: Any, specs: Sequence[Spec], output: int) -> bytes | None:
        """The bytes of a small output, where they follow from the specs of the inputs."""
        return None

    by_rows: ClassVar[bool] = True
    # whether `rows` makes an output without axes too, as row 0 to 1, of less than all inputs
    scalars_by_rows: ClassVar[bool] = False

    def rows(
        self,
        args: Any,
        part: Callable[..., Array],
        specs: Sequence[Spec],
        parts: int,
        output: int,
        start: int,
        stop: int,
    ) -> Array:
        """As `Op.rows`, from the boxes that `needs` names for rows cut at the borders of blocks."""
        if self.surveys(args, specs) or not self.makes_rows(args, specs):
            # of calls that are surveyed, `surveyed_rows` makes them of less where the op can
            return super().rows(args, part, specs, parts, output, start, stop)
        shape = self.infer(args, specs, parts)[output].shape
        low, high = self.rounded_rows(args, specs, parts, output, start, stop)
        boxes = self.needs(args, specs, output, ((low, high), *((0, n) for n in shape[1:])))
        arrays = []
        for number, (spec, box) in enumerate(zip(specs, boxes, strict=True)):
            columns = needed_columns(box, spec.shape) if high - low < shape[0] else ()
            arrays.append(part(number, *(box[0] if box else (0, 0)), *columns))
        made: Array = self.eager(args, arrays, parts, [s.dtype for s in specs])[output]
        # an op that needs all of its inputs makes all of its output
        first = low if len(made) == high - low else 0
        return made[start - first : stop - first]

    def rounded_rows(
        self, args: Any, specs: Sequence[Spec], parts: int, output: int, start: int, stop: int
    ) -> tuple[int, int]:
        """The rows around these that end with blocks: `eager` makes the same of what they need."""
        grain = self.grain(args, specs, output)[0]
        return start // grain * grain, min(
            -(-stop // grain) * grain, self.infer(args, specs, parts)[output].shape[0]
        )

    def makes_rows(self, args: Any, specs: Sequence[Spec]) -> bool:
        """Whether rows can be made of some rows of the inputs: by `rows` or, of a call that is
        surveyed, by `surveyed_rows`.
        """
        return not self.surveys(args, specs)

    def eager_survey(
        self, args: Any, specs: Sequence[Spec], start: int, array: Array, known: Any = None
    ) -> Any:
        """What `survey` finds, written as `eager` is: `array` has the rows of the first input from
        `start` on, `known` is what was found in those before.
        """
        raise NotImplementedError

    def surveyed_rows(
        self,
        args: Any,
        part: Callable[[int, int, int], Array],
        specs: Sequence[Spec],
        parts: int,
        output: int,
        start: int,
        stop: int,
        survey: Any,
    ) -> Array:
        """`rows` where `eager_survey` found `survey` in all rows. An output that follows from that
        alone is made without `part`; one without axes is row 0 to 1.
        """
        raise NotImplementedError

    def eager_width(self, args: Any) -> int | None:
        """Bytes for each element that `eager` takes beside its inputs and results; None for an op
        that lays out whole arrays of float64.
        """
        return None

    def eager_memory(self, args: Any, specs: Sequence[Spec]) -> int | None:
        """The same for all of them together, where specs of the inputs do not count the elements;
        None where they do.
        """
        return None

    def torch(self, args: Any, specs: Sequence[Spec]) -> bool:
        """Whether `compute` on the CPU imports torch; numpy is there in any case."""
        return True

    def passes(self, args: Any, specs: Sequence[Spec]) -> bool:
        """Whether the output is the first input: bytes are copied and nothing is computed."""
        return False

    def slack(self, args: Any, arrays: Sequence[Array], dtypes: Sequence[str] = ()) -> list[Array]:
        """Of an op without `same_bits`: how far each element of what `compute` makes may lie from
        `eager`'s, in float64. Unless an op says so, not at all."""
        import numpy as np

        return [np.zeros(made.shape) for made in self.eager(args, arrays, dtypes=dtypes)]

    def remembers(self, args: Any, specs: Sequence[Spec]) -> int:
        """The most bytes that `compute` keeps in `memo`, a dict for all boxes and outputs of a
        call; 0: it takes no `memo`.

        None may be given all the same where there is no memory for it.
        """
        return 0

    def follows(self, args: Any, output: int) -> bool:
        """Whether output `output` follows from computing the others and is cheap (`recall`)."""
        return False

    def recall(
        self,
        args: Any,
        specs: Sequence[Spec],
        output: int,
        box: Box,
        out: Any,
        memo: dict[str, Any] | None = None,
        survey: Any = None,
    ) -> bool:
        """Fills `out` as `compute` would, from `memo` and `survey` alone; False where these are not
        enough.
        """
        return False

    def surveys(self, args: Any, specs: Sequence[Spec]) -> bool:
        """Whether something must be known of all numbers of the first input before the first box is
        computed: `compute` and `recall` are then given it as `survey`.
        """
        return False

    def survey(
        self, args: Any, specs: Sequence[Spec], box: Box, array: Any, known: Any = None
    ) -> Any:
        """What is known of the first input after one more box of it, `array`, in little memory.

        `known` is what was found before, None of the first box; boxes come in row-major order and
        are of any size. OpError for values that the op refuses, with the first index.
        """
        raise NotImplementedError

    def loss_on(self, args: Any, specs: Sequence[Spec]) -> Loss:
        """The loss on inputs of these specs."""
        return self.loss(args)

    def infer(self, args: Any, specs: Sequence[Spec], parts: int = 1) -> list[Spec]:
        """The output specs. OpError for shapes or dtypes that do not fit."""
        raise NotImplementedError

    def needs(self, args: Any, specs: Sequence[Spec], output: int, box: Box) -> list[Box]:
        """The box of each input that `box` of an output comes from; by default all of each."""
        return [tuple((0, n) for n in s.shape) for s in specs]

    def needs_surveyed(
        self, args: Any, specs: Sequence[Spec], output: int, box: Box, survey: Any
    ) -> list[Box]:
        """`needs` without what `compute` does not look at where it is given this `survey`."""
        return self.needs(args, specs, output, box)

    def packed(self, args: Any, specs: Sequence[Spec]) -> Collection[int]:
        """The inputs of less than a byte an element whose boxes `compute` is given as the bytes
        that hold them, uint8: `needs` cuts the last axis of these at whole bytes. Asked only where
        there is an input of such elements.
        """
        return ()

    def grain(self, args: Any, specs: Sequence[Spec], output: int) -> tuple[int, ...]:
        """On each axis of output `output`, the multiple at which boxes begin and end at little
        cost; 1 where any will do.
        """
        return (1,) * len(self.infer(args, specs)[output].shape)

    def compute(
        self,
        args: Any,
        arrays: Sequence[Any],
        specs: Sequence[Spec],
        output: int,
        box: Box,
        out: Any,
        meter: Meter | None = None,
    ) -> None:
        """Fills `out`, which has the shape of `box`, with raw elements of output `output`.

        `arrays` hold the boxes that `needs` names, `specs` are those of the whole inputs. `meter`,
        if there is one, gets the error of what an op rounds. OpError for values that the op
        refuses, with the first index in the whole input.
        """
        raise NotImplementedError


__all__ = [
    "Array",
    "Axes",
    "Box",
    "Capture",
    "Check",
    "CodecArgs",
    "Decided",
    "Dtype",
    "Flag",
    "Formatted",
    "Integer",
    "Integers",
    "Loss",
    "Meter",
    "Number",
    "OneWay",
    "Only",
    "Op",
    "OpCall",
    "OpError",
    "Sizes",
    "Text",
    "ValueOp",
    "Written",
    "arg",
    "dataclass",
    "replace",
    "step",
]  # fmt: skip


Shape = tuple[int, ...]


def format_shape(shape: Sequence[int]) -> str:
    """A shape as messages print it: `[2, 3]`."""
    return f"[{', '.join(map(str, shape))}]"


def axis(op: str, dim: int, shape: Shape, extra: int = 0) -> int:
    """`dim` from the front; `extra` axes are to be added to `shape`. OpError M304 without it."""
    rank = len(shape) + extra
    if -rank <= dim < rank:
        return dim % rank
    what = f"a result of rank {rank}" if extra else f"a tensor of rank {rank}"
    inside = (
        f"axes are 0 to {rank - 1}, or {-rank} to -1 from the end"
        if rank
        else "a scalar has no axes"
    )
    raise OpError(
        "M304",
        f"{op}: there is no axis {dim} in {what}, shape {format_shape(shape)}",
        notes=[inside],
    )


def same_shapes(label: str, shapes: Sequence[Shape], but: int | None = None) -> None:
    """OpError M301 unless all shapes are equal, apart from axis `but`."""
    first = shapes[0]
    for number, shape in enumerate(shapes):
        differs = len(shape) != len(first) or any(
            a != b for i, (a, b) in enumerate(zip(shape, first, strict=True)) if i != but
        )
        if differs:
            where = "" if but is None else f" in an axis other than {but}"
            raise OpError(
                "M301",
                f"{label}: tensor 0 is {format_shape(first)} and tensor {number} is "
                f"{format_shape(shape)}; they differ{where}",
            )


def same_dtypes(label: str, specs: Sequence[Spec]) -> None:
    """OpError M303 unless all dtypes are equal."""
    for number, spec in enumerate(specs):
        if spec.dtype != specs[0].dtype:
            message = f"{label}: tensor 0 is {specs[0].dtype} and tensor {number} is {spec.dtype}"
            raise OpError(
                "M303",
                message,
                help="nothing is promoted; write `cast` before, with `only` where it is for some",
            )


def number_of(
    label: str, views: Sequence[View], count: int | None, sizes: Sequence[int] | None = None
) -> None:
    """OpError M305 unless there is a tensor, and as many as `count` and `sizes` say."""
    for name, wanted in (("count", count), ("sizes", None if sizes is None else len(sizes))):
        if wanted is not None and wanted != len(views):
            raise OpError("M305", f"{label}: {len(views)} tensors, {name} says {wanted}")
    if not views:
        raise OpError("M305", f"{label}: there are no tensors")


def parts_of(
    label: str, values: int | None, count: int | None, sizes: Sequence[int] | None = None
) -> int:
    """How many parts the values, `count` and `sizes` agree on. OpError M305 if they do not."""
    said = {
        "its values are": values,
        "count says": count,
        "sizes are": None if sizes is None else len(sizes),
    }
    known = {name: number for name, number in said.items() if number is not None}
    if not known:
        raise OpError("M305", f"{label}: the number of parts is not known", help="write `count`")
    if len(set(known.values())) > 1:
        raise OpError(
            "M305", f"{label}: {', '.join(f'{name} {number}' for name, number in known.items())}"
        )
    return next(iter(known.values()))


def cut(
    label: str, dim: int, size: int, parts: int, sizes: Sequence[int] | None
) -> tuple[int, ...]:
    """The sizes of the `parts` parts of an axis. OpError M301, M302 or M305 unless they add up."""
    if sizes is None:
        if parts < 1 or size % parts:
            raise OpError(
                "M302",
                f"{label}: axis {dim} has {size} elements, not divisible into {parts} equal parts",
                help="write `sizes`",
            )
        return (size // parts,) * parts
    if len(sizes) != parts:
        raise OpError(
            "M305", f"{label}: {parts} parts, sizes are {len(sizes)}: {format_shape(sizes)}"
        )
    if sum(sizes) != size or min(sizes, default=0) < 0:
        raise OpError(
            "M301",
            f"{label}: sizes {format_shape(sizes)} add up to {sum(sizes)}, axis {dim} has "
            f"{size} elements",
        )
    return tuple(sizes)


def uncounted(op: str, over: str, counted: bool) -> OneWay | None:
    """Why joining over `over` cannot be undone where no argument says how many, else None."""
    if counted:
        return None
    return OneWay(
        f"{op} over {{{over}}} does not say into how many parts a downgrade cuts", "write `count`"
    )


def stated(op: str, dim: int, size: int, of: int | None) -> None:
    """OpError M307 unless the axis has the size that `of` states."""
    if of is not None and of != size:
        raise OpError("M307", f"{op}: axis {dim} has {size} elements, `of` says {of}")
