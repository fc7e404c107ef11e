"""Checkpoints of several ranks through the command line: joined, cut, kept apart, and back under
the names they had.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from commandline import contents, done, rules, run, safetensors
from naive_ops import Tensor
from stored_sets import write_torch

CASES = Path(__file__).parent.parent / "data" / "cases"


def f32(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def iota(start: int, *shape: int) -> tuple[str, list[int], bytes]:
    count = 1
    for n in shape:
        count *= n
    return "F32", list(shape), f32(*range(start, start + count))


def rows(path: Path, key: str) -> list[float]:
    raw = contents(path)[key][2]
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def files(folder: Path) -> dict[str, dict]:
    return {str(p.relative_to(folder)): contents(p) for p in sorted(folder.rglob("*.safetensors"))}


def migrated(source: Path, rule: Path, work: Path, *options: object) -> Path:
    """The output; it is verified and goes back to what the source was, file by file."""
    out, back = work / "out", work / "back"
    done("apply", source, "-o", out, "--rules", rule, "--no-fsync", *options)
    done("verify", out, "--source", source, "--rules", rule, *options)
    done("downgrade", out, "-o", back, "--rules", rule, "--no-fsync")
    assert files(back) == files(source)
    done("diff", source, back)
    return out


JOIN = """params: {tp: {type: int, default: 2}}
keep: ["{k...}"]
rules:
  - {name: q, from: "q@{r:int}", to: "joined", via: [{concat: {over: r, dim: 0, count: $tp}}]}
  - {name: n, from: "norm@{r:int}", to: "norm", via: [{same: {over: r, count: $tp}}]}
"""
NAMES = [
    "consolidated.{:02}.safetensors",
    "consolidated.{:03}.safetensors",
    "mp_rank_{:02}/model.safetensors",
    "mp_rank_{:02}/states.safetensors",
]


def ranked(folder: Path, form: str, ranks: int = 2, extra: bool = True) -> Path:
    for r in range(ranks):
        tensors = {"q": iota(10 * r, 2, 2), "norm": iota(5, 3)}
        if extra:
            tensors["own" if r else "first"] = iota(r, 1 + r)
        safetensors(folder / form.format(r), tensors, {"format": "pt", "rank": "all"})
    (folder / "params.json").write_text('{"dim": 3}')
    return folder


@pytest.mark.parametrize("form", NAMES)
def test_ranks_are_joined_and_come_back_under_their_names(tmp_path: Path, form: str) -> None:
    source = ranked(tmp_path / "in", form, extra=False)
    out = migrated(source, rules(tmp_path, JOIN), tmp_path)
    assert list(files(out)) == ["model.safetensors"]
    assert rows(out / "model.safetensors", "joined") == [0, 1, 2, 3, 10, 11, 12, 13]
    assert (out / "params.json").read_text() == '{"dim": 3}'


@pytest.mark.parametrize("form", NAMES)
def test_a_single_rank_comes_back_under_its_name_too(tmp_path: Path, form: str) -> None:
    source = ranked(tmp_path / "in", form, ranks=1)
    assert list(files(migrated(source, rules(tmp_path, JOIN), tmp_path, "--set", "tp=1"))) == [
        "model.safetensors"
    ]


@pytest.mark.parametrize("form", NAMES)
def test_what_stays_on_a_rank_keeps_its_file_and_the_name_of_the_file(
    tmp_path: Path, form: str
) -> None:
    source = ranked(tmp_path / "in", form)
    out = migrated(source, rules(tmp_path, JOIN), tmp_path)
    assert {name: set(held) for name, held in files(out).items()} == {
        form.format(0): {"joined", "norm", "first"},
        form.format(1): {"own"},
    }
    keys = [line["keys"] for line in done("inspect", out, "--format", "json").json["keys"]]
    assert keys == ["first", "joined", "norm", "own@1"]


def test_inspect_says_which_keys_several_files_have(tmp_path: Path) -> None:
    source = ranked(tmp_path / "in", NAMES[0])
    document = done("inspect", source, "--format", "json").json
    assert {(line["keys"], line["count"]) for line in document["keys"]} == {
        ("q@{0,1}", 2),
        ("norm@{0,1}", 2),
        ("first", 1),
        ("own@1", 1),
    }
    assert [f["name"] for f in document["files"]] == [
        "consolidated.00.safetensors",
        "consolidated.01.safetensors",
    ]


def test_a_plan_that_writes_ranks_says_that_shards_are_not_made(tmp_path: Path) -> None:
    source, rule = ranked(tmp_path / "in", NAMES[0]), rules(tmp_path, JOIN)
    made = done("plan", source, "--rules", rule, "--max-shard-size", "8B").out
    assert "the limit on shards does not apply" in made
    done("apply", source, "-o", tmp_path / "out", "--rules", rule, "--max-shard-size", "8B")
    assert list(files(tmp_path / "out")) == [
        "consolidated.00.safetensors",
        "consolidated.01.safetensors",
    ]
    joined = done("plan", ranked(tmp_path / "b", NAMES[0], extra=False), "--rules", rule).out
    assert "the limit on shards" not in joined


def test_a_rule_without_ranks_works_on_each_and_a_kept_key_that_is_left_alone_is_plain(
    tmp_path: Path,
) -> None:
    source = ranked(tmp_path / "in", NAMES[0])
    rule = rules(
        tmp_path,
        """keep: ["{k...}"]
rules:
  - {name: q, from: "q", to: "p", via: [{transpose: {dims: [0, 1]}}]}
  - {name: gone, from: "norm@{r:int}", where: {r: {min: 1}}, via: [{drop: {why: the first one counts}}]}
""",  # noqa: E501
    )
    out = tmp_path / "out"
    done("apply", source, "-o", out, "--rules", rule, "--allow", "drop")
    made = files(out)
    assert {name: set(held) for name, held in made.items()} == {
        NAMES[0].format(0): {"p", "first", "norm"},
        NAMES[0].format(1): {"p", "own"},
    }
    assert rows(out / NAMES[0].format(1), "p") == [10, 12, 11, 13]
    # the stamp fits: the plan called keys as the written files do
    assert done("history", out, "--format", "json").json["notes"] == []


def test_a_saved_plan_of_ranks_is_run_as_it_was_read(tmp_path: Path) -> None:
    source, rule = ranked(tmp_path / "in", NAMES[2]), rules(tmp_path, JOIN)
    done("plan", source, "--rules", rule, "-o", tmp_path / "plan.json")
    done("apply", tmp_path / "plan.json", "-o", tmp_path / "out")
    assert list(files(tmp_path / "out")) == [NAMES[2].format(0), NAMES[2].format(1)]


def test_a_rank_that_is_carried_along_cannot_become_another(tmp_path: Path) -> None:
    """`w@0` of a rule that does not name ranks is `w` of rank 0, never a `w@0` that goes to two
    files more.
    """
    old = tmp_path / "old"
    for rank in (0, 1):
        safetensors(old / f"consolidated.{rank:02}.safetensors", {"w": iota(rank, 2)})
    rule = rules(
        tmp_path,
        "rules:\n  - {name: w, from: '{x}', to: 'new.{x}@{r:int}', via: [{copy: {into: r, count: "
        "2}}]}\n",
    )
    refused = run("apply", old, "-o", tmp_path / "out", "--rules", rule)
    assert refused.exit == 3, refused
    assert "M209" in refused.err + refused.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("there", ["rank 0", "both"])
def test_a_target_of_rank_0_exists_with_and_without_its_rank(tmp_path: Path, there: str) -> None:
    """`if_exists: keep` where the sources are plain and the targets ranked (`new@0`), or the other
    way round.
    """
    old = tmp_path / "old"
    one, other = (
        {"a.old": iota(0, 2), "b.old": iota(2, 2), "a.new": iota(0, 2)},
        {"b.old": iota(2, 2)},
    )
    if there == "both":
        other["a.new"] = iota(5, 2)
    for rank, held in enumerate((one, other)):
        safetensors(old / f"consolidated.{rank:02}.safetensors", held)
    rule = rules(
        tmp_path,
        "keep: ['{x}.new']\nrules:\n  - {name: w, from: '{x}.old', to: '{x}.new', if_exists: "
        "keep}\n",
    )
    done("apply", old, "-o", tmp_path / "out", "--rules", rule)
    after = files(tmp_path / "out")
    assert sorted(after["consolidated.00.safetensors"]) == ["a.new", "b.new"]
    assert sorted(after["consolidated.01.safetensors"]) == (
        ["a.new", "b.new"] if there == "both" else ["b.new"]
    )
    done("verify", tmp_path / "out", "--source", old, "--rules", rule)


@pytest.mark.parametrize("ranks", [1, 2])
def test_verify_knows_what_ranks_of_torch_files_hold_beside_tensors(
    tmp_path: Path, ranks: int
) -> None:
    """Values of a rank that has no file any more are those of rank 0, and names in two files are
    two tensors, tied or not.
    """
    tensors = {"w": Tensor("float32", np.arange(8, dtype="<u4").reshape(4, 2))}
    if ranks == 2:
        old, change = (
            tmp_path / "old",
            "{name: w, from: 'w@{r:int}', to: w, via: [{same: {over: r, count: 2}}]}",
        )
        for rank in range(ranks):
            write_torch(old / f"mp_rank_{rank:02}" / "model_optim_rng.pt", tensors, nested=True)
    else:
        old, change = (
            tmp_path / "old.pt",
            "{name: w, from: w, to: 'w@{r:int}', via: [{tie: {into: r, count: 2}}]}",
        )
        write_torch(old, tensors, nested=True)
    rule = rules(tmp_path, f"rules:\n  - {change}\n")
    done("apply", old, "-o", tmp_path / "out", "--rules", rule)
    done("verify", tmp_path / "out", "--source", old, "--rules", rule)


def test_one_output_file_cannot_hold_ranks(tmp_path: Path) -> None:
    source, rule = ranked(tmp_path / "in", NAMES[0]), rules(tmp_path, JOIN)
    assert run(
        "apply", source, "-o", tmp_path / "x.safetensors", "--rules", rule, "--format", "json"
    ).codes == ["M916"]


def test_a_missing_rank_stops_every_command(tmp_path: Path) -> None:
    source = ranked(tmp_path / "in", NAMES[0], ranks=4)
    for rank in (0, 2):
        (source / NAMES[0].format(rank)).unlink()
    for command in (("inspect", source), ("plan", source, "--rules", rules(tmp_path, JOIN))):
        result = done(*command, exit=3)
        assert "error[M920]" in result.err
        assert "consolidated.00.safetensors, consolidated.02.safetensors" in result.err


def test_a_key_that_is_called_like_a_rank_can_be_looked_at_and_not_migrated(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", {"w@1": iota(0, 2)})
    assert done("inspect", source, "--format", "json").json["keys"][0]["keys"] == "w@1"
    rule = rules(tmp_path, 'keep: ["{k...}"]\n')
    assert run(
        "apply", source, "-o", tmp_path / "out", "--rules", rule, "--format", "json"
    ).codes == ["M921"]


def test_a_stamp_with_a_name_that_leads_elsewhere_is_ignored(tmp_path: Path) -> None:
    source, rule = ranked(tmp_path / "in", NAMES[0], extra=False), rules(tmp_path, JOIN)
    done("apply", source, "-o", tmp_path / "out", "--rules", rule)
    stamp = tmp_path / "out" / "migrate.history.json"
    document = json.loads(stamp.read_text())
    assert document["applied"][0]["ranks"] == "consolidated.00.safetensors"
    for name in (
        "../consolidated.00.safetensors",
        "mp_rank_00/../../x.safetensors",
        "/etc/passwd",
        3,
        None,
    ):
        document["applied"][0]["ranks"] = name
        stamp.write_text(json.dumps(document))
        assert (
            "the stamp cannot be read"
            in done("history", tmp_path / "out", "--format", "json").json["notes"][0]
        )


# ---------------------------------------------------------------------- cases


def test_case_1_wrappers_go_from_each_rank(tmp_path: Path) -> None:
    keys = {
        "module._orig_mod.layers.0._fsdp_wrapped_module.w": "layers.0.w",
        "_checkpoint_wrapped_module.module.b": "b",
        "plain": "plain",
    }
    for r in range(2):
        safetensors(
            tmp_path / "in" / NAMES[0].format(r),
            {key: iota(10 * r + n, 2) for n, key in enumerate(keys)},
        )
    done("apply", tmp_path / "in", "-o", tmp_path / "out", "--rules", CASES / "c01-wrappers.yaml")
    done(
        "verify",
        tmp_path / "out",
        "--source",
        tmp_path / "in",
        "--rules",
        CASES / "c01-wrappers.yaml",
    )
    for r in range(2):
        assert contents(tmp_path / "out" / NAMES[0].format(r)) == {
            keys[key]: held for key, held in contents(tmp_path / "in" / NAMES[0].format(r)).items()
        }


def test_case_8_llama_of_two_files(tmp_path: Path) -> None:
    for r in range(2):
        at = "layers.0."
        tensors = {
            f"{at}attention.{w}.weight": iota(100 * r + 20 * n, 4, 4)
            for n, w in enumerate(("wq", "wk", "wv"))
        }
        tensors |= {
            f"{at}attention.wo.weight": iota(100 * r, 8, 2),
            f"{at}feed_forward.w2.weight": iota(100 * r, 4, 3),
        }
        tensors |= {f"{at}feed_forward.{w}.weight": iota(100 * r, 3, 4) for w in ("w1", "w3")}
        tensors |= {
            name: iota(7, 4)
            for name in (f"{at}attention_norm.weight", f"{at}ffn_norm.weight", "norm.weight")
        }
        tensors |= {
            "output.weight": iota(100 * r, 5, 4),
            "tok_embeddings.weight": iota(100 * r, 5, 4),
        }
        safetensors(tmp_path / "in" / NAMES[0].format(r), tensors)
    (tmp_path / "in" / "params.json").write_text('{"n_heads": 2, "n_kv_heads": 2}')
    out = (
        migrated(tmp_path / "in", CASES / "c08-meta-llama.yaml", tmp_path, "--set", "tp=2")
        / "model.safetensors"
    )
    # heads of 4 rows: 0 1 2 3 -> 0 2 1 3
    assert rows(out, "model.layers.0.self_attn.q_proj.weight")[::4] == [
        0,
        8,
        4,
        12,
        100,
        108,
        104,
        112,
    ]
    assert rows(out, "model.layers.0.mlp.down_proj.weight")[:6] == [0, 1, 2, 100, 101, 102]
    assert contents(out)["lm_head.weight"][1] == (10, 4)


@pytest.mark.parametrize("interleave", ["false", "true"])
def test_case_9_gate_and_up_join_inside_each_rank(tmp_path: Path, interleave: str) -> None:
    at = "model.layers.0.mlp."
    tensors = {
        f"{at}gate_proj.weight": iota(0, 8, 1),
        f"{at}up_proj.weight": iota(100, 8, 1),
        f"{at}down_proj.weight": iota(0, 1, 8),
    }
    safetensors(tmp_path / "in" / "model.safetensors", tensors)
    out = migrated(
        tmp_path / "in", CASES / "c09-swiglu-tp.yaml", tmp_path, "--set", f"interleave={interleave}"
    )
    assert list(files(out)) == ["consolidated.00.safetensors", "consolidated.01.safetensors"]
    second = rows(out / "consolidated.01.safetensors", "decoder.layers.0.mlp.linear_fc1.weight")
    assert second == (
        [4, 5, 104, 105, 6, 7, 106, 107]
        if interleave == "true"
        else [4, 5, 6, 7, 104, 105, 106, 107]
    )
    assert rows(out / "consolidated.01.safetensors", "decoder.layers.0.mlp.linear_fc2.weight") == [
        4,
        5,
        6,
        7,
    ]


def test_case_10_interleaved_qkv_of_each_rank(tmp_path: Path) -> None:
    at = "decoder.layers.0.self_attention.linear_qkv."
    for r in range(2):
        tensors = {
            f"{at}weight": iota(0, 8, 2),
            f"{at}bias": iota(100 * r, 8),
            f"{at}layer_norm_weight": iota(3, 2),
        }
        safetensors(tmp_path / "in" / NAMES[2].format(r), tensors)
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 1}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    out = migrated(tmp_path / "in", CASES / "c10-megatron-gqa-qkv.yaml", tmp_path)
    held = out / NAMES[2].format(1)
    found = {w: rows(held, f"model.layers.0.self_attn.{w}_proj.bias") for w in "qkv"}
    assert found == {"q": [100, 101, 104, 105], "k": [102, 106], "v": [103, 107]}


def test_case_16_mambas_in_proj_falls_apart_on_every_rank(tmp_path: Path) -> None:
    rule = tmp_path / "c16.yaml"
    text = (CASES / "c16-mamba.yaml").read_text()
    # exp rounds: the way back of A is not exact
    rule.write_text(
        "".join(line for line in text.splitlines(keepends=True) if "neg_exp" not in line)
    )
    at = "backbone.layers.0.mixer."
    tensors = {
        f"{at}in_proj.weight": iota(0, 14, 1),
        f"{at}conv1d.weight": iota(0, 4, 1, 3),
        f"{at}dt_bias": iota(0, 2),
        f"{at}norm.weight": iota(0, 4),
    }
    safetensors(tmp_path / "in" / "model.safetensors", tensors)
    options = [word for pair in ("tp=2", "inner=4", "bc=2", "heads=2") for word in ("--set", pair)]
    out = migrated(tmp_path / "in", rule, tmp_path, *options)
    parts = {
        w: [rows(out / NAMES[0].format(r), f"{at}in_proj.weight.{w}") for r in range(2)]
        for w in ("z", "x", "B", "C", "dt")
    }
    assert parts == {
        "z": [[0, 1], [2, 3]],
        "x": [[4, 5], [6, 7]],
        "B": [[8], [9]],
        "C": [[10], [11]],
        "dt": [[12], [13]],
    }
    assert contents(out / NAMES[0].format(0))[f"{at}norm.weight"][1] == (2, 2)
