"""Parameters of a live module that are objects made of tensors: quantized weights of Transformer
Engine and torchao.

A checkpoint has such a weight as the components that it consists of (`w._rowwise_data`,
`w._rowwise_scale_inv`, …). Where the parameter is in the same encoding, the bytes of each component
go into the tensor that the parameter has for it: the parameter stays the object that it is, in the
memory that it has. Any other way into it is its own `copy_`, which quantizes anew and is a loss.

A component that only one side has is another usage of the same numbers (the transpose that a
backward pass multiplies with). What the parameter has and the checkpoint lacks is derived where
copying determines it, that is where blocks are square or the whole tensor has one scale; what the
checkpoint has and the parameter lacks is left out, which is no loss in the same cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core import view as views
from ..core.errors import Diagnostic, Report, listed, plural, printable
from ..core.spec import BITS, Spec
from ..core.templates import list_collapsed
from ..core.view import TooManyPieces
from ..elements.raw import is_dtensor, is_plain_class
from ..formats.memory import dense
from ..planning.graph import stored_keys
from ..source.component_boxes import Box, component_of, uncut
from ..source.pickle.quantized_tensors import CLASSES, FORMATS, MODULES, QUANTIZERS
from ..source.pickle.te_grouped import in_members
from ..source.pickle.tree import NEW, NUMBERINGS, PARAMETER, Composite, Encoding, ask
from ..source.torn_tensors import REQUANTIZE
from ..source.tree import CheckpointTree, resolve_objects
from .module import Slot, spec_of

if TYPE_CHECKING:
    import torch

    from ..planning.graph import Tensor
    from ..planning.request import Request
    from ..source.index import Index

# what of an object's settings decides what its bytes mean, beyond the shapes of its components
_SETTINGS = (
    "is_2D_scaled",
    "with_2d_quantization",
    "with_gemm_swizzled_scales",
    "row_scaled_nvfp4",
    "nvfp4_use_4over6",
    "nvfp4_e4m3_max",
    "data_format",
    "is_swizzled_scales",
)
# what is meant where a release had no such setting
_DEFAULTS: dict[str, Any] = {"nvfp4_e4m3_max": 448}
_NUMBERS = {
    "kFloat8E4M3": "float8_e4m3fn",
    "kFloat8E5M2": "float8_e5m2",
    "kFloat4E2M1": "float4_e2m1fn",
}
# each the other usage of the same numbers
_ROWWISE = frozenset({"_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise", "_data"})
_COLUMNWISE = frozenset(
    {"_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise", "_transpose"}
)
_RIDERS = "_quantizer."
# bits of an element that is a code rather than a number
_CODE = 8


@dataclass(frozen=True, slots=True)
class QuantizedTarget:
    """A live quantized tensor: its class, and the tensors that it is made of by attribute.

    `format` is a word such as "te-mxfp8", `number` the dtype of one stored number, both None if the
    class is not known. `settings` decide what the bytes mean. `members` > 0: a group of so many,
    whose components are stacks of theirs, each a view of the run among `runs`.
    """

    value: Any
    cls: str
    format: str | None
    number: str | None
    components: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    members: int = 0
    runs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def takes_dense(self) -> bool:
        """Whether the class copies plain tensors into itself; those of torchao do not."""
        return self.format is None or not self.format.startswith("ao-")

    @property
    def copies(self) -> bool:
        """Whether its own `copy_` takes the numbers of a tensor in any encoding."""
        return self.takes_dense and self.format is not None and not self.members

    @property
    def square(self) -> bool:
        """Whether both usages have the same scales, so that one determines the other."""
        return not self.members and (
            self.format == "te-fp8"
            or (self.format == "te-fp8-block" and bool(self.settings.get("is_2D_scaled")))
            or (
                self.format in ("te-mxfp8", "te-nvfp4")
                and bool(self.settings.get("with_2d_quantization"))
                and not self.settings.get("with_gemm_swizzled_scales")
                and not self.settings.get("row_scaled_nvfp4")
            )
        )


def held(value: Any) -> QuantizedTarget | None:
    """What a tensor is made of that keeps its numbers in another format; None for any other.

    Of a DTensor it is the part that is here.
    """
    import torch

    if value is None or is_plain_class(value) or torch.nn.parameter.is_lazy(value):
        return None
    if is_dtensor(value):
        value = value._local_tensor
        if is_plain_class(value):
            return None
    components = _components(value)
    if not components or dense(value):
        return None
    known, name = _known(type(value))
    if known is None and name == "GroupedTensor":
        return _group(value, components)
    if known is None:
        return QuantizedTarget(value, name, None, None, components)
    stale = getattr(value, "_transpose_invalid", False) is True
    if stale:
        components.pop("_transpose", None)
    said = _said(value)
    settings = {key: said[key] for key in _SETTINGS if said.get(key) is not None}
    return QuantizedTarget(
        value, name, known, _number(known, components, said), components, settings
    )


def _group(value: Any, runs: Mapping[str, Any]) -> QuantizedTarget:
    """A GroupedTensor by the components that its members have, each a stack over its run."""
    quantizer, count = getattr(value, "quantizer", None), int(getattr(value, "num_tensors", 0))
    cls = QUANTIZERS.get(type(quantizer).__name__)
    unknown = QuantizedTarget(value, "GroupedTensor", None, None, runs)
    shapes = {tuple(shape) for shape in getattr(value, "tensor_shapes", None) or ()}
    if cls is None or count < 1 or len(shapes) != 1:
        return unknown
    (member,) = shapes
    said = _said(value)
    for name, setting in vars(quantizer).items():
        said.setdefault(name.lstrip("_"), setting)
    components, of = {}, {}
    for run, one in runs.items():
        each = one.numel() // count
        two = said.get("block_scaling_dim") != 1
        found = in_members(cls, run, member, each, two)
        if found is None or one.numel() % count or not one.is_contiguous():
            return unknown
        components[found[0]], of[found[0]] = one.view(count, *found[1]), one
    if cls == "Float8BlockwiseQTensor":
        said["is_2D_scaled"] = said.get("block_scaling_dim") == 2
    code = getattr(quantizer, "dtype", None)
    number = _NUMBERS.get(getattr(code, "name", ""))
    if number is None and code is not None:
        number = NUMBERINGS[NEW].get(int(getattr(code, "value", code)))
    settings = {key: said[key] for key in _SETTINGS if said.get(key) is not None}
    return QuantizedTarget(
        value, "GroupedTensor", FORMATS[cls], number, components, settings, count, of
    )


def _components(value: Any) -> dict[str, Any]:
    """The tensors that a wrapper is made of; empty for what has memory of its own."""
    import torch

    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is not None:
        names = flatten()[0]
    elif not value.is_meta and value.numel() and not _has_memory(value):
        names = [name for name, one in vars(value).items() if isinstance(one, torch.Tensor)]
    else:
        return {}
    found = {name: getattr(value, name, None) for name in names}
    return {name: one for name, one in found.items() if isinstance(one, torch.Tensor)}


def _has_memory(value: Any) -> bool:
    try:
        return bool(value.data_ptr())
    except RuntimeError:
        # classes of some releases raise where they have none
        return False


def _known(kind: type) -> tuple[str | None, str]:
    """The format of a class, and its name."""
    for base in kind.__mro__:
        if base.__module__ in MODULES.get(base.__name__, ()):
            return FORMATS[base.__name__], base.__name__
        if (base.__module__, base.__name__) in CLASSES:
            return CLASSES[base.__module__, base.__name__].format, base.__name__
    return None, kind.__qualname__


def _said(value: Any) -> dict[str, Any]:
    """The settings of a tensor and, behind them, of its quantizer."""
    out: dict[str, Any] = {}
    for owner in (value, getattr(value, "_quantizer", None)):
        for name, setting in vars(owner).items() if hasattr(owner, "__dict__") else ():
            out.setdefault(name.lstrip("_"), setting)
    return out


def _number(form: str, components: Mapping[str, Any], said: Mapping[str, Any]) -> str | None:
    if form.startswith("ao-"):
        for key in ("elem_dtype", "target_dtype"):
            if said.get(key) is not None:
                return str(said[key]).removeprefix("torch.").removesuffix("_x2")
        fixed = next((c.number for c in CLASSES.values() if c.format == form), None)
        return fixed or str(components["qdata"].dtype).removeprefix("torch.")
    code = said.get("fp8_dtype", said.get("fp4_dtype"))
    named = _NUMBERS.get(getattr(code, "name", ""))
    if named is not None or code is None:
        return named
    return NUMBERINGS[NEW].get(int(getattr(code, "value", code)))


def unlike(
    one: QuantizedTarget, form: str, number: str | None, settings: Mapping[str, Any]
) -> list[str]:
    """What makes another encoding of it, for people; empty where it is the same."""
    if one.format != form:
        return [f"{form}, the parameter's is {one.format or one.cls}"]
    found = []
    if number is not None and one.number is not None and number != one.number:
        found.append(f"{number}, the parameter's is {one.number}")
    for name in _SETTINGS:
        a, b = settings.get(name), one.settings.get(name)
        # a quantizer is a recipe for the next weights; without one nothing is said
        if name == "with_2d_quantization" and (a is None or b is None):
            continue
        a, b = (_DEFAULTS.get(name, False) if x is None else getattr(x, "value", x) for x in (a, b))
        if a != b:
            found.append(f"{name} is {a}, the parameter's is {b}")
    return found


def copy_alike(value: Any, target: Any) -> bool:
    """Copies the components of a tensor into those of another in the same encoding; False if they
    are not, or not all of them can be had.
    """
    ways = _ways(held(value), held(target))
    if ways is None:
        return False
    into, given, derived = ways
    for name, inner in into.components.items():
        if name in given.components:
            inner.copy_(given.components[name])
    derive(into, derived)
    return True


def is_alike(value: Any, target: Any, *, whole: bool = False) -> bool:
    """Whether `copy_alike` can copy the one into the other without losing anything of it; with
    `whole` also whether they have the same components, which their own `copy_` asks for.
    """
    ways = _ways(held(value), held(target))
    if ways is None or not whole:
        return ways is not None
    return ways[0].components.keys() == ways[1].components.keys()


def requantized(value: Any, target: Any, *, whole: bool = False) -> QuantizedTarget | None:
    """What the target is made of if it would quantize the value anew, None if nothing is lost.
    `value` is an object to copy, None for a plain tensor; `whole` as for `is_alike`.
    """
    one = held(target)
    return None if one is None or is_alike(value, target, whole=whole) else one


def _ways(
    given: QuantizedTarget | None, into: QuantizedTarget | None
) -> tuple[QuantizedTarget, QuantizedTarget, frozenset[str]] | None:
    if given is None or into is None or given.format is None or given.number is None:
        return None
    if unlike(into, given.format, given.number, given.settings):
        return None
    missing = into.components.keys() - given.components.keys()
    left = given.components.keys() - into.components.keys()
    if (missing and not derivable(into, missing, given.components)) or (left and not into.square):
        return None
    if any(
        (one.shape, one.dtype) != (given.components[name].shape, given.components[name].dtype)
        for name, one in into.components.items()
        if name in given.components
    ):
        return None
    return into, given, frozenset(missing)


def derivable(one: QuantizedTarget, missing: Iterable[str], given: Iterable[str]) -> bool:
    """Whether copying the components that are `given` determines those that are missing."""
    missing, there = set(missing), set(given)
    if not one.square:
        return False
    for own, other in ((_COLUMNWISE, _ROWWISE), (_ROWWISE, _COLUMNWISE)):
        if missing <= own and {_other(name) for name in missing} <= there & other:
            return True
    return False


_PAIRS = (
    ("_rowwise_data", "_columnwise_data"),
    ("_rowwise_scale_inv", "_columnwise_scale_inv"),
    ("_amax_rowwise", "_amax_columnwise"),
    ("_data", "_transpose"),
)


def _other(name: str) -> str:
    """The component of the other usage."""
    return next(b if name == a else a for a, b in _PAIRS if name in (a, b))


def derive(one: QuantizedTarget, missing: Iterable[str]) -> None:
    """Fills components from those of the other usage, see `derivable`."""
    for name in missing:
        source, target = one.components[_other(name)], one.components[name]
        if "amax" in name:
            target.copy_(source)
        elif "scale" in name:
            target.zero_()
            found = _turned_scales(one, name, source)
            target[: found.shape[0], : found.shape[1]].copy_(found)
        elif one.format == "te-mxfp8":
            target.copy_(source)
        else:
            target.copy_(_turned(source, one.format == "te-nvfp4", name in _COLUMNWISE))


def _turned(data: torch.Tensor, packed: bool, forwards: bool) -> torch.Tensor:
    """The data with its last axis first, or its first one last; `packed`: two to a byte."""
    import torch

    if packed:
        data = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    data = data.movedim(-1, 0) if forwards else data.movedim(0, -1)
    if packed:
        data = data[..., ::2] | (data[..., 1::2] << 4)
    return data


def _turned_scales(one: QuantizedTarget, name: str, scales: torch.Tensor) -> torch.Tensor:
    """The scales of one usage as the other one stores them, without padding."""
    rows, last = prod(one.value.shape[:-1]), one.value.shape[-1]
    if one.format == "te-fp8-block":
        a, b = -(-rows // 128), -(-last // 128)
        return (scales[:a, :b] if name in _COLUMNWISE else scales[:b, :a]).t()
    size = 32 if one.format == "te-mxfp8" else 16
    a, b = -(-rows // size), -(-last // size)
    columnwise = name in _COLUMNWISE
    if one.format == "te-mxfp8":
        # both in the order of the tensor: [rows, columns / 32] and [rows / 32, columns]
        blocks = scales[:rows:size, :b] if columnwise else scales[:a, :last:size]
        axis, most = (1, last) if columnwise else (0, rows)
    else:
        blocks = (scales[:rows:size, :b] if columnwise else scales[:last:size, :a]).t()
        axis, most = 0, last if columnwise else rows
    return blocks.repeat_interleave(size, axis).narrow(axis, 0, most)


class Origin(NamedTuple):
    """The object that a component was stored in: its key, its encoding, the component's name."""

    key: str
    encoding: Encoding
    attribute: str


def origins(tree: CheckpointTree | None, numbering: str | None) -> dict[str, Origin]:
    """Of each stored tensor that is a component of an object, which one, by its key."""
    out: dict[str, Origin] = {}
    if tree is None:
        return out
    for rank, part in enumerate(tree.parts):
        mark = f"@{rank}" if len(tree.parts) > 1 else ""
        seen = {} if part.table is None else dict(part.table.pairs)
        for key, value in resolve_objects(part, numbering).items():
            keys = [name for name, _ in value.keys(key)]
            for name, (attribute, record) in zip(keys, value.components, strict=True):
                # one object may stand in several places; outside of what rules see it has one name
                at = f"{name}{mark}" if type(seen.get(key)) is Composite else None
                at = at or tree.names.get(id(record))
                if at is not None:
                    out[at] = Origin(key, value.encoding, attribute)
    return out


@dataclass(slots=True)
class TakenApart:
    """What becomes of the slots of quantized parameters: each component is a slot of its own.

    `cuts` has of outputs the parts that lie here, for parameters that are DTensors.
    `left` are outputs that no slot takes. `derived` has what is to be derived when all is filled:
    nothing of a part without elements, which gets its memory then. `decoded` has by slot the
    numbers of objects in another encoding, which the parameter's own `copy_` takes.
    `changed` are the parameters whose components are written, `groups` those of them that have
    members.
    """

    slots: dict[str, Slot]
    cuts: dict[str, Tensor]
    decoded: dict[str, Tensor]
    left: dict[str, None]
    derived: list[tuple[QuantizedTarget, frozenset[str]]]
    groups: list[QuantizedTarget]
    changed: list[Any]
    notes: list[str]
    problems: list[Diagnostic]

    def finish(
        self,
        real: Callable[[Any], Any] = lambda one: one,
        replaced: Callable[[Any, Any], None] = lambda whole, view: None,
    ) -> None:
        """Derives what is to be derived, after all slots are filled. `real` answers with what
        takes the place of a component on the meta device, `replaced` gets tensors there with the
        views that were filled for them.
        """
        import torch

        with torch.no_grad():
            for one, missing in self.derived:
                parts = {name: real(part) for name, part in one.components.items()}
                derive(replace(one, components=parts), missing)
        for one in self.groups:
            for name, run in one.runs.items():
                replaced(run, one.components[name])
        for value in self.changed:
            # what was saved for a backward pass is another one now
            torch.autograd.graph.increment_version(value)


def take_apart(
    slots: Mapping[str, Slot],
    outputs: Mapping[str, Tensor],
    index: Index,
    request: Request,
    boxes: Mapping[str, tuple[tuple[int, ...], Box]] | None = None,
) -> TakenApart:
    """The slots with the components of quantized parameters in their place, where the outputs have
    components for them. `boxes` has the shape of the whole tensor, and where the slot's lies in it,
    of slots that are parts; those of DTensors are known. What an object in another encoding stands
    for is one tensor in place of its components. Problems: M961 where that is not permitted, M960
    where it cannot be had and for components that are missing, M402 for those that are left out,
    M946 for parts that are not cut on borders, unless the request has them encoded anew (M401
    without permission). M955 if the dtype of one is not known.
    """
    allow = request.allow
    out = TakenApart({}, {}, {}, {}, [], [], [], [], [])
    # a tensor under several names has the same components under each
    known = {id(slot.tensor): held(slot.tensor) for slot in slots.values()}
    wanted = {
        key: one for key, slot in slots.items() if (one := known[id(slot.tensor)]) is not None
    }
    if not wanted:
        out.slots.update(slots)
        return out
    offered: dict[str, dict[str, str]] = {}
    for key in outputs:
        for prefix, attribute in _splits(key):
            offered.setdefault(prefix, {})[attribute] = key
    stored = origins(index.tree, request.params.get(PARAMETER))
    other: list[str] = []
    anew: list[str] = []
    inside: list[str] = []
    short: list[str] = []
    lost: list[str] = []
    spared: list[str] = []
    unread: dict[str, Encoding] = {}
    for key, slot in slots.items():
        one, given = wanted.get(key), offered.get(slot.plain)
        if one is None or not given or slot.plain in outputs:
            out.slots[key] = slot
            continue
        found = [
            stored[source] for name in given.values() for source in stored_keys(outputs[name])
            if source in stored
        ]  # fmt: skip
        why, differs = _judge(one, given, found, unread, slot.plain)
        why = why or _other_bits(one, given, outputs)
        if not why and not one.value.numel():
            out.left.update(dict.fromkeys(given.values()))
            out.derived.append((one, frozenset()))
            continue
        place = (boxes or {}).get(key) or (
            _place_of(slot.tensor, one) if is_dtensor(slot.tensor) else None
        )
        if not why and place is not None:
            cut = (
                place
                if isinstance(place, str)
                else _cut(one, given, outputs, found[0], place, request, out)
            )
            if cut:
                inside.append(f"{printable(slot.plain)}: {cut}")
                out.left.update(dict.fromkeys(given.values()))
                continue
        if why:
            out.left.update(dict.fromkeys(given.values()))
            made = _numbers(given, outputs, found, index) if differs and one.copies else None
            if made is None or isinstance(made, str):
                other.append(f"{printable(slot.plain)}: {why}{made or ''}")
                continue
            anew.append(f"{printable(slot.plain)}: {why}")
            if "lossy" in allow:
                out.slots[key], out.decoded[slot.plain] = slot, made
            continue
        missing = one.components.keys() - given.keys()
        if missing and not derivable(one, missing, given):
            short.append(f"{printable(slot.plain)}: {listed(sorted(missing))}")
            out.left.update(dict.fromkeys(given.values()))
            continue
        spare = [name for name in given if name not in one.components]
        if any(name not in _ROWWISE | _COLUMNWISE for name in spare if _RIDERS not in name) or (
            not one.square and any(_RIDERS not in name for name in spare)
        ):
            lost += [given[name] for name in spare if _RIDERS not in name]
        out.left.update(dict.fromkeys(given[name] for name in spare))
        spared += [given[name] for name in spare]
        for attribute, inner in one.components.items():
            if attribute in given:
                name = f"{slot.plain}.{attribute}"
                out.slots[f"{key}.{attribute}"] = Slot(name, slot.owner, slot.name, inner)
        if missing:
            out.derived.append((one, frozenset(missing)))
        if one.runs:
            out.groups.append(one)
        out.changed.append(slot.tensor)
    filled = {id(tensor) for tensor in out.changed}
    twice = [key for key in out.slots if key in wanted and id(slots[key].tensor) in filled]
    for key in twice:
        out.notes.append(
            "one tensor under several names, of which the checkpoint has another: "
            f"{printable(out.slots.pop(key).plain)}"
        )
    ask(unread)
    _report(out, other, anew, inside, short, lost, allow)
    if spared:
        out.notes.append(
            "components that the module's parameters do not have, left out: "
            f"{list_collapsed(spared, 8)}"
        )
    if derived := [one for one, names in out.derived if names]:
        out.notes.append(
            f"derived from the other usage: {plural(len(derived), 'quantized parameter')}"
        )
    return out


def _place_of(target: Any, one: QuantizedTarget) -> tuple[tuple[int, ...], Box] | str:
    """The shape of a DTensor and the box of it that is here, or why there is none."""
    if any(p.is_partial() for p in target.placements):
        return "its part in this process is to be summed with others"
    chunks = target.__create_chunk_list__()
    if len(chunks) != 1 or tuple(one.value.shape) != tuple(chunks[0].sizes):
        return "its part in this process is not one box"
    return tuple(target.shape), (tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def _cut(
    one: QuantizedTarget,
    given: Mapping[str, str],
    outputs: Mapping[str, Tensor],
    origin: Origin,
    place: tuple[tuple[int, ...], Box],
    request: Request,
    out: TakenApart,
) -> str:
    """Adds the parts of components that belong to a box of a tensor. Why they cannot be told, empty
    if they can.
    """
    shape, box = place
    encoding, cuts = replace(origin.encoding, shape=shape), out.cuts
    mine = [name for name in given if name in one.components]
    if why := uncut(encoding, mine, box):
        if REQUANTIZE in request.params:
            from ..running.encoding_anew import cut_box, named_by, require_lossy

            plain = given[mine[0]][: -len(mine[0]) - 1]
            if any(map(named_by(request), (plain, origin.key))):
                parts = {name: outputs[key] for name, key in given.items() if "." not in name}
                keys = tuple(given[name] for name in parts)
                made = cut_box(encoding, parts, box, keys, request)
                cuts.update((given[name], tensor) for name, tensor in made.items())
                require_lossy({given[name]: tensor for name, tensor in made.items()}, request)
                out.notes.append(f"its part is decoded and encoded anew: {printable(plain)}")
                return ""
        return f"its part in this process is not cut on a border: {why}"
    for name in mine:
        whole = outputs[given[name]]
        try:
            view = component_of(encoding, name, whole.view, whole.spec.dtype, box)
        except (ValueError, TooManyPieces) as error:
            return f"{name}: {error}"
        cuts[given[name]] = type(whole)(Spec(whole.spec.dtype, view.shape), view, whole.sources)
    return ""


def _splits(key: str) -> Iterable[tuple[str, str]]:
    """(parameter, component) that a key can mean."""
    head, _, last = key.rpartition(".")
    if head:
        yield head, last
        if head.endswith(f".{_RIDERS[:-1]}"):
            yield head[: -len(_RIDERS)], f"{_RIDERS}{last}"


def _judge(
    one: QuantizedTarget,
    given: Mapping[str, str],
    found: list[Origin],
    unread: dict[str, Encoding],
    plain: str,
) -> tuple[str, bool]:
    """Why these components are none of the parameter's encoding, empty if they are; and whether
    they are an object in another one.
    """
    if not found:
        return "nothing in the checkpoint says what its numbers are", False
    wrong = [name for name, key in given.items() if name not in {o.attribute for o in found}]
    if wrong:
        return f"{listed(wrong)} were not components by these names", False
    for origin in found:
        encoding = origin.encoding
        if encoding.number is None and encoding.readings:
            unread[plain] = encoding
            continue
        if why := unlike(one, encoding.format, encoding.number, encoding.options or {}):
            return listed(why), True
    return "", False


def _numbers(
    given: Mapping[str, str], outputs: Mapping[str, Tensor], found: list[Origin], index: Index
) -> Tensor | str:
    """The numbers of the object whose components these are, computed by region, or why they cannot
    be had, to be added to a message.
    """
    from ..planning.requantized import decode, why_unread
    from ..planning.stored import untouched_key

    encoding = found[0].encoding
    parts = {name: outputs[key] for name, key in given.items() if _RIDERS not in name}
    where = {untouched_key(part, index.tensors) for part in parts.values()}
    if len({origin.key for origin in found}) > 1 or None in where:
        return "; rules change its components, so they are no object any more"
    why = why_unread(encoding, {name: part.spec.dtype for name, part in parts.items()})
    if why is not None:
        return f"; and it cannot be decoded: {why}"
    flat = decode(encoding, parts, tuple(given.values()), rule="load")
    view = views.reshape(flat.view, encoding.shape)
    return type(flat)(Spec(flat.spec.dtype, view.shape), view, flat.sources)


def _other_bits(
    one: QuantizedTarget, given: Mapping[str, str], outputs: Mapping[str, Tensor]
) -> str:
    """Which components are codes of another dtype, whose numbers would be converted and not their
    bits; empty if none is.
    """
    wrong = []
    for name, inner in one.components.items():
        there = spec_of(inner)
        made = outputs[given[name]].spec.dtype if name in given else None
        if made is None or there is None or made == there.dtype:
            continue
        if min(BITS[made], BITS[there.dtype]) <= _CODE:
            wrong.append(f"{name} is {made}, the parameter's is {there.dtype}")
    return listed(wrong) if wrong else ""


def _report(
    out: TakenApart,
    other: list[str],
    anew: list[str],
    inside: list[str],
    short: list[str],
    lost: list[str],
    allow: frozenset[str],
) -> None:
    report = Report()
    if other:
        report.add(
            "M960",
            f"another encoding than the module's in {plural(len(other), 'quantized parameter')}",
            notes=(*other[:8], *[f"and {len(other) - 8} more"] * (len(other) > 8)),
            help='dequantize by rules; with allow={"lossy"} the module quantizes the result itself',
        )
    if anew and "lossy" not in allow:
        report.add(
            "M961",
            f"another encoding than the module's in {plural(len(anew), 'quantized parameter')}, "
            "which would quantize the numbers anew",
            notes=(*anew[:8], *[f"and {len(anew) - 8} more"] * (len(anew) > 8)),
            help='allow={"lossy"}, or build the module in the encoding of the checkpoint',
            permit="lossy",
        )
    elif anew:
        out.notes.append(
            f"decoded, and quantized by the parameter's own `copy_`: {listed(anew, 8)}"
        )
    if inside:
        report.add(
            "M946",
            f"the parts that lie here of {plural(len(inside), 'quantized parameter')} are no parts "
            "of the checkpoint's without loss",
            notes=(*inside[:8], *[f"and {len(inside) - 8} more"] * (len(inside) > 8)),
            help="shard the module so that parts end on borders of blocks, or dequantize by rules",
        )
    if short:
        report.add(
            "M960",
            "the checkpoint lacks components of "
            f"{plural(len(short), 'quantized parameter')}, and others do not determine them",
            notes=(*short[:8], *[f"and {len(short) - 8} more"] * (len(short) > 8)),
            help="build the module for the usages that were saved, or dequantize by rules",
        )
    if lost and "drop" not in allow:
        report.add(
            "M402",
            "the module has no place for components that others do not determine: "
            f"{list_collapsed(lost, 8)}",
            help='allow={"drop"} leaves them out',
            permit="drop",
        )
    out.problems += report.diagnostics
