"""The packs that only move values, against the arithmetic of the programs that first made the
layouts, through files of ranks.

The expectations are made by hand with torch's views and loops, from the published formulas, and
never by the engine: a rule and its inverse can be wrong alike.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from migrate import api
from migrate.core.errors import Diagnostic, MigrateError

Tensors = dict[str, torch.Tensor]


def random(*shape: int, seed: str) -> torch.Tensor:
    made = torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(seed)) % 2**31)
    return (
        torch.randint(0, 2**16, shape, generator=made, dtype=torch.int32)
        .to(torch.uint16)
        .view(torch.bfloat16)
    )


def bits(tensor: torch.Tensor) -> tuple[str, list[int], bytes]:
    return (
        str(tensor.dtype),
        list(tensor.shape),
        tensor.contiguous().view(torch.uint8).numpy().tobytes(),
    )


def save(files: dict[str, Tensors], folder: Path, **side: object) -> Path:
    for name, tensors in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file({key: t.contiguous() for key, t in tensors.items()}, folder / name)
    for name, value in side.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def saved(folder: Path) -> dict[str, dict[str, tuple[str, list[int], bytes]]]:
    """File -> key -> bits, read by the library."""
    return {
        str(p.relative_to(folder)): {key: bits(t) for key, t in load_file(p).items()}
        for p in sorted(folder.rglob("*.safetensors"))
    }


def there_and_back(
    source: Path, work: Path, goal: str, allow: tuple[str, ...] = (), **params: object
) -> dict[str, Tensors]:
    """What comes out, by file, verified; the source must come back file by file, bit by bit."""
    out, back = work / "out", work / "back"
    published = api.apply(source, out, to=goal, params=params, allow=allow, fsync=False)
    assert published.to_json()["downgrade"]["exact"], published["downgrade"]
    assert api.verify(out, source=source).equal
    api.downgrade(out, back, fsync=False)
    assert saved(back) == saved(source)
    assert api.diff(source, back).equal
    assert api.inspect(back).index_hash == api.inspect(source).index_hash
    return {str(p.relative_to(out)): load_file(p) for p in sorted(out.rglob("*.safetensors"))}


# ---------------------------------------------------------------------- meta-llama

DIM, HEADS, HIDDEN, VOCAB = 16, 4, 24, 12


def llama(ranks: int, generation: int, kv_heads: int | None) -> dict[str, Tensors]:
    """The files of a small Llama as Meta's code cuts it: column-parallel layers by rows,
    row-parallel ones by columns.
    """
    kv = DIM // HEADS * (kv_heads or HEADS)
    whole: Tensors = {"norm.weight": random(DIM, seed="norm")}
    by_rows = {"output.weight": random(VOCAB, DIM, seed="output")}
    by_columns: Tensors = {}
    (by_rows if generation == 3 else by_columns)["tok_embeddings.weight"] = random(
        VOCAB, DIM, seed="embedding"
    )
    for n in range(2):
        at = f"layers.{n}."
        whole |= {
            f"{at}{name}.weight": random(DIM, seed=at + name)
            for name in ("attention_norm", "ffn_norm")
        }
        shapes = {"attention.wq": (DIM, DIM), "attention.wk": (kv, DIM), "attention.wv": (kv, DIM)}
        shapes |= {"feed_forward.w1": (HIDDEN, DIM), "feed_forward.w3": (HIDDEN, DIM)}
        by_rows |= {
            f"{at}{name}.weight": random(*shape, seed=at + name) for name, shape in shapes.items()
        }
        by_columns[f"{at}attention.wo.weight"] = random(DIM, DIM, seed=f"{at}wo")
        by_columns[f"{at}feed_forward.w2.weight"] = random(DIM, HIDDEN, seed=f"{at}w2")
    return {
        f"consolidated.{r:02}.safetensors": {
            **whole,
            **{key: t.chunk(ranks, 0)[r] for key, t in by_rows.items()},
            **{key: t.chunk(ranks, 1)[r] for key, t in by_columns.items()},
        }
        for r in range(ranks)
    }


def convert_llama_weights_to_hf(
    files: dict[str, Tensors], generation: int, kv_heads: int | None
) -> Tensors:
    """transformers/models/llama/convert_llama_weights_to_hf.py, sharded branch."""
    loaded = list(files.values())
    kv_dim = DIM // HEADS * (kv_heads or HEADS)

    def permute(w: torch.Tensor, n_heads: int, dim1: int, dim2: int) -> torch.Tensor:
        return w.view(n_heads, dim1 // n_heads // 2, 2, dim2).transpose(1, 2).reshape(dim1, dim2)

    def cat(key: str, dim: int) -> torch.Tensor:
        return torch.cat([shard[key] for shard in loaded], dim=dim)

    out = {
        "model.embed_tokens.weight": cat("tok_embeddings.weight", 0 if generation == 3 else 1),
        "model.norm.weight": loaded[0]["norm.weight"],
        "lm_head.weight": cat("output.weight", 0),
    }
    for n in range(2):
        old, new = f"layers.{n}.", f"model.layers.{n}."
        out |= {
            f"{new}self_attn.q_proj.weight": permute(
                cat(f"{old}attention.wq.weight", 0), HEADS, DIM, DIM
            ),
            f"{new}self_attn.k_proj.weight": permute(
                cat(f"{old}attention.wk.weight", 0), kv_heads or HEADS, kv_dim, DIM
            ),
            f"{new}self_attn.v_proj.weight": cat(f"{old}attention.wv.weight", 0),
            f"{new}self_attn.o_proj.weight": cat(f"{old}attention.wo.weight", 1),
            f"{new}mlp.gate_proj.weight": cat(f"{old}feed_forward.w1.weight", 0),
            f"{new}mlp.down_proj.weight": cat(f"{old}feed_forward.w2.weight", 1),
            f"{new}mlp.up_proj.weight": cat(f"{old}feed_forward.w3.weight", 0),
            f"{new}input_layernorm.weight": loaded[0][f"{old}attention_norm.weight"],
            f"{new}post_attention_layernorm.weight": loaded[0][f"{old}ffn_norm.weight"],
        }
    return out


def params_json(kv_heads: int | None) -> dict[str, int]:
    return {
        "dim": DIM,
        "n_layers": 2,
        "n_heads": HEADS,
        **({} if kv_heads is None else {"n_kv_heads": kv_heads}),
    }


@pytest.mark.parametrize(
    ("ranks", "generation", "kv_heads"), [(2, 3, 2), (2, 2, None), (1, 3, 2), (4, 1, None)]
)
def test_metas_files_become_what_the_released_script_makes_of_them(
    tmp_path: Path, ranks: int, generation: int, kv_heads: int | None
) -> None:
    files = llama(ranks, generation, kv_heads)
    source = save(files, tmp_path / "in", params=params_json(kv_heads))
    out = there_and_back(source, tmp_path, "meta-llama@hf", generation=generation)
    assert list(out) == ["model.safetensors"]
    expected = convert_llama_weights_to_hf(files, generation, kv_heads)
    assert {k: bits(t) for k, t in out["model.safetensors"].items()} == {
        k: bits(t) for k, t in expected.items()
    }
    # q is square: only its values tell that something was done to it
    q = "layers.0.attention.wq.weight"
    plain = torch.cat([f[q] for f in files.values()])
    assert plain.shape == expected["model.layers.0.self_attn.q_proj.weight"].shape
    assert bits(plain) != bits(out["model.safetensors"]["model.layers.0.self_attn.q_proj.weight"])
    assert (tmp_path / "back" / "params.json").read_bytes() == (source / "params.json").read_bytes()


def test_a_checkpoint_of_transformers_is_cut_for_metas_code(tmp_path: Path) -> None:
    files = llama(2, 3, 2)
    save(
        {"model.safetensors": convert_llama_weights_to_hf(files, 3, 2)},
        tmp_path / "hf",
        config={"model_type": "llama"},
    )
    api.apply(
        tmp_path / "hf",
        tmp_path / "meta",
        to="meta-llama@meta",
        params={"ranks": 2, "heads": HEADS},
        fsync=False,
    )
    assert saved(tmp_path / "meta") == {
        name: {k: bits(t) for k, t in tensors.items()} for name, tensors in files.items()
    }


def refused(source: Path, out: Path, goal: str, **params: object) -> Diagnostic:
    """What is wrong with the question, of one kind; nothing is published."""
    with pytest.raises(MigrateError) as caught:
        api.apply(source, out, to=goal, params=params, allow=["drop"], fsync=False)
    assert not out.exists()
    found = caught.value.diagnostics
    assert len({d.code for d in found}) == 1, found
    return found[0]


@pytest.mark.parametrize(
    "says",
    [
        {"params": {"n_heads": HEADS}},
        {"config": {"model_type": "llama", "num_attention_heads": HEADS}},
    ],
)
def test_a_number_of_heads_that_either_sides_files_contradict_is_refused(
    tmp_path: Path, says: dict[str, object]
) -> None:
    meta = save(llama(1, 3, None), tmp_path / "in", **says)
    hf = save(
        {"model.safetensors": convert_llama_weights_to_hf(llama(1, 3, None), 3, None)},
        tmp_path / "hf",
        **says,
    )
    for source, goal, new in ((meta, "meta-llama@hf", "out"), (hf, "meta-llama@meta", "back")):
        found = refused(source, tmp_path / "wrong", goal, heads=1)
        assert (found.code, found.notes[0]) == ("M510", "`params` says 1")
        assert found.notes[1].endswith(f"heads says {HEADS}")
        api.apply(source, tmp_path / new, to=goal, fsync=False)
    assert saved(tmp_path / "out") == saved(hf)
    # written by the path that was never told anything but what a file says
    assert {
        k: bits(t) for k, t in load_file(next((tmp_path / "back").glob("*.safetensors"))).items()
    } == {k: bits(t) for k, t in llama(1, 3, None)["consolidated.00.safetensors"].items()}


def test_heads_that_no_file_says_are_asked_for_by_their_meaning(tmp_path: Path) -> None:
    found = refused(save(llama(1, 3, None), tmp_path / "in"), tmp_path / "out", "meta-llama@hf")
    assert (found.code, found.help) == (
        "M509",
        'params={"heads": …}, an integer: attention heads of the whole model',
    )
    assert found.notes == (
        (
            "its places in the configuration are params.json#n_heads, "
            "config.json#num_attention_heads, and nothing is there"
        ),
    )


@pytest.mark.parametrize(
    "says", [{"config": {"head_dim": DIM // HEADS}}, {"params": {"head_dim": DIM // HEADS}}, {}]
)
def test_the_width_of_a_head_contradicts_heads_that_fit_the_matrices(
    tmp_path: Path, says: dict[str, object]
) -> None:
    files = llama(1, 3, None)
    if not says:
        files["consolidated.00.safetensors"]["layers.0.attention.inner_attention.rope.freqs"] = (
            random(DIM // HEADS // 2, seed="rope")
        )
    source = save(files, tmp_path / "in", **says)
    found = refused(source, tmp_path / "out", "meta-llama@hf", heads=1)
    assert found.code == "M301"
    assert "attention.wq.weight" in " ".join(found.notes)
    api.apply(
        source,
        tmp_path / "out",
        to="meta-llama@hf",
        params={"heads": HEADS},
        allow=["drop"],
        fsync=False,
    )


def test_the_frequencies_of_metas_files_go_with_permission_alone(tmp_path: Path) -> None:
    files = llama(2, 3, 2)
    for tensors in files.values():
        tensors["rope.freqs"] = random(2, seed="rope")
        tensors["layers.0.attention.inner_attention.rope.freqs"] = random(2, seed="rope")
    source = save(files, tmp_path / "in", params=params_json(2))
    with pytest.raises(MigrateError) as caught:
        api.plan(source, to="meta-llama@hf")
    assert [d.code for d in caught.value.diagnostics] == ["M402"]
    api.apply(source, tmp_path / "out", to="meta-llama@hf", allow=["drop"], fsync=False)
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(
        convert_llama_weights_to_hf(files, 3, 2)
    )


def test_norms_that_differ_between_ranks_are_refused_by_rank_and_index(tmp_path: Path) -> None:
    files = llama(2, 3, 2)
    changed = files["consolidated.01.safetensors"]["layers.1.ffn_norm.weight"].clone()
    changed.view(torch.uint8)[2 * 11 + 1] ^= 1
    files["consolidated.01.safetensors"]["layers.1.ffn_norm.weight"] = changed
    source = save(files, tmp_path / "in", params=params_json(2))
    with pytest.raises(MigrateError) as caught:
        api.apply(source, tmp_path / "out", to="meta-llama@hf", fsync=False)
    (found,) = caught.value.diagnostics
    assert found.code == "M404"
    assert (
        "layers.1.ffn_norm.weight@0 and layers.1.ffn_norm.weight@1 (bfloat16 [16]) differ first "
        "at [11]" in found.notes
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "params", "code"),
    [
        ({"n_heads": 8}, {}, "M301"),  # n_kv_heads times the width of a head is not what k has
        ({"n_kv_heads": 4}, {}, "M301"),
        ({"dim": 32}, {}, "M510"),  # the norms say 16
        ({}, {"heads": 2}, "M510"),
        ({}, {"ranks": 4}, "M510"),  # there are two
        ({}, {"generation": 2}, "M307"),
    ],
)
def test_a_configuration_that_does_not_fit_the_files_is_refused(
    tmp_path: Path, change: dict, params: dict, code: str
) -> None:
    source = save(llama(2, 3, 2), tmp_path / "in", params={**params_json(2), **change})
    with pytest.raises(MigrateError) as caught:
        api.plan(source, to="meta-llama@hf", params=params)
    assert code in {d.code for d in caught.value.diagnostics}, str(caught.value)


# ---------------------------------------------------------------------- megatron-gqa-qkv


def interleaved(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, groups: int, width: int
) -> torch.Tensor:
    """Megatron-Core's order: of each group all queries, then its key, then its value."""
    rows = []
    for g in range(groups):
        for i in range(heads // groups):
            head = g * (heads // groups) + i
            rows += [q[head * width + d] for d in range(width)]
        rows += [k[g * width + d] for d in range(width)]
        rows += [v[g * width + d] for d in range(width)]
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("ranks", "heads", "groups", "width"), [(2, 8, 4, 2), (2, 4, 4, 4), (1, 6, 2, 3), (4, 8, 4, 1)]
)
def test_megatrons_interleaved_rows_come_apart_by_group(
    tmp_path: Path, ranks: int, heads: int, groups: int, width: int
) -> None:
    hidden = heads * width
    files: dict[str, Tensors] = {f"mp_rank_{r:02}/model.safetensors": {} for r in range(ranks)}
    expected: Tensors = {}
    for n in range(2):
        for leaf, shape in (("weight", (hidden,)), ("bias", ())):
            q, k, v = (
                random(count * width, *shape, seed=f"{n}{w}{leaf}")
                for w, count in (("q", heads), ("k", groups), ("v", groups))
            )
            expected |= {
                f"model.layers.{n}.self_attn.{w}_proj.{leaf}": t
                for w, t in (("q", q), ("k", k), ("v", v))
            }
            whole = interleaved(q, k, v, heads, groups, width)
            for own, part in zip(files.values(), whole.chunk(ranks, 0), strict=True):
                own[f"decoder.layers.{n}.self_attention.linear_qkv.{leaf}"] = part
        norm = random(hidden, seed=f"norm{n}")
        expected[f"model.layers.{n}.input_layernorm.weight"] = norm
        for r, own in enumerate(files.values()):
            own[f"decoder.layers.{n}.self_attention.linear_qkv.layer_norm_weight"] = norm
            own[f"decoder.layers.{n}.self_attention.linear_proj.weight"] = random(
                hidden, hidden // ranks, seed=f"proj{n}{r}"
            )
    config = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": width}
    source = save(files, tmp_path / "in", config=config)
    out = there_and_back(source, tmp_path, "megatron-gqa-qkv@hf")
    # q, k and v have no rank and stand in the first file; what is not ours stays on its rank
    first, *others = out.values()
    proj = [f"decoder.layers.{n}.self_attention.linear_proj.weight" for n in range(2)]
    for r, (own, made) in enumerate(zip(files.values(), out.values(), strict=True)):
        assert [bits(made[key]) for key in proj] == [bits(own[key]) for key in proj], r
    assert {key: bits(t) for key, t in first.items() if key not in proj} == {
        key: bits(t) for key, t in expected.items()
    }
    assert all(set(made) == set(proj) for made in others)
    if ranks > 1:
        assert list(out) == list(files)


# ---------------------------------------------------------------------- torch-wrappers

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
NAMES = [
    "module.embed.weight",
    "module._orig_mod.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.weight",
    "_orig_mod._orig_mod.module.layers.1._fsdp_wrapped_module.mlp.module.weight",
    "modules.module_list.weight",
    "head.weight",
]


def test_wrappers_go_from_the_keys_of_every_rank(tmp_path: Path) -> None:
    files = {
        f"mp_rank_{r:02}/model.safetensors": {name: random(3, seed=f"{name}{r}") for name in NAMES}
        for r in range(2)
    }
    source = save(files, tmp_path / "in")
    published = api.apply(source, tmp_path / "out", to="torch-wrappers@plain", fsync=False)
    assert not published.to_json()["downgrade"]["exact"]
    assert api.verify(tmp_path / "out", source=source).equal
    stripped = {name: ".".join(s for s in name.split(".") if s not in WRAPPERS) for name in NAMES}
    assert saved(tmp_path / "out") == {
        file: {stripped[name]: bits(t) for name, t in held.items()} for file, held in files.items()
    }


def test_a_submodule_called_module_is_left_where_only_the_first_is_a_wrapper(
    tmp_path: Path,
) -> None:
    names = {
        "module.block.module.weight": "block.module.weight",
        "module._orig_mod.head.weight": "head.weight",
    }
    source = save(
        {"model.safetensors": {name: random(3, seed=name) for name in names}}, tmp_path / "in"
    )
    api.apply(
        source, tmp_path / "out", to="torch-wrappers@plain", params={"module": "first"}, fsync=False
    )
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(names.values())


def test_a_checkpoint_without_wrappers_is_in_no_layout_of_that_lineage(tmp_path: Path) -> None:
    source = save({"model.safetensors": {"modules.w": random(3, seed="w")}}, tmp_path / "in")
    with pytest.raises(MigrateError) as caught:
        api.plan(source, to="torch-wrappers@plain")
    assert [d.code for d in caught.value.diagnostics] == ["M504"]
