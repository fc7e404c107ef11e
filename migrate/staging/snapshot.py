"""A snapshot: what a training state was at one moment.

Its state has the structure of the source and tensors on the CPU, whose memory belongs to the stager
and goes back to it when nothing refers to it any more: not the snapshot, not the state, not a
tensor that was taken out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import torch

from ..core.errors import Diagnostic, QuestionError
from . import paths
from .copying import Home
from .tensors import GRAD, PARAMETER, NotCopiedError, Recipe, make, parts_of
from .walk import Build, outside_of_modes

if TYPE_CHECKING:
    from ..core.types import PathLike
    from ..formats.torchstream import StateSource
    from ..results import ApplyReport
    from .jobs import Job, Writer
    from .migration import SnapshotMigration


class Image:
    """A structure without its bytes: stream, recipes and references. Built over any storages."""

    __slots__ = ("devices", "places", "recipes", "references", "stream", "users")

    def __init__(
        self,
        stream: bytes,
        recipes: list[Recipe],
        references: list[Any],
        users: Sequence[int],
        places: Sequence[Home | None],
        devices: Mapping[int, torch.device],
    ) -> None:
        """`users` and `places` are by storage, `devices` by storage where it was not the CPU."""
        self.stream, self.recipes, self.references = stream, recipes, references
        self.users, self.places, self.devices = users, places, devices

    def build(self, views: Sequence[memoryview]) -> Any:
        """The state over the blocks that `views` look at."""
        frombuffer = torch.frombuffer
        places, users = self.places, self.users

        def mapped(number: int) -> torch.UntypedStorage:
            place = places[number]
            if place is None or not place.size:
                return torch.UntypedStorage(0)
            made = frombuffer(
                views[place.block], dtype=torch.uint8, count=place.size, offset=place.at
            )
            return made.untyped_storage()

        storage = _once(mapped)
        tensors: list[torch.Tensor] = []
        # from one tensor of each dtype the next is made in two thirds of the time
        empty = {dtype: torch.empty(0, dtype=dtype).new_empty for dtype in _dtypes(self.recipes)}
        for recipe in self.recipes:
            if recipe[0] == "strided" and not recipe[6]:
                _, number, dtype, offset, shape, stride, _ = recipe
                # what `make` does, which asks each storage for its device
                tensors.append(empty[dtype](0).set_(storage(number), offset, shape, stride))
                continue
            if recipe[0] != "whole" or users[recipe[1]] != 1:
                tensors.append(make(recipe, storage))
                continue
            _, number, dtype, shape, flags = recipe
            place = places[number]
            if place is None:
                tensors.append(make(recipe, storage))
                continue
            # a storage of its own, in one call where `make` takes three
            count = place.size // dtype.itemsize
            made = frombuffer(views[place.block], dtype=dtype, count=count, offset=place.at)
            # lengths one by one are read in half the time; there must be one
            made = made.resize_(*shape) if shape else made.resize_(shape)
            if flags & PARAMETER:
                made = torch.nn.Parameter(made, bool(flags & GRAD))
            elif flags:
                made.requires_grad_()
            tensors.append(made)
        return Build(self.stream, tensors, self.references, storage).run()

    def build_apart(self, views: Sequence[memoryview]) -> Any:
        """The state in memory of torch's, on the devices that it came from."""

        def copied(number: int) -> torch.UntypedStorage:
            place = self.places[number]
            device = self.devices.get(number, torch.device("cpu"))
            if place is None or not place.size:
                return torch.UntypedStorage(0, device=device)
            held = torch.frombuffer(
                views[place.block], dtype=torch.uint8, count=place.size, offset=place.at
            )
            made = torch.empty(place.size, dtype=torch.uint8, device=device)
            return made.copy_(held).untyped_storage()

        storage = _once(copied)
        tensors = [make(recipe, storage) for recipe in self.recipes]
        return Build(self.stream, tensors, self.references, storage, apart=True).run()


def _dtypes(recipes: Iterable[Recipe]) -> set[torch.dtype]:
    """The dtypes of strided tensors."""
    return {recipe[2] for recipe in recipes if recipe[0] == "strided"}


def _once(
    make_storage: Callable[[int], torch.UntypedStorage],
) -> Callable[[int], torch.UntypedStorage]:
    made: dict[int, torch.UntypedStorage] = {}

    def storage(number: int) -> torch.UntypedStorage:
        found = made.get(number)
        if found is None:
            found = made[number] = make_storage(number)
        return found

    return storage


class HeldState(NamedTuple):
    """What a snapshot holds. It keeps the memory for a caller who is at it during a `release`."""

    image: Image
    views: list[memoryview]
    state: Any


class Snapshot(Mapping[Any, Any]):
    """What `Stager.stage` answers with. A read-only mapping where the state is one."""

    __slots__ = ("__weakref__", "_content", "_copied", "_nbytes", "_writer")

    def __init__(self, image: Image, views: list[memoryview], nbytes: int, copied: Any) -> None:
        self._content: HeldState | None = HeldState(image, views, image.build(views))
        self._nbytes = nbytes
        self._copied = copied
        # the stager's; a snapshot of another process has one of its own
        self._writer: Writer | None = None

    @property
    def state(self) -> Any:
        """The structure that was staged, its tensors on the CPU; waits until they are there.

        QuestionError M976 after `release`.
        """
        self.wait()
        return self._held().state

    @property
    def nbytes(self) -> int:
        """The bytes that were copied: each storage once, of large ones what tensors touch."""
        return self._nbytes

    @property
    def devices(self) -> dict[str, torch.device]:
        """Where each tensor came from, by its path in the state."""
        held = self._held()
        tensors = {p: x for p, x, _ in paths.objects(held.state) if isinstance(x, torch.Tensor)}
        known = {_address(held, number): device for number, device in held.image.devices.items()}
        return {path: _origin(x, known) for path, x in tensors.items()}

    def wait(self) -> None:
        """Returns when all bytes are there."""
        self._copied.wait()

    def done(self) -> bool:
        """Whether all bytes are there."""
        return bool(self._copied.done())

    def guard(self) -> None:
        """Makes the current stream of each device wait for the copies, without blocking the CPU.

        Belongs between a `stage(..., non_blocking=True)` and what changes the state on the device,
        `optimizer.step()` say.
        """
        self._copied.guard()

    def restore(self, state: Any = None) -> Any:
        """The values as they were: in `state`, in place, or in a new state on the same devices.

        Returns the state. QuestionError M977 naming the paths where the structures differ; nothing
        has been changed then. M975 where an object cannot copy itself again.
        """
        held = self._held()
        self.wait()
        with outside_of_modes():
            if state is None:
                try:
                    return held.image.build_apart(held.views)
                except NotCopiedError as error:
                    from .refusing import refusal

                    raise refusal(held.state, error) from None
            from .restoring import put_back

            put_back(held.state, state)
            return state

    def migrate(
        self,
        *,
        to: str | Iterable[str] = (),
        from_: str | Iterable[str] = (),
        rules: Iterable[PathLike] = (),
        params: Mapping[str, Any] | None = None,
        allow: Iterable[str] = (),
        at: str | None = None,
        rest: Literal["carry", "leave"] = "carry",
    ) -> SnapshotMigration:
        """Plan a migration of the snapshot, whichever way leads there.

        The state is taken for the `.pt` that `torch.save` would make of it: what rules do not work
        on is carried as there.

        Args:
            to: Layouts to reach, as `LINEAGE@LAYOUT`, one or several. Default: none; `rules` then
                determine what is done.
            from_: Layouts that the state is in. Default: none; detected from keys and shapes.
            rules: Rule files, applied as they are, or one folder of lineages that is searched
                first. Default: none.
            params: Values of the rules' params, by name. Default: none; they are read from the
                state.
            allow: Permissions, such as "lossy" or "drop". Default: none, so that whatever would
                lose something is refused.
            at: The dict of a nested state that rules work on, as a path such as `model.state_dict`.
                Default: found automatically.
            rest: "leave" takes that dict alone: what stands around it, optimizer state too, is
                listed in the plan's notes and needs no permission. Default: "carry".

        Returns:
            A `SnapshotMigration` with the `plan`, `state_dict()`, `save(path)` and
            `save_async(path)`. It holds the snapshot's memory.

        Raises:
            MigrateError: What `plan` raises, M945 where `at` fits no dict, or without it where
                several fit.
        """
        return self._prepared(
            to=to, from_=from_, rules=rules, params=params, allow=allow, at=at, rest=rest
        )

    def save(self, path: PathLike, *, allow: Iterable[str] = (), **options: Any) -> ApplyReport:
        """Write the state as it is and wait until it is there; arguments as `save_async`."""
        return self._prepared(allow=allow, as_it_is=True).save(path, **options)

    def save_async(self, path: PathLike, *, allow: Iterable[str] = (), **options: Any) -> Job:
        """Write the state as it is behind the training.

        Args:
            path: The new checkpoint, which must not exist: one file if the name ends in
                .safetensors, .pt, .pth, .bin or .ckpt, else a folder. Also the URL of a store.
            allow: Permissions: "opaque" leaves out what no file can hold, and says so. Default:
                none, so that it is refused.
            options: `output_format`, `max_shard_size`, `max_memory`, `fsync`, as
                `SnapshotMigration.save_async` takes them.

        Returns:
            A `Job`. The memory of the snapshot is held until it ends.

        Raises:
            MigrateError: What `SnapshotMigration.save_async` raises.
        """
        return self._prepared(allow=allow, as_it_is=True).save_async(path, **options)

    def opened(self, at: str | None = None) -> StateSource:
        """The state as the `.pt` that `torch.save` would make of it, rules working on the dict
        `at`. For `plan`, `inspect` and `apply`, which are given a snapshot of a nested state.
        """
        from .migration import source_of

        return source_of(self._held().state, self._copied.wait, at)

    def _prepared(self, **asked: Any) -> SnapshotMigration:
        from .jobs import Writer
        from .migration import prepare

        state = self._held().state
        if self._writer is None:
            self._writer = Writer()
        return prepare(state, self._copied.wait, self._writer, **asked)

    @property
    def _metadata(self) -> Any:
        """`_metadata` of a module's state dict; AttributeError without."""
        return self._mapping()._metadata  # type: ignore[attr-defined]

    def release(self) -> None:
        """Lets go of the state. Its memory is free once no tensor that was taken out is left."""
        self.wait()
        self._content = None

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __getitem__(self, key: Any) -> Any:
        return self._mapping()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._mapping())

    def __len__(self) -> int:
        return len(self._mapping())

    def __repr__(self) -> str:
        held = "released" if self._content is None else f"{self._nbytes} bytes"
        return f"<migrate.Snapshot, {held}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a snapshot is not pickled or copied: it can be sent by multiprocessing if its stager "
            "is a Stager(share_memory=True); else use its `state`"
        )

    def _mapping(self) -> Mapping[Any, Any]:
        state = self.state
        if not isinstance(state, Mapping):
            raise TypeError(
                f"the state of this snapshot is a {type(state).__name__}, not a mapping"
            )
        return state

    def _held(self) -> HeldState:
        held = self._content
        if held is None:
            raise QuestionError(
                [
                    Diagnostic(
                        "M976",
                        "this snapshot was released, its memory may hold another state by now",
                        help="stage the state again, or release a snapshot after its last use",
                    )
                ]
            )
        return held


def _address(held: HeldState, number: int) -> int:
    """Where the bytes of a storage begin, 0 without bytes."""
    place = held.image.places[number]
    if place is None:
        return 0
    view = held.views[place.block]
    first = torch.frombuffer(view, dtype=torch.uint8, count=1, offset=place.at)
    return int(first.data_ptr())


def _origin(x: torch.Tensor, known: Mapping[int, torch.device]) -> torch.device:
    """Where a staged tensor came from: `known` is by the address of its storage."""
    if x.is_meta or not known:
        return x.device
    inner = [part for _, part in paths.children(x) if isinstance(part, torch.Tensor)]
    if hasattr(type(x), "__torch_dispatch__") and inner:
        return _origin(inner[0], known)
    try:
        address = parts_of(x.detach())[0].untyped_storage().data_ptr()
    except RuntimeError:
        return x.device
    return known.get(address, x.device)
