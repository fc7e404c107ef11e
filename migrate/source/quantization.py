"""What a checkpoint's configuration says of number formats, in one form for all of them.

`quantization_config` of `config.json` (compressed-tensors, transformers' FP8, GPTQ, AWQ, MXFP4,
bitsandbytes, torchao, ModelOpt's copy) and ModelOpt's `hf_quant_config.json` all say which modules
are encoded and how. Here they become a `Scheme` for each module: what is not said is None, and
nothing is made up. A checkpoint need not be what its configuration says; `contradiction` has the
words.

Where the fields come from: compressed-tensors 0.20 (`quantization/quant_args.py`,
`quant_config.py`), transformers 5.23 (`utils/quantization_config.py`), GPTQModel 7.7
(`quantization/config.py`, `dynamic_get`), ModelOpt 0.47 (`torch/export/convert_hf_config.py`),
torchao 0.18 (`core/config.py`, `quantization/quant_api.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

from ..core.errors import fail, printable
from ..core.regexes import Regexes
from .module_lists import (
    COMPRESSED_TENSORS,
    CONFIG,
    MODELOPT,
    MODELOPT_CONFIG,
    QUANTIZATION,
    TRANSFORMERS,
    ModuleList,
    RegexError,
    is_class,
)

_MOST_BITS, _MOST_SIZE = 16, 2**31 - 1


class Scheme(NamedTuple):
    """How the weights of some modules are stored. None: the configuration does not say."""

    # as codecs are called
    format: str | None
    bits: int | None = None
    # elements along the input axis that share a scale
    group: int | None = None
    # rows and columns that share a scale
    block: tuple[int, int] | None = None
    # tensor, channel, group or block: what has a scale of its own
    granularity: str | None = None
    symmetric: bool | None = None
    # which of several layouts: v1, v2; gemm, gemv; nf4, fp4; modelopt, compressed-tensors
    form: str | None = None
    # whether columns of a group lie apart, so that a part has to name the group of each
    indexed: bool | None = None
    # whether scales are codes that have scales of their own
    nested: bool | None = None
    # where it stands, for messages
    place: str = ""
    # the modules are named one by one or by a pattern, so none of them can be another kind of layer
    named: bool = False
    # what the configuration calls a format of which tensors tell everything
    called: str | None = None


@dataclass(frozen=True, slots=True)
class Quantization:
    """What one configuration says of all modules."""

    # as `quant_method` has it
    method: str
    place: str
    # those that are named, by what selects them; the first that does counts
    chosen: tuple[tuple[Callable[[str], bool], Scheme | None], ...] = ()
    # all others; None: they stay plain
    rest: Scheme | None = None
    # every scheme, each once
    schemes: tuple[Scheme, ...] = ()
    # what another file says of the same checkpoint
    beside: Quantization | None = None

    def scheme_of(self, module: str) -> Scheme | None:
        """How the module is stored, if it is of a kind that is encoded; None if it stays plain."""
        for selects, scheme in self.chosen:
            if selects(module):
                return scheme
        return self.rest


def read_quantization(
    value: Callable[[str], Mapping[str, Any] | None],
) -> Quantization | None:
    """What the configuration says, None if there is none.

    `value` answers with the JSON object in a side file, None if the file is not there. What
    `config.json` says counts, and what ModelOpt's own file says is `beside` it. M513, with the
    place, for anything that its library would not write.
    """
    config, other = value(CONFIG), value(MODELOPT_CONFIG)
    found = None
    if config is not None:
        found = _in_config(_Object(config, CONFIG)) or _in_config(
            _Object(config, CONFIG).part("text_config", "#")
        )
    if other is None:
        return found
    beside = _modelopt(_Object(other, MODELOPT_CONFIG).part("quantization", "#"), "modelopt")
    return beside if found is None else replace(found, beside=beside)


def describe(scheme: Scheme | None) -> str:
    """The scheme in words, without its place."""
    if scheme is None:
        return "plain"
    size = f"{scheme.bits} bits" if scheme.bits is not None else ""
    said = [scheme.format or scheme.called or "a format that is not known here", size]
    if scheme.group is not None:
        said.append(f"groups of {scheme.group}")
    if scheme.block is not None:
        said.append(f"blocks of {scheme.block[0]} x {scheme.block[1]}")
    if scheme.granularity in ("tensor", "channel"):
        said.append(f"a scale for each {scheme.granularity}")
    if scheme.symmetric is not None:
        said.append("symmetric" if scheme.symmetric else "with zero points")
    said.append(scheme.form or "")
    if scheme.indexed is not None:
        said.append("columns sorted by their groups" if scheme.indexed else "no g_idx")
    if scheme.nested is not None:
        said.append("scales quantized again" if scheme.nested else "scales not quantized")
    return ", ".join(word for word in said if word)


def contradiction(module: str, said: Scheme | None, found: Scheme | None) -> str | None:
    """A sentence with both readings where a configuration and tensors differ, else None.

    What one of them does not say is not compared. A plain module contradicts a scheme only where
    it is named: layers of other kinds are not encoded, and keys do not show kinds.
    """
    if said is None or found is None:
        apart = (said is None) is not (found is None) and (said is None or said.named)
    else:
        apart = any(
            one is not None and other is not None and one != other
            for one, other in zip(said[:-3], found[:-3], strict=True)
        )
    if not apart:
        return None
    who = said.place if said is not None and said.place else "the configuration"
    return f"{printable(module)} is {describe(found)} by its tensors, and {describe(said)} by {who}"


class _Object:
    """An object of a configuration, whose values are asked for by type. M513 for another type."""

    def __init__(self, value: Any, place: str) -> None:
        self.place = place
        self.value: Mapping[str, Any] = value if value is not None else {}
        if not isinstance(self.value, Mapping):
            self.refuse(None, value, "an object is expected")

    def __contains__(self, name: str) -> bool:
        return self.value.get(name) is not None

    def refuse(self, name: str | None, value: Any, wanted: str) -> NoReturn:
        place = self.place if name is None else f"{self.place}.{name}"
        kind = (
            "an object"
            if isinstance(value, Mapping)
            else "a list"
            if isinstance(value, (list, tuple))
            else repr(value)
        )
        fail(
            "M513",
            f"{printable(place, 300)} is {printable(kind, 80)}; {wanted}",
            help="the configuration was written by hand, or by a program that is not known here; "
            "correct it there",
        )

    def part(self, name: str, joint: str = ".") -> _Object:
        """The object below `name`; an empty one if there is none."""
        return _Object(self.value.get(name), f"{self.place}{joint}{name}")

    def parts(self, name: str) -> list[tuple[str, _Object]]:
        """(name, object) of each below `name`."""
        below = self.part(name)
        return [(str(n), below.part(n)) for n in below.value]

    def integer(self, *names: str, least: int = 1, most: int = _MOST_SIZE) -> int | None:
        """The integer at the first of the names that has one."""
        for name in names:
            value = self.value.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                self.refuse(name, value, f"an integer from {least} to {most} is expected")
            return value
        return None

    def text(self, *names: str) -> str | None:
        for name in names:
            value = self.value.get(name)
            if value is None:
                continue
            if not isinstance(value, str):
                self.refuse(name, value, "text is expected")
            return value.lower()
        return None

    def truth(self, name: str) -> bool | None:
        value = self.value.get(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, value, "true or false is expected")
        return value

    def names(self, *names: str) -> list[str]:
        """The list of texts at the first of the names that has one; empty if there is none."""
        for name in names:
            value = self.value.get(name)
            if value is None:
                continue
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                self.refuse(name, value, "a list of names is expected")
            return value
        return []

    def sizes(self, name: str) -> tuple[int, int] | None:
        """Two positive integers, as a list or as `128x128`."""
        value = self.value.get(name)
        if value is None:
            return None
        two = value
        if isinstance(value, str):
            two = [int(n) if n.isascii() and n.isdecimal() else n for n in value.split("x")]
        if (
            not isinstance(two, list)
            or len(two) != 2
            or not all(type(n) is int and 0 < n <= _MOST_SIZE for n in two)
        ):
            self.refuse(name, value, "two sizes of a block are expected")
        return two[0], two[1]


def _selector(items: Sequence[str], library: str, place: str) -> Callable[[str], bool]:
    try:
        return ModuleList(items, library).selects
    except RegexError as error:
        _refuse_expression(place, error)


def _refuse_expression(place: str, error: RegexError) -> NoReturn:
    fail(
        "M513",
        f"{printable(place, 300)}: the expression {printable(str(error), 400)}",
        help="it cannot be read in one pass over a name; list the modules that it means",
    )


def _made(
    method: str,
    place: str,
    rest: Scheme | None,
    chosen: Sequence[tuple[Callable[[str], bool], Scheme | None]] = (),
) -> Quantization:
    schemes = dict.fromkeys([scheme for _, scheme in chosen] + [rest])
    return Quantization(
        method, place, tuple(chosen), rest, tuple(s for s in schemes if s is not None)
    )


def _in_config(config: _Object) -> Quantization | None:
    joint = "." if "#" in config.place else "#"
    name = next((name for name in QUANTIZATION if name in config), None)
    if name is None:
        return None
    here = config.part(name, joint)
    method = here.text("quant_method", "quantization_method") or (
        COMPRESSED_TENSORS if "config_groups" in here else ""
    )
    if method.startswith("modelopt"):
        inner = here.part("quantization") if "quantization" in here else here
        return _modelopt(inner, method)
    if method == "fp8" and "expert_dtype" not in here:
        # DeepSeek-V4 says it of the model, and not of the format
        nested = config.value.get("text_config")
        models = (config.value, nested if isinstance(nested, Mapping) else {})
        experts = next((m["expert_dtype"] for m in models if m.get("expert_dtype")), None)
        here = _Object({**here.value, "expert_dtype": experts}, here.place)
    reader = _READERS.get(method)
    if reader is None:
        return Quantization(method, here.place, rest=Scheme(None, place=here.place))
    return reader(here, method)


def _compressed_tensors(here: _Object, method: str) -> Quantization:
    overall = here.text("format")
    # of what is left out too, tensors tell which modules it is and how the others are stored
    pruned: Scheme | None = None
    if (sparse := here.part("sparsity_config").text("format")) not in (None, "dense"):
        pruned = Scheme(None, place=f"{here.place}.sparsity_config", called=sparse)
    exact: list[tuple[Callable[[str], bool], Scheme | None]] = []
    found: list[tuple[str, Scheme | None]] = []
    classes: list[tuple[str, Scheme | None]] = []
    for _, group in here.parts("config_groups"):
        scheme = None
        if "weights" in group:
            scheme = _weights(group.part("weights"), group.text("format") or overall)
        if scheme is not None and pruned is not None:
            scheme = pruned
        targets = group.names("targets")
        plain = [t for t in targets if not t.startswith("re:") and not is_class(t)]
        named = scheme._replace(named=True) if scheme is not None else None
        if plain:
            exact.append((frozenset(plain).__contains__, named))
        found += [(t, named) for t in targets if t.startswith("re:")]
        classes += [(t, scheme) for t in targets if is_class(t)]
    # a name counts before an expression, expressions in their order as texts, classes last
    ignored = _selector(here.names("ignore"), COMPRESSED_TENSORS, f"{here.place}.ignore")
    chosen: list[tuple[Callable[[str], bool], Scheme | None]] = [(ignored, None), *exact]
    for text, scheme in sorted(found, key=lambda pair: pair[0]):
        chosen.append((_selector([text], COMPRESSED_TENSORS, here.place), scheme))
    # of several kinds of layers those that hold nearly all weights
    rest = dict(reversed(classes)).get("Linear", classes[0][1] if classes else pruned)
    return _made(method, here.place, rest, chosen)


def _weights(args: _Object, form: str | None) -> Scheme | None:
    """`weights` of a group, with the defaults of `QuantizationArgs`."""
    if form == "dense":
        return None
    bits = args.integer("num_bits", most=_MOST_BITS) or 8
    kind = args.text("type") or "int"
    if kind not in ("int", "float"):
        args.refuse("type", args.value["type"], "int or float is expected")
    group = args.integer("group_size", least=-1)
    strategy = args.text("strategy")
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    group = group if group is not None and group > 0 else None
    symmetric = args.truth("symmetric")
    symmetric = True if symmetric is None else symmetric
    block = args.sizes("block_structure")
    granularity = strategy if strategy in ("tensor", "channel", "block") else "group"
    if group is None and granularity == "group":
        args.refuse("group_size", args.value.get("group_size"), "a size of groups is expected")
    name: str | None = None
    if kind == "float":
        symmetric_of = None
        if bits == 8:
            name = {"block": "fp8-block", "group": "mxfp8"}.get(granularity, "fp8")
        elif bits == 6:
            name = "mxfp6"
        elif bits == 4:
            name = "mxfp4" if group == 32 or (form or "").startswith("mxfp4") else "nvfp4"
    else:
        symmetric_of = symmetric
        packed = form == "pack-quantized" or (form is None and bits < 8)
        name = "marlin-24" if form == "marlin-24" else "int-pack" if packed else "int8"
    return Scheme(
        name,
        bits,
        group,
        block if granularity == "block" else None,
        granularity,
        symmetric_of,
        COMPRESSED_TENSORS if name in ("nvfp4", "fp8") else None,
        _sorted(name == "int-pack" and group is not None and args.value.get("actorder")),
        place=args.place,
    )


def _sorted(said: Any) -> bool | None:
    """True where groups are of columns sorted by how much they matter; of what says less, None."""
    return True if said is True or said in ("group", "dynamic") else None


# quant_algo -> format, bits, size of groups, what has a scale, form
_ALGORITHMS: dict[str, tuple[str, int, int | None, str, str | None]] = {
    "fp8": ("fp8", 8, None, "tensor", None),
    "fp8_per_channel_per_token": ("fp8", 8, None, "channel", None),
    "fp8_pb_wo": ("fp8-block", 8, None, "block", None),
    "fp8_pb_real": ("fp8-block", 8, None, "block", None),
    "nvfp4": ("nvfp4", 4, 16, "group", MODELOPT),
    "nvfp4_awq": ("nvfp4", 4, 16, "group", MODELOPT),
    "nvfp4_svd": ("nvfp4", 4, 16, "group", MODELOPT),
    "nvfp4_svdquant": ("nvfp4", 4, 16, "group", MODELOPT),
    "w4a16_nvfp4": ("nvfp4", 4, 16, "group", MODELOPT),
    "w4a8_nvfp4_fp8": ("nvfp4", 4, 16, "group", MODELOPT),
    "mxfp4": ("mxfp4", 4, 32, "group", None),
    "w4a8_mxfp4_fp8": ("mxfp4", 4, 32, "group", None),
    "mxfp8": ("mxfp8", 8, 32, "group", None),
    "w4a16_awq": ("int4-rows", 4, 128, "group", None),
    "int4_awq": ("int4-rows", 4, 128, "group", None),
    "w4a8_awq": ("int4-rows", 4, 128, "group", None),
    "w8a16": ("int8", 8, None, "channel", None),
    "w8a8_sq_per_channel": ("int8", 8, None, "channel", None),
    "int8_wo": ("int8", 8, None, "channel", None),
    "int8_sq": ("int8", 8, None, "channel", None),
}


def _modelopt(here: _Object, method: str) -> Quantization:
    excluded = "exclude_modules" if "exclude_modules" in here else "ignore"
    plain = _selector(here.names(excluded), MODELOPT, f"{here.place}.{excluded}")
    algorithm = here.text("quant_algo")
    chosen: list[tuple[Callable[[str], bool], Scheme | None]] = [(plain, None)]
    if algorithm != "mixed_precision":
        rest = None if algorithm is None else _algorithm(here, algorithm)
        return _made(method, here.place, rest, chosen)
    by_scheme: dict[Scheme | None, set[str]] = {}
    for name, layer in here.parts("quantized_layers"):
        one = layer.text("quant_algo")
        scheme = _algorithm(layer, one)._replace(place=f"{here.place}.quantized_layers", named=True)
        by_scheme.setdefault(scheme if one is not None else None, set()).add(name)
    chosen += [(frozenset(names).__contains__, scheme) for scheme, names in by_scheme.items()]
    return _made(method, here.place, None, chosen)


def _algorithm(here: _Object, algorithm: str | None) -> Scheme:
    known = _ALGORITHMS.get(algorithm or "")
    if known is None:
        return Scheme(None, place=here.place)
    name, bits, group, granularity, form = known
    said = here.integer("group_size", least=0)
    return Scheme(
        name,
        bits,
        None if group is None else said or group,
        (128, 128) if name == "fp8-block" else None,
        granularity,
        None,
        form,
        place=here.place,
    )


def _fp8(here: _Object, method: str) -> Quantization:
    block = here.sizes("weight_block_size")
    name: str | None
    fmt = here.text("fmt")
    if fmt not in (None, "e4m3", "float8_e4m3fn", "e5m2", "float8_e5m2"):
        here.refuse("fmt", here.value["fmt"], "e4m3 or e5m2 is expected")
    name = "fp8-block" if block else "fp8"
    if "weight_block_size" not in here.value:
        # transformers takes blocks of 128 then, vLLM one scale for each tensor
        name = None
    rest = Scheme(name, 8, None, block, "block" if block else None, place=here.place)
    if block == (1, 32):
        # MXFP8 in the words of blocks, as MiniMax-M3 has it
        rest = Scheme("mxfp8", 8, 32, None, "group", place=here.place)
    chosen = _skipped(here, "modules_to_not_convert", "ignored_layers")
    if here.text("expert_dtype") == "fp4":
        experts = Scheme("mxfp4", 4, 32, None, "group", place=f"{here.place}.expert_dtype")
        chosen.append((lambda module: "experts" in module.split("."), experts))
    return _made(method, here.place, rest, chosen)


def _skipped(here: _Object, *names: str) -> list[tuple[Callable[[str], bool], Scheme | None]]:
    """The modules that transformers leaves as they are."""
    name = next((name for name in names if name in here), names[0])
    return [(_selector(here.names(name), TRANSFORMERS, f"{here.place}.{name}"), None)]


def _group(here: _Object, *names: str) -> tuple[int | None, str | None]:
    """(size of groups, what has a scale): -1 is the whole input axis."""
    size = here.integer(*names, least=-1)
    if size == 0:
        here.refuse(names[0], 0, "a size of groups or -1 is expected")
    return (None, "channel") if size == -1 else (size, None if size is None else "group")


def _gptq(here: _Object, method: str) -> Quantization:
    form = here.text("checkpoint_format", "format") or "gptq"
    group, granularity = _group(here, "group_size")
    bits = here.integer("bits", most=_MOST_BITS)
    rest = Scheme(
        "gptq", bits, group, None, granularity, here.truth("sym"),
        {"gptq": "v1", "gptq_v2": "v2"}.get(form),
        _sorted(group is not None and here.truth("desc_act")), place=here.place,
    )  # fmt: skip
    chosen: list[tuple[Callable[[str], bool], Scheme | None]] = []
    for pattern, other in here.parts("dynamic"):
        place = f"{here.place}.dynamic"
        scheme: Scheme | None = None
        if not pattern.startswith("-:"):
            size, kind = _group(other, "group_size")
            sym = other.truth("sym")
            scheme = rest._replace(
                bits=other.integer("bits", most=_MOST_BITS) or bits,
                group=size if kind else group,
                granularity=kind or granularity,
                symmetric=rest.symmetric if sym is None else sym,
                place=f"{place}.{pattern}",
            )
        text = pattern.removeprefix("-:").removeprefix("+:")
        try:
            chosen.append((Regexes([text]).match, scheme))
        except RegexError as error:
            _refuse_expression(place, error)
    if not here.truth("lm_head"):
        chosen.append((_ends_in(["lm_head"]), None))
    if "modules_in_block_to_quantize" in here:
        inside = here.value["modules_in_block_to_quantize"]
        flat = [n for row in inside if isinstance(row, list) for n in row] if isinstance(
            inside, list
        ) else None  # fmt: skip
        if flat is None or not all(isinstance(name, str) for name in flat):
            here.refuse("modules_in_block_to_quantize", inside, "lists of names are expected")
        chosen.append((_ends_in(flat), rest))
        return _made(method, here.place, None, chosen)
    return _made(method, here.place, rest, chosen)


def _ends_in(names: Sequence[str]) -> Callable[[str], bool]:
    ends = tuple(f".{name}" for name in names)
    return lambda module: f".{module}".endswith(ends)


def _awq(here: _Object, method: str) -> Quantization:
    group, granularity = _group(here, "group_size", "q_group_size")
    zero = here.truth("zero_point")
    rest = Scheme(
        "awq",
        here.integer("bits", "w_bit", most=_MOST_BITS),
        group,
        None,
        granularity,
        None if zero is None else not zero,
        form if (form := here.text("version", "format")) in ("gemm", "gemv") else None,
        place=here.place,
    )
    return _made(method, here.place, rest, _skipped(here, "modules_to_not_convert"))


def _mxfp4(here: _Object, method: str) -> Quantization:
    rest = Scheme("mxfp4", 4, 32, None, "group", place=here.place)
    return _made(method, here.place, rest, _skipped(here, "modules_to_not_convert"))


def _bitsandbytes(here: _Object, method: str) -> Quantization:
    four = here.truth("load_in_4bit") or here.truth("_load_in_4bit")
    eight = here.truth("load_in_8bit") or here.truth("_load_in_8bit")
    if four and eight:
        here.refuse("load_in_8bit", True, "load_in_4bit is true as well, and only one can be")
    rest = None
    if four:
        kind = here.text("bnb_4bit_quant_type")
        nested = here.truth("bnb_4bit_use_double_quant")
        rest = Scheme("bnb-4bit", 4, form=kind or "fp4", nested=nested, place=here.place)
    elif eight:
        rest = Scheme("bnb-int8", 8, granularity="channel", place=here.place)
    return _made(method, here.place, rest, _skipped(here, "llm_int8_skip_modules"))


# torchao's configurations by the name of their class: format, bits
_OF_TORCHAO: dict[str, tuple[str | None, int]] = {
    "float8weightonlyconfig": ("fp8", 8),
    "float8dynamicactivationfloat8weightconfig": ("fp8", 8),
    "int8weightonlyconfig": ("int8", 8),
    "int8dynamicactivationint8weightconfig": ("int8", 8),
    "int8staticactivationint8weightconfig": ("int8", 8),
    # of up to 8 bits, each in a byte
    "intxweightonlyconfig": ("int8", 8),
    "int8dynamicactivationintxweightconfig": ("int8", 8),
    # how codes lie depends on the device that they were made for
    "int4weightonlyconfig": (None, 4),
    "float8dynamicactivationint4weightconfig": (None, 4),
    "mxdynamicactivationmxweightconfig": ("mxfp8", 8),
    "nvfp4weightonlyconfig": ("nvfp4", 4),
    "nvfp4dynamicactivationnvfp4weightconfig": ("nvfp4", 4),
}
_GRANULARITIES = {
    "perrow": "channel", "peraxis": "channel", "pertensor": "tensor", "pergroup": "group",
}  # fmt: skip
_BY_NAME = ("fqntoconfig", "modulefqntoconfig")
_DEFAULT = "_default"


def _torchao(here: _Object, method: str) -> Quantization:
    """`quant_type`, which is one configuration under `default`; a text there is of old releases."""
    if not isinstance(here.value.get("quant_type"), Mapping):
        return _made(method, here.place, Scheme(None, place=here.place))
    kinds = here.part("quant_type")
    if list(kinds.value) != ["default"]:
        here.refuse("quant_type", kinds.value, "one configuration, under `default`, is expected")
    kind, chosen = kinds.part("default"), _skipped(here, "modules_to_not_convert")
    if kind.text("_type") not in _BY_NAME:
        return _made(method, here.place, _torchao_scheme(kind), chosen)
    data = kind.part("_data")
    name = next((n for n in ("fqn_to_config", "module_fqn_to_config") if data.value.get(n)), "")
    named = data.parts(name) if name else []
    exact: dict[Scheme | None, set[str]] = {}
    matched: list[tuple[Regexes, Scheme | None]] = []
    rest = None
    for text, one in named:
        scheme = _torchao_scheme(one) if one.value else None
        if text == _DEFAULT:
            rest = scheme
            continue
        if scheme is not None:
            scheme = scheme._replace(place=f"{data.place}.{name}", named=True)
        if not text.startswith("re:"):
            exact.setdefault(scheme, set()).add(text)
            continue
        try:
            matched.append((Regexes([text.removeprefix("re:")]), scheme))
        except RegexError as error:
            _refuse_expression(one.place, error)
    # names before expressions, and each of parameters before modules
    for end in (".weight", ""):
        chosen += [(_named_so(frozenset(names), end), scheme) for scheme, names in exact.items()]
    for end in (".weight", ""):
        chosen += [(_matched_whole(expression, end), scheme) for expression, scheme in matched]
    return _made(method, here.place, rest, chosen)


def _named_so(names: frozenset[str], end: str) -> Callable[[str], bool]:
    return lambda module: module + end in names


def _matched_whole(expression: Regexes, end: str) -> Callable[[str], bool]:
    return lambda module: len(module + end) in expression.ends(module + end)


def _torchao_scheme(kind: _Object) -> Scheme:
    data = kind.part("_data")
    name, bits = _OF_TORCHAO.get(kind.text("_type") or "", (None, None))
    if name is None:
        return Scheme(None, bits, data.integer("group_size") if bits else None, place=kind.place)
    if name == "mxfp8" and data.part("weight_dtype").text("_data") == "float4_e2m1fn_x2":
        name, bits = "mxfp4", 4
    if name in ("mxfp8", "mxfp4", "nvfp4"):
        each = 16 if name == "nvfp4" else data.integer("block_size") or 32
        return Scheme(name, bits, each, None, "group", place=kind.place)
    said, form = data.value.get("granularity"), data.part("intx_packing_format").text("_data")
    if form not in (None, "unpacked_to_int8"):
        # words for the kernels of one processor
        return Scheme(None, bits, place=kind.place)
    said = data.value.get("weight_granularity", said)
    # of activations and of weights
    if isinstance(said, list) and len(said) == 2:
        said = said[1]
    of = _Object(said, f"{data.place}.granularity")
    granularity = _GRANULARITIES.get(of.text("_type") or "")
    if of.text("_type") == "perblock":
        block = of.part("_data").sizes("block_size")
        return Scheme("fp8-block" if name == "fp8" else None, bits, None, block, "block",
                      place=kind.place)  # fmt: skip
    size = of.part("_data").integer("group_size") if granularity == "group" else None
    return Scheme(name, bits, size, None, granularity, place=kind.place)


_READERS: dict[str, Callable[[_Object, str], Quantization]] = {
    COMPRESSED_TENSORS: _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
}
