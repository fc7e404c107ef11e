"""Stand-ins for Transformer Engine's GroupedLinear and its tensor classes, small and on the CPU.

The multi layout has `weight0`, `bias0`, … ; the single one has `weight` [GEMMs, out, in] as one
parameter of a wrapper class that holds its rows flat, and `bias` [GEMMs, out]. Each can be chosen
alone. `Remapping` reads the other layout by itself, as the module API does; the plain one reads its
own only, as the operations API does.
"""

from __future__ import annotations

import torch
from torch import nn

aten = torch.ops.aten


class Wrapper(torch.Tensor):
    """A tensor whose elements lie in other tensors. Operations work on the elements, as plain
    tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def shell(cls, shape, dtype, device="cpu", requires_grad=False):
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.copy_.default and isinstance(args[0], Wrapper):
            args[0].fill(plain(args[1]))
            return args[0]
        if func in (aten.detach.default, aten.alias.default):
            return args[0].twin(args[0].held())
        if func in (aten.empty_like.default, aten.clone.default):
            fresh = args[0].twin({name: t.clone() for name, t in args[0].held().items()})
            return (
                fresh
                if func is aten.clone.default or kwargs.get("device") in (None, args[0].device)
                else NotImplemented
            )
        return func(*[plain(a) for a in args], **{name: plain(a) for name, a in kwargs.items()})

    def held(self):
        return {name: value for name, value in vars(self).items() if type(value) is torch.Tensor}

    def twin(self, held):
        made = self.shell(self.shape, self.dtype, self.device)
        vars(made).update(
            {name: value for name, value in vars(self).items() if name != "_is_param"}, **held
        )
        return made

    def __repr__(self):
        return f"{type(self).__name__}({list(self.shape)})"


def plain(value):
    if isinstance(value, Wrapper):
        return value.dequantize()
    return type(value)(plain(v) for v in value) if isinstance(value, (list, tuple)) else value


class GroupedTensor(Wrapper):
    """The weights of all GEMMs in one flat row; with a scale, as bytes of eight bits."""

    @classmethod
    def of(cls, tensor, scale=None):
        made = cls.shell(tensor.shape, tensor.dtype)
        made.num_tensors, made.scale = len(tensor), scale
        made.rowwise_data = torch.empty(
            tensor.numel(), dtype=tensor.dtype if scale is None else torch.uint8
        )
        made.fill(tensor)
        return made

    def fill(self, tensor):
        flat = tensor.detach().reshape(-1)
        self.rowwise_data.copy_(flat if self.scale is None else quantized(flat, self.scale))

    def dequantize(self):
        rows = (
            self.rowwise_data
            if self.scale is None
            else dequantized(self.rowwise_data, self.scale, self.dtype)
        )
        return rows.view(self.shape)


class Float8(Wrapper):
    """A tensor in eight bits with one scale."""

    @classmethod
    def of(cls, tensor, scale=0.25):
        made = cls.shell(tensor.shape, tensor.dtype)
        made.scale, made._data = scale, quantized(tensor, scale)
        return made

    def fill(self, tensor):
        self._data.copy_(quantized(tensor.detach(), self.scale))

    def dequantize(self):
        return dequantized(self._data, self.scale, self.dtype)


def quantized(tensor, scale):
    return (tensor / scale).to(torch.float8_e4m3fn).view(torch.uint8)


def dequantized(data, scale, dtype):
    return data.view(torch.float8_e4m3fn).to(dtype) * scale


class GroupedLinear(nn.Module):
    """`gemms` linear maps from `width` to `height`."""

    def __init__(
        self,
        gemms,
        width,
        height,
        *,
        single_weight=False,
        single_bias=False,
        bias=True,
        scale=None,
        dtype=torch.float32,
    ):
        super().__init__()
        self.gemms = gemms
        weights = torch.zeros(gemms, height, width, dtype=dtype)
        biases = torch.zeros(gemms, height, dtype=dtype)
        if single_weight:
            self.weight = nn.Parameter(GroupedTensor.of(weights, scale))
        for i in range(gemms):
            if not single_weight:
                own = weights[i].clone() if scale is None else Float8.of(weights[i], scale)
                self.register_parameter(f"weight{i}", nn.Parameter(own))
            if bias and not single_bias:
                self.register_parameter(f"bias{i}", nn.Parameter(biases[i].clone()))
        if bias and single_bias:
            self.bias = nn.Parameter(GroupedTensor.of(biases))

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        assert state.dtype is torch.uint8

    def values(self):
        """(weights, biases) as two plain stacked tensors, whichever way they are kept."""
        names = dict(self.named_parameters())

        def of(name):
            if name in names:
                return plain(names[name].detach())
            parts = [
                plain(names[f"{name}{i}"].detach())
                for i in range(self.gemms)
                if f"{name}{i}" in names
            ]
            return torch.stack(parts) if parts else None

        return of("weight"), of("bias")


class Remapping(GroupedLinear):
    """Takes the other layout's keys by itself."""

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        for name in ("weight", "bias"):
            single, parts = f"{prefix}{name}", [f"{prefix}{name}{i}" for i in range(self.gemms)]
            if name in self._parameters:
                if single not in state_dict and all(part in state_dict for part in parts):
                    state_dict[single] = torch.stack(
                        [plain(state_dict.pop(part)) for part in parts]
                    )
            elif single in state_dict and not all(part in state_dict for part in parts):
                state_dict.update(zip(parts, plain(state_dict.pop(single)).unbind(0), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *rest)
