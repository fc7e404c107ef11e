"""The settings of a training run, as its script saves them: `argparse.Namespace`, and members of
enums.

Both are data. A Namespace is its fields, and the way it is written has no other argument; a member
is its class and one plain value, and which members a class has stands here: what another one would
be, and whether there is one, only the program that owns the class can say.
"""

from __future__ import annotations

from typing import Any

from .decoding import Decoder, Decoding, ForeignError, Table, plain
from .nodes import ABSENT, Call, kind_of
from .tree import OBJECTS, Composite, Constant, DictNode, LocalShard, Storage, TensorRecord, holders

_TENSORS = frozenset({TensorRecord, Composite, LocalShard, Storage})


def _numbered(names: str) -> dict[Any, str]:
    """Members that are numbered from 1."""
    return dict(enumerate(names.split(), 1))


def _texts(names: str) -> dict[Any, str]:
    """Members whose values are their names."""
    return {name: name for name in names.split()}


_MODEL = _numbered("encoder_or_decoder encoder_and_decoder retro_encoder retro_decoder")
_CORE = "megatron.core.transformer.enums"
# (module, name) -> value -> what the member is called. Source: megatron-core 0.11 to 0.16, Megatron
# before it; signals as Linux numbers them.
ENUMS: dict[tuple[str, str], dict[Any, str]] = {
    ("megatron.core.enums", "ModelType"): _MODEL,
    (_CORE, "ModelType"): _MODEL,
    ("megatron.model.enums", "ModelType"): _MODEL,
    ("megatron.core.enums", "Fp8Recipe"): _texts("delayed tensorwise mxfp8 blockwise custom"),
    ("megatron.core.enums", "Fp4Recipe"): _texts("nvfp4 custom"),
    (_CORE, "LayerType"): _numbered("embedding loss encoder decoder mtp"),
    (_CORE, "AttnType"): _numbered("self_attn cross_attn"),
    (_CORE, "AttnMaskType"): _numbered(
        "padding causal no_mask padding_causal arbitrary causal_bottom_right"
    ),
    (_CORE, "AttnBackend"): _numbered("flash fused unfused local auto"),
    (_CORE, "CudaGraphScope"): _numbered(
        "full_iteration attn mlp moe moe_router moe_preprocess mamba full_iteration_inference"
    ),
    (_CORE, "CudaGraphModule"): _numbered("attn mlp moe moe_router moe_preprocess mamba"),
    (_CORE, "InferenceCudaGraphScope"): _numbered("none layer block"),
    ("signal", "Signals"): {
        1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 10: "SIGUSR1", 12: "SIGUSR2", 15: "SIGTERM",
    },
}  # fmt: skip


def _namespace(call: Call, parts: list[Any], _: Decoding) -> DictNode:
    name = call.function.name
    fields = parts[0]
    if call.items or call.pairs or not (fields is None or _is_dict(fields)):
        raise ForeignError(f"{kind_of(call)} with more than fields")
    if fields is None:
        return DictNode(name, (), call)
    if any(type(key) is not str for key, _ in fields.pairs):
        raise ForeignError(f"{kind_of(call)} with a field whose name is no text")
    if id(fields) in holders(fields, _TENSORS):
        raise ForeignError(f"{kind_of(call)} with tensors in it")
    return DictNode(name, fields.pairs, call)


def _is_dict(value: Any) -> bool:
    return type(value) is DictNode and value.kind == "dict"


def _fields(call: Call) -> list[Any]:
    return [None if call.state is ABSENT else call.state]


def _member(call: Call, _: Any, __: Decoding) -> Constant:
    value = call.arguments[0]
    members = ENUMS[call.function.module, call.function.name]
    if not plain(call) or type(value) not in (int, str) or value not in members:
        raise ForeignError("a member of an enum that is not known here")
    return Constant("enum", f"{call.function.name}.{members[value]}", call)


DECODERS: Table = {
    **{(*name, "newobj", 0): Decoder(_namespace, _fields) for name in OBJECTS.values()},
    **{(*name, "reduce", 1): Decoder(_member) for name in ENUMS},
}
