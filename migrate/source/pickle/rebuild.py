"""A tensor as the call that rebuilds it: what torch.save would have written for it.

Torch has two spellings. Storages of the old dtypes have a class each; for all newer dtypes a tensor
lies on an untyped storage and says its dtype itself. Source: torch 2.13, Tensor._reduce_ex_internal
and torch.storage._new_dtypes.
"""

from __future__ import annotations

from typing import Any

from .decoding import TYPED
from .nodes import Call, Dict, Global, Persistent
from .tree import ITEMSIZE

# the dtypes that have a storage class of their own, by their names
_CLASSES = {dtype: name for name, dtype in TYPED.items()}


class Rebuilder:
    """Makes the nodes of one stream; names and empty containers are shared as the pickler shares
    them.
    """

    __slots__ = ("_names", "_storages")

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], Global] = {}
        self._storages: dict[str, Persistent] = {}

    def name(self, module: str, name: str) -> Global:
        """The one node of this name."""
        found = self._names.get((module, name))
        if found is None:
            found = self._names[module, name] = Global(module, name)
        return found

    def storage(self, key: str, dtype: str, nbytes: int) -> Persistent:
        """The storage of `nbytes` bytes called `key`, of the class that torch uses for `dtype`."""
        found = self._storages.get(key)
        if found is None:
            typed = _CLASSES.get(dtype)
            cls = (
                self.name("torch", typed)
                if typed is not None
                else self.name("torch.storage", "UntypedStorage")
            )
            numel = nbytes // ITEMSIZE[dtype] if typed is not None else nbytes
            found = self._storages[key] = Persistent(("storage", cls, key, "cpu", numel))
        return found

    def tensor(
        self,
        key: str,
        dtype: str,
        shape: tuple[int, ...],
        nbytes: int,
        *,
        requires_grad: bool = False,
        parameter: bool = False,
        subclass: str | None = None,
        state: Any = None,
    ) -> Call:
        """A row-major tensor that is all of the storage `key`.

        `dtype` is torch's name; `state` are its attributes as nodes, None without.
        """
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        typed = dtype in _CLASSES
        own = () if typed else (self.name("torch", dtype),)
        hooks = Call("reduce", self.name("collections", "OrderedDict"), ())
        grad = requires_grad and not parameter
        arguments = (
            self.storage(key, dtype, nbytes),
            0,
            shape,
            tuple(reversed(strides)),
            grad,
            hooks,
            *own,
        )
        function = self.name(
            "torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"
        )
        made = Call("reduce", function, arguments)
        if parameter:
            more = Call("reduce", self.name("collections", "OrderedDict"), ())
            if state is None:
                return Call(
                    "reduce",
                    self.name("torch._utils", "_rebuild_parameter"),
                    (made, requires_grad, more),
                )
            return Call(
                "reduce",
                self.name("torch._utils", "_rebuild_parameter_with_state"),
                (made, requires_grad, more, state),
            )
        if subclass is None and state is None:
            return made
        # a buffer is a plain tensor with a mark
        marked = Dict([("_is_buffer", True)]) if state is None else state
        rebuild = self.name("torch._tensor", "_rebuild_from_type_v2")
        return Call("reduce", rebuild, (function, self.name("torch", "Tensor"), arguments, marked))
