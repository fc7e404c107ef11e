"""A program for any release of torch from 2.0 on, without migrate: saves a small checkpoint as
`torch.distributed.checkpoint` of that release writes it. What came of it stands in tests/data/dcp.

`save_by_torch.py FOLDER` prints the release.
"""

import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp


def state():
    """Tensors that are alike, of which the second and third are recognised by the first, and what
    is unlike them: strides, no axes, no elements, values.
    """
    g = torch.Generator().manual_seed(7)

    def r(*shape):
        return torch.rand(shape, generator=g)

    model = {
        "a": r(3, 5),
        "b": r(3, 5),
        "c": r(3, 5),
        "half": r(4, 2).to(torch.bfloat16),
        "half2": r(4, 2).to(torch.bfloat16),
        "t": r(5, 3).t(),
        "scalar": torch.tensor(2.5),
        "none": torch.ones(0, 3),
        "none2": torch.ones(0, 3),
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.95)}]
    return {"model": model, "optimizer": {"param_groups": groups}, "step": 7}


def main(folder):
    warnings.simplefilter("ignore")
    writer = dcp.FileSystemWriter(folder, sync_files=False)
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 3):
        # they ask for ranks otherwise
        planner = dcp.DefaultSavePlanner(flatten_state_dict=True)
        dcp.save_state_dict(state(), storage_writer=writer, no_dist=True, planner=planner)
    else:
        dcp.save(state(), storage_writer=writer)
    print(torch.__version__)


if __name__ == "__main__":
    main(*sys.argv[1:])
