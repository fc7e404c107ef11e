"""The rows of the table: what each one runs, and what it must reach.

A target is an upper bound unless its name ends in `_faster`, which is a lower bound on how many
times faster we are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RULES = HERE / "rules"

# (1.2 GB and below, above)
Bound = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Task:
    """One job on the whole checkpoint. `name` is what baseline_stack.py calls it, `-lite` apart;
    `source` the layout to start from.
    """

    name: str
    title: str
    # targets; None where a row is there to be compared with another
    cp: Bound | None
    aim: float | None
    script_faster: Bound | None
    private_mb: float
    source: str = "v4"
    rules: str | None = None
    one_file: bool = False
    transformers_faster: float | None = None
    # lineage@layout to go to, and whether it is a way back
    to: str = "hf-mixtral@v5"
    back: bool = False
    # whether our process imports torch, so that what it writes is written a second after it starts
    torch: bool = False
    # whether start-up is taken off both sides before we are compared with the script: what it
    # spends on torch we spend too
    apart: bool = False
    # about so many output files
    files: int = 4
    # bytes written for each byte of the checkpoint
    grows: float = 1.0
    # the format to go to, and nothing else
    output: str | None = None
    # most private memory that the script may need, as a share of the checkpoint: it decides how
    # much is made free
    script_share: float = 0.6

    @property
    def variant(self) -> str:
        """What the row's name ends in where it is one more of another row, on other sizes."""
        return "-lite" if self.name.endswith("-lite") else ""

    def arguments(self, source: Path, target: Path) -> list[str]:
        """What follows `migrate` on the command line, shard size and fsync apart."""
        if self.output:
            return ["apply", str(source), "-o", str(target), "--output-format", self.output]
        if self.rules:
            return ["apply", str(source), "-o", str(target), "--rules", str(RULES / self.rules)]
        lossy = ["--allow", "lossy"] if self.to.startswith("deepseek") else []
        return [
            "downgrade" if self.back else "apply",
            str(source),
            "-o",
            str(target),
            "--to",
            self.to,
            *lossy,
        ]


_WHOLE = {"cp": (1.0, 1.0), "aim": 0.75, "script_faster": (5.0, 3.5), "private_mb": 40.0}
_CAST = {"cp": (1.0, 1.0), "aim": None, "script_faster": (3.0, 3.0), "private_mb": 400.0}
_BLOCKS = {
    "torch": True,
    "apart": True,
    "files": 10,
    "aim": None,
    "script_faster": (3.0, 3.0),
    "private_mb": 600.0,
    "script_share": 3.0,
}
_LITE = {**_BLOCKS, "script_faster": None}
_RUNS = {"cp": (1.2, 1.2), "aim": None, "script_faster": (4.0, 2.5), "private_mb": 60.0}

TASKS = [
    Task("rename", "rename only", rules="rename.yaml", **_WHOLE),
    Task("pack", "v4 -> v5: stack experts, concat gate/up", transformers_faster=12.0, **_WHOLE),
    Task("unbind", "v5 -> v4: unbind back", source="v5", to="hf-mixtral@v4", back=True, **_WHOLE),
    Task("concat-last", "concat on the last dim", rules="concat-last.yaml", **_RUNS),
    Task("deinterleave", "de-interleave of rows", rules="deinterleave.yaml", **_RUNS),
    Task("heads", "rearrange of heads", rules="heads.yaml", **_RUNS),
    Task(
        "transpose",
        "transpose of every 2-D weight",
        rules="transpose.yaml",
        cp=(2.0, 2.0),
        aim=None,
        script_faster=(1.5, 1.5),
        private_mb=400.0,
    ),
    Task("pack-one-file", "v4 -> v5 into one file (default shard size)", one_file=True, **_WHOLE),
    Task("widen", "cast bf16 -> f32", rules="widen.yaml", grows=2.0, script_share=2.5, **_CAST),
    Task(
        "narrow",
        "cast f32 -> bf16, every value exact",
        source="f32",
        rules="narrow.yaml",
        script_share=2.5,
        **_CAST,
    ),
    # CRC-32s are made or compared on the way; with zlib's instead of isal's the bound is 1.6
    Task("from-pt", ".pt -> safetensors", source="pt", output="safetensors", files=2, **_RUNS),
    Task("to-pt", "safetensors -> .pt", output="torch", files=2, **_RUNS),
    Task(
        "dequantize",
        "FP8 blocks -> bf16",
        source="fp8-large",
        to="deepseek-v3@bf16",
        cp=(1.6, 1.6),
        grows=2.0,
        **_BLOCKS,
    ),
    Task(
        "quantize",
        "bf16 -> FP8 blocks",
        source="bf16-large",
        to="deepseek-v3@fp8",
        back=True,
        cp=(3.0, 3.0),
        **_BLOCKS,
    ),
    Task(
        "dequantize-lite",
        "FP8 blocks -> bf16, small matrices",
        source="fp8-lite",
        to="deepseek-v3@bf16",
        cp=None,
        grows=2.0,
        **_LITE,
    ),
    Task(
        "quantize-lite",
        "bf16 -> FP8 blocks, small matrices",
        source="bf16-lite",
        to="deepseek-v3@fp8",
        back=True,
        cp=None,
        **_LITE,
    ),
]


@dataclass(frozen=True, slots=True)
class Limit:
    """One judged number of the report: `met` is None where there was nothing to judge."""

    what: str
    value: float
    bound: float
    at_least: bool = False
    unit: str = "x"
    note: str = ""

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return (
            f"{self.what} {self.value:.2f}{self.unit} {sign} {self.bound:g}{self.unit}: "
            f"{'met' if self.met else 'NOT MET'}{self.note}"
        )


# indexing a .pt of so many tensors, against torch.load(weights_only=True, map_location="meta")
INDEX_KEYS, INDEX_FASTER = 100_000, 3.0
# `plan` of many keys, against json over the same header: binding and lowering against the parse,
# whole process against whole process
PLAN_KEYS, PLAN_BIND, PLAN_WHOLE = 100_000, 2.0, 6.5
# 10x the keys may take this many times the seconds before it is no longer called linear
PLAN_LINEAR = 12.0
# of a million keys: processor time against 100,000, and gigabytes
PLAN_CPU, PLAN_PEAK = 11.0, 1.2
# files of as many keys each, and how many times the processor time of the same keys in few files
# their plan may take
MANY_FILES, FEW_FILES, KEYS_A_FILE, FILES_TIMES = 10_000, 5, 50, 1.3
# a load into a live module, against load_state_dict(load_file(migrated)); MB above module and
# largest tensor
LOAD_TIMES, LOAD_PRIVATE = 1.15, 100.0
# the hook on so many tensors, against torch's load_state_dict of what it makes: the first time, and
# for the same keys and shapes again
HOOK_KEYS, HOOK_FIRST, HOOK_AGAIN = 20_000, 2.5, 0.25
# against a process that imports click and does nothing
HELP_CLICKS, PLAN_CLICKS = 3.0, 5.0
# of all shipped rules, against PyYAML's loader in Python over the same files
LINT_TIMES, SPECS_TIMES = 4.0, 6.0
# a lineage of the catalogue against one written by hand
LINEAGE_TIMES = 1.0
# a folder of a number format against the larger of cp and the codec in memory; MB; and the memory
# of a tensor of 8 GB against that of one of 100 MB
FOLDER_TIMES, FOLDER_PRIVATE, LARGE_TENSOR = 1.6, 600.0, 1.25
# as fast as the folder converters of libraries so many times
FOLDER_FASTER = 3.0
# against an earlier commit in the same rounds
BEFORE_TIMES, BEFORE_MEMORY = 1.03, 1.05
# distributed checkpoints: against cp -r of the output's bytes, with rows and with columns of ranks;
# MB beyond start-up; against torch's converter
DCP_ROWS, DCP_ROWS_ZLIB, DCP_COLUMNS = 1.25, 1.7, 1.6
DCP_PRIVATE, DCP_COLUMNS_PRIVATE, DCP_CONVERT = 80.0, 150.0, 3.0
# seconds of `plan`, and 10x the chunks against the seconds of a tenth
DCP_CHUNKS, DCP_OPEN, DCP_LINEAR = 100_000, 8.0, 12.0
# seconds of `apply` where names alone change; ms of a run of so many bytes whose files the file
# system can share, beside start-up
DCP_NAMES, DCP_SHARED, DCP_FILES_BYTES = 8.0, 100.0, 400_000_000
# names alone, against cp -r; two processes against one; one chunk of a stack against one a rank
DCP_RENAME, DCP_RANKS, DCP_STACK = 1.0, 0.75, 1.0
# quantized tensors of ranks put together, against cp -r
DCP_JOIN = 1.4
# dcp.load through the reader that migrates: 64 experts of a stack against preadv of the same bytes,
# and faster than torch's reader behind names; a model against stock torch and a migrated copy; FP8
# blocks against apply; MB of a rank above model and imports
READER_STACK, READER_STACK_BYTES, READER_STOCK = 1.5, 2_147_483_648, 20.0
READER_MODEL, READER_BLOCKS, READER_PRIVATE = 1.3, 1.3, 120.0
# runs of Megatron against cp -r of what is written, MB beyond start-up; memory of megatron-core's;
# the plan of 1,024 parts: seconds, eight times the parts against an eighth, MB, and arguments of
# 800 fields against as few as there can be
MEGATRON_CP, MEGATRON_CP_ZLIB, MEGATRON_PRIVATE, MEGATRON_MEMORY = 1.4, 1.8, 100.0, 0.1
MEGATRON_PLAN, MEGATRON_LINEAR, MEGATRON_PLAN_PRIVATE = 10.0, 10.0, 1000.0
MEGATRON_FIELDS = 1.3
# from bucket to bucket, of download, apply and upload: time and bytes through the client when the
# store copies, time when all is streamed; where nothing can be copied, of the same streamed, which
# makes the same requests; 50 ms a request, of none; MB of --max-memory, and above it
STORES_COPIED, STORES_PASSED, STORES_STREAMED = 0.4, 0.1, 0.6
STORES_SHORT, STORES_FAR, STORES_MEMORY, STORES_PRIVATE = 1.05, 1.5, 256, 80.0
# processor time of reading by ranges, against boto3's client alone
STORES_READ = 1.3
# a run by one worker of Ray, against one process; four workers against one, where there are cores
RAY_OVERHEAD, RAY_FASTER = 1.1, 3.0
# verify against the apply whose output it checks; MB above what it announces: the interpreter, its
# libraries, the plan
VERIFY_LAYOUTS, VERIFY_BLOCKS, VERIFY_PRIVATE = 3.0, 2.0, 120.0
# rules from two checkpoints against cp of both, MB; from headers alone, and what else writes rules,
# locks, stamps and pages, against `plan` of as many keys
DIFF_TIMES, DIFF_PRIVATE, FROM_TRANSFORMERS, NEW_HEADERS, PLAN_TIMES = 2.5, 400.0, 1.5, 2.0, 1.0


@dataclass(frozen=True, slots=True)
class DecodeBars:
    """What decoding a matrix may take in clones of the result, and how many times faster it is to
    be than the fastest peer; None where that is not judged.
    """

    clones: float | None
    faster: float | None = None


DECODED = {
    "fp8 tensor": DecodeBars(1, 6),
    "fp8 row": DecodeBars(1, 6),
    "fp8-block": DecodeBars(1, 6),
    "mxfp8": DecodeBars(1, 6),
    "mxfp4": DecodeBars(2, 10),
    "nvfp4": DecodeBars(2.2, 5),
    "int-pack sym": DecodeBars(2, 1.3),
    "int-pack asym": DecodeBars(2.5, 1.2),
    "gptq": DecodeBars(4, 5),
    "gptq, columns out of order": DecodeBars(None),
    "awq": DecodeBars(10, 2.5),
    # C++ with AVX-512: at most twice its time
    "nf4": DecodeBars(3, 0.5),
    "int8": DecodeBars(None),
    "Q8_0": DecodeBars(6, 1.5),
    "Q4_K": DecodeBars(6, 1.5),
}
# encoding, against the fastest peer
ENCODED_FASTER = {
    "fp8 tensor": 2, "fp8 row": 2, "fp8-block": 2, "mxfp8": 2, "mxfp4": 8, "nvfp4": 8, "nf4": 5,
}  # fmt: skip

_MANY = """\
id: bench/many
title: Many rules for many keys
lineage: bench
edge: [old, new]
requires: ">=0.1"
keep: ["{p...}.{n:input_layernorm|post_attention_layernorm}.weight", "model.rest.{i:int}.weight"]
rules:
  - name: gate-up
    from: "{p...}.mlp.experts.{e:int}.{w:gate_proj|up_proj}.weight"
    to: "{p}.mlp.experts.gate_up_proj"
    via: [{stack: {over: e}}, {concat: {over: w, dim: 1}}]
  - {name: down, from: "{p...}.mlp.experts.{e:int}.down_proj.weight", to: "{p}.mlp.experts.down_proj", via: [{stack: {over: e}}]}
  - name: qkv
    from: "model.layers.{n:int}.self_attn.{w:q_proj|k_proj|v_proj}.weight"
    to: "model.layers.{n}.self_attn.qkv_proj.weight"
    via: [{concat: {over: w, dim: 0}}]
  - {name: out, from: "{p...}.self_attn.o_proj.weight", to: "{p}.self_attn.out_proj.weight"}
  - {name: router, from: "{p...}.mlp.gate.weight", to: "{p}.mlp.router.weight"}
"""  # noqa: E501
_UNUSED = """\
  - {name: unused-#, from: "{p...}.unused#.{x:int}.{y}.weight", to: "{p}.other#.{x}.{y}.weight", optional: true}
"""  # noqa: E501


def many_rules(count: int) -> str:
    """A rule file of `count` rules: five take the keys of `data.make_headers`, the others look and
    find nothing.
    """
    return _MANY + "".join(_UNUSED.replace("#", str(i)) for i in range(count - 5))
