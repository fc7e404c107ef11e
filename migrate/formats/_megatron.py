"""Megatron's table: how the parts of its checkpoints are called, which layers and experts each of
them holds, and what its arguments say of that.

`--ckpt-format torch` writes a folder for each part, `mp_rank_TT[_PPP][_EEE]`: the tensor-parallel
rank, then the pipeline stage where there are several, then the expert group where there are
several, so that a second number alone may count either. Layers are numbered from 0 in every stage
and in each of its virtual stages (dicts `model0`, `model1`, …), experts from 0 in every group. The
model runs through the first virtual stage of all stages, then through the second: whatever way
layers were dealt out, the number of the first layer of a stage is that of all layers before it in
this order. So the keys themselves tell the numbers, and the arguments are compared with them; they
alone tell them where one part is read without the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..source.pickle.nodes import ABSENT, Call, Dict
from ..source.pickle.tree import OBJECTS, Constant, DictNode, ListNode, Opaque

PART = re.compile(r"mp_rank_([0-9]{2,5})(?:_([0-9]{3,5}))?(?:_([0-9]{3,5}))?", re.ASCII)
# beside the weights of a part: the state of the distributed optimizer
OPTIMIZER = "distrib_optim.pt"
OLDEST_VERSION = 3

_MODEL = re.compile(r"model(0|[1-9][0-9]{0,3})?", re.ASCII)
_LAYER = re.compile(r"(?P<stack>decoder|encoder)\.layers\.(?P<n>0|[1-9][0-9]{0,6})(?=\.|$)")
# stacks of layers that are numbered otherwise, or in one stage alone
_OTHER_STACK = re.compile(r"((?:.+\.)?[A-Za-z_]*layers)\.[0-9]+\.")
_EXPERT = re.compile(
    r"(?P<before>(?:.+\.)?experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))"
    r"(?P<e>0|[1-9][0-9]{0,6})(?=\.|$)"
)
# stands for the number of any expert
_ANY = "*"
_GROUPED = re.compile(r"(?:.+\.)?experts\.weight[12]")
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_FINAL = ("decoder.final_layernorm.", "encoder.final_layernorm.")

# the sizes of the grid, by axis
SIZES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "VPP": "virtual_pipeline_model_parallel_size",
    "EP": "expert_model_parallel_size",
}
_EXPERT_TENSOR = "expert_tensor_parallel_size"
# layers of uneven stages: what the training script calls them, and what Megatron Core does
_FIRST = ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
_LAST = ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")
_LAYOUT = "pipeline_model_parallel_layout"
_WITH_EMBEDDING = "account_for_embedding_in_pipeline_split"
_WITH_LOSS = "account_for_loss_in_pipeline_split"

# the arguments that describe the model and its grid: all parts of one checkpoint agree in them
DESCRIBING = (
    *SIZES.values(), _EXPERT_TENSOR, *_FIRST, *_LAST, _LAYOUT, _WITH_EMBEDDING, _WITH_LOSS,
    "num_layers", "encoder_num_layers", "decoder_num_layers", "hidden_size", "ffn_hidden_size",
    "num_attention_heads", "num_query_groups", "group_query_attention", "kv_channels",
    "max_position_embeddings", "padded_vocab_size", "vocab_size", "make_vocab_size_divisible_by",
    "position_embedding_type", "rotary_base", "rotary_percent", "normalization",
    "apply_layernorm_1p", "swiglu", "untie_embeddings_and_output_weights", "add_bias_linear",
    "add_qkv_bias", "qk_layernorm", "num_experts", "moe_ffn_hidden_size", "moe_router_topk",
    "moe_layer_freq", "moe_shared_expert_intermediate_size", "moe_grouped_gemm",
    "multi_latent_attention", "mtp_num_layers", "transformer_impl",
)  # fmt: skip
# those that tell a run, and how far it was, from another one of the same model
OF_RUN = ("seed", "consumed_train_samples")
# layers of a layout's text that are believed
_MOST_LAYERS = 100_000


class Facts(NamedTuple):
    """What the root of a part's file says. `models` are its dicts of tensors by virtual stage, one
    under None where there are no virtual stages.
    """

    args: Mapping[str, Any] | None
    iteration: Any
    version: Any
    models: Mapping[int | None, DictNode]

    def size(self, axis: str) -> int | None:
        """What the arguments say of an axis; None where they do not."""
        if self.args is None:
            return None
        said = self.args.get(SIZES[axis], None if axis in ("TP", "PP") else 1)
        if axis == "VPP" and said is None:
            return 1
        return said if type(said) is int and 0 < said < 100_000 else None

    @property
    def expert_tensor(self) -> int | None:
        """The tensor parallelism of experts, where it is another than that of the rest."""
        said = (self.args or {}).get(_EXPERT_TENSOR)
        return said if type(said) is int and said != self.size("TP") else None

    @property
    def layers(self) -> int | None:
        said = (self.args or {}).get("num_layers")
        return said if type(said) is int and said >= 0 else None

    @property
    def experts(self) -> int | None:
        said = (self.args or {}).get("num_experts")
        return said if type(said) is int and said > 0 else None

    @property
    def tied(self) -> bool:
        """Whether the last stage's output layer is a copy of the embedding."""
        return (self.args or {}).get("untie_embeddings_and_output_weights") is False


def facts_of(root: Any) -> Facts:
    """What the root of a part's file says; of anything but a dict, nothing."""
    pairs = root.pairs if type(root) is DictNode else ()
    held = {key: value for key, value in pairs if type(key) is str}
    models: dict[int | None, DictNode] = {}
    for key, value in held.items():
        if (found := _MODEL.fullmatch(key)) and type(value) is DictNode:
            models[None if found[1] is None else int(found[1])] = value
    args = _attributes(held.get("args"))
    return Facts(args, held.get("iteration"), held.get("checkpoint_version"), models)


def _attributes(node: Any) -> Mapping[str, Any] | None:
    """The plain values of a Namespace by their names; None for anything else."""
    pairs: Sequence[tuple[Any, Any]]
    if type(node) is DictNode:
        pairs = node.pairs
    elif type(node) is Opaque and type(node.node) is Call and type(node.node.state) is Dict:
        pairs = node.node.state.pairs
    else:
        return None
    return {key: _plain(value) for key, value in pairs if type(key) is str}


def _plain(value: Any) -> Any:
    """Lists as lists, members of enums by their names; anything but a plain value as ABSENT."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is ListNode and value.kind in ("list", "tuple"):
        return [_plain(item) for item in value.items]
    if type(value) in (list, tuple):
        return [_plain(item) for item in value]
    if type(value) is Constant:
        return value.text
    if type(value) is DictNode and value.kind in OBJECTS:
        # a layout of stages is what it was made of
        return _plain(value.get("input_data", ABSENT))
    return ABSENT


def spread(facts: Facts, stages: int, virtual: int) -> list[list[int]] | str | None:
    """How many layers each stage has, by virtual stage and stage; None where the arguments do not
    say it, and a text that says why where they contradict themselves.
    """
    args, layers = facts.args, facts.layers
    if args is None or layers is None:
        return None
    layout = args.get(_LAYOUT)
    if layout is not None and stages > 1:
        return _laid_out(layout, layers, stages, virtual)
    first, last = (
        next((args[n] for n in names if args.get(n) is not None), None) for names in (_FIRST, _LAST)
    )
    if stages == 1:
        return [[layers]] if virtual == 1 else f"{virtual} virtual stages of a single stage"
    if type(first) is int or type(last) is int:
        return _uneven(layers, stages, virtual, first, last)
    before, behind = (args.get(name) is True for name in (_WITH_EMBEDDING, _WITH_LOSS))
    counted = layers + before + behind
    if counted % (stages * virtual):
        more = " and what is counted as one" if counted > layers else ""
        return f"{layers} layers{more} do not divide by {stages} stages{_times(virtual)}"
    here = [[counted // (stages * virtual)] * stages for _ in range(virtual)]
    here[0][0] -= before
    here[-1][-1] -= behind
    return here if min(here[0][0], here[-1][-1]) >= 0 else "a stage has less than no layer"


def _times(virtual: int) -> str:
    return f" of {virtual} virtual stages" if virtual > 1 else ""


def _uneven(
    layers: int, stages: int, virtual: int, first: int | None, last: int | None
) -> list[list[int]] | str:
    ends = {0: first} if type(first) is int else {}
    ends |= {stages - 1: last} if type(last) is int else {}
    left, middle = layers - sum(n or 0 for n in ends.values()), stages - len(ends)
    per = left // middle if middle > 0 else 0
    counts = [n if (n := ends.get(stage)) is not None else per for stage in range(stages)]
    if sum(counts) != layers or min(counts) < 0 or any(n % virtual for n in counts):
        return (
            f"{layers} layers with {first} in the first and {last} in the last stage do not divide "
            f"by {stages} stages{_times(virtual)}"
        )
    return [[n // virtual for n in counts] for _ in range(virtual)]


def _laid_out(layout: Any, layers: int, stages: int, virtual: int) -> list[list[int]] | str | None:
    """The counts of a layout: a text such as `Ettt|(tt|)*29,m|L`, or lists of words."""
    if type(layout) is str:
        text = _unrolled(layout)
        rows = None if text is None else [row.count("t") for row in text.split("|")]
    elif type(layout) is list and all(type(row) is list for row in layout):
        rows = [sum(_word(item) == "decoder" for item in row) for row in layout]
    else:
        return None
    if rows is None or len(rows) != stages * virtual or sum(rows) != layers:
        return f"{_LAYOUT} is not one of {layers} layers in {stages} stages{_times(virtual)}"
    return [rows[v * stages : (v + 1) * stages] for v in range(virtual)]


def _word(item: Any) -> str:
    return item.rpartition(".")[2].strip().lower() if type(item) is str else ""


def _unrolled(text: str) -> str | None:
    """A layout's text without repetitions; None for one of too many layers."""
    text = text.replace(",", "")
    for pattern in (r"\(([^()]+)\)\*([0-9]{1,6})", r"(.)\*([0-9]{1,6})"):
        size = len(text)
        if size > _MOST_LAYERS:
            return None
        repeated = sum(len(m[1]) * int(m[2]) for m in re.finditer(pattern, text))
        if size + repeated > _MOST_LAYERS:
            return None
        text = re.sub(pattern, lambda m: m[1] * int(m[2]), text)
    return text


class Numbers(NamedTuple):
    """The numbers of layers and experts among the names of one dict, as they stand there.

    `stack` is what the layers are layers of, "" without any; `others` are stacks that are not
    numbered over stages. `grouped` is a key that holds all experts of its group, and `lost` one
    that an expert has not and another has, "" without one.
    """

    stack: str
    layers: frozenset[int]
    experts: frozenset[int]
    others: frozenset[str]
    grouped: str
    lost: str


def numbers_in(names: Iterable[str]) -> Numbers:
    """What the names of a dict number."""
    stack = grouped = ""
    layers: set[int] = set()
    experts: set[int] = set()
    of_experts: dict[str, set[int]] = {}
    others: set[str] = set()
    for name in names:
        found = _LAYER.match(name)
        if found is not None and found["stack"] == (stack or found["stack"]):
            stack = found["stack"]
            layers.add(int(found["n"]))
        elif strange := _OTHER_STACK.match(name):
            others.add(strange[1])
        if ".experts." in name:
            if expert := _EXPERT.match(name):
                experts.add(int(expert["e"]))
                of_experts.setdefault(_of_any_expert(expert), set()).add(int(expert["e"]))
            elif not grouped and _GROUPED.fullmatch(name):
                grouped = name
    lost = next(
        (
            name.replace(_ANY, str(min(experts - held)))
            for name, held in of_experts.items()
            if held != experts
        ),
        "",
    )
    return Numbers(stack, frozenset(layers), frozenset(experts), frozenset(others), grouped, lost)


def renumber(first_layer: int, first_expert: int) -> Callable[[str], str]:
    """What names in a part, of tensors and of modules, are in the whole model."""

    def renamed(name: str) -> str:
        if first_layer and (found := _LAYER.match(name)):
            name = f"{found['stack']}.layers.{int(found['n']) + first_layer}{name[found.end() :]}"
        if first_expert and ".experts." in name and (found := _EXPERT.match(name)):
            name = f"{found['before']}{int(found['e']) + first_expert}{name[found.end() :]}"
        return name

    return renamed


def layer_of(name: str) -> int | None:
    """The number of the layer that a name belongs to."""
    found = _LAYER.match(name)
    return None if found is None else int(found["n"])


def of_any_expert(name: str) -> str:
    """The name without the number of an expert, which one group alone holds."""
    found = _EXPERT.match(name) if ".experts." in name else None
    return name if found is None else _of_any_expert(found)


def _of_any_expert(found: re.Match[str]) -> str:
    return f"{found['before']}{_ANY}{found.string[found.end() :]}"


def is_whole(names: Collection[str]) -> bool | None:
    """Whether the names run from the embedding to the last norm, as in every expert group and in no
    stage of several; None where neither is among them.
    """
    last = any(name.startswith(_FINAL) for name in names)
    return (EMBEDDING in names and last) if EMBEDDING in names or last else None
