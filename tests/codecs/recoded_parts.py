"""Whole parts through `recode`, each output in one box."""

from __future__ import annotations

from typing import Any

import numpy as np

from migrate import ops
from migrate.core.spec import Spec
from migrate.elements.raw import carrier

RECODE: Any = ops.get("recode")


def computed_parts(
    settled: Any, specs: list[Spec], held: list[Any]
) -> tuple[list[Spec], list[Any]]:
    made, survey = RECODE.infer(settled, specs), {}
    if RECODE.surveys(settled, specs):
        whole = tuple((0, n) for n in specs[0].shape)
        survey = {"survey": RECODE.survey(settled, specs, whole, held[0])}
    out = []
    for number, spec in enumerate(made):
        box = tuple((0, n) for n in spec.shape)
        needed = RECODE.needs(settled, specs, number, box)
        cut = [a[tuple(slice(*side) for side in b)] for a, b in zip(held, needed, strict=True)]
        array = np.empty(spec.shape, carrier(spec.dtype))
        RECODE.compute(settled, cut, specs, number, box, array, **survey)
        out.append(array)
    return made, out
