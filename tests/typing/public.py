"""What type checkers make of the public functions. Checked by mypy and pyright, never run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from typing_extensions import assert_type

import migrate
from migrate.results import (
    ApplyReport,
    DetectedLayout,
    DiffReport,
    DowngradeVerdict,
    ErrorReport,
    HistoryReport,
    InspectReport,
    LineagesReport,
    LintReport,
    LoadReport,
    PathEdge,
    PlanReport,
    RuleTestReport,
    StateDictReport,
    VerifyEstimate,
    VerifyReport,
    WrittenFile,
)


def on_disk(path: Path, text: str) -> None:
    assert_type(migrate.inspect(path), InspectReport)
    assert_type(migrate.plan(text, to="a@b"), migrate.Plan)
    assert_type(migrate.plan(text, to=["a@b"]).report, PlanReport)
    assert_type(migrate.apply(path, text, to="a@b", allow={"lossy"}), ApplyReport)
    assert_type(migrate.apply(path, path, rules=["a.yaml", path], source=text), ApplyReport)
    assert_type(migrate.apply(path, dry_run=True), PlanReport)
    assert_type(migrate.apply(path, text, dry_run=True), PlanReport)
    assert_type(migrate.downgrade(path, text, threads=4, max_memory="4GB"), ApplyReport)
    assert_type(migrate.downgrade(path, dry_run=True), PlanReport)
    assert_type(migrate.verify(text, source=path, sample="5%"), VerifyReport)
    assert_type(migrate.diff(path, text), DiffReport)
    assert_type(migrate.history(path), HistoryReport)
    assert_type(migrate.history(), LineagesReport)
    assert_type(migrate.lint([path]), LintReport)
    assert_type(migrate.test(path), RuleTestReport)


def in_memory(state: dict[str, torch.Tensor], model: torch.nn.Module, path: Path) -> None:
    assert_type(migrate.apply(state, to="a@b"), OrderedDict[str, Any])
    assert_type(migrate.apply(model, to="a@b", inform=informed), OrderedDict[str, Any])
    assert_type(migrate.apply(state, path, to="a@b"), ApplyReport)
    assert_type(migrate.apply(model, path, to="a@b"), ApplyReport)
    assert_type(migrate.apply(state, dry_run=True), PlanReport)
    values: Mapping[str, Any] = migrate.migrate_state_dict(state, "a@b", device="cpu")
    model.load_state_dict(values)
    migrate.attach(model, "a@b", inform=informed).remove()
    assert_type(migrate.load(model, state), LoadReport)
    assert_type(migrate.load(model, path, strict=False), LoadReport)
    assert_type(migrate.convert_module(model, model), LoadReport)
    assert_type(migrate.save(model, path), ApplyReport)


def informed(report: StateDictReport) -> None:
    assert_type(report.report, ErrorReport | None)
    assert_type(report.steps, tuple[PathEdge, ...])


def estimated(estimate: VerifyEstimate) -> None:
    assert_type(estimate.seconds, float | None)
    migrate.verify("new", source="old", inform=estimated)


def fields(report: ApplyReport, inspected: InspectReport) -> None:
    assert_type(report.path, str | None)
    assert_type(report.files["model.safetensors"], WrittenFile)
    assert_type(report.files["model.safetensors"].size, int)
    assert_type(report.downgrade, DowngradeVerdict)
    assert_type(report.steps[0].from_, str)
    assert_type(report.warnings, tuple[migrate.Diagnostic, ...])
    assert_type(report.to_json(), dict[str, Any])
    assert_type(inspected.layouts[0], DetectedLayout)
    assert_type(inspected.keys[0].count, int)
    assert_type(inspected.metadata, Mapping[str, str])
