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
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..source.pickle.nodes import ABSENT, Call, Dict
from ..source.pickle.tree import OBJECTS, Constant, DictNode, ListNode, Opaque

PART = re.compile(r"mp_rank_([0-9]{2,5})(?:_([0-9]{3,5}))?(?:_([0-9]{3,5}))?", re.ASCII)
# what layouts call this table
NAME = "megatron"
# what the folder of a checkpoint is called, in that of its run
FOLDER = re.compile(r"iter_[0-9]{7,18}|release", re.ASCII)
RELEASE = "release"
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
# GroupedMLP's matrices of all experts of a group, in memory one expert after the other: `weight1`
# is [hidden, experts * rows] of (experts, hidden, rows), `weight2` [experts * columns, hidden]
GROUPED = re.compile(r"((?:.+\.)?)experts\.weight([12])", re.ASCII)
# the state that Transformer Engine has of all experts of a group, behind their module
STATE_OF_GROUP = re.compile(r"((?:.+\.)?experts\.linear_fc[12])\._extra_state", re.ASCII)
UNTIED = "untie_embeddings_and_output_weights"
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_FINAL = ("decoder.final_layernorm.", "encoder.final_layernorm.")
# what the first stage holds beside layers, and the last one
_ENDS = {"first": ("embedding.",), "last": (*_FINAL, "output_layer.")}

# the sizes of the grid, by axis
SIZES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "VPP": "virtual_pipeline_model_parallel_size",
    "EP": "expert_model_parallel_size",
}
EXPERT_TENSOR = "expert_tensor_parallel_size"
# layers of uneven stages: what the training script calls them, and what Megatron Core does
FIRST = ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
LAST = ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")
LAYOUT = "pipeline_model_parallel_layout"
WITH_EMBEDDING = "account_for_embedding_in_pipeline_split"
WITH_LOSS = "account_for_loss_in_pipeline_split"

# the arguments that describe the model and its grid: all parts of one checkpoint agree in them
DESCRIBING = (
    *SIZES.values(), EXPERT_TENSOR, *FIRST, *LAST, LAYOUT, WITH_EMBEDDING, WITH_LOSS,
    "num_layers", "encoder_num_layers", "decoder_num_layers", "hidden_size", "ffn_hidden_size",
    "num_attention_heads", "num_query_groups", "group_query_attention", "kv_channels",
    "max_position_embeddings", "padded_vocab_size", "vocab_size", "make_vocab_size_divisible_by",
    "position_embedding_type", "rotary_base", "rotary_percent", "normalization",
    "apply_layernorm_1p", "swiglu", "untie_embeddings_and_output_weights", "add_bias_linear",
    "add_qkv_bias", "qk_layernorm", "num_experts", "moe_ffn_hidden_size", "moe_router_topk",
    "moe_layer_freq", "moe_shared_expert_intermediate_size", "moe_grouped_gemm",
    "multi_latent_attention", "mtp_num_layers", "transformer_impl", "norm_epsilon",
    "attention_output_gate", "use_rope_scaling", "rope_scaling_factor", "rotary_interleaved",
    "rotary_seq_len_interpolation_factor", "window_size", "softmax_type",
    "moe_router_pre_softmax", "moe_router_score_function", "moe_router_topk_scaling_factor",
)  # fmt: skip
# those that tell a run, and how far it was, from another one of the same model
OF_RUN = ("seed", "consumed_train_samples")
# what tells processes apart
RANK = "rank"
_ASKED = frozenset((*DESCRIBING, *OF_RUN, RANK))
# layers of a layout's text that are believed
_MOST_LAYERS = 100_000


class Facts(NamedTuple):
    """What the root of a part's file says. `args` are those that describe the model, its grid, the
    run and the process. `models` are its dicts of tensors by virtual stage, one under None where
    there are no virtual stages.
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
        said = (self.args or {}).get(EXPERT_TENSOR)
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
        return (self.args or {}).get(UNTIED) is False


def tie_contradicted(untied: Any, keys: Container[str]) -> str | None:
    """What the arguments say of the output layer and the keys of a whole model do not; None where
    they agree, or nothing is said.
    """
    if type(untied) is not bool or EMBEDDING not in keys or (OUTPUT in keys) is untied:
        return None
    there = "there is no" if untied else "there is an"
    return f"`{UNTIED}` is {untied}, and {there} {OUTPUT}"


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


def folder_of(called: str, facts: Facts) -> str:
    """What the folder of a checkpoint is called in its run, if it is not `called` so already: by
    its iteration, and without one as what was never trained.
    """
    if FOLDER.fullmatch(called):
        return called
    at = facts.iteration
    return f"iter_{at:07}" if type(at) is int and 0 < at < 10**18 else RELEASE


def iteration_note(called: str, iteration: Any) -> tuple[str, ...]:
    """What to say of a checkpoint in a folder that is `called` after another iteration than it
    names.
    """
    number = called.removeprefix("iter_") if FOLDER.fullmatch(called) else ""
    if type(iteration) is not int or not number.isdecimal() or int(number) == iteration:
        return ()
    return (f"the folder is called {called}, and what is in it says `iteration` {iteration}",)


def _attributes(node: Any) -> Mapping[str, Any] | None:
    """The plain values of a Namespace by their names, of those asked for; None for others."""
    pairs: Sequence[tuple[Any, Any]]
    if type(node) is DictNode:
        pairs = node.pairs
    elif type(node) is Opaque and type(node.node) is Call and type(node.node.state) is Dict:
        pairs = node.node.state.pairs
    else:
        return None
    return {
        key: value if type(value) in _SIMPLE else _plain(value)
        for key, value in pairs
        if type(key) is str and key in _ASKED
    }


_SIMPLE = frozenset({type(None), bool, int, float, str})


def _plain(value: Any) -> Any:
    """Lists as lists, members of enums by their names; anything but a plain value as ABSENT."""
    if type(value) in _SIMPLE:
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
    layout = args.get(LAYOUT)
    if layout is not None and stages > 1:
        return _laid_out(layout, layers, stages, virtual)
    first, last = (
        next((args[n] for n in names if args.get(n) is not None), None) for names in (FIRST, LAST)
    )
    if stages == 1:
        return [[layers]] if virtual == 1 else f"{virtual} virtual stages of a single stage"
    if type(first) is int or type(last) is int:
        return _uneven(layers, stages, virtual, first, last)
    before, behind = (args.get(name) is True for name in (WITH_EMBEDDING, WITH_LOSS))
    counted = layers + before + behind
    if counted % (stages * virtual):
        more = " and what is counted as one" if counted > layers else ""
        return f"{layers} layers{more} do not divide by {stages} stages{_times(virtual)}"
    here = [[counted // (stages * virtual)] * stages for _ in range(virtual)]
    here[0][0] -= before
    here[-1][-1] -= behind
    return here if min(here[0][0], here[-1][-1]) >= 0 else "a stage has less than no layer"


def facts_that_say(layers: int, first: int | None, last: int | None, layout: str | None) -> Facts:
    """What a part would say of stages whose layers are dealt out so."""
    args = {"num_layers": layers, FIRST[0]: first, LAST[0]: last, LAYOUT: layout}
    return Facts(args, None, None, {})


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
        text = unrolled(layout)
        rows = None if text is None else [row.count("t") for row in text.split("|")]
    elif type(layout) is list and all(type(row) is list for row in layout):
        rows = [sum(_word(item) == "decoder" for item in row) for row in layout]
    else:
        return None
    if rows is None or len(rows) != stages * virtual or sum(rows) != layers:
        return f"{LAYOUT} is not one of {layers} layers in {stages} stages{_times(virtual)}"
    return [rows[v * stages : (v + 1) * stages] for v in range(virtual)]


def _word(item: Any) -> str:
    return item.rpartition(".")[2].strip().lower() if type(item) is str else ""


def unrolled(text: str) -> str | None:
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
            elif not grouped and GROUPED.fullmatch(name):
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


def forms_of_experts(names: tuple[Any, ...]) -> frozenset[Any]:
    """The names without the numbers of experts, and anything but text as it is."""
    return frozenset(of_any_expert(name) if type(name) is str else name for name in names)


def _of_any_expert(found: re.Match[str]) -> str:
    return f"{found['before']}{_ANY}{found.string[found.end() :]}"


def is_whole(names: Collection[str]) -> bool | None:
    """Whether the names run from the embedding to the last norm, as in every expert group and in no
    stage of several; None where neither is among them.
    """
    last = any(name.startswith(_FINAL) for name in names)
    return (EMBEDDING in names and last) if EMBEDDING in names or last else None


def end_of(name: str) -> str | None:
    """The stage that holds a name, of a tensor or of a module, which is in no layer: `first` or
    `last`; None where that is not known.
    """
    dotted = f"{name}."
    return next((end for end, words in _ENDS.items() if dotted.startswith(words)), None)


class NameForm(NamedTuple):
    """A name without the numbers that count something, and these numbers."""

    text: str
    layer: int | None
    expert: int | None


def form_of(name: str) -> NameForm:
    """The form of a name, with `{}` for the number of its layer and of its expert."""
    layer = expert = None
    if ".experts." in name and (found := _EXPERT.match(name)):
        expert = int(found["e"])
        name = f"{found['before']}{{}}{name[found.end() :]}"
    if found := _LAYER.match(name):
        layer = int(found["n"])
        name = f"layers.{{}}{name[found.end() :]}"
    return NameForm(name, layer, expert)


_LINEAR = ("layer_norm_weight", "layer_norm_bias", "weight", "bias", "_extra_state")
_NORM = ("weight", "bias", "_extra_state")
_MODULES: tuple[tuple[str, Sequence[str]], ...] = (
    ("input_layernorm.", _NORM),
    ("self_attention.linear_proj.", _LINEAR),
    ("self_attention.linear_qkv.", _LINEAR),
    ("self_attention.q_layernorm.", _NORM),
    ("self_attention.k_layernorm.", _NORM),
    ("pre_mlp_layernorm.", _NORM),
    ("mlp.router.", ("weight", "bias", "expert_bias")),
    ("mlp.experts.local_experts.{}.linear_fc1.", _LINEAR),
    ("mlp.experts.local_experts.{}.linear_fc2.", _LINEAR),
    ("mlp.experts.", ("weight1", "weight2")),
    ("mlp.experts.linear_fc1.", ("weight{}", "bias{}", "_extra_state")),
    ("mlp.experts.linear_fc2.", ("weight{}", "bias{}", "_extra_state")),
    ("mlp.linear_fc1.", _LINEAR),
    ("mlp.linear_fc2.", _LINEAR),
)
# the forms of keys in the order in which Megatron's modules have them
ORDER = (
    *(f"embedding.{kind}_embeddings.weight" for kind in ("word", "position", "tokentype")),
    *(f"layers.{{}}.{module}{leaf}" for module, leaves in _MODULES for leaf in leaves),
    *(final + leaf for final in _FINAL for leaf in _NORM),
    *(f"output_layer.{leaf}" for leaf in _NORM),
)
_MODULE_OF_EXPERT = "local_experts.{}."
# forms of keys whose order is remembered; no model comes near
_MOST_FORMS = 500


class Order:
    """The order of keys in a dict of the model: what stands before its layers, these by number, the
    rest. Within a layer names stand as their `forms` do, and experts that are modules one after the
    other; a form that is not among these stands behind them.
    """

    def __init__(self, forms: Iterable[str]) -> None:
        self._places = {form: place for place, form in enumerate(forms)}
        self._layers = min(
            (place for form, place in self._places.items() if form.startswith("layers.{}")),
            default=0,
        )
        self._experts: dict[str, int] = {}
        for form, place in self._places.items():
            before, among, _ = f"{form}.".partition(_MODULE_OF_EXPERT)
            if among:
                self._experts.setdefault(before, place)

    def __contains__(self, form: str) -> bool:
        return form in self._places

    def rank(self, form: NameForm) -> tuple[int, int, int, int, int]:
        """What keys of these forms are sorted by."""
        place = self._places.setdefault(form.text, len(self._places))
        if form.layer is None:
            return (0 if place < self._layers else 2), 0, place, 0, 0
        before, among, _ = f"{form.text}.".partition(_MODULE_OF_EXPERT)
        block = self._experts.setdefault(before, place) if among else place
        return 1, form.layer, block, form.expert or 0, place


def order_of(parts: Iterable[Sequence[str]]) -> tuple[str, ...] | None:
    """The forms that tell the order of the keys of each of these dicts; None where there are none
    that tell it of all.
    """
    known: dict[tuple[NameForm, ...], None] = {}
    # most parts have the same names
    for names in dict.fromkeys(map(tuple, parts)):
        known[tuple(map(form_of, names))] = None
    forms: list[str] = []
    there: set[str] = set()
    if len({form.text for row in known for form in row}) > _MOST_FORMS:
        return None
    for row in known:
        last = -1
        for form in row:
            if form.text not in there:
                there.add(form.text)
                last += 1
                forms.insert(last, form.text)
            else:
                last = forms.index(form.text)
    order = Order(forms)
    if any(list(row) != sorted(row, key=order.rank) for row in known):
        return None
    return tuple(forms)


def exchanged(places: Sequence[tuple[int, ...]], ranks: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Two parts by number, the nearer one first, whose processes are in another order than their
    places along an axis: in whatever order Megatron counts the axes, ranks grow along each.
    """
    last: dict[tuple[Any, ...], int] = {}
    for number in sorted(range(len(places)), key=places.__getitem__):
        place = places[number]
        for axis in range(len(place)):
            line = (axis, *place[:axis], *place[axis + 1 :])
            before = last.get(line, number)
            if ranks[before] > ranks[number]:
                yield before, number
            last[line] = number
