"""The stream that torch.save would write of a snapshot, and the storages that it names.

Written by C pickle and read by nobody but the package's own decoder, which executes nothing: what
cannot be found by its name (a function inside of a function, a process group) is left in it as an
entry that is not read, with its path.
"""

from __future__ import annotations

import copyreg
import io
import sys
from pickle import Pickler
from types import MethodType
from typing import Any, Final

import torch

# the one that files of torch.save are in
_PROTOCOL: Final = 2


class Unnamed:
    """Stands in a stream for what no stream can hold."""


class StateStream(Pickler):
    """One pass over a state: `stream`, and the storages by number, each once."""

    def __init__(self, state: Any) -> None:
        file = io.BytesIO()
        super().__init__(file, _PROTOCOL)
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}
        try:
            with torch._C.DisableTorchFunction():
                self.dump(state)
        finally:
            self.clear_memo()
        self.stream = file.getvalue()

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.TypedStorage):
            held: torch.UntypedStorage = obj._untyped_storage
            kind, count = getattr(torch, obj._pickle_storage_type()), obj._size()
        elif isinstance(obj, torch.UntypedStorage):
            held, kind, count = obj, torch.UntypedStorage, obj.nbytes()
        else:
            return None
        number = self._numbers.get(held._cdata)
        if number is None:
            number = self._numbers[held._cdata] = len(self.storages)
            self.storages.append(held)
        return ("storage", kind, str(number), "cpu", count)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) or type(obj) in copyreg.dispatch_table:
            return NotImplemented
        if isinstance(obj, MethodType) and isinstance(obj.__self__, type):
            # pickled by its class and name: Transformer Engine before 2.16 makes tensors so
            return NotImplemented
        if isinstance(obj, type) or hasattr(obj, "__qualname__"):
            return NotImplemented if _found(obj) else (Unnamed, ())
        try:
            obj.__reduce_ex__(_PROTOCOL)
        except Exception:  # noqa: BLE001 - methods of the state's objects may raise anything
            return Unnamed, ()
        return NotImplemented


def _found(obj: Any) -> bool:
    """Whether a class or function is found by its name, as pickle asks."""
    here: Any = sys.modules.get(getattr(obj, "__module__", None) or "builtins")
    for part in obj.__qualname__.split("."):
        here = getattr(here, part, None)
    return here is obj
