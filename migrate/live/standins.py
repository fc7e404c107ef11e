"""What `load_state_dict` is given for tensors: values that are made when they are copied, and what
is left in their place when a load is refused.

torch looks at the shape of a value and then calls `parameter.copy_(value)`; any class with
`__torch_function__` may answer (`Module._load_from_state_dict`, `overrides.is_tensor_like`). So a
state dict of these costs nothing, and one tensor is held at a time. Every other use makes the
tensor, so that code that looks closer sees an ordinary one.

torch writes on after the first error, module by module, and cannot be stopped. So a refused load
hands torch what the module holds already, and a load that breaks off lets all values that are still
to come write nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ..core.errors import Diagnostic, Report, fail, printable
from ..core.templates import list_collapsed
from ..elements.raw import has_plain_bytes, is_dtensor, is_plain_class
from .module import EXTRA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from ..core.spec import Spec
    from .migration import Outputs
    from .module import Slot


class LazyTensor:
    """Stands for a tensor of this spec: `make` returns it, `into(target)` is its `copy_`."""

    is_meta = False
    requires_grad = False
    grad = None

    def __init__(
        self, spec: Spec, make: Callable[[], torch.Tensor], into: Callable[[torch.Tensor], None]
    ) -> None:
        self.spec, self.make, self.into = spec, make, into

    def loaded(self, target: torch.Tensor) -> torch.Tensor:
        """What torch swaps a parameter for instead of copying: the parameter's memory, filled."""
        self.into(target)
        return target.detach()

    @property
    def shape(self) -> torch.Size:
        import torch

        shape = self.spec.shape
        if self.spec.dtype == "float4_e2m1fn":
            # torch counts pairs
            shape = (*shape[:-1], shape[-1] // 2)
        return torch.Size(shape)

    @property
    def dtype(self) -> torch.dtype:
        import torch

        found = getattr(torch, self.spec.dtype, None)
        return found if isinstance(found, torch.dtype) else self.make().dtype

    @property
    def ndim(self) -> int:
        return len(self.spec.shape)

    def dim(self) -> int:
        """As a tensor's."""
        return len(self.spec.shape)

    def size(self, dim: int | None = None) -> Any:
        """As a tensor's."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """As a tensor's."""
        return int(self.shape.numel())

    def __repr__(self) -> str:
        return f"LazyTensor({self.spec})"

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.make()[index]

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getattr__(self, name: str) -> Any:
        # protocols of Python and numpy are asked for by name, and a tensor is not made for that
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.make(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        import torch

        if (
            len(args) >= 2
            and isinstance(args[1], LazyTensor)
            and not isinstance(args[0], LazyTensor)
        ):
            if func is torch.Tensor.copy_:
                args[1].into(args[0])
                return args[0]
            if func is torch.Tensor.module_load:
                return args[1].loaded(args[0])
        return func(*_made(args), **_made(kwargs or {}))


# Python looks for these on the class, and asks no `__getattr__`
_OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv",
    "mod", "rmod", "pow", "rpow", "matmul",
    "rmatmul", "and", "rand", "or", "ror", "xor", "rxor", "eq", "ne", "lt", "le", "gt", "ge", "neg",
    "abs", "invert", "bool", "int",
    "float", "index", "contains", "array", "deepcopy", "reduce_ex",
)  # fmt: skip


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self.make(), f"__{name}__")(*_made(args), **kwargs)


for _name in _OPERATORS:
    setattr(LazyTensor, f"__{_name}__", _operator(_name))
# who compares is not who looks up
LazyTensor.__hash__ = object.__hash__  # type: ignore[method-assign]


def _made(value: Any) -> Any:
    """The arguments with tensors in the place of what stands for them."""
    if isinstance(value, LazyTensor):
        return value.make()
    if isinstance(value, Mapping):
        return {key: _made(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_made(one) for one in value)
    return value


# templates of names that a message lists
_MOST_NAMED = 200


def stand_in(
    outputs: Outputs,
    key: str,
    get: Callable[[], Any] | None = None,
    copy_into: Callable[[Any], None] | None = None,
) -> LazyTensor:
    """What stands for an output until it is used; `get` and `copy_into` default to the outputs'."""
    return LazyTensor(
        outputs.graph.outputs[key].spec,
        get or partial(outputs.get, key),
        copy_into or partial(outputs.copy_into, key),
    )


class HeldTensor(LazyTensor):
    """Stands for what a module holds already: copying it there changes nothing, not its version."""

    def __init__(self, current: torch.Tensor) -> None:
        self.current = current
        self.is_meta = current.is_meta

    def make(self) -> torch.Tensor:
        """The tensor that is held."""
        return self.current

    def into(self, target: torch.Tensor) -> None:
        """Nothing."""

    def loaded(self, target: torch.Tensor) -> torch.Tensor:
        """What torch swaps the target for: the same memory, with the gradient that it has."""
        import torch

        same = target.detach()
        if isinstance(target, torch.nn.Parameter):
            same = torch.nn.Parameter(same, requires_grad=target.requires_grad)
            same.grad = target.grad
        return same

    @property
    def shape(self) -> torch.Size:
        return self.current.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.current.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return len(self.current)

    def __repr__(self) -> str:
        return f"HeldTensor({self.current!r})"


def stay(
    state: MutableMapping[str, Any],
    prefix: str,
    keys: Iterable[str],
    slots: Mapping[str, Slot],
    *,
    assign: bool,
) -> None:
    """Replaces the entries of these keys by what the module holds, so that torch changes nothing of
    it and misses nothing.

    Extra states are left out, because setting one may do anything; torch names them as missing.
    """
    import torch

    for key in keys:
        del state[prefix + key]
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    for key, slot in slots.items():
        if slot.tensor is not None:
            itself = (assign and not swaps) or torch.nn.parameter.is_lazy(slot.tensor)
            itself = itself or _takes_over(slot.tensor.__class__)
            state[prefix + key] = slot.tensor if itself else HeldTensor(slot.tensor)


class ModuleValues:
    """The values of one load on their way; `places`: slots by output, `say` takes messages."""

    def __init__(
        self,
        outputs: Outputs,
        places: Mapping[str, str],
        slots: Mapping[str, Slot],
        say: Callable[[Diagnostic], None],
    ) -> None:
        self._outputs, self._slots, self._say = outputs, slots, say
        self._names = {key: name for name, key in places.items()}
        self._written: list[str] = []
        # given to torch as they are
        self._given: list[str] = []
        self._stopped = False

    def lazily(self, others: Mapping[str, Any], free: tuple[str, ...]) -> dict[str, Any]:
        """Slot's key -> what torch copies there, in the order of the module.

        `others` are values that are no tensors. Below `free` modules load themselves: what is there
        already, or a view of it, is no stand-in there.
        """
        out: dict[str, Any] = {}
        for key, slot in self._slots.items():
            name = self._names.get(key)
            if name is None:
                continue
            if name in others:
                out[key] = others[name]
                continue
            own, itself = self._outputs.own(name), None
            if key.startswith(free):
                itself = self._outputs.view(name)
            elif own is not None and not is_plain_class(own):
                itself = own
            if slot.name == EXTRA and slot.tensor is None:
                given = self._outputs.view(name)
                out[key] = self._outputs.compute(name) if given is None else given
            elif itself is not None:
                out[key] = itself
            elif _takes_over(slot.tensor.__class__):
                out[key] = self._outputs.get(name)
            else:
                copy_into = partial(self._copy_into, name, key)
                out[key] = stand_in(self._outputs, name, copy_into=copy_into)
                continue
            self._given.append(key)
        return out

    def assigned(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """Slot's key -> new parameters and buffers of the module's classes, one for tied names."""
        out: dict[str, Any] = {}
        # torch copies in this order, and what is copied last stays
        last = {
            id(slot.tensor): key
            for key, slot in self._slots.items()
            if key in self._names and slot.tensor is not None
        }
        new: dict[int, Any] = {}
        used: set[int] = set()
        report = Report()
        for key, slot in self._slots.items():
            name, tied = self._names.get(key), id(slot.tensor)
            if name is not None and name in others:
                out[key] = others[name]
            elif slot.tensor is None:
                if name is not None:
                    out[key] = self._fresh(name, used)
            elif tied in last:
                if tied not in new:
                    new[tied] = _as_held(
                        last[tied], slot, self._fresh(self._names[last[tied]], used), report
                    )
                out[key] = new[tied]
        report.check()
        return out

    def _fresh(self, name: str, used: set[int]) -> Any:
        """The caller's own object the first time, else a new tensor: no tie that was not there."""
        own = self._outputs.own(name)
        if own is None or id(own) in used:
            return self._outputs.compute(name)
        used.add(id(own))
        return own

    def _copy_into(self, name: str, key: str, target: torch.Tensor) -> None:
        if self._stopped or target.is_meta:
            return
        try:
            if self._outputs.own(name) is not None or not self._outputs.fill(name, target):
                value = self._outputs.get(name)
                target.copy_(shard_as(value, target) if is_dtensor(target) else value)
        except Exception as error:  # noqa: BLE001 - whatever it is, what was written must be said
            # torch would collect one such message a parameter and write on
            self._stopped = True
            self._say(self._broken(key, error))
            return
        self._written.append(key)

    def _broken(self, key: str, error: Exception) -> Diagnostic:
        written, done = self._written, {*self._written, *self._given, key}
        left = [k for k in self._slots if k in self._names and k not in done]
        notes = [
            f"written before: {list_collapsed(written, _MOST_NAMED)}"
            if written
            else "nothing was written before"
        ]
        notes += [
            (
                "given to torch as they are, and written by it: "
                f"{list_collapsed(self._given, _MOST_NAMED)}"
            )
        ] * bool(self._given)
        notes += [f"as before: {list_collapsed(left, _MOST_NAMED)}"] * bool(left)
        why = printable(f"{type(error).__name__}: {error}", 400)
        report = Report()
        report.add(
            "M962",
            f"loading stopped at {printable(key)}, which may be written in part: {why}",
            notes=tuple(notes),
            help="load again, or build the module again",
        )
        return report.diagnostics[0]


def require_readable(outputs: Outputs, names: Iterable[str]) -> None:
    """M916 naming what rules need the elements of and that does not give them: on the meta device,
    sharded, or of a class of its own.

    One tensor of each such class is read to find out.
    """
    needed: dict[str, Any] = {}
    for name in names:
        if outputs.own(name) is None:
            needed.update(outputs.list_sources(name))
    unlike: dict[str, list[str]] = {}
    tried: set[type] = set()
    for key, value in needed.items():
        if value is None or has_plain_bytes(value):
            continue
        if value.is_meta:
            unlike.setdefault("a tensor on the meta device holds no bytes", []).append(key)
        elif is_dtensor(value):
            unlike.setdefault("a DTensor is moved as a whole or not at all", []).append(key)
        elif type(value) not in tried:
            tried.add(type(value))
            outputs.probe_source(key)
    report = Report()
    for why, keys in unlike.items():
        report.add(
            "M916",
            f"rules need the elements of {list_collapsed(keys, _MOST_NAMED)}: {why}",
            help="load plain tensors, `full_tensor()` makes them",
        )
    report.check()


def require_present(outputs: Outputs, places: Mapping[str, Slot]) -> None:
    """M916 for meta tensors to be copied into ones that hold elements; `places` by output."""
    absent = [
        key
        for key, slot in places.items()
        if slot.tensor is not None
        and not slot.tensor.is_meta
        and getattr(outputs.own(key), "is_meta", False)
    ]
    if absent:
        what = (
            "a tensor on the meta device holds no bytes, and the module asks for those of "
            f"{list_collapsed(absent, _MOST_NAMED)}"
        )
        fail("M916", what, help="load tensors that have their bytes")


def _as_held(key: str, slot: Slot, value: Any, report: Report) -> Any:
    """The value as a parameter or buffer of the slot's class; M964 in the report if impossible."""
    import torch

    held = slot.tensor
    if torch.nn.parameter.is_lazy(held) or not hasattr(value, "detach"):
        return value
    parameter = isinstance(held, torch.nn.Parameter)
    try:
        value = shard_as(value, held)
        with torch.no_grad():
            if is_plain_class(held) or type(value) is type(held):
                made = value.detach()
            else:
                made = torch.empty_like(held, device=value.device)
                if type(made) is type(held):
                    made.copy_(value)
                elif issubclass(type(held), torch.nn.Parameter) and is_plain_class(made):
                    made = torch.Tensor._make_subclass(
                        type(held), value.detach().to(held.dtype), held.requires_grad
                    )
                    vars(made).update(vars(held))
                    return made
                else:
                    raise TypeError(f"its `empty_like` makes a {_class(made)}")
        return torch.nn.Parameter(made, requires_grad=held.requires_grad) if parameter else made
    except (RuntimeError, TypeError, NotImplementedError) as error:
        report.add(
            "M964",
            f"no new {_class(held)} can be made for {printable(key)}: {printable(str(error), 200)}",
            help="load without assign=True",
        )
    return value


def _class(value: Any) -> str:
    return printable(type(value).__qualname__)


@cache
def _takes_over(target: type) -> bool:
    """Whether the target's class answers torch functions itself and would not know a stand-in."""
    import torch

    def answers(kind: Any) -> Any:
        return getattr(kind.__torch_function__, "__func__", kind.__torch_function__)

    return answers(target) not in map(
        answers, (torch.Tensor, torch.nn.Parameter, torch.nn.parameter.UninitializedTensorMixin)
    )


def shard_as(value: Any, target: Any) -> Any:
    """The value as the target takes it: this rank's part, if only the target is a DTensor."""
    if not is_dtensor(target) or is_dtensor(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    there = value if target.is_meta else value.to(target.device)
    return distribute_tensor(there, target.device_mesh, target.placements, src_data_rank=None)
