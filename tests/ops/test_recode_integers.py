"""`recode` of whole numbers in rule files, on checkpoints that libraries made: the numbers of these
are the same before and after, the way back restores the bytes, and what libraries make of the same
parts is what comes out.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commandline import contents
from genuine import FOLDER, checkpoint, digest, digests

import migrate
from migrate.core.errors import MigrateError

RECODED: dict[str, dict[str, str]] = json.loads((FOLDER / "recoded.json").read_text())
GPTQ = {"weight": "qweight", "zero": "qzeros", "scale": "scales", "group": "g_idx"}
AWQ = {"weight": "qweight", "zero": "qzeros", "scale": "scales"}
PACK = {
    "weight": "weight_packed", "scale": "weight_scale", "shape": "weight_shape",
    "zero": "weight_zero_point",
}  # fmt: skip


def rules(
    path: Path, via: str, one: dict[str, str], other: dict[str, str] | str, optional: str = "[]"
) -> Path:
    """A rule file that makes these parts of those."""
    sides = [
        side
        if isinstance(side, str)
        else "{" + ", ".join(f'{role}: "{{m...}}.{name}"' for role, name in side.items()) + "}"
        for side in (one, other)
    ]
    path.write_text(
        f"""id: {path.stem}/b/parts
title: Parts of whole numbers become others
lineage: {path.stem}
edge: [a, b]
# migrate: allow M612 because the weights of any model are meant, and what is beside them stays
keep: ["{{k...}}"]
rules:
  - name: parts
    from: {sides[0]}
    to: {sides[1]}
    optional: {optional}
    via: [{via}]
"""
    )
    return path


def plain(path: Path, codec: str, parts: dict[str, str]) -> Path:
    """A rule file that decodes them."""
    via = f"{{dequantize: {{codec: {codec}, dtype: float16}}}}"
    optional = [role for role in ("zero", "group") if role in parts and "int-pack" in codec]
    return rules(path, via, parts, '"{m}.weight"', json.dumps(optional))


def source(folder: Path, name: str) -> Path:
    """A copy of a genuine folder without what says how it is stored."""
    made = folder / name
    shutil.copytree(checkpoint(name).folder, made)
    (made / "config.json").unlink()
    return made


V1 = "{codec: gptq, form: v1, zeros: words}"
V2 = "{codec: gptq, form: v2}"
PATHS: dict[str, tuple[str, str, dict[str, str], dict[str, str], str]] = {
    "AWQ to int-pack": ("awq-gemm", "{codec: awq}", AWQ, PACK, "{codec: int-pack}"),
    "GPTQ v2, three and eight bits, in turn, to int-pack": (
        "gptq-v2-dynamic", V2, GPTQ, PACK, "{codec: int-pack}",
    ),
    "symmetric GPTQ without its zeros": (
        "gptq-v2-dynamic", V2, GPTQ, {r: PACK[r] for r in ("weight", "scale", "shape")},
        "{codec: int-pack}",
    ),
    "GPTQ v1, sorted by how much columns matter, to int-pack with an index": (
        "gptq-v1", V1, GPTQ, PACK | {"group": "weight_g_idx"}, "{codec: int-pack}",
    ),
    "GPTQ v1 to v2": ("gptq-v1", V1, GPTQ, GPTQ, V2),
    "GPTQ v2 to v1": ("gptq-v2-dynamic", V2, GPTQ, GPTQ, V1),
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("name", PATHS)
def test_numbers_are_those_of_the_library_and_the_bytes_come_back(
    tmp_path: Path, name: str
) -> None:
    of, form, one, other, to = PATHS[name]
    given = source(tmp_path, of)
    way = rules(tmp_path / "way.yaml", f"{{recode: {{from: {form}, to: {to}}}}}", one, other)
    made = tmp_path / "made"
    report = migrate.apply(given, made, rules=way)
    assert report.to_json()["downgrade"]["exact"] is True
    assert migrate.verify(made, source=given, rules=way).to_json()["equal"] is True
    decode = plain(tmp_path / "plain.yaml", to[len("{codec: ") : -1], other)
    migrate.apply(made, tmp_path / "plain", rules=decode, allow={"lossy"})
    assert digests(tmp_path / "plain") == checkpoint(of).tensors
    migrate.downgrade(made, tmp_path / "back", rules=way)
    assert digests(tmp_path / "back") == digests(given)


@pytest.mark.heavy
def test_awq_becomes_what_the_converter_of_compressed_tensors_makes_of_it(tmp_path: Path) -> None:
    given = source(tmp_path, "awq-gemm")
    via = "{recode: {from: {codec: awq}, to: {codec: int-pack}}}"
    migrate.apply(given, tmp_path / "made", rules=rules(tmp_path / "way.yaml", via, AWQ, PACK))
    made, was = contents(tmp_path / "made"), contents(given)
    found = {key: digest(*tensor) for key, tensor in made.items() if key not in was}
    assert found == RECODED["awq-gemm"]


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "form", "to"), [("gptq-v1", V1, V2), ("gptq-v2-dynamic", V2, V1)])
def test_zeros_become_those_that_gptqmodel_makes_of_them(
    tmp_path: Path, name: str, form: str, to: str
) -> None:
    given = source(tmp_path, name)
    way = rules(tmp_path / "way.yaml", f"{{recode: {{from: {form}, to: {to}}}}}", GPTQ, GPTQ)
    migrate.apply(given, tmp_path / "made", rules=way)
    made = digests(tmp_path / "made")
    assert {key: made[key] for key in made if key.endswith("qzeros")} == RECODED[name]
    was = digests(given)
    assert {k: v for k, v in made.items() if k not in RECODED[name]} == {
        k: v for k, v in was.items() if k not in RECODED[name]
    }


@pytest.mark.heavy
def test_columns_out_of_turn_are_refused_by_name_and_nothing_appears(tmp_path: Path) -> None:
    given = source(tmp_path, "gptq-v1")
    way = rules(
        tmp_path / "way.yaml", f"{{recode: {{from: {V1}, to: {{codec: int-pack}}}}}}", GPTQ, PACK
    )
    with pytest.raises(
        MigrateError, match=r"M406.*_proj.*the group of column \d+ is \d+"
    ) as caught:
        migrate.apply(given, tmp_path / "made", rules=way)
    assert "group: …" in str(caught.value)
    assert not (tmp_path / "made").exists()


@pytest.mark.heavy
def test_an_index_that_was_not_there_is_not_made_on_the_way_back(tmp_path: Path) -> None:
    given = source(tmp_path, "gptq-v2-dynamic")
    tensors: Any = {k: v for k, v in contents(given).items() if not k.endswith("g_idx")}
    (given / "model.safetensors").unlink()
    places, header, raw = 0, {}, b""
    for key, (dtype, shape, data) in tensors.items():
        header[key] = {
            "dtype": dtype, "shape": list(shape), "data_offsets": [places, places + len(data)]
        }  # fmt: skip
        places, raw = places + len(data), raw + data
    text = json.dumps(header).encode()
    (given / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw)
    via = f"{{recode: {{from: {V2}, to: {{codec: int-pack}}}}}}"
    way = rules(tmp_path / "way.yaml", via, GPTQ, PACK, "[group]")
    migrate.apply(given, tmp_path / "made", rules=way)
    migrate.downgrade(tmp_path / "made", tmp_path / "back", rules=way)
    assert digests(tmp_path / "back") == digests(given)


@pytest.mark.heavy
def test_undo_keeps_what_no_way_back_makes(tmp_path: Path) -> None:
    """bits that int8 does not say, as the rule does not."""
    given = source(tmp_path, "ct-w4a16")
    symmetric = {r: PACK[r] for r in ("weight", "scale", "shape")}
    way = rules(
        tmp_path / "way.yaml", "{recode: {from: {codec: int-pack}, to: {codec: int8}}}",
        symmetric, {"weight": "weight", "scale": "weight_scale"},
    )  # fmt: skip
    undo = tmp_path / "undo"
    migrate.apply(given, tmp_path / "made", rules=way, undo=undo)
    migrate.downgrade(tmp_path / "made", tmp_path / "back", rules=way, undo=undo)
    assert digests(tmp_path / "back") == digests(given)
