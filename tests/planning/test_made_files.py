"""Side files that a layout makes of params, and those of a reference folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import migrate

LAYOUTS = """lineage: demo
title: Demo
ordered: true
layouts:
  v1: {title: first, detect: {present: "old.{i:int}.w"}}
  v2:
    title: second
    detect: {present: "new.{i:int}.w"}
    files:
      config.json:
        - {kind: v2, width: $width, layers: $layers, eps: $eps, none: $null, dtype: $dtype}
        - {$tied: true, tied: true}
        - rope: {$scaled: true, factor: 8}
params:
  width: {type: int, shape: {key: "new.{i:int}.w"}}
  layers: {type: int, shape: {key: "new.{i:int}.w", count: i}}
  eps: {type: float, config: params.json#eps}
  dtype: {type: str, dtype: {key: "new.{i:int}.w"}}
  tied: {type: bool, absent: head}
  scaled: {type: bool, config: params.json#scaled, default: false}
"""
RULES = """id: demo/v2/names
title: Names
lineage: demo
edge: [v1, v2]
rules: [{name: w, from: "old.{i:int}.w", to: "new.{i}.w"}]
"""
MADE = {"kind": "v2", "width": 4, "layers": 2, "eps": 1e-05, "none": None, "dtype": "float32"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rules" / "demo" / "v2").mkdir(parents=True)
    (tmp_path / "rules" / "demo" / "layouts.yaml").write_text(LAYOUTS)
    (tmp_path / "rules" / "demo" / "v2" / "names.yaml").write_text(RULES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checkpoint(here: Path, **said: Any) -> Path:
    source = here / "source"
    source.mkdir()
    save_file({f"old.{i}.w": torch.ones(4) for i in range(2)}, source / "model.safetensors")
    if said:
        (source / "params.json").write_text(json.dumps(said))
    return source


def applied(source: Path, out: str = "out", **asked: Any) -> dict[str, Any]:
    migrate.apply(source, out, to="demo@v2", **asked)
    made: dict[str, Any] = json.loads(Path(out, "config.json").read_text())
    return made


def test_a_file_is_made_of_the_tensors_and_of_other_files(here: Path) -> None:
    source = checkpoint(here, eps=1e-05)
    assert applied(source) == {**MADE, "tied": True}
    (change,) = migrate.plan(source, to="demo@v2").document["patched"]
    assert (change["path"], change["change"]) == ("config.json", "added")
    (source / "params.json").write_text(json.dumps({"eps": 1e-05, "scaled": True}))
    assert applied(source, "scaled") == {**MADE, "tied": True, "rope": {"factor": 8}}


def test_what_a_file_lacks_is_said_and_can_be_given(here: Path) -> None:
    source = checkpoint(here)
    migrate.apply(source, "out", to="demo@v2")
    assert not Path("out", "config.json").exists()
    notes = migrate.plan(source, to="demo@v2").document["notes"]
    why = "config.json is not made, because nothing says `eps`"
    assert [note for note in notes if note.startswith(why)]
    assert applied(source, "given", params={"eps": 0.5})["eps"] == 0.5


def test_a_file_that_is_there_is_left_alone(here: Path) -> None:
    source = checkpoint(here, eps=1e-05)
    (source / "config.json").write_text('{"own": 1}')
    assert applied(source) == {"own": 1}


def test_sources_that_disagree_are_refused(here: Path) -> None:
    source = checkpoint(here, eps=1e-05)
    with pytest.raises(migrate.MigrateError) as found:
        migrate.plan(source, to="demo@v2", params={"eps": 0.5})
    assert [d.code for d in found.value.diagnostics] == ["M510"]


def test_a_downgrade_takes_the_file_away_and_says_whether_it_was_edited(here: Path) -> None:
    applied(checkpoint(here, eps=1e-05))
    plan = migrate.plan("out", backwards=True)
    assert plan.document["downgrade"]["exact"]
    migrate.downgrade("out", "back")
    assert sorted(path.name for path in Path("back").iterdir() if "history" not in path.name) == [
        "model.safetensors",
        "params.json",
    ]
    made = json.loads(Path("out", "config.json").read_text())
    Path("out", "config.json").write_text(json.dumps({**made, "eps": 2.0}))
    edited = migrate.plan("out", backwards=True).document["downgrade"]
    assert not edited["exact"]
    assert "edited since, at eps" in str(edited["because"])


def test_layouts_say_what_is_wrong_with_their_files(here: Path) -> None:
    path = here / "rules" / "demo" / "layouts.yaml"
    path.write_text(LAYOUTS.replace("eps: $eps", "eps: $epsi"))
    (finding,) = [d for d in migrate.lint().to_json()["diagnostics"] if d["severity"] == "error"]
    assert (finding["code"], finding["message"]) == ("M112", "`$epsi` is not a param of this file")
    path.write_text(LAYOUTS.replace("$scaled: true", "$scaled: 7"))
    assert "M114" in {d["code"] for d in migrate.lint().to_json()["diagnostics"]}


def reference(here: Path, **files: str) -> Path:
    folder = here / "reference"
    folder.mkdir(exist_ok=True)
    save_file({"own": torch.ones(2)}, folder / "model.safetensors")
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    return folder


def test_files_of_a_reference_folder_come_along_byte_for_byte(here: Path) -> None:
    source = checkpoint(here, eps=1e-05)
    side = reference(here, tokenizer='{"a":  1}', generation_config="{}")
    first = migrate.plan(source, to="demo@v2", side=side)
    assert sorted(first.document["reference"]) == ["generation_config.json", "tokenizer.json"]
    applied(source, side=side)
    assert Path("out", "tokenizer.json").read_text() == '{"a":  1}'
    assert [p.name for p in Path("out").glob("*.safetensors")] == ["model.safetensors"]
    saved = here / "plan.json"
    saved.write_text(first.to_json())
    migrate.apply(saved, "again")
    assert Path("again", "tokenizer.json").read_text() == '{"a":  1}'
    assert migrate.verify("again", source=source, side=side).equal
    assert not migrate.verify("again", source=source).equal
    # as many bytes, and others
    (side / "tokenizer.json").write_text('{"a":  2}')
    assert migrate.plan(source, to="demo@v2", side=side).digest != first.digest
    with pytest.raises(migrate.MigrateError) as found:
        migrate.apply(saved, "third")
    assert [d.code for d in found.value.diagnostics] == ["M903"]


def test_a_name_that_both_have_is_refused(here: Path) -> None:
    source = checkpoint(here, eps=1e-05)
    with pytest.raises(migrate.MigrateError, match=r"params.json is beside the checkpoint"):
        migrate.plan(source, to="demo@v2", side=reference(here, params="{}"))


def test_one_file_has_none_beside_it(here: Path) -> None:
    source = checkpoint(here, eps=1e-05)
    side = reference(here, tokenizer="{}")
    with pytest.raises(migrate.MigrateError, match="no files beside it"):
        migrate.apply(source, "out.safetensors", to="demo@v2", side=side)
    single = migrate.apply(source / "model.safetensors", "out", to="demo@v2", side=side)
    assert single.path == "out"
    assert Path("out", "tokenizer.json").exists()


def test_what_a_reference_folder_says_contradicts(here: Path) -> None:
    source = checkpoint(here)
    assert applied(source, side=reference(here, params='{"eps": 0.25}'))["eps"] == 0.25


@pytest.mark.parametrize("way", ["there", "back"])
def test_llama_as_meta_has_it_comes_with_its_configuration_both_ways(
    way: str, tmp_path: Path
) -> None:
    """As the converters of both sides would write it."""
    source, heads, kv, dim, ffn = tmp_path / "source", 4, 2, 16, 48
    source.mkdir()
    said = {"dim": dim, "n_layers": 1, "n_heads": heads, "n_kv_heads": kv, "vocab_size": 8,
            "multiple_of": ffn, "norm_eps": 1e-05, "rope_theta": 500000.0}  # fmt: skip
    shapes = {
        "tok_embeddings": (8, dim), "norm": (dim,), "output": (8, dim),
        "layers.0.attention.wq": (dim, dim), "layers.0.attention.wk": (kv * 4, dim),
        "layers.0.attention.wv": (kv * 4, dim), "layers.0.attention.wo": (dim, dim),
        "layers.0.feed_forward.w1": (ffn, dim), "layers.0.feed_forward.w2": (dim, ffn),
        "layers.0.feed_forward.w3": (ffn, dim), "layers.0.attention_norm": (dim,),
        "layers.0.ffn_norm": (dim,),
    }  # fmt: skip
    torch.save(
        {f"{name}.weight": torch.ones(shape) for name, shape in shapes.items()},
        source / "consolidated.00.pth",
    )
    (source / "params.json").write_text(json.dumps({**said, "use_scaled_rope": True}))
    hf = tmp_path / "hf"
    migrate.apply(source, hf, to="meta-llama@hf", output_format="safetensors")
    made = json.loads((hf / "config.json").read_text())
    if way == "there":
        assert made == {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8,
            "hidden_size": dim, "intermediate_size": ffn, "num_hidden_layers": 1,
            "num_attention_heads": heads, "num_key_value_heads": kv, "hidden_act": "silu",
            "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
            "torch_dtype": "float32", "attention_bias": False, "mlp_bias": False,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
        }  # fmt: skip
        return
    (hf / "migrate.history.json").unlink()
    (hf / "params.json").unlink()
    meta = tmp_path / "meta"
    migrate.apply(hf, meta, to="meta-llama@meta", from_="meta-llama@hf")
    assert json.loads((meta / "params.json").read_text()) == {**said, "use_scaled_rope": True}
