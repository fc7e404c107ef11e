"""Objects of Transformer Engine in the words of a named release, and stock torch reads them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import quantized_classes as classes
import quantized_ranks as ranks
import torch
from marks import thorough
from work import HANG

import migrate
from migrate.core.errors import MigrateError

FORMS = {"te-2.16": 11, "te-2.17": 14, "te-2.18": 14, "te-2.19": 14, "te-2.20": 14}
OLDEST = {
    "te-float8": (1, 13),
    "te-mxfp8": (2, 0),
    "te-block-2d": (2, 3),
    "te-block-1d": (2, 12),
    "te-nvfp4-2d": (2, 8),
}
# a process in which only what releases from 2.16 on register with torch is safe
READ = """
import sys, torch
import quantized_classes as classes
modules = classes.install()
safe = [
    one for name, module in modules.items() for key, one in vars(module).items()
    if name.startswith("transformer_engine") and callable(one) and "Tensor" not in key
]
torch.serialization.add_safe_globals(safe)
state = torch.load(sys.argv[1], weights_only=True)
out = {}
for key, value in state.items():
    out |= {f"{key}.{name}": one for name, one in value.held().items()}
    said = value._quantizer
    print(key, type(value).__name__, value._count, value._by_method,
          getattr(value, value.CODE).value, type(getattr(value, value.CODE)).__module__,
          said and (said.dtype.value, said.optimize_for_gemm))
torch.save(out, sys.argv[2])
"""


@pytest.fixture
def old(tmp_path, monkeypatch):
    """A checkpoint of objects as the first releases of each class wrote them."""
    with classes.installed():
        state = {}
        for name, release in OLDEST.items():
            kind = dataclasses.replace(ranks.KINDS[name], release=release)
            monkeypatch.setitem(ranks.KINDS, name, kind)
            state[name] = ranks.wrapped(name, kind.shape, ranks.whole(name))
            if release < (2, 6) and state[name]._quantizer is not None:
                del state[name]._quantizer.optimize_for_gemm
        torch.save(state, tmp_path / "old.pt")
        held = {
            f"{key}.{n}": one for key, value in state.items() for n, one in value.held().items()
        }
        yield tmp_path / "old.pt", held


def reading(path, folder):
    """torch reads in a process of its own."""
    paths = [str(Path(ranks.__file__).parent), str(Path(__file__).parents[1] / "source")]
    return subprocess.run(
        [sys.executable, "-c", READ, path, folder / "read.pt"],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
        env={"PYTHONPATH": ":".join(paths)},
    )


def read(path, folder):
    """What torch reads, and what that says of each tensor."""
    done = reading(path, folder)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    return torch.load(folder / "read.pt"), dict(lines)


@pytest.mark.parametrize("form", thorough(FORMS, default=2))
def test_stock_torch_reads_old_objects_in_the_words_of_a_release(old, tmp_path, form):
    path, held = old
    report = migrate.apply(
        path, tmp_path / "new.pt", output_format="torch", params={"object_form": form}
    )
    assert f"written as {form} writes them: 5 quantized tensors" in report.notes
    found, said = read(tmp_path / "new.pt", tmp_path)
    assert found.keys() == held.keys()
    assert all(torch.equal(found[key], one) for key, one in held.items())
    module = "transformer_engine_torch" if form == "te-2.16" else f"{classes.TE}.constants"
    float8 = 6 if form in ("te-2.19", "te-2.20") else 5
    assert said == {
        "te-float8": f"Float8Tensor {float8} False 7 {module} None",
        "te-mxfp8": f"MXFP8Tensor 9 False 7 {module} None",
        "te-block-2d": f"Float8BlockwiseQTensor 10 False 7 {module} (7, False)",
        "te-block-1d": f"Float8BlockwiseQTensor 10 False 7 {module} (7, False)",
        "te-nvfp4-2d": f"NVFP4Tensor {FORMS[form]} False 10 {module} (10, False)",
    }
    answer = migrate.verify(tmp_path / "new.pt", source=path, params={"object_form": form})
    assert answer.equal


@pytest.mark.thorough
def test_stock_torch_refuses_what_older_releases_wrote(old, tmp_path):
    """Which is why no form of theirs can be asked for."""
    done = reading(old[0], tmp_path)
    assert done.returncode == 1
    assert "UnpicklingError: Weights only load failed" in done.stderr
    assert "getattr" in done.stderr


def saved(path, kind, **changes):
    """A checkpoint of one object, with these attributes."""
    one = ranks.KINDS[kind]
    value = ranks.wrapped(kind, one.shape, ranks.whole(kind))
    vars(value).update(changes)
    torch.save({"w": value}, path)
    return path


def refused(path, out, **params):
    with pytest.raises(MigrateError) as caught:
        migrate.apply(path, out, output_format="torch", params=params)
    assert not out.exists()
    (found,) = caught.value.diagnostics
    return found.code, found.render()


def test_the_integer_of_a_dtype_is_the_one_that_it_has_in_the_release(tmp_path, monkeypatch):
    old = dataclasses.replace(ranks.KINDS["te-float8"], number="e5m2", release=(2, 0))
    monkeypatch.setitem(ranks.KINDS, "te-float8", old)
    with classes.installed():
        path = saved(tmp_path / "old.pt", "te-float8")
        code, text = refused(path, tmp_path / "no.pt", object_form="te-2.18")
        assert code == "M955"
        assert "w" in text
        for numbering, new in (("0.8", 8), ("2.4", 7)):
            out = tmp_path / f"{numbering}.pt"
            params = {"object_form": "te-2.18", "te_dtype_numbering": numbering}
            migrate.apply(path, out, output_format="torch", params=params)
            assert torch.load(out, weights_only=True)["w"]._fp8_dtype.value == new


def test_what_a_release_has_no_words_for_is_refused(tmp_path):
    out = tmp_path / "out.pt"
    with classes.installed():
        path = saved(tmp_path / "a.pt", "te-float8-transposed")
        code, text = refused(path, out, object_form="te-2.18")
        assert (code, "w: no place for _transpose" in text) == ("M957", True)
        path = saved(tmp_path / "b.pt", "te-block-1d-compact")
        code, text = refused(path, out, object_form="te-2.18")
        assert (code, "w: its scales are compact" in text) == ("M957", True)
        path = saved(tmp_path / "c.pt", "ao-float8-row")
        code, text = refused(path, out, object_form="te-2.18")
        assert (code, "no object of Transformer Engine" in text) == ("M115", True)
    for older in ("te-1.13", "te-2.9", "te-2.15", "te-2.12.0"):
        code, text = refused(path, out, object_form=older)
        assert (code, "one of te-2.16, te-2.17" in text) == ("M115", True)
        assert "what releases before 2.16 wrote is read, but not written" in text
    code, text = refused(path, out, object_form="te-2.21")
    assert (code, "before 2.16" in text) == ("M115", False)


def test_without_rules_and_with_safetensors_between_objects_get_the_form(tmp_path):
    with classes.installed():
        path = saved(tmp_path / "old.pt", "te-mxfp8")
        migrate.apply(path, tmp_path / "folder", output_format="safetensors")
        params = {"object_form": "te-2.20"}
        migrate.apply(tmp_path / "folder", tmp_path / "b.pt", output_format="torch", params=params)
        one, two = (torch.load(f, weights_only=True)["w"] for f in (path, tmp_path / "b.pt"))
        assert all(torch.equal(a, b) for a, b in zip(one.held().values(), two.held().values()))


def test_genuine_objects_of_today_are_in_the_form_already(tmp_path):
    # files that Transformer Engine 2.20 itself wrote, byte for byte but for what torch adds
    genuine = Path(__file__).parents[1] / "data" / "te" / "tensors" / "nvfp4_2d_weight.pt"
    plain, formed = tmp_path / "plain.pt", tmp_path / "formed.pt"
    migrate.apply(genuine, plain, output_format="torch")
    params = {"object_form": "te-2.20"}
    migrate.apply(genuine, formed, output_format="torch", params=params)
    assert plain.read_bytes() == formed.read_bytes()
