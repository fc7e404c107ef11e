"""A value that `load_state_dict` takes for a tensor and that is made when it is copied.

torch looks at the shape of a value and then calls `parameter.copy_(value)`; any class with
`__torch_function__` may answer (`Module._load_from_state_dict`, `overrides.is_tensor_like`). So a
state dict of these costs nothing, and one tensor is held at a time. Every other use makes the
tensor, so that code that looks closer sees an ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..core.spec import Spec


class LazyTensor:
    """Stands for a tensor of this spec. `make` answers with it, `into(target)` copies it into a
    tensor as `copy_` would.
    """

    is_meta = False
    requires_grad = False
    grad = None

    def __init__(
        self, spec: Spec, make: Callable[[], torch.Tensor], into: Callable[[torch.Tensor], None]
    ) -> None:
        self.spec, self.make, self.into = spec, make, into

    def loaded(self, target: torch.Tensor) -> torch.Tensor:
        """What torch swaps a parameter for when it is told to swap instead of to copy: the
        parameter's memory, filled.
        """
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
