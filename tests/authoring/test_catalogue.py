"""The lineages that ship for the model types of transformers: against what the library itself loads
and saves, and how they are found.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import migrate
from migrate.rules.families import families

SHIPPED = {kind: family for family in families().values() for kind in family.model_types}
# of each kind of rules one: experts, joined, renamed, shared by several, corrected, by hand
SAMPLE = ["axk2", "esm", "gemma3", "gpt_neox", "inkling_mm_model", "sam3_tracker", "solar_open"]


def compare(kind: str, tmp: Path, layers: int = 3, experts: int = 6, cls: Any = None) -> list[str]:
    """What differs between what the shipped rules make of a checkpoint for the Hub, and what the
    library makes of it; and what is not as it was after the way back.
    """
    from catalogue import hub_name
    from import_proof import differences, saved, stored
    from transformers import PreTrainedModel

    cls, hub = saved(kind, tmp / "hub", layers=layers, experts=experts, cls=cls)
    weights = {name: t for key, t in stored(hub).items() for name in hub_name(kind, key, layers)}
    for file in hub.glob("*.safetensors*"):
        file.unlink()
    save_file({name: t.clone() for name, t in weights.items()}, hub / "model.safetensors")
    load = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
    model, info = load(cls, hub, output_loading_info=True)
    model.save_pretrained(tmp / "expected", save_original_format=False)
    expected = stored(tmp / "expected")
    made_up = {*info["missing_keys"]} - weights.keys()
    expected = {key: tensor for key, tensor in expected.items() if key not in made_up}
    report = migrate.apply(hub, tmp / "v5", to="latest", allow={"drop"})
    wrong = differences(stored(tmp / "v5"), expected)
    if not report.losses:
        migrate.downgrade(tmp / "v5", tmp / "back", to=f"{SHIPPED[kind].name}@v4")
        wrong += [f"back: {key}" for key in differences(stored(tmp / "back"), weights)]
    return wrong


@pytest.mark.libraries
@pytest.mark.parametrize("kind", SAMPLE)
def test_latest_is_what_the_library_loads_and_saves(kind: str, tmp_path: Path) -> None:
    assert compare(kind, tmp_path) == []


def of_another_class(kind: str, cls: Any, tmp: Path) -> str:
    """`equal` or `refused`, which is an error that names what is in no layout; else what differs
    for a model of this class.
    """
    try:
        wrong = compare(kind, tmp, cls=cls)
    except migrate.MigrateError as error:
        codes = {found.code[:2] for found in error.diagnostics}
        return "refused" if codes <= {"M2", "M5"} else f"{cls.__name__}: {error}"
    return f"{cls.__name__}: {wrong[:3]}" if wrong else "equal"


def others(kind: str) -> list[Any]:
    """The classes of a model type beside the one that its lineage was imported of."""
    from tiny_models import class_of, classes_of

    first = class_of(kind)
    return [cls for cls in classes_of(kind) if cls is not first]


@pytest.mark.libraries
@pytest.mark.parametrize(
    ("kind", "name"),
    [("esm", "EsmModel"), ("gpt_neox", "GPTNeoXModel"), ("swin", "SwinForMaskedImageModeling")],
)
def test_a_model_of_another_class_is_right_or_refused(kind: str, name: str, tmp_path: Path) -> None:
    (cls,) = [one for one in others(kind) if one.__name__ == name]
    assert of_another_class(kind, cls, tmp_path) in ("equal", "refused")


@pytest.mark.campaign
def test_so_is_every_class_of_every_model_type(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    wrong = []
    for kind in SHIPPED:
        for cls in others(kind):
            folder = tmp_path / f"{kind}-{cls.__name__}"
            try:
                found = of_another_class(kind, cls, folder)
            except (AttributeError, ImportError, TypeError, ValueError) as error:
                # a part of a model that the library cannot make or load by itself
                found = f"not made: {type(error).__name__}"
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            seen[found.split(":")[0] if found.startswith("not made") else found] += 1
            wrong += [found] if ": " in found and not found.startswith("not made") else []
    print(dict(seen))
    assert wrong == []
    assert seen["equal"] > seen["refused"]


@pytest.mark.campaign
def test_latest_is_so_for_every_model_type(tmp_path: Path) -> None:
    wrong = {kind: found for kind in SHIPPED if (found := compare(kind, tmp_path / kind))}
    assert wrong == {}


def test_what_wraps_timm_adds_the_prefix_that_the_library_adds(tmp_path: Path) -> None:
    """By the library's own renaming: the class needs timm, and has whatever timm's model has."""
    pytest.importorskip("transformers", reason="the extra `test` brings it")
    from transformers.conversion_mapping import _build_checkpoint_conversion_mapping

    from migrate.authoring.transformers import classes, moves

    changes = _build_checkpoint_conversion_mapping()["timm_wrapper"]
    renamed = moves.renaming(classes.library(), changes, "timm_model")
    keys = ("conv1.weight", "layer1.0.bn1.running_mean", "head.fc.bias", "pos_embed")
    names = {f"timm_model.{key}": None for key in keys}
    tensors = {key: torch.full((2,), float(n)) for n, key in enumerate(keys)}
    hub = tmp_path / "hub"
    hub.mkdir()
    save_file(tensors, hub / "model.safetensors")
    (hub / "config.json").write_text('{"model_type": "timm_wrapper"}')
    migrate.apply(hub, tmp_path / "v5", to="latest")
    made = load_file(tmp_path / "v5" / "model.safetensors")
    assert made.keys() == {renamed(key, names)[0] for key in keys} == names.keys()
    assert all(torch.equal(made[f"timm_model.{key}"], tensors[key]) for key in keys)
    migrate.downgrade(tmp_path / "v5", tmp_path / "back")
    assert migrate.diff(hub, tmp_path / "back").equal


# of a model with a backbone of no layers
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.libraries
def test_what_ships_is_what_the_importer_makes() -> None:
    import catalogue
    import make_catalogue

    found = {kind: made for kind, made in catalogue.made() if not isinstance(made, str)}
    all_ = catalogue.families(found)
    files = {name: text for one in all_ for name, text in catalogue.files_of(one).items()}
    assert [name for name, _ in make_catalogue.differences(files)] == []
    assert make_catalogue.orphans({one.name for one in all_}) == []
    by_hand = {kind for kind, (_, made) in catalogue.shipped_types().items() if not made}
    assert {kind for one in all_ for kind in one.types} == SHIPPED.keys() - by_hand


def test_a_lineage_that_no_model_type_gives_any_more_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="the extra `test` brings it")
    import catalogue
    import make_catalogue

    home = tmp_path / "hf-gone"
    home.mkdir()
    detect = "{detect: {config: {model_type: gone}}}"
    said = f"# {catalogue.MADE}\nlineage: hf-gone\nlayouts: {{v4: {detect}}}\n"
    (home / "layouts.yaml").write_text(said)
    monkeypatch.setattr(catalogue, "RULES", tmp_path)
    monkeypatch.setattr(catalogue, "made", list)
    monkeypatch.setattr("sys.argv", ["make_catalogue.py", "--check"])
    assert make_catalogue.main() == 1
    assert "hf-gone: no model type of transformers" in capsys.readouterr().out
    (home / "layouts.yaml").write_text(said.replace(catalogue.MADE, "written by hand"))
    assert make_catalogue.main() == 0


def test_a_file_that_says_why_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import catalogue
    import make_catalogue

    monkeypatch.setattr(catalogue, "RULES", tmp_path)
    file = tmp_path / "hf-toy" / "v5" / "rename.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("id: other\n")
    made = {"hf-toy/v5/rename.yaml": "id: made\n", "hf-toy/layouts.yaml": "lineage: hf-toy\n"}
    names = [name for name, _ in make_catalogue.differences(made)]
    assert names == ["hf-toy/layouts.yaml", "hf-toy/v5/rename.yaml"]
    file.write_text(f"{catalogue.CHANGED}the Hub has another key\nid: other\n")
    assert [name for name, _ in make_catalogue.differences(made)] == ["hf-toy/layouts.yaml"]
