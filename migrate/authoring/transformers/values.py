"""What transformers' own operations make of numbered tensors: the values of made tests.

Neither the rules nor the engine have a hand in them. The tensors are as small as the operations
allow, whatever the checkpoint's are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from math import prod
from typing import TYPE_CHECKING, Any

from ...core.spec import Spec
from ..relations import Relation
from .classes import Built
from .mapping import Mapped

if TYPE_CHECKING:
    import numpy as np

    Read = Callable[[str], np.ndarray[Any, Any]]

# longer axes are made as long as heads, and parts in twos, threes and fours, need them to be
LONGEST = 64


def shortened(
    specs: Mapping[str, Spec],
    relations: Iterable[Relation],
    values: Mapping[str, int],
    longest: int = LONGEST,
) -> dict[str, Spec]:
    """The specs with short axes, all of one length; also of keys that only relations have."""
    others = dict.fromkeys((key for r in relations for key in r.sources), Spec("float32", (4, 4)))
    short = 12 * max(values.values(), default=2)
    return {
        key: Spec(spec.dtype, tuple(short if size > longest else size for size in spec.shape))
        for key, spec in {**others, **specs}.items()
    }


def readers(made: Built, found: Mapped, specs: Mapping[str, Spec]) -> tuple[Read, Read]:
    """The numbers of a key before and after."""
    import numpy as np
    import torch

    first: dict[str, int] = {}
    total = 0
    for key, spec in specs.items():
        first[key] = total
        total += prod(spec.shape)

    # which no example fits
    nothing = np.zeros((1,) * 8, dtype=np.uint64)

    def before(key: str) -> Any:
        shape = specs[key].shape
        start = first[key]
        return np.arange(start, start + prod(shape), dtype=np.uint64).reshape(shape)

    def after(name: str) -> Any:
        group = found.origins.get(name)
        if group is None:
            return nothing
        converter = deepcopy(found.owners.get(group[0].pattern or ""))
        if converter is None:
            return before(group[0].key)
        for moved in group:
            tensor = torch.from_numpy(before(moved.key).astype(np.int64))
            converter.add_tensor(moved.renamed, moved.key, moved.pattern, tensor)
        try:
            out = converter.convert(group[0].renamed, model=made.model, config=made.config)
        except Exception:  # noqa: BLE001 - an operation that needs the model's own shapes
            return nothing
        tensor = out[name]
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        return tensor.contiguous().numpy().astype(np.uint64)

    return before, after
