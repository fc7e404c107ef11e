"""The lineages of families: found by what config.json says, and read for no other checkpoint."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

import migrate
from migrate.core.spec import spec
from migrate.rules import families as index
from migrate.rules import files, packs
from migrate.rules.families import families, suiting
from migrate.rules.lineage import Matcher, detect, resolve_goal
from migrate.rules.packs import Packs, find_packs
from migrate.source.blobs import Stored
from migrate.source.index import Index

PACKS = Packs((), scan=False)
ATTENTION = [f"self_attn.{w}_proj.weight" for w in "qkvo"]
SOLAR = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    *(f"model.layers.0.{key}" for key in ATTENTION),
    *(
        f"model.layers.0.mlp.experts.{e}.{w}_proj.weight"
        for e in range(2)
        for w in ("gate", "up", "down")
    ),
]


def held(keys: list[str]) -> Index:
    return Index({key: Stored(spec("bfloat16", (2, 2)), 0, 0) for key in keys}, ("f",))


def test_every_model_type_belongs_to_one_lineage() -> None:
    counts = Counter(kind for family in families().values() for kind in family.model_types)
    assert [kind for kind, count in counts.items() if count > 1] == []
    by_hand = [
        kind
        for name in ("hf-mixtral", "hf-qwen2-moe", "hf-deepseek-v3")
        for layout in PACKS.load_lineage(name).layouts
        if layout.detect
        for kind in layout.detect.config["model_type"]
    ]
    assert not counts.keys() & {*by_hand}


def test_every_name_of_a_family_leads_to_it_alone() -> None:
    names = Counter(n for f in families().values() for n in (f.name, *f.aliases))
    assert max(names.values()) == 1
    for family in families().values():
        kinds = {"hf-" + kind.replace("_", "-") for kind in family.model_types}
        assert kinds == {family.name, *family.aliases}


def test_config_decides_which_families_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    whole = packs.shipped_lineage
    monkeypatch.setattr(
        packs, "shipped_lineage", lambda home: read.append(home.name) or whole(home)
    )
    found = Packs((), scan=False).lineages(suiting({"model_type": "solar_open"}))[0]
    assert [name for name in read if name in families()] == ["hf-deepseek-v2"]
    assert found.keys() - families().keys() == PACKS.lineages(suiting({}))[0].keys()
    read.clear()
    Packs((), scan=False).lineages(suiting(None))
    assert not [name for name in read if name in families()]


def test_without_config_no_family_is_guessed_and_near_ones_are_named(tmp_path: Path) -> None:
    keys = held(SOLAR)
    lineage = PACKS.load_lineage("hf-deepseek-v2")
    (old, new) = detect(lineage, keys, lambda path: None)
    assert not old.holds
    assert [line for line in old.evidence if line.startswith("not: ")] == [
        "not: there is no config.json"
    ]
    assert not new.holds
    # several families have these keys: which one it is, keys do not say
    near = PACKS.lineages(suiting(None, Matcher(keys).has))[0].keys() & families().keys()
    assert {"hf-deepseek-v2", "hf-mellum"} <= near
    assert "hf-vit" not in near


def test_config_and_keys_together_say_the_layout() -> None:
    lineage = PACKS.load_lineage("hf-deepseek-v2")
    for kind, expected in (("solar_open", [True, False]), ("vit", [False, False])):
        raw = json.dumps({"model_type": kind}).encode()
        found = detect(lineage, held(SOLAR), lambda path, raw=raw: raw)
        assert [one.holds for one in found] == expected


def test_an_alias_is_a_name_that_goals_take() -> None:
    lineages = PACKS.lineages(suiting({"model_type": "solar_open"}))[0]
    for goal in ("hf-solar-open", "hf-solar-open@v5", "hf-deepseek-v2@v5"):
        assert resolve_goal(goal, lineages, {}) == ("hf-deepseek-v2", "v5")
    assert PACKS.load_lineage("hf-solar-open").name == "hf-deepseek-v2"
    assert PACKS.knows("hf-solar-open")
    assert not PACKS.knows("hf-solar")
    with pytest.raises(migrate.MigrateError, match="M507") as caught:
        PACKS.load_lineage("hf-solar-opem")
    assert "hf-solar-open" in str(caught.value)


def test_a_pack_has_aliases_too(tmp_path: Path) -> None:
    home = tmp_path / "rules" / "toy"
    shutil.copytree(files.shipped_folder() / "torch-wrappers", home)
    for path in home.rglob("*.yaml"):
        text = path.read_text("utf-8").replace("torch-wrappers", "toy")
        if path.name == "layouts.yaml":
            text = text.replace("lineage: toy\n", "lineage: toy\naliases: [toy-two]\n")
        path.write_text(text, "utf-8")
    for made in (*home.glob("rules.lock"), *home.glob("compiled.jsonl")):
        made.unlink()
    found = find_packs(tmp_path / "rules", cwd=tmp_path, installed=False)
    assert found.load_lineage("toy-two").name == "toy"


def test_the_index_counts_only_for_files_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shipped"
    shutil.copytree(files.shipped_folder() / "hf-vit", folder / "hf-vit")
    shutil.copy(files.shipped_folder() / index.INDEX, folder / index.INDEX)
    monkeypatch.setattr(files, "shipped_folder", lambda: folder)
    monkeypatch.setattr(packs, "shipped_folder", lambda: folder)
    assert not Packs((), scan=False).lineages(suiting({}))[0]
    with (folder / "hf-vit" / "layouts.yaml").open("a") as file:
        file.write("# more\n")
    assert [*Packs((), scan=False).lineages(suiting({}))[0]] == ["hf-vit"]
    for text in ("", "[]", '{"form": 0, "families": []}', '{"form": 1, "families": [1]}'):
        (folder / index.INDEX).write_text(text)
        index._read.cache_clear()
        assert families() == {}
    index._read.cache_clear()
