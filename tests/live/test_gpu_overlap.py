"""On a GPU: one buffer is read while the other one travels, as a trace of the profiler shows it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import migrate
from migrate.running import gather


def overlap(ones, others):
    """How long intervals of the one kind run at the same time as intervals of the other."""
    return sum(max(0, min(b, d) - max(a, c)) for a, b in ones for c, d in others)


def test_intervals_overlap_by_what_they_share():
    assert overlap([(0, 10)], [(10, 20), (30, 40)]) == 0
    assert overlap([(0, 10), (20, 30)], [(5, 25)]) == 10


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: the overlap of reading and copying is not traced"
)
def test_reading_goes_on_while_the_bytes_read_before_travel(tmp_path, monkeypatch):
    state = {f"w{i}": torch.randn(4096, 4096) for i in range(4)}
    save_file(state, tmp_path / "w.safetensors")
    model = torch.nn.ParameterDict(
        {key: torch.empty_like(one, device="cuda") for key, one in state.items()}
    )
    migrate.load(model, tmp_path / "w.safetensors")
    fill = gather.Gather.fill

    def recorded(self, *given):
        with torch.profiler.record_function("gather"):
            fill(self, *given)

    monkeypatch.setattr(gather.Gather, "fill", recorded)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        migrate.load(model, tmp_path / "w.safetensors", threads=1)
        torch.cuda.synchronize()
    spans = {"gather": [], "HtoD": []}
    for event in profile.events():
        for kind, found in spans.items():
            if kind in event.name:
                found.append((event.time_range.start, event.time_range.end))
    assert len(spans["HtoD"]) > 4
    assert "Pinned" in next(event.name for event in profile.events() if "HtoD" in event.name)
    assert overlap(spans["gather"], spans["HtoD"]) > 0
    assert all(torch.equal(model[key].cpu(), one) for key, one in state.items())
