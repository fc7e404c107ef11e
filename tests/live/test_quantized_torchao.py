"""Quantized parameters of torchao's own classes."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import migrate
from migrate.core.errors import MigrateError

pytestmark = pytest.mark.libraries

CONFIGS = {
    "Float8Tensor": lambda ao: ao.Float8WeightOnlyConfig(),
    "Int8Tensor": lambda ao: ao.Int8WeightOnlyConfig(version=2),
    "MXTensor": lambda ao: None,
}


@pytest.fixture
def ao():
    # here, because it takes seconds, and most runs leave these tests out
    import torchao.quantization

    return torchao.quantization


def quantized(ao, cls, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128, dtype=torch.bfloat16))
    if cls == "MXTensor":
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        made = MXTensor.to_mx(model[0].weight.detach(), torch.float8_e4m3fn, 32)
        model[0].weight = torch.nn.Parameter(made, requires_grad=False)
    else:
        ao.quantize_(model, CONFIGS[cls](ao))
    assert type(model[0].weight).__name__ == cls
    return model


def bits(model):
    weight = model[0].weight
    names = weight.__tensor_flatten__()[0]
    return {n: getattr(weight, n).contiguous().view(torch.uint8).tolist() for n in names}


@pytest.mark.parametrize("cls", sorted(CONFIGS))
def test_components_go_into_the_parameters_that_are_there(tmp_path, ao, cls):
    old, new = quantized(ao, cls, 1), quantized(ao, cls, 2)
    torch.save(old.state_dict(), tmp_path / "old.pt")
    weight, data = new[0].weight, new[0].weight.qdata
    migrate.load(new, tmp_path / "old.pt")
    assert new[0].weight is weight
    assert weight.qdata is data
    assert bits(new) == bits(old)
    assert torch.equal(weight.dequantize(), old[0].weight.dequantize())


@pytest.mark.parametrize("cls", sorted(CONFIGS))
def test_a_module_on_the_meta_device_gets_objects_of_its_classes(tmp_path, ao, cls):
    old = quantized(ao, cls, 1)
    torch.save(old.state_dict(), tmp_path / "old.pt")
    new = quantized(ao, cls, 2).to("meta")
    assert new[0].weight.qdata.is_meta
    migrate.load(new, tmp_path / "old.pt", device="cpu")
    assert type(new[0].weight) is type(old[0].weight)
    assert bits(new) == bits(old)
    assert torch.equal(new[0].bias, old[0].bias)


def test_plain_weights_are_refused_before_anything_is_written(tmp_path, ao):
    new = quantized(ao, "Float8Tensor", 2)
    before = bits(new)
    dense = torch.nn.Sequential(torch.nn.Linear(64, 128, dtype=torch.bfloat16))
    with pytest.raises(MigrateError, match="take no plain tensors"):
        migrate.load(new, dense.state_dict(), allow={"lossy"})
    assert bits(new) == before


def test_torchao_need_not_be_compiled_before(ao):
    """Its source has a sequence that Python warns of, and warnings are errors here."""
    import torchao.quantization.quant_api as module

    text = Path(module.__file__).read_text(encoding="utf-8")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        compile(text, module.__file__, "exec")
    # else the filter in pyproject.toml is for nothing
    assert found
    compile(text, module.__file__, "exec")
