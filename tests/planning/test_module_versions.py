"""`detect: {module_version: …}` reads the `_metadata` that a module's state dict carries, in a file
and in memory.
"""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

import migrate
from migrate.core.errors import MigrateError

LAYOUTS = """\
lineage: norms
title: t
ordered: true
layouts:
  v1: {title: a, status: supported, detect: {present: "{m...}.w", module_version: {"{m...}": 1}}}
  v2: {title: b, status: current, detect: {present: "{m...}.v", module_version: {"{m...}": 2}}}
"""
RULE = """\
id: norms/v2/rename
title: t
why: t
lineage: norms
edge: [v1, v2]
requires: ">=0.1"
rules: [{name: r, from: "{m...}.w", to: "{m}.v"}]
"""


@pytest.fixture
def rules(tmp_path):
    folder = tmp_path / "rules" / "norms" / "v2"
    folder.mkdir(parents=True)
    (folder.parent / "layouts.yaml").write_text(LAYOUTS)
    (folder / "rename.yaml").write_text(RULE)
    return tmp_path / "rules"


def state(version):
    made = OrderedDict({"a.w": torch.ones(2)})
    made._metadata = OrderedDict({"": {}, "a": {"version": version}})
    return made


def test_a_file_of_torch_is_told_by_its_module_versions(tmp_path, rules):
    for version, expected in ((1, ["v1"]), (2, [])):
        torch.save(state(version), tmp_path / "x.pt")
        found = migrate.inspect(tmp_path / "x.pt", rules=[rules]).to_json()["layouts"]
        assert [one["layout"] for one in found if one["lineage"] == "norms"] == expected


def test_a_state_dict_is_told_by_its_module_versions(rules):
    assert list(migrate.migrate_state_dict(state(1), to="norms@v2", rules=[rules])) == ["a.v"]
    with pytest.raises(MigrateError, match="fits no layout"):
        migrate.migrate_state_dict(state(3), to="norms@v2", rules=[rules])
