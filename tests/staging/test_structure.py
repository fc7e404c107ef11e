"""Structure: whatever copy.deepcopy copies, with the same identities; what it cannot is refused."""

from __future__ import annotations

import collections
import copy
import copyreg
import dataclasses
import datetime
import enum
import functools
import gc
import io
import pathlib
import random
import re
import sys
import threading
import types
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from work import HANG

import migrate


def staged(state: Any) -> Any:
    return migrate.Stager().stage(state).state


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Plain:
    value: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    value: Any


class Attributes:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slots:
    __slots__ = ("other", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class Reducing:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Reducing, (None,), {"value": self.value}


class Registered:
    def __init__(self, value: Any) -> None:
        self.value = value


copyreg.pickle(Registered, lambda x: (Registered, (None,), {"value": x.value}))  # type: ignore[arg-type, return-value]


class Lists(list[Any]):
    pass


class Dicts(dict[Any, Any]):
    pass


class State:
    """Says what is copied of it, and how it is put together."""

    def __init__(self, value: Any) -> None:
        self.value, self.cache = value, object()

    def __getstate__(self) -> Any:
        return [self.value]

    def __setstate__(self, state: Any) -> None:
        (self.value,) = state


class Own:
    def __init__(self, value: Any) -> None:
        self.value, self.copies = value, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Own:
        made = Own.__new__(Own)
        memo[id(self)] = made
        made.value, made.copies = copy.deepcopy(self.value, memo), self.copies + 1
        return made


def ordered(value: Any) -> Any:
    made = OrderedDict(value=value)
    made._metadata = {"version": 1}  # type: ignore[attr-defined]
    return made


def objects(value: Any) -> Any:
    made = numpy.empty(1, dtype=object)
    made[0] = value
    return made


def item(x: Any) -> Any:
    return next(iter(x))


# how an object of each kind is made around a value, and how the value is taken out again
KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda v: [v], item),
    "tuple": (lambda v: (v,), item),
    "dict": (lambda v: {"k": v}, lambda x: x["k"]),
    "dict by object": (lambda v: {Attributes(v): 1}, lambda x: item(x).value),
    "set": (lambda v: {Attributes(v)}, lambda x: item(x).value),
    "frozenset": (lambda v: frozenset([Attributes(v)]), lambda x: item(x).value),
    "OrderedDict": (ordered, lambda x: x["value"]),
    "defaultdict": (lambda v: defaultdict(list, k=v), lambda x: x["k"]),
    "deque": (lambda v: deque([v], maxlen=3), item),
    "ChainMap": (lambda v: ChainMap({"k": v}), lambda x: x["k"]),
    "UserDict": (lambda v: UserDict({"k": v}), lambda x: x["k"]),
    "NamedTuple": (lambda v: Pair(v, 1), item),
    "dataclass": (Plain, lambda x: x.value),
    "frozen": (Frozen, lambda x: x.value),
    "slotted": (Slotted, lambda x: x.value),
    "frozen and slotted": (FrozenSlotted, lambda x: x.value),
    "attributes": (Attributes, lambda x: x.value),
    "slots": (Slots, lambda x: x.value),
    "reduce": (Reducing, lambda x: x.value),
    "copyreg": (Registered, lambda x: x.value),
    "state": (State, lambda x: x.value),
    "list subclass": (lambda v: Lists([v]), item),
    "dict subclass": (lambda v: Dicts(k=v), lambda x: x["k"]),
    "namespace": (lambda v: types.SimpleNamespace(v=v), lambda x: x.v),
    "partial": (lambda v: functools.partial(print, v), lambda x: x.args[0]),
    "array of objects": (objects, lambda x: x[0]),
    "own __deepcopy__": (Own, lambda x: x.value),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_copied_with_its_identities(kind: str) -> None:
    make, take = KINDS[kind]
    x = torch.arange(3.0)
    inner = [x]
    holder = make(inner)
    state = [holder, inner, x, holder]
    for order in (state, state[::-1]):
        made = staged(order)
        twin, inside, tensor, again = made if order is state else made[::-1]
        assert type(twin) is type(holder)
        assert twin is not holder
        assert twin is again
        assert take(twin) is inside
        assert inside[0] is tensor
        assert tensor is not x
        assert tensor.equal(x)
    assert take(holder) is inner


CYCLIC = [kind for kind in KINDS if kind != "array of objects"] + ["array of objects"]


@pytest.mark.parametrize("kind", CYCLIC)
def test_a_cycle_through_a_kind_stays_one(kind: str) -> None:
    make, take = KINDS[kind]
    inner: list[Any] = []
    holder = make(inner)
    inner.append(holder)
    twin = staged(holder)
    assert type(twin) is type(holder)
    assert twin is not holder
    assert take(twin)[0] is twin
    inside = staged(inner)
    assert inside is not inner
    assert take(inside[0]) is inside


# what takes several objects a level
SEVERAL = {"dict by object", "set", "frozenset", "ChainMap", "UserDict", "partial"}


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "own __deepcopy__"])
def test_400_levels_of_a_kind_are_copied_from_any_stack(kind: str) -> None:
    make, take = KINDS[kind]
    levels = 400 if kind not in SEVERAL else 100
    state: Any = torch.ones(1)
    for _ in range(levels):
        state = make(state)

    def deep(frames: int) -> Any:
        return staged(state) if not frames else deep(frames - 1)

    limit = sys.getrecursionlimit()
    made = deep(300)
    assert sys.getrecursionlimit() == limit
    for _ in range(levels):
        made = take(made)
    assert made.tolist() == [1]


@pytest.mark.parametrize(
    "kind", ["list", "dict", "tuple", "attributes", "NamedTuple", "OrderedDict"]
)
def test_deeper_structures_are_refused_by_path(kind: str) -> None:
    state: Any = torch.ones(1)
    for _ in range(3000):
        state = KINDS[kind][0](state)
    with pytest.raises(migrate.MigrateError, match="M975") as caught:
        staged({"here": state})
    assert "['here']" in str(caught.value)
    assert "nested deeper than 400 levels" in str(caught.value)


class Color(enum.Enum):
    RED = 1


def function() -> None:
    """Stands for any function."""


SHARED = [
    function, len, Attributes, Color.RED, torch.float32, torch.device("cpu"), torch.strided, re,
    torch.contiguous_format, torch.per_tensor_affine, ..., NotImplemented, None, True, print,
    numpy.float32, numpy.dtype("f4"), lambda: 1,
]  # fmt: skip


def test_functions_classes_and_constants_are_not_copied() -> None:
    for made, source in zip(staged(list(SHARED)), SHARED, strict=True):
        assert made is source


VALUES = [
    0, -1, 1 << 200, 1.5, float("inf"), 1j, "", "\ud800", "ä" * 300, b"", b"x" * 100_000,
    bytearray(b"xyz"), range(3, 9, 2), slice(1, 2), Decimal("1.10"), Fraction(1, 3), list[int],
    datetime.datetime(2026, 1, 1), datetime.timedelta(1), pathlib.PurePosixPath("a/b"),
    re.compile("a+"), Counter("aab"), torch.Size([1, 2]), numpy.float64(1.5), numpy.arange(3),
    numpy.array(["a", "bc"]), numpy.arange(6).reshape(2, 3).T, numpy.array(4), numpy.zeros((0, 3)),
    numpy.array([("x", 1)], dtype=[("a", "U3"), ("b", "i4")]), numpy.arange(9)[::-2],
    numpy.array(["2026-01-01"], dtype="datetime64[D]"), numpy.arange(4, dtype=">i2"),
    types.MappingProxyType, collections.namedtuple("N", "a")(1)._fields,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_values_are_those_of_deepcopy(value: Any) -> None:
    made, copied = staged([value])[0], copy.deepcopy(value)
    assert type(made) is type(copied)
    assert repr(made) == repr(copied)
    if isinstance(value, numpy.ndarray):
        assert (made.dtype, made.shape, made.tobytes()) == (
            value.dtype,
            value.shape,
            value.tobytes(),
        )
        assert not numpy.shares_memory(made, value)
        if value.size:
            assert made.flags.writeable


def test_generators_of_random_numbers_go_on_where_they_were() -> None:
    state = {
        "python": random.Random(3),
        "numpy": numpy.random.default_rng(3),
        "torch": torch.Generator().manual_seed(3),
    }
    made = staged(state)
    assert made["python"].random() == state["python"].random()  # type: ignore[attr-defined]
    assert made["numpy"].random() == state["numpy"].random()  # type: ignore[attr-defined]
    ours, theirs = (torch.rand(3, generator=s["torch"]) for s in (made, state))
    assert ours.equal(theirs)
    assert staged(numpy.random.get_state())[1].tolist() == numpy.random.get_state()[1].tolist()


def test_ordered_dicts_keep_their_attributes_and_defaults_their_factory() -> None:
    made = staged([ordered(1), defaultdict(list, a=1), deque([1], maxlen=3)])
    assert made[0]._metadata == {"version": 1}
    assert made[1]["new"] == []
    assert made[2].maxlen == 3


def test_methods_are_bound_to_the_copy() -> None:
    thing = Lists([1])
    made = staged({"thing": thing, "append": thing.append, "own": Attributes(1).__init__})
    made["own"](2)
    assert made["own"].__self__.value == 2


def test_modules_and_optimizers_go_on_as_they_would() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    model[0].tied = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step(model: Any, optimizer: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=generator)).square().sum().backward()
        optimizer.step()

    step(model, optimizer)
    optimizer.zero_grad()
    made = staged({"model": model, "optimizer": optimizer, "schedule": scheduler.state_dict()})
    twin = made["model"]
    assert twin[0].tied is twin[0].weight
    assert made["optimizer"].param_groups[0]["params"][0] is twin[0].weight
    step(model, optimizer)
    assert not twin[0].weight.equal(model[0].weight)
    step(twin, made["optimizer"])
    for name, value in model.state_dict().items():
        assert twin.state_dict()[name].equal(value)


def test_gradients_and_hooks_stay_behind() -> None:
    x = torch.nn.Parameter(torch.ones(2))
    x.sum().backward()
    x.register_hook(lambda g: g * 2)
    made = staged([x])[0]
    assert made.grad is None
    made.sum().backward()
    assert made.grad.tolist() == [1, 1]
    assert x.grad is not None


class Careful:
    """Cannot be pickled, copies itself, and leaves out what it does not need."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.lock = {"x": x, "lock": threading.Lock()}, threading.Lock()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("not this one")

    def __deepcopy__(self, memo: dict[int, Any]) -> Careful:
        return Careful(copy.deepcopy(self.x["x"], memo))


@pytest.mark.parametrize("first", [True, False])
def test_tensors_of_what_copies_itself_are_the_staged_ones(first: bool) -> None:
    x = torch.nn.Parameter(torch.arange(4.0))
    view = x.detach()[1:]
    state = [Careful(x), x, view] if first else [x, view, Careful(x)]
    made = staged(state)
    (thing,) = (v for v in made if isinstance(v, Careful))
    twin = next(v for v in made if isinstance(v, torch.nn.Parameter))
    tail = next(v for v in made if type(v) is torch.Tensor)
    assert thing.x["x"] is twin
    tail[0] = 7
    assert twin.tolist() == [0, 7, 2, 3]
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("again", [False, True])
def test_what_copies_itself_is_that_of_its_moment_ever_after(again: bool) -> None:
    own = Own([1])
    state: Any = {"own": own, "list": [own]}
    snapshot = migrate.Stager().stage(state)
    watched = weakref.ref(own)
    own.value[0] = 2
    if again:
        state.clear()
        del own
        gc.collect()
        assert watched() is None
    new = snapshot.restore()
    assert new["own"].value == [1]
    assert new["list"][0] is new["own"]
    assert new["own"] is not snapshot["own"]


class OwnDict(dict[Any, Any]):
    def __deepcopy__(self, memo: dict[int, Any]) -> OwnDict:
        return OwnDict({key: copy.deepcopy(value, memo) for key, value in self.items()})


class OwnList(list[Any]):
    def __deepcopy__(self, memo: dict[int, Any]) -> OwnList:
        return OwnList([copy.deepcopy(value, memo) for value in self])


class Holder:
    """Cannot be taken apart."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("not this one")


class Opening(Plain):
    """Copies what cannot be taken apart by anybody else."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Opening:
        return Opening(Holder(copy.deepcopy(self.value.x, memo)))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["dict", "list", "inside"])
def test_tensors_of_containers_that_copy_themselves_are_the_staged_ones(
    kind: str, first: bool
) -> None:
    x = torch.arange(4.0)
    make: dict[str, Callable[[Any], Any]] = {
        "dict": lambda x: OwnDict(k=x),
        "list": lambda x: OwnList([x]),
        "inside": lambda x: Opening(Holder(x)),
    }
    take: dict[str, Callable[[Any], Any]] = {
        "dict": lambda o: o["k"],
        "list": lambda o: o[0],
        "inside": lambda o: o.value.x,
    }
    state = [make[kind](x), x] if first else [x, make[kind](x)]
    made = staged(state)
    own, twin = made if first else reversed(made)
    assert type(own) is type(make[kind](x))
    assert take[kind](own) is twin
    assert twin is not x


def test_objects_that_copy_themselves_may_hold_one_another() -> None:
    x = torch.ones(4)
    inner = Own([x])
    outer = Own({"inner": inner, "view": x[1:]})
    for state in ([outer, inner, x], [x, inner, outer], [inner, outer, x]):
        twin = dict(zip(map(id, state), staged(state), strict=True))
        made = twin[id(outer)].value
        assert made["inner"] is twin[id(inner)]
        assert made["inner"].value[0] is twin[id(x)]
        assert made["view"].data_ptr() == twin[id(x)].data_ptr() + 4


class WithAttributes(Pair):
    """A NamedTuple with a dict."""


@dataclasses.dataclass
class Counted:
    """What a constructor does to it is done once."""

    value: Any
    begin: dataclasses.InitVar[int] = 3
    count: int = dataclasses.field(init=False, default=0)

    def __post_init__(self, begin: int) -> None:
        self.count += begin


@dataclasses.dataclass(frozen=True, slots=True)
class Longer(FrozenSlotted):
    more: Any


@dataclasses.dataclass(slots=True)
class Unset:
    value: Any = dataclasses.field(init=False)
    other: int = 1


def test_named_tuples_and_dataclasses_of_every_form() -> None:
    x = torch.eye(2)
    pair = WithAttributes(x, 1)
    pair.extra = [x]
    counted, found = Counted(x), torch.max(x, 0)
    made = staged(
        {"x": x, "pair": pair, "c": counted, "l": Longer(x, [x]), "u": Unset(), "m": found}
    )
    assert type(made["pair"]) is WithAttributes
    assert made["pair"].left is made["x"]
    assert made["pair"].extra[0] is made["x"]
    assert (made["c"].value is made["x"], made["c"].count) == (True, 3)
    assert (made["l"].value is made["x"], made["l"].more[0] is made["x"]) == (True, True)
    assert (hasattr(made["u"], "value"), made["u"].other) == (False, 1)
    assert type(made["m"]) is type(found)
    assert made["m"].indices.equal(found.indices)


class Growing:
    """A dict that grows while it is walked, as one that another thread writes to."""

    def __init__(self, into: dict[Any, Any]) -> None:
        self.into = into

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.into[len(self.into)] = 1
        return Attributes, (1,)


def test_a_state_that_changes_in_size_is_refused() -> None:
    state: dict[Any, Any] = {}
    state.update(a=[Growing(state)], b=1)
    stager = migrate.Stager()
    with pytest.raises(migrate.MigrateError, match=r"M975.*changed size"):
        stager.stage(state)
    assert stager.nbytes == 0


def test_a_state_that_another_thread_changes_is_staged_or_refused() -> None:
    state: dict[str, Any] = {"d": {n: [n] for n in range(200)}, "q": deque(range(50))}
    state["x"] = [torch.ones(1) for _ in range(100)]
    stop = threading.Event()

    def change() -> None:
        n = 200
        while not stop.is_set():
            state["d"][n] = [n]
            state["q"].append(n)
            state["x"].append(torch.ones(1))
            del state["d"][n]
            state["q"].pop()
            state["x"].pop()
            n += 1

    stager, thread, interval = migrate.Stager(), threading.Thread(target=change), 1e-6
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    thread.start()
    try:
        for _ in range(40):
            try:
                made = stager.stage(state).state
            except migrate.MigrateError as error:
                assert "M975" in str(error)  # noqa: PT017
            else:
                assert all(made["d"][n] == [n] for n in range(200))
                assert all(x.tolist() == [1] for x in made["x"])
    finally:
        stop.set()
        thread.join(HANG)
        sys.setswitchinterval(before)
    made = None
    stager.trim()
    assert stager.nbytes == 0


def test_an_interrupt_leaves_nothing_held() -> None:
    class Interrupting:
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise KeyboardInterrupt

    stager = migrate.Stager()
    with pytest.raises(KeyboardInterrupt):
        stager.stage([torch.ones(3), Interrupting()])
    assert stager.nbytes == 0
    assert stager.stage([torch.ones(3)]).state[0].tolist() == [1, 1, 1]


@pytest.fixture
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_a_default_device_has_no_say(default_device: None) -> None:
    x = torch.arange(6.0, device="cpu").reshape(2, 3)
    made = staged([x, x.t(), x.to_sparse()])
    assert [v.device.type for v in made] == ["cpu"] * 3
    assert made[1].equal(x.t())


class Counting(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


def test_modes_have_no_say() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    state = [x, x.t(), x.to_sparse(), torch.nn.Parameter(x)]
    with Counting():
        made = staged(state)
    assert made[1].equal(x.t())
    with torch.no_grad():
        made = staged(state)
    assert made[3].requires_grad
    with torch.inference_mode():
        inference = torch.ones(3)
        made = staged([*state, inference])
    assert made[3].requires_grad
    assert not any(v.is_inference() for v in made)
    made[3].sum().backward()
    with torch._subclasses.FakeTensorMode():
        made = staged(state)
    assert made[1].equal(x.t())


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_for_autograd(mode: Any) -> None:
    seen = []

    class Own:
        def __deepcopy__(self, memo: dict[int, Any]) -> Own:
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return self

    with mode():
        before = torch.is_grad_enabled()
        staged([Own()])
        assert torch.is_grad_enabled() is before
    assert set(seen) == {(False, False)}


def test_a_snapshot_is_saved_without_what_no_tensor_uses() -> None:
    big = torch.arange(1_000_000)
    snapshot = migrate.Stager().stage({"a": big[10:20], "b": big[15:25], "c": big[900_000:900_010]})
    assert snapshot.nbytes < 1000
    file = io.BytesIO()
    torch.save(snapshot.state, file)
    assert len(file.getvalue()) < 5000
    assert snapshot["c"].equal(big[900_000:900_010])
    snapshot["a"][5] = -1
    assert snapshot["b"][0] == -1
    storages = {x.untyped_storage().data_ptr() for x in snapshot.values()}
    assert len(storages) == 1
