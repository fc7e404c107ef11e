"""What the tests of other projects' layouts share: models at random, and the way there and back."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import migrate

State = dict[str, torch.Tensor]


def package(name: str) -> ModuleType:
    """Skips where there is none. What these packages ask of torchvision is in Python; PyPI's build
    of it stops beside torch's build for CPUs, unless somebody has declared its operators.
    """
    if importlib.util.find_spec("torchvision") and not hasattr(torch.ops.torchvision, "nms"):
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float above) -> Tensor"
            )
    return pytest.importorskip(
        name, reason=f"{name} is not installed: make .venv-projects/.ready", exc_type=ImportError
    )


def random(model: nn.Module) -> nn.Module:
    """Every parameter at random: what is left at ones and zeros tells no rows apart."""
    made = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=made) * 0.2)
    return model.eval()


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def near(one: torch.Tensor, other: torch.Tensor, within: float = 1e-11) -> bool:
    """Two programs add in different orders; `within` is more where one has steps in float32."""
    assert one.shape == other.shape
    return bool((one.double() - other.double()).abs().max() <= within * other.double().abs().max())


def folder(state: State, at: Path, **side: object) -> Path:
    at.mkdir(parents=True)
    save_file(
        {key: t.detach().contiguous().clone() for key, t in state.items()}, at / "model.safetensors"
    )
    for name, value in side.items():
        (at / f"{name}.json").write_text(json.dumps(value))
    return at


def there_and_back(source: Path, work: Path, goal: str, **params: object) -> Path:
    """What comes out, verified; the source comes back bit by bit, and its layout was detected."""
    out = work / "out"
    published = migrate.apply(source, out, to=goal, params=params, fsync=False)
    assert published.to_json()["downgrade"]["exact"]
    assert migrate.verify(out, source=source).equal
    migrate.downgrade(out, work / "back", fsync=False)
    assert migrate.diff(source, work / "back").equal
    return out


def loaded(kind: str, at: Path, **more: Any) -> nn.Module:
    """A model of transformers, of which nothing is missing, left over or of another shape."""
    transformers = pytest.importorskip("transformers")
    model, said = getattr(transformers, kind).from_pretrained(
        at, output_loading_info=True, dtype=torch.float32, **more
    )
    assert not any(said[which] for which in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.double().eval()


def only(at: Path) -> State:
    """The tensors of the folder's one file."""
    (file,) = at.glob("*.safetensors")
    return load_file(file)
