"""Has megatron-core itself judge what we write: our outputs are loaded into its model, for every
rank of every grid, with `strict=True`, and compared with what its own resharding made.

    make genuine-megatron [MEGATRON="llama qwen3"]

or, on its own, `python tests/genuine/check_megatron.py [FAMILY …]` in that environment. Sources are
the model of transformers and the runs of tests/data/megatron in both formats on every grid; each
goes to every grid in both formats, and each run to transformers, whose logits are compared. What
does not hold is listed at the end, by case. With `--anew`, which `.ci/run` asks for, a run of each
family is made by megatron-core as well, and becomes the model that went in.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from make_megatron import (
    ITERATION,
    VOCABULARY,
    arguments,
    as_ranks,
    build,
    compare_logits,
    make,
    padded,
    sharded,
    without_gpu,
)
from megatron_runs import FORMATS, GRIDS, RUNS, checkpoint, family, run_folder
from safetensors.torch import load_file

LEGACY, DIST = FORMATS
# of each family, those that no other property of a run than its grid makes
CHECKED = ("1", "tp2", "pp2", "tp2-pp2", "pp2-vpp2", "ep2", "tp2-ep2", "pp2-ep2")
DENSE = ("llama", "qwen2", "qwen3")
# what `args` say of a grid, and have to say anew of another
OF_GRID = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "padded_vocab_size",
    "world_size", "rank", "num_layers", "hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "num_experts", "add_qkv_bias", "qk_layernorm", "swiglu", "normalization",
    "untie_embeddings_and_output_weights", "position_embedding_type", "rotary_base",
)  # fmt: skip


class Case(NamedTuple):
    """A conversion: `kind` and `grid` of the source, and those of the target. "hf" is the model of
    transformers; it and a target in `torch_dist` are of no grid, "".
    """

    family: str
    kind: str
    grid: str
    to_kind: str
    to_grid: str

    @property
    def name(self) -> str:
        source, target = (f"{k}-{g}".rstrip("-") for k, g in (self[1:3], self[3:5]))
        return f"{self.family}: {source} -> {target}"

    def out(self, folder: Path) -> Path:
        return folder / self.name.replace(": ", "/").replace(" -> ", "_to_")

    def rows(self, tp: int) -> int:
        """Rows of the embedding that the target's model has, by Megatron's own rule."""
        if self.kind == "hf":
            return -(-VOCABULARY // (128 * tp)) * 128 * tp
        return padded(VOCABULARY, tp)

    def asked(self) -> dict[str, Any]:
        """How `migrate.apply` is asked for it."""
        if self.to_kind == "hf":
            return {
                "to": f"megatron-gpt@{self.family}",
                "params": {"vocab": VOCABULARY},
                "allow": ["drop"],
            }
        if self.to_kind == DIST and self.kind != "hf":
            return {
                "to": "megatron-gpt@mcore",
                "output_format": "torch_dist",
                "allow": ["drop"],
            }
        params: dict[str, Any] = {"impl": "local"}
        if self.to_kind == LEGACY:
            tp, pp, vpp, ep = GRIDS[self.to_grid]
            params.update(tp=tp, pp=pp, vpp=vpp, ep=ep)
        if self.family not in DENSE:
            params["experts"] = "local"
        # random states are those of the ranks of another grid
        said: dict[str, Any] = {"to": "megatron-gpt@mcore", "params": params, "allow": ["drop"]}
        if self.kind != "hf":
            params["vocab"] = VOCABULARY
        if self.to_kind == DIST:
            said["output_format"] = "torch_dist"
        return said


def cases(name: str) -> Iterator[Case]:
    """All conversions of a family."""
    grids = [grid for grid in RUNS[name] if grid in CHECKED]
    runs = [(k, g) for k in FORMATS for g in grids]
    for kind, grid in [("hf", ""), *runs]:
        for to_grid in grids:
            if (kind, grid) != (LEGACY, to_grid):
                yield Case(name, kind, grid, LEGACY, to_grid)
        if kind != DIST:
            yield Case(name, kind, grid, DIST, "")
        if kind != "hf":
            yield Case(name, kind, grid, "hf", "")


def convert(case: Case, folder: Path) -> str | None:
    """Makes the output; why it could not be made, if it could not."""
    import migrate

    source = family(case.family) / "hf"
    if case.kind != "hf":
        source = run_folder(case.family, case.kind, case.grid)
    else:
        # logits lie there too
        copied = folder / case.family / "hf"
        if not copied.exists():
            copied.mkdir(parents=True)
            for name in ("model.safetensors", "config.json"):
                (copied / name).write_bytes((source / name).read_bytes())
        source = copied
    try:
        migrate.apply(source, case.out(folder), fsync=False, **case.asked())
    except migrate.MigrateError as error:
        return "; ".join(f"{d.code} {d.message}" for d in error.diagnostics[:2])
    except Exception as error:  # noqa: BLE001  (the others are still to be judged)
        return f"{type(error).__name__}: {error}"
    return None


# ---- what megatron-core says of it ---------------------------------------------------------------


def judge_rank(rank: int, name: str, grid: str, made: list[Case], folder: Path, meet: str) -> None:
    """One rank of a grid: loads all outputs for it, and says in a file of its own what is wrong."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    without_gpu()
    from megatron.core import parallel_state as mpu

    tp, pp, vpp, ep = GRIDS[grid]
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=tp * pp * ep)
    mpu.initialize_model_parallel(
        tp, pp, vpp if vpp > 1 else None, expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
    )  # fmt: skip
    config = json.loads((family(name) / "hf" / "config.json").read_text())
    args = arguments(name, config, grid, LEGACY, rank)
    part = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
    part += f"_{mpu.get_pipeline_model_parallel_rank():03d}" if pp > 1 else ""
    part += f"_{mpu.get_expert_model_parallel_rank():03d}" if ep > 1 else ""
    held = torch.load(
        checkpoint(name, LEGACY, grid) / part / "model_optim_rng.pt", weights_only=False
    )
    wrong: dict[str, list[str]] = {}
    for case in made:
        args.padded_vocab_size = case.rows(tp)
        models = build(args, grid)
        try:
            read = load_dist(models, case, folder) if case.to_kind == DIST else {}
            wrong[case.name] = judge(case, models, held, read, part, folder, rank)
        except Exception as error:  # noqa: BLE001  (whatever megatron-core says of an output)
            first = str(error).strip().splitlines() or [""]
            wrong[case.name] = [f"rank {rank}: {type(error).__name__}: {' '.join(first[:6])[:600]}"]
        dist.barrier()
    (folder / f"{name}-{grid}-{rank}.json").write_text(json.dumps(wrong))
    dist.barrier()
    dist.destroy_process_group()


def load_dist(models: list[Any], case: Case, folder: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    (there,) = (one.parent for one in case.out(folder).rglob("metadata.json"))
    found, lacking, unknown = dist_checkpointing.load(
        sharded(models, {}), str(there), strict="return_all"
    )
    # the states of generators are those of another grid
    if unknown or lacking - {"rng_state"}:
        raise ValueError(f"keys of the folder alone {lacking}, of the model alone {unknown}")
    state: dict[str, Any] = found
    return state


def judge(
    case: Case,
    models: list[Any],
    due: dict[str, Any],
    read: dict[str, Any],
    part: str,
    folder: Path,
    rank: int,
) -> list[str]:
    """What is wrong with an output, of this rank."""
    out, found = case.out(folder), list[str]()
    if case.to_kind == LEGACY:
        tracker = (out / "latest_checkpointed_iteration.txt").read_text()
        iteration = "release" if case.kind == "hf" else f"iter_{ITERATION:07d}"
        if tracker != ("release" if case.kind == "hf" else str(ITERATION)):
            found.append(f"the tracker says {tracker!r}")
        file = out / iteration / part / "model_optim_rng.pt"
        read = torch.load(file, weights_only=False)
        found += judge_root(case, read, due)
    for at, model in enumerate(models):
        key = "model" if len(models) == 1 else f"model{at}"
        model.load_state_dict(read[key], strict=True)
        found += compare(case, model.state_dict(), due[key], key)
    if len(models) == 1 and dist.get_world_size() == 1:
        compare_logits(models[0], family(case.family) / "hf")
    return [f"rank {rank}: {one}" for one in found]


def judge_root(case: Case, root: dict[str, Any], due: dict[str, Any]) -> list[str]:
    """What is wrong beside the model."""
    args, wanted = vars(root["args"]), vars(due["args"])
    wanted = {**wanted, "padded_vocab_size": case.rows(wanted["tensor_model_parallel_size"])}
    found = [
        f"args.{name} is {args.get(name)!r}, not {wanted[name]!r}"
        for name in OF_GRID
        if args.get(name) != wanted[name]
    ]
    if root.get("checkpoint_version") != 3.0:
        found.append(f"checkpoint_version is {root.get('checkpoint_version')!r}")
    if "parts" in root:
        found.append("`parts` is left at the root")
    # the order that megatron-core gives keys is known where one of its files was read
    if case.kind == LEGACY and list(root["model" if "model" in root else "model0"]) != list(
        due["model" if "model" in due else "model0"]
    ):
        found.append("keys are in another order")
    return found


def compare(case: Case, made: dict[str, Any], due: dict[str, Any], key: str) -> list[str]:
    """What differs from what megatron-core made. Of rows of padding nothing is known where each
    grid has begun with its own, and they are zeros where there never were any.
    """
    from megatron.core import parallel_state as mpu

    weights = load_file(family(case.family) / "hf" / "model.safetensors")
    found = []
    for name, tensor in due.items():
        if tensor is None:
            continue
        one, other = made[name], tensor
        if name.startswith(("embedding.", "output_layer.")):
            whole = weights["model.embed_tokens.weight"]
            if name.startswith("output_layer."):
                whole = weights.get("lm_head.weight", whole)
            first = len(one) * mpu.get_tensor_model_parallel_rank()
            other = whole[first : first + len(one)]
            if case.kind == "hf" and case.to_kind == LEGACY and one[len(other) :].any():
                found.append(f"{key}: rows of padding of {name} are not zeros")
            one = one[: len(other)]
        if one.dtype != other.dtype or not torch.equal(one, other):
            found.append(f"{key}: {name} differs")
    return found


# ---- transformers --------------------------------------------------------------------------------


def judge_huggingface(case: Case, folder: Path) -> list[str]:
    """What is wrong with a folder of transformers."""
    out, there = case.out(folder), family(case.family) / "hf"
    made, due = load_file(out / "model.safetensors"), load_file(there / "model.safetensors")
    if made.keys() != due.keys() or not all(torch.equal(made[k], due[k]) for k in due):
        return ["weights differ"]
    said = load_file(there / "logits.safetensors")
    try:
        logits, went_in = (computed(folder, said["input_ids"]) for folder in (out, there))
    except ValueError as error:
        return [str(error)]
    if not torch.equal(logits, went_in):
        return [f"logits are off by {(logits - went_in).abs().max().item()}"]
    # found where the run was made: another processor adds in another order
    off = (logits - said["logits"]).abs().max().item()
    same = torch.equal(logits.argmax(-1), said["logits"].argmax(-1))
    return [] if off <= 2e-6 and same else [f"logits are off by {off}, same argmax: {same}"]


def computed(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of transformers' model of a folder, all of whose weights it takes."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    if any(info.values()):
        raise ValueError(f"{folder}: from_pretrained says {info}")
    with torch.no_grad():
        return model.eval()(tokens).logits


def check(name: str, wanted: str) -> dict[str, list[str]]:
    """What is wrong, by case."""
    wrong: dict[str, list[str]] = {}
    # ranks are processes of their own, and need the folder too
    family(name)
    with tempfile.TemporaryDirectory(prefix="megatron-out-") as there:
        folder = Path(there)
        (folder / name).mkdir()
        made = []
        for case in cases(name):
            if wanted not in case.name:
                continue
            why = convert(case, folder)
            wrong[case.name] = [f"not made: {why}"] if why else []
            made += [] if why else [case]
        for case in made:
            if case.to_kind == "hf":
                wrong[case.name] += judge_huggingface(case, folder)
        for grid in [grid for grid in RUNS[name] if grid in CHECKED]:
            here = [case for case in made if case.to_kind == DIST or case.to_grid == grid]
            if not here:
                continue
            tp, pp, _, ep = GRIDS[grid]
            meet = f"file://{folder}/meeting-{grid}"
            as_ranks(judge_rank, (name, grid, here, folder, meet), tp * pp * ep)
            for rank in range(tp * pp * ep):
                said = json.loads((folder / f"{name}-{grid}-{rank}.json").read_text())
                for one, found in said.items():
                    wrong[one] += found
            print(name, grid, "checked", flush=True)
    return wrong


def check_anew(name: str) -> dict[str, list[str]]:
    """What is wrong with a run of two ranks that megatron-core makes now."""
    import migrate

    with tempfile.TemporaryDirectory(prefix="megatron-new-") as there:
        folder = Path(there)
        make(name, folder, {"1": ["torch_dist"], "tp2": [LEGACY]})
        asked = Case(name, LEGACY, "tp2", "hf", "").asked()
        migrate.apply(folder / f"{LEGACY}-tp2", folder / "out", fsync=False, **asked)
        made, due = (load_file(folder / one / "model.safetensors") for one in ("out", "hf"))
        same = made.keys() == due.keys() and all(torch.equal(made[key], due[key]) for key in due)
    return {f"{name}: made anew": [] if same else ["weights differ"]}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(RUNS))
    asked.add_argument("--only", default="", help="cases with this in their names")
    asked.add_argument("--anew", action="store_true", help="make a run of each as well")
    said = asked.parse_args()
    if unknown := sorted(set(said.families) - RUNS.keys()):
        asked.error(f"there is no family {unknown[0]}: {', '.join(RUNS)}")
    wrong: dict[str, list[str]] = {}
    torch.set_num_threads(1)
    for name in said.families or RUNS:
        if said.anew:
            wrong |= check_anew(name)
        wrong |= check(name, said.only)
    bad = {name: found for name, found in wrong.items() if found}
    for name, found in bad.items():
        print(f"{name}\n  " + "\n  ".join(found[:6]))
    print(f"{len(wrong) - len(bad)} of {len(wrong)} conversions hold")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
