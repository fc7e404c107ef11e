"""What transformers loads, against what the imported rules make: bit for bit.

A small model is saved by `save_pretrained`, in the layout of the hub, and loaded again; the rules
imported for the file are applied to it, and undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_models
from safetensors.torch import load_file

import migrate
from migrate import formats
from migrate.authoring.transformers import Imported, imported


@dataclass(frozen=True)
class Proof:
    """What was compared: how many tensors, and whether the way back was gone too."""

    entry: str
    cls: str
    imported: Imported
    tensors: int
    back: bool


def saved(
    entry: str,
    folder: Path,
    *,
    layers: int = 2,
    experts: int = 4,
    dtype: str = "float32",
    original: bool = True,
    cls: Any = None,
) -> tuple[Any, Path]:
    """A checkpoint of a small model, in the layout of the hub or as the library has it, and its
    class: that of the entry, or another one.
    """  # fmt: skip
    import torch

    cls = cls or tiny_models.class_of(entry)
    model = tiny_models.model(cls, tiny_models.configuration(entry, cls, layers, experts))
    model.to(getattr(torch, dtype)).save_pretrained(folder, save_original_format=original)
    return cls, folder


def loaded(cls: Any, folder: Path) -> dict[str, Any]:
    """What the library has after loading, without what it had to make up."""
    from transformers import PreTrainedModel

    # not `cls.from_pretrained`: one class has its own, which cannot say what was missing
    load = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
    model, info = load(cls, folder, output_loading_info=True, dtype=dtype_of(folder))
    made_up = {*info["missing_keys"]}
    assert not info["mismatched_keys"], info["mismatched_keys"]
    return {k: v for k, v in model.state_dict().items() if k not in made_up}


def stored(folder: Path) -> dict[str, Any]:
    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }


def dtype_of(folder: Path) -> Any:
    sizes: dict[Any, int] = {}
    for tensor in stored(folder).values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda d: sizes[d])


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys whose tensors are not the same to the bit."""
    import torch

    def bits(tensor: Any) -> Any:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    wrong = sorted(set(one) ^ set(other))
    for key in set(one) & set(other):
        a, b = one[key], other[key]
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(bits(a), bits(b)):
            wrong.append(f"{key}: {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
    return wrong


def prove(entry: str, tmp: Path, dtype: str = "float32") -> Proof:
    """Imports, applies, compares, goes back, and does the same to a larger model."""
    cls, hub = saved(entry, tmp / "hub", dtype=dtype)
    file = tmp / "rules.yaml"
    migrate.new(file, from_transformers=hub, cls=cls.__name__)
    made = read_rules(hub, cls.__name__)
    back = all(draft.targets or draft.keep for draft in made.drafts)
    tensors = compared(cls, hub, file, tmp / "one", back)
    cls, larger = saved(entry, tmp / "larger", layers=3, experts=6, dtype=dtype)
    try:
        compared(cls, larger, file, tmp / "two", back)
    except (AssertionError, migrate.MigrateError) as error:
        raise AssertionError(f"equal, but not with one more layer: {error}") from error
    return Proof(entry, cls.__name__, made, tensors, back)


def read_rules(hub: Path, cls: str | None = None, *, reverse: bool = False) -> Imported:
    with closing(formats.open(hub)) as source:
        return imported(source, cls, reverse=reverse)


def compared(cls: Any, hub: Path, file: Path, tmp: Path, back: bool) -> int:
    """Applies a rule file and goes back; how many tensors were equal to what the library has."""
    tmp.mkdir()
    expected = loaded(cls, hub)
    migrate.apply(hub, tmp / "v5", rules=[file], allow=() if back else {"drop"})
    wrong = differences(stored(tmp / "v5"), expected)
    assert not wrong, wrong[:5]
    if back:
        migrate.downgrade(tmp / "v5", tmp / "back", rules=[file])
        wrong = differences(stored(tmp / "back"), stored(hub))
        assert not wrong, wrong[:5]
    return len(expected)
