"""`extra_state`: the state that Transformer Engine hides in `_extra_state`, judged by what it is.

How many tensors come out depends on the bytes of the one that goes in, so the bytes are read while
planning. Nothing in them is executed. Whether state of delayed scaling goes on, a person says with
`--allow delayed-scaling`: neither a rule nor the checkpoint nor an environment variable (such as
the one that makes TE's own loader unpickle) can say it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from ..core.errors import CheckpointError, option
from ..core.spec import Spec, spec
from .base import Array, Decided, OneWay, Op, OpError, Shape, arg, dataclass

if TYPE_CHECKING:
    from ..extra_state.record import StateRecord, StateTensor
    from ..extra_state.verdict import StateVerdict

ALLOWED = "delayed-scaling"
_EMPTY = spec("uint8", (0,))
# the policies by which state of delayed scaling goes on
_FORMS = ("pickle-2.x", "tensors")


@dataclass(frozen=True, slots=True)
class Making:
    """The arguments of a call that makes what was decided: `form` as in the rule, and the specs."""

    form: str
    outputs: tuple[Spec, ...]


_EMPTIED = Making("empty", (_EMPTY,))


def _unneeded() -> str:
    return (
        "if they are not needed, drop them with a rule of their own (`drop`, and "
        f"{option('allow', 'drop')})"
    )


class ExtraState(Op):
    kind = "decide"
    summary = "drops, carries or rewrites the extra state of Transformer Engine, by what it holds"

    @dataclass(frozen=True, slots=True)
    class Args:
        stateless: Literal["drop", "empty", "keep"] = arg(
            "states that hold nothing but settings: left out, an empty tensor (as 2.18 writes "
            "them), or kept",
            default="drop",
        )
        delayed_scaling: Literal["refuse", "pickle-2.x", "tensors", "drop"] = arg(
            "scales and histories: refused, or where `delayed-scaling` is allowed as 2.x writes "
            "them or as plain tensors beside the module, or where `drop` is allowed left out",
            default="refuse",
        )
        legacy: Literal["refuse"] = arg("states with neither a recipe nor scales", default="refuse")
        unknown: Literal["refuse"] = arg(
            "states that are not understood, or hostile", default="refuse"
        )

        @property
        def why(self) -> str:
            lost = (
                "; state of delayed scaling is left behind"
                if self.delayed_scaling == "drop"
                else ""
            )
            return f"the modules of Transformer Engine make these settings again{lost}"

    def decide(
        self, args: Args, spec: Spec, payload: bytes, name: str, allow: frozenset[str]
    ) -> Decided:
        from ..extra_state.record import DELAYED, OBJECTS, STATELESS
        from ..extra_state.verdict import judged

        if spec.numel and (spec.dtype != "uint8" or len(spec.shape) != 1):
            raise OpError(
                "M950",
                f"{name} is {spec}; an extra state is a row of bytes (uint8)",
                help=_unneeded(),
            )
        try:
            verdict, like, odd, _ = judged(payload, name)
        except CheckpointError as error:
            found = error.diagnostics[0]
            raise OpError(
                found.code, found.message, notes=found.notes, help=found.help or _unneeded()
            ) from None
        if verdict.sort == DELAYED and args.delayed_scaling in _FORMS and ALLOWED in allow:
            carried = _carried(args.delayed_scaling, like) or Decided((("", spec),))
            return carried._replace(notes=odd) if odd else carried
        if verdict.sort != STATELESS:
            return self._demanding(args, verdict, like, name)
        if args.stateless == "drop":
            return Decided(())
        # what old releases stored as an object they read as that object alone
        if spec == _EMPTY or (args.stateless == "keep" and like.form not in OBJECTS):
            return Decided((("", spec),))
        return Decided((("", _EMPTY),), _EMPTIED)

    def _demanding(
        self, args: Args, verdict: StateVerdict, like: StateRecord, name: str
    ) -> Decided:
        """What becomes of a state that is not permitted to go on: it goes, or OpError."""
        from ..extra_state.record import DELAYED, how_to_leave
        from ..extra_state.verdict import LEGACY

        written = f"; it was written by Transformer Engine {like.releases}" if like.releases else ""
        if verdict.sort != DELAYED:
            code = "M952" if verdict.sort == LEGACY else "M950"
            raise OpError(code, f"{name}: {verdict.why}{written}", help=_unneeded())
        if args.delayed_scaling == "drop":
            return Decided((), loses=True)
        says = (
            ""
            if args.delayed_scaling in _FORMS
            else "with a rule that says `delayed_scaling: pickle-2.x` or `tensors`, "
        )
        raise OpError(
            "M951",
            f"{name} holds state of delayed scaling: {verdict.why}{written}",
            help=f"{says}{option('allow', ALLOWED)} carries it on; {how_to_leave()}",
            permit=ALLOWED if args.delayed_scaling in _FORMS else "",
        )

    def infer(self, args: Making, specs: Sequence[Spec], parts: int = 1) -> list[Spec]:
        return list(args.outputs)

    def eager(
        self, args: Making, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        import numpy as np

        from ..elements.raw import carrier
        from ..extra_state.decode import decode

        made: list[bytes | memoryview] = [b""]
        if args.form != "empty":
            record = decode(arrays[0].tobytes(), "an extra state")
            made = (
                [_pickled(record, "an extra state")]
                if args.form == "pickle-2.x"
                else [t.data for _, t in _tensors(record)]
            )
        if [len(data) for data in made] != [s.nbytes for s in args.outputs]:
            raise OpError("M950", "an extra state is not the one that the plan was made for")
        return [
            np.frombuffer(data, carrier(s.dtype)).reshape(s.shape)
            for data, s in zip(made, args.outputs, strict=True)
        ]

    def invert(self, args: Args, enumerated: bool = False) -> OneWay:
        return OneWay(
            "what became of an extra state does not say what it was",
            "`inverse: skip` leaves them as they are on a downgrade",
        )

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {}, [(296,)]
        yield {"stateless": "empty", "delayed_scaling": "pickle-2.x"}, [(2201,)]
        yield {"stateless": "keep", "delayed_scaling": "tensors"}, [(2201,)]
        yield {"delayed_scaling": "drop"}, [(2201,)]


@lru_cache(maxsize=64)
def _carried(form: str, like: StateRecord) -> Decided | None:
    """What goes on of a state with this structure; None: the state as it is."""
    from ..extra_state.record import is_current

    if form == "tensors":
        outputs = tuple(
            (suffix, spec(tensor.dtype, tensor.shape)) for suffix, tensor in _tensors(like)
        )
    elif is_current(like):
        return None
    else:
        # numbers have a fixed width, so another state of this structure is as long
        outputs = (("", spec("uint8", (len(_pickled(like, "an extra state")),))),)
    # a recipe without scales has no tensors to go on as
    return Decided(outputs, Making(form, tuple(s for _, s in outputs)), loses=not outputs)


def _pickled(record: StateRecord, name: str) -> bytes:
    from ..extra_state.write import pickled

    return pickled(record, name)


def _tensors(record: StateRecord) -> list[tuple[str, StateTensor]]:
    """The scales and histories, each with what stands behind the module's key."""
    from ..extra_state.record import scaling_states

    return [
        (f".{mode}.{name}" if mode else f".{name}", state.tensors[name])
        for mode, state in scaling_states(record).items()
        for name in state.scaling
    ]


OP = ExtraState()
