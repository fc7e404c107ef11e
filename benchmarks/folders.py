"""Folders of number formats: `apply` against the larger of `cp` of the output and the codec's own
time in memory with the same threads, and against what libraries convert folders with; and one
tensor of 8 GB against one of 100 MB.

Each folder is a row of its own, which takes less than a minute in three rounds: `--rows
folders-gpt-oss`, or all by `--rows folders`. A way back starts from what the way there made, which
is removed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import data_formats
import data_gguf
import memory
import numpy as np
import process
import report
from format_speed import PEERS
from tasks import FOLDER_FASTER, FOLDER_PRIVATE, FOLDER_TIMES, LARGE_TENSOR, RULES, Limit

if TYPE_CHECKING:
    from bench import Bench

# a dtype of safetensors, a shape, and the numbers; None where all are zeros
Stored = tuple[str, list[int], Any]
WIDTHS = {"BF16": 2, "F16": 2, "I32": 4, "F8_E4M3": 1}

HERE = Path(__file__).resolve().parent
MB = 1_000_000
# of `apply`, and of the codec alone
THREADS = 2
# the unpacked sdist of GPTQModel, if there is one
GPTQMODEL = os.environ.get("GPTQMODEL", "")


class Work(NamedTuple):
    """What a codec does for a folder, alone; `names` are what those of parts add to a tensor's."""

    codec: str
    names: dict[str, str]
    arguments: dict[str, Any]
    verb: str = "decode"


class Folder(NamedTuple):
    """A folder to convert: what it starts from, the words of the command, and the work of codecs;
    none of a folder whose parts get new names or other codes. `first` makes what a way back
    starts from. `peer` does the same by a library. `layers`: of a folder that is recoded or
    encoded, as many as make 1 GB of output.
    """

    title: str
    source: str
    words: tuple[str, ...]
    work: Work | tuple[Work, ...] = ()
    first: tuple[str, ...] = ()
    peer: str = ""
    times: float = FOLDER_TIMES
    layers: int = 0


def _to(layout: str, *more: str) -> tuple[str, ...]:
    return ("apply", "--to", layout, "--allow", "lossy", *more)


_INV = {"weight": ".weight", "scale": ".weight_scale_inv"}
_PLAIN = {"weight": ".weight", "scale": ".weight_scale"}
_NVFP4 = {**_PLAIN, "global": ".weight_scale_2"}
_DEEPSEEK = {"block": [128, 128], "like": "deepseek"}
_DIVIDED = {
    "weight": ".weight_packed", "scale": ".weight_scale", "global": ".weight_global_scale",
}  # fmt: skip
_PACKED = {"weight": ".weight_packed", "scale": ".weight_scale", "shape": ".weight_shape"}
_WORDS = {"weight": ".qweight", "zero": ".qzeros", "scale": ".scales"}
_EXPERTS = {"weight": "_blocks", "scale": "_scales"}
_V4 = {"weight": ".weight", "scale": ".scale"}
_NF4 = {
    "weight": ".weight", "absmax": ".weight.absmax", "map": ".weight.quant_map",
    "state": ".weight.quant_state.bitsandbytes__nf4",
}  # fmt: skip
_CT8 = {"granularity": "channel", "like": "compressed-tensors", "scale": "bfloat16"}
_MX8 = {"scale": "uint8", "like": "compressed-tensors"}
_OSS = {"form": "blocks", "like": "torchao", "rule": "even"}
_FP4 = {"like": "deepseek", "weight": "int8", "scale": "float8_e8m0fnu"}
_KIMI = {"bits": 4, "group": 32, "like": "kimi", "shape": "int32"}
# what makes a folder, and the file that it writes last
MAKERS = {
    **dict.fromkeys(data_formats.PACKS, (data_formats.make, "config.json")),
    "gguf-llama": (data_gguf.make, data_gguf.FILE),
}
# recoding by nibbles, and by other names, against cp
NIBBLES, NAMES = 2.0, 1.1

FOLDERS = {
    "folders-fp8-blocks": Folder(
        "FP8 blocks -> bf16", "fp8-large", _to("deepseek-v3@bf16"),
        Work("fp8-block", _INV, _DEEPSEEK), peer="fp8_blocks",
    ),
    "folders-fp8-blocks-back": Folder(
        "bf16 -> FP8 blocks", "bf16-large", ("downgrade", *_to("deepseek-v3@fp8")[1:]),
        Work("fp8-block", _INV, _DEEPSEEK, "encode"),
    ),
    "folders-fp8-tensor-encode": Folder(
        "bf16 -> FP8 tensors", "bf16-large",
        ("apply", "--rules", str(RULES / "fp8-tensor.yaml"), "--allow", "lossy"),
        Work("fp8", _INV, {"granularity": "tensor"}, "encode"),
    ),
    "folders-nvfp4-encode": Folder(
        "bf16 -> NVFP4", "bf16-more",
        ("apply", "--rules", str(RULES / "nvfp4.yaml"), "--allow", "lossy"),
        Work("nvfp4", _INV, {}, "encode"),
    ),
    "folders-fp8-rows": Folder(
        "FP8 rows -> bf16", "fp8-rows", _to("fp8@bf16"), Work("fp8", _PLAIN, _CT8),
        peer="compressed_tensors",
    ),
    "folders-fp8-rows-back": Folder(
        "bf16 -> FP8 rows", "fp8-rows", _to("fp8@compressed-tensors"),
        Work("fp8", _PLAIN, _CT8, "encode"), _to("fp8@bf16"),
        layers=20,
    ),
    "folders-fp8-tensor": Folder(
        "FP8 tensors -> bf16", "fp8-tensor", _to("fp8@bf16"),
        Work("fp8", _PLAIN, {"granularity": "tensor", "like": "modelopt"}),
    ),
    "folders-fp8-tensor-back": Folder(
        "bf16 -> FP8 tensors (modelopt)", "fp8-tensor", _to("fp8@modelopt"),
        Work("fp8", _PLAIN, {"granularity": "tensor", "like": "modelopt"}, "encode"),
        _to("fp8@bf16"),
        layers=20,
    ),
    "folders-fp8-mistral": Folder(
        "FP8 of Mistral -> bf16", "fp8-mistral", _to("fp8@bf16", "--allow", "drop"),
        Work("fp8", _INV, {"granularity": "tensor"}),
    ),
    "folders-fp8-torchao": Folder(
        "FP8 of torchao -> bf16", "fp8-torchao", _to("fp8@bf16"),
        Work(
            "fp8", {"weight": "._weight_qdata", "scale": "._weight_scale"},
            {"granularity": "channel", "like": "torchao"},
        ),
    ),
    "folders-mxfp8": Folder(
        "MXFP8 -> bf16", "mxfp8", _to("mxfp8@bf16"), Work("mxfp8", _PLAIN, _MX8),
        peer="compressed_tensors",
    ),
    "folders-mxfp8-back": Folder(
        "bf16 -> MXFP8", "mxfp8", _to("mxfp8@mxfp8"), Work("mxfp8", _PLAIN, _MX8, "encode"),
        _to("mxfp8@bf16"),
        layers=19,
    ),
    "folders-gpt-oss": Folder(
        "gpt-oss MXFP4 -> bf16", "gpt-oss", _to("gpt-oss@bf16"), Work("mxfp4", _EXPERTS, _OSS)
    ),
    "folders-gpt-oss-back": Folder(
        "gpt-oss bf16 -> MXFP4", "gpt-oss", _to("gpt-oss@mxfp4"),
        Work("mxfp4", _EXPERTS, _OSS, "encode"), _to("gpt-oss@bf16"),
        layers=37,
    ),
    "folders-deepseek-v4": Folder(
        "DeepSeek-V4 FP4 -> bf16", "deepseek-v4", _to("deepseek-v4@bf16"),
        Work("mxfp4", _V4, _FP4),
    ),
    "folders-deepseek-v4-back": Folder(
        "DeepSeek-V4 bf16 -> FP4", "deepseek-v4", _to("deepseek-v4@fp4"),
        Work("mxfp4", _V4, _FP4, "encode"), _to("deepseek-v4@bf16"),
        layers=33,
    ),
    "folders-deepseek-v4-fp8": Folder(
        "DeepSeek-V4 FP4 -> FP8, recoded", "deepseek-v4", _to("deepseek-v4@fp8"), times=NIBBLES,
        layers=19,
    ),
    "folders-deepseek-v4-blocks": Folder(
        "DeepSeek-V4 FP8 -> bf16", "deepseek-v4-fp8", _to("deepseek-v4@bf16"),
        Work("fp8-block", _V4, _DEEPSEEK),
    ),
    "folders-nvfp4": Folder(
        "NVFP4 -> bf16", "nvfp4", _to("nvfp4@bf16", "--allow", "drop"),
        Work("nvfp4", _NVFP4, {"form": "modelopt"}),
    ),
    "folders-nvfp4-back": Folder(
        "bf16 -> NVFP4 (modelopt)", "nvfp4", _to("nvfp4@modelopt"),
        Work("nvfp4", _NVFP4, {"form": "modelopt"}, "encode"), _to("nvfp4@bf16", "--allow", "drop"),
        layers=35,
    ),
    "folders-nvfp4-names": Folder(
        "NVFP4 ModelOpt -> compressed-tensors, recoded", "nvfp4",
        _to("nvfp4@compressed-tensors"), peer="nvfp4", times=NAMES, layers=35,
    ),
    "folders-kimi-k2": Folder(
        "Kimi K2 int4 -> bf16", "kimi-k2", _to("kimi-k2@bf16"), Work("int-pack", _PACKED, _KIMI),
        peer="compressed_tensors",
    ),
    "folders-kimi-k2-back": Folder(
        "Kimi K2 bf16 -> int4", "kimi-k2", _to("kimi-k2@int4"),
        Work("int-pack", _PACKED, _KIMI, "encode"), _to("kimi-k2@bf16"),
        layers=33,
    ),
    "folders-int-pack": Folder(
        "int4 in words -> bf16", "int-pack", _to("compressed-tensors@bf16"),
        Work("int-pack", _PACKED, {}), peer="compressed_tensors",
    ),
    "folders-int8": Folder(
        "int8 -> bf16", "int8", _to("compressed-tensors@bf16"), Work("int8", _PLAIN, {}),
        peer="compressed_tensors",
    ),
    "folders-mxfp4": Folder(
        "MXFP4 in rows -> bf16", "mxfp4", _to("compressed-tensors@bf16"),
        Work("mxfp4", {"weight": ".weight_packed", "scale": ".weight_scale"}, {}),
        peer="compressed_tensors",
    ),
    "folders-mixed": Folder(
        "FP8 and NVFP4 mixed -> bf16", "mixed", _to("compressed-tensors@bf16"),
        (Work("fp8", _PLAIN, _CT8), Work("nvfp4", _DIVIDED, {"form": "compressed-tensors"})),
        peer="compressed_tensors",
    ),
    "folders-awq": Folder(
        "AWQ -> fp16", "awq", _to("awq@fp16"), Work("awq", _WORDS, {}), peer="gptqmodel"
    ),
    "folders-awq-recode": Folder(
        "AWQ -> compressed-tensors, recoded", "awq", _to("awq@compressed-tensors"), times=NIBBLES,
        layers=37,
    ),
    "folders-gptq-recode": Folder(
        "GPTQ -> compressed-tensors, recoded", "gptq",
        _to("gptq@compressed-tensors", "--set", "symmetric=true"), times=NIBBLES,
        layers=37,
    ),
    "folders-gptq": Folder(
        "GPTQ -> fp16", "gptq", _to("gptq@fp16"),
        Work("gptq", {**_WORDS, "group": ".g_idx"}, {"form": "v1"}), peer="gptqmodel",
    ),
    "folders-nf4": Folder("NF4 -> bf16", "nf4", _to("bnb@bf16"), Work("bnb-4bit", _NF4, {})),
    "folders-nf4-back": Folder(
        "bf16 -> NF4", "nf4", _to("bnb@4bit"), Work("bnb-4bit", _NF4, {}, "encode"),
        _to("bnb@bf16"),
        layers=35,
    ),
    "folders-bnb-int8": Folder(
        "bitsandbytes int8 -> bf16", "bnb-int8", _to("bnb@bf16"),
        Work(
            "bnb-int8", {"weight": ".weight", "scale": ".SCB", "format": ".weight_format"}, {}
        ),
    ),
    "folders-gguf-llama": Folder(
        "GGUF Q4_K -> bf16, transformers' names", "gguf-llama", _to("gguf-llama@hf"),
        Work("gguf", {"data": ".weight", "type": ".weight_type"}, {}),
    ),
}  # fmt: skip


def _measured(folder: Folder, bench: Bench) -> list[Limit]:
    """A folder in rounds of `apply`, `cp`, the codec alone, and a peer less its start-up."""
    kept, target = bench.root / "kept", bench.root / "out"
    made = [bench.root / "plain", bench.root / "tiny-plain"]
    for left in (kept, target, *made):
        shutil.rmtree(left, ignore_errors=True)

    def command(words: tuple[str, ...], old: Path, new: Path) -> list[str]:
        verb, *rest = words
        return _texts(
            [*bench.migrate, verb, old, "-o", new, *rest, "--threads", THREADS, "--no-fsync"]
        )

    codes, tiny = _source(bench, folder.source, folder.layers)
    source = codes
    if folder.first:
        for old, new in zip((codes, tiny), made, strict=True):
            process.run(command(folder.first, old, new))
        source, tiny = made
    elif folder.source.startswith("bf16"):
        codes, _ = _source(bench, folder.source.replace("bf16", "fp8"))
    process.run(command(folder.words, source, kept))
    for place in (source, kept):
        memory.read_through(place, anew=True)
    written = sum(f.stat().st_size for f in kept.iterdir())
    need = int(1.05 * written) + 512 * MB

    works = (folder.work,) if isinstance(folder.work, Work) else folder.work

    def alone(threads: int) -> float:
        """The codecs' time in memory; 0 where parts get new names or other codes."""
        return sum(
            float(process.run(_texts([
                sys.executable, HERE / "in_memory.py", source, work.codec,
                json.dumps(work.arguments), work.verb, threads, json.dumps(work.names), codes,
            ])).stdout)
            for work in works
        )  # fmt: skip

    taken: list[process.Taken] = []
    ratios, larger, lesses = [], [], []
    for _ in range(bench.args.rounds):
        taken.append(bench.timed(command(folder.words, source, target), target, need))
        cp = bench.timed(["cp", "-r", str(kept), str(target)], target, need).wall
        small = bench.timed(command(folder.words, tiny, target), target, 256 * MB).wall
        codec = alone(THREADS)
        lesses.append(max(taken[-1].wall - small, 0.001))
        ratios.append(lesses[-1] / max(cp, codec))
        larger.append((cp, codec))
    found = report.spread(ratios)
    cp, codec = (statistics.median(times) for times in zip(*larger, strict=True))
    times = f"cp {cp:.2f} s" + (f", in memory {codec:.2f} s" if folder.work else "")
    # reading, the codec and writing, divided evenly among the threads: what no run can be faster
    # than that does all three
    begun = time.perf_counter()
    memory.read_through(source)
    least = (time.perf_counter() - begun + alone(1) + cp) / THREADS
    times += f"; shared evenly, reading, codec and cp take {least / max(cp, codec):.2f}x"
    note = f" ({report.shown(found)}; {written / 1e9:.2f} GB, {THREADS} threads: {times})"
    what = "of the larger of cp and the codec in memory" if folder.work else "of cp"
    private = max(t.private for t in taken) / MB
    limits = [
        Limit(f"{folder.title}: less start-up, {what}", found[0], folder.times, note=note),
        Limit(f"{folder.title}: private memory", private, FOLDER_PRIVATE, unit=" MB"),
    ]
    if folder.peer and PEERS.exists() and (folder.peer != "gptqmodel" or GPTQMODEL):
        words = [PEERS, HERE / "folder_peers.py", folder.peer]
        more = [GPTQMODEL] if folder.peer == "gptqmodel" else []
        ours = statistics.median(lesses)
        try:
            # each is a difference of runs of several seconds
            theirs = statistics.median(
                bench.timed(_texts([*words, source, target, *more]), target, need).wall
                - bench.timed(_texts([*words, tiny, target, *more]), target, need).wall
                for _ in range(bench.args.rounds)
            )
        except process.RunError as error:
            print(f"  {folder.title}: no peer, {error}", file=sys.stderr)
        else:
            title = f"{folder.title}: faster than {folder.peer.replace('_', ' ')}"
            note = f" (less start-up, {theirs:.1f} s and {ours:.1f} s)"
            limits.append(Limit(title, theirs / ours, FOLDER_FASTER, note=note, at_least=True))
    for left in (kept, *made):
        shutil.rmtree(left, ignore_errors=True)
    return limits


def _source(bench: Bench, name: str, layers: int = 0) -> tuple[Path, Path]:
    """A checkpoint and its tiny twin, made if they are not there yet."""
    if name not in MAKERS:
        bench.require(name)
        return bench.root / name, bench.root / f"tiny-{name}"
    make, last = MAKERS[name]
    found = []
    more = {"layers": layers} if layers else {}
    large = f"pack-{name}" + (f"-{layers}" if layers else "")
    for place, size, said in ((large, bench.args.size, more), (f"tiny-pack-{name}", "tiny", {})):
        if not (bench.root / place / last).exists():
            shutil.rmtree(bench.root / place, ignore_errors=True)
            make(bench.root / place, name, size, **said)
        found.append(bench.root / place)
    return found[0], found[1]


def _texts(words: list[Any]) -> list[str]:
    return [str(word) for word in words]


# bytes of bfloat16 or float16 in the two tensors
SIZES = {"tiny": (100 * MB, 400 * MB), "demo": (100 * MB, 800 * MB)}
COLUMNS = 8192
NAME = "model.layers.0.mlp.down_proj"


class Large(NamedTuple):
    """One tensor that is encoded or decoded: its parts by the number of rows, and the words."""

    title: str
    parts: Callable[[int], dict[str, Stored]]
    words: tuple[str, ...]


def _by(rules: str) -> tuple[str, ...]:
    return ("--rules", str(RULES / rules), "--allow", "lossy")


def _plain(rows: int) -> dict[str, Stored]:
    return {".weight": ("BF16", [rows, COLUMNS], None)}


def _rows_of_fp8(rows: int) -> dict[str, Stored]:
    scales = np.full((rows, 1), 0x3B00, "<u2")
    return {
        ".weight": ("F8_E4M3", [rows, COLUMNS], None),
        ".weight_scale": ("BF16", [rows, 1], scales),
    }


def _columns_of_gptq(rows: int) -> dict[str, Stored]:
    """Codes of a row lie in a column of words."""
    groups = COLUMNS // 128
    return {
        ".qweight": ("I32", [COLUMNS // 8, rows], None),
        ".qzeros": ("I32", [groups, rows // 8], None),
        ".scales": ("F16", [groups, rows], np.full((groups, rows), 0.01, "<f2")),
        ".g_idx": ("I32", [COLUMNS], (np.arange(COLUMNS) // 128).astype("<i4")),
    }


LARGE = (
    Large("bf16 -> FP8 tensors", _plain, _by("fp8-tensor.yaml")),
    Large("bf16 -> NVFP4", _plain, _by("nvfp4.yaml")),
    Large("FP8 rows -> bf16", _rows_of_fp8, _by("fp8-decode.yaml")),
    Large("GPTQ -> fp16", _columns_of_gptq, _by("gptq-decode.yaml")),
)


def large_tensor(bench: Bench) -> list[Limit]:
    """One tensor, encoded with one scale for all or decoded, in a file with holes: its private
    memory.
    """
    limits = []
    for one in LARGE:
        private = []
        for size in SIZES.get(bench.args.size, (100 * MB, 8_000 * MB)):
            source, target = bench.root / "one.safetensors", bench.root / "one-out.safetensors"
            for left in (source, target):
                left.unlink(missing_ok=True)
            _write(source, one.parts(size // (2 * COLUMNS) // 8 * 8))
            try:
                words = [*bench.migrate, "apply", source, "-o", target, *one.words]
                private.append(process.run(_texts([*words, "--no-fsync"])).private / MB)
            finally:
                for file in (source, target):
                    file.unlink(missing_ok=True)
        small, large = private
        note = f" ({small:.0f} MB and {large:.0f} MB)"
        what = f"{one.title}: private memory of a tensor of 8 GB, of one of 100 MB"
        limits.append(Limit(what, large / small, LARGE_TENSOR, note=note))
        limits.append(Limit(f"{one.title}: that memory", large, FOLDER_PRIVATE, unit=" MB"))
    return limits


def _write(path: Path, parts: dict[str, Stored]) -> None:
    """A file of the parts of one tensor; what is zeros takes no place on the disk."""
    entries, at, filled = {}, 0, []
    for suffix, (dtype, shape, array) in parts.items():
        end = at + prod(shape) * WIDTHS[dtype]
        entries[NAME + suffix] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        filled.append((at, array))
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        first = file.tell()
        file.truncate(first + at)
        for place, array in filled:
            if array is not None:
                file.seek(first + place)
                file.write(array.tobytes())


ROWS: dict[str, Callable[[Bench], list[Limit]]] = {
    **{name: partial(_measured, folder) for name, folder in FOLDERS.items()},
    "large-tensor": large_tensor,
}
