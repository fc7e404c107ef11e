"""Strided copies and transposes in memory, against numpy's own."""

from __future__ import annotations

import numpy as np
import pytest

from migrate.elements.transposes import flip_panel
from migrate.running import gather
from migrate.running.gather import copy_strided


@pytest.mark.parametrize("item", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (7, 300), (8, 8), (513, 257), (1027, 391), (2, 800), (520, 3)]
)
def test_a_panel_of_any_size_is_transposed(item: int, rows: int, columns: int) -> None:
    panel = (
        np.random.default_rng(0)
        .integers(0, 256, (rows, columns * item), dtype="u1")
        .view(f"u{item}")
    )
    out = np.zeros((columns, rows), f"u{item}")
    flip_panel(panel, out)
    assert (out == panel.T).all()


@pytest.mark.parametrize("item", [1, 2, 4])
def test_rows_may_be_cut_out_of_something_wider_at_any_byte(item: int) -> None:
    held = np.random.default_rng(1).integers(0, 256, 1 + 40 * 90 * item, dtype="u1")
    panel = np.ndarray((40, 70), f"u{item}", held, 1, (90 * item, item))
    store = np.zeros(3 + 70 * 40 * item, "u1")
    out = np.ndarray((70, 40), f"u{item}", store, 3)
    flip_panel(panel, out)
    assert (out == panel.T).all()
    assert not store[:3].any()


@pytest.mark.parametrize("longest", [gather._LONGEST, 12])
@pytest.mark.parametrize("item", [1, 2, 3, 4, 8, 12, 16, 100])
@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0), (1, 2, 0), (2, 0, 1), (1, 0, 2)])
def test_a_permutation_written_as_loops_is_numpys(
    item: int, order: tuple[int, ...], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "_LONGEST", longest)
    shape = (12, 33, 70)
    held = np.random.default_rng(2).integers(0, 256, (*shape, item), dtype="u1")
    wanted = np.ascontiguousarray(held.transpose(*order, 3))
    source = np.empty(shape, f"V{item}").strides
    to = np.empty([shape[a] for a in order], f"V{item}").strides
    loops = tuple((shape[a], d, source[a]) for a, d in zip(order, to, strict=True))
    dest = bytearray(held.nbytes)
    copy_strided(memoryview(dest), 0, held.reshape(-1).data.cast("B"), 0, item, loops)
    assert bytes(dest) == wanted.tobytes()
