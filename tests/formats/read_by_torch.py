"""A program for any release of torch, without migrate: reads distributed checkpoints as stock torch
does, and compares them with a file of torch.save that holds the same.

`read_by_torch.py WHOLE FOLDER…` prints the release and how many tensors it compared.
"""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def same(one, other, path, found):
    """Notes the paths of tensors; AssertionError at the first difference."""
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        # bit by bit: a NaN is equal to itself
        bits = [t.contiguous().flatten().view(torch.uint8) for t in (one, other)]
        assert torch.equal(*bits), path
        found.append(path)
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key, value in one.items():
            same(value, other[key], f"{path}.{key}", found)
    elif isinstance(one, (list, tuple)):
        assert type(one) is type(other), path
        assert len(one) == len(other), path
        for number, (a, b) in enumerate(zip(one, other)):
            same(a, b, f"{path}.{number}", found)
    else:
        assert (type(one), one) == (type(other), other), path


def emptied(value):
    """The nested value with tensors to be filled and other values to be replaced."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: emptied(held) for key, held in value.items()}
    if isinstance(value, list):
        return [emptied(held) for held in value]
    return value


def main(whole, *folders):
    warnings.simplefilter("ignore")
    expected = torch.load(whole, weights_only=True)
    found = []
    for folder in folders:
        assert FileSystemReader(folder).read_metadata().storage_data
        target = emptied(expected)
        dcp.load(target, checkpoint_id=folder)
        same(expected, target, folder, found)
        with tempfile.TemporaryDirectory() as made:
            converted = os.path.join(made, "converted.pt")
            dcp_to_torch_save(folder, converted)
            same(expected, torch.load(converted, weights_only=True), folder, found)
    print(torch.__version__, len(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
