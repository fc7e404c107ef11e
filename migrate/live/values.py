"""Values that are no tensors, decoded from a checkpoint, as the Python objects that
`set_extra_state` expects.

A decoded tree says what a pickle means without running it; here it becomes the few kinds of objects
that training code puts into an extra state. Whatever would need a class of somebody else's is
refused by name.
"""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from ..core.errors import fail, printable
from ..source.pickle.tree import Array, Buffer, Constant, DictNode, ListNode, TensorRecord

_LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque,
    "slice": lambda items: slice(*items), "range": lambda items: range(*items),
}  # fmt: skip
_DICTS: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
}
# what the pickle machine lets a defaultdict call
_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool, OrderedDict)
}
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})


def value_of(tree: Any, name: str, tensor: Callable[[TensorRecord], Any]) -> Any:
    """The object that the tree means; `tensor` makes those of its tensors. M916 naming what no
    object is made of here.
    """
    made: dict[int, Any] = {}

    def visit(node: Any) -> Any:
        kind = type(node)
        if kind in _PLAIN:
            return node
        if id(node) not in made:
            # one object in several places stays one; containers hold no cycles
            made[id(node)] = _made(node, name, visit, tensor)
        return made[id(node)]

    return visit(tree)


def _made(  # noqa: RET503 - what fails does not return
    node: Any, name: str, visit: Callable[[Any], Any], tensor: Callable[[TensorRecord], Any]
) -> Any:
    import torch

    match node:
        case DictNode(kind="defaultdict"):
            factory = node.node.arguments[0] if node.node.arguments else None
            made = None if factory is None else _FACTORIES[factory.name]
            return defaultdict(made, {visit(key): visit(value) for key, value in node.pairs})
        case DictNode():
            out = _DICTS[node.kind]()
            out.update({visit(key): visit(value) for key, value in node.pairs})
            return out
        case ListNode(kind="Size"):
            return torch.Size(node.items)
        case ListNode():
            return _LISTS[node.kind]([visit(item) for item in node.items])
        case TensorRecord():
            return tensor(node)
        case Buffer():
            found = io.BytesIO(node.data)
            found.seek(node.position)
            return found
        case Constant(kind="device"):
            return torch.device(node.text)
        case Constant(kind="numpy.dtype"):
            import numpy as np

            return np.dtype(node.text)
        case Constant():
            return getattr(torch, node.text)
        case Array():
            import numpy as np

            array = np.frombuffer(node.data, node.dtype).reshape(
                node.shape, order="F" if node.fortran else "C"
            )
            return array[()] if node.scalar else array.copy()
    fail(
        "M916",
        f"{printable(name)} holds a {printable(type(node).__name__)}, and an object of it cannot "
        "be made here",
    )
