"""How fast number formats are decoded and encoded in memory: one matrix of 4096 x 4096 in each, to
bfloat16 or float16, one thread.

    python benchmarks/format_speed.py [--rounds 5] [--only nvfp4] [--device cuda] [--json FILE]

Decoding is timed where nothing has imported torch, which takes a second or more of a run and leaves
all to numpy, and where torch is there, whose conversions are used then; the bits are the same. It
stands beside a clone of the result into fresh memory and a copy into warm memory, because
`migrate` writes into memory that is reused, and beside peers (`make peers` installs them), which
allocate what they make. How many of their numbers or bytes of codes are ours is said, so that no
figure is one of something else; FP8 blocks must be the same.

Times are the smallest CPU time of this thread over all rounds, in which the candidates take turns,
so that a busy machine slows all alike; compare figures of one run only. Fresh memory costs more
than the arithmetic, five times as much where the kernel has no huge page at hand, so that a bar of
clones decides only where no peer is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import process
from format_cases import ENCODED, NUMBERS, SIDE, cases
from tasks import DECODED, ENCODED_FASTER, Limit

from migrate.codecs.kit.decoding import decode
from migrate.codecs.kit.encoding import TensorEncoding
from migrate.codecs.kit.geometry import geometry
from migrate.core.spec import Spec
from migrate.elements.raw import carrier

HERE = Path(__file__).resolve().parent
# where `make peers` installs the libraries that are compared with
PEERS = HERE.parent / ".venv-peers" / "bin" / "python"
# what must be ours to the bit
SAME = (
    "scales repeated", "block by block", "transformers", "DeepGEMM in torch", "gguf-py",
    "bitsandbytes", "GPTQModel in torch", "AutoAWQ in torch",
)  # fmt: skip
Work = dict[str, Callable[[], Any]]


class Nobody:
    """A meter that does not listen: what measuring costs the codec itself."""

    def add(self, *numbers: Any, **counts: Any) -> None:
        pass


def race(candidates: Work, rounds: int, device: str = "cpu") -> dict[str, float]:
    """name -> milliseconds."""
    best = dict.fromkeys(candidates, float("inf"))
    clock = time.thread_time if device == "cpu" else time.perf_counter
    for _ in range(rounds):
        for name, run in candidates.items():
            settle(device)
            start = clock()
            run()
            settle(device)
            best[name] = min(best[name], (clock() - start) * 1e3)
    return best


def settle(device: str) -> None:
    """Waits for what a device has yet to do."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def raw(tensor: Any) -> Any:
    """What is decoded into: raw elements, numpy on the CPU."""
    import torch

    whole = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
    if tensor.device.type != "cpu":
        return whole
    return whole.numpy().view(f"<u{tensor.element_size()}")


def as_tensor(dtype: str, array: Any) -> Any:
    """Raw elements as a tensor of torch's own dtype."""
    import torch

    whole = torch.from_numpy(np.ascontiguousarray(array).view({1: "u1", 2: "<i2", 4: "<i4"}[
        array.itemsize
    ]))  # fmt: skip
    return whole.view(getattr(torch, dtype))


# -- decoding ------------------------------------------------------------------------------------


def alone(rounds: int, only: str) -> dict[str, float]:
    """name -> milliseconds of decoding in a process that has not imported torch."""
    out, work = np.empty((SIDE, SIDE), "<u2"), {}
    for name, make in cases().items():
        if only in name:
            layout, parts, dtype = make()
            specs = {role: Spec(kind, a.shape) for role, (kind, a) in parts.items()}
            arrays = {role: a for role, (_, a) in parts.items()}
            box = tuple((0, n) for n in geometry(layout, specs).shape)
            work[name] = lambda given=(layout, specs, arrays, dtype, box): decode(*given, out)
    found = race(work, rounds)
    if "torch" in sys.modules:
        raise SystemExit("decoding imported torch")
    return found


def copies(rounds: int, on: str) -> dict[str, float]:
    """The times of copying a result into fresh and into warm memory. They are taken first: once
    much has been freed, an allocator gives memory that is not fresh.
    """
    import torch

    made = torch.zeros((SIDE, SIDE), dtype=torch.bfloat16, device=on)
    warm = torch.zeros_like(made)
    return race({"clone": made.clone, "copy_": lambda: warm.copy_(made)}, rounds, on)


def decoding(name: str, make: Any, peers: Mapping[str, Any], rounds: int, on: str) -> Any:
    """The times of one format: migrate, the same measured, and peers."""
    import torch

    layout, parts, dtype = make()
    specs = {role: Spec(kind, a.shape) for role, (kind, a) in parts.items()}
    given = {role: as_tensor(kind, a).to(on) for role, (kind, a) in parts.items()}
    arrays = {role: raw(tensor) for role, tensor in given.items()}
    made = torch.empty((SIDE, SIDE), dtype=getattr(torch, dtype), device=on)
    out = raw(made)
    box = tuple((0, n) for n in geometry(layout, specs).shape)

    def run(meter: Any = None) -> None:
        decode(layout, specs, arrays, dtype, box, out, meter)

    run()
    work: Work = {
        "migrate": run,
        "migrate, measured": lambda: run(Nobody()),
    }
    for who, peer in peers.items():
        theirs = peer(given).to(made.dtype)
        compare(f"{who} decodes {name}", who, theirs.view(torch.int16) == made.view(torch.int16))
        work[who] = lambda peer=peer: peer(given)
    return race(work, rounds, on)


def compare(what: str, who: str, same: Any) -> None:
    """Says how much of what a peer made is ours. SystemExit where all has to be."""
    share = float(same.float().mean())
    if share < 1:
        print(f"  {what}: {share:.4%} as we do")
        if who in SAME:
            raise SystemExit(f"{what}: the bits differ")


# -- encoding ------------------------------------------------------------------------------------


def encoding(name: str, peers: Mapping[str, Any], rounds: int) -> Any:
    """The times of one format: migrate, the same measured, and peers."""
    import torch

    layout, parts, rule = ENCODED[name]
    numbers = (
        torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)) * 0.02
    ).bfloat16()
    source, box = raw(numbers), ((0, SIDE), (0, SIDE))
    given = TensorEncoding(layout, NUMBERS, parts, rule)
    out = {role: np.empty(part.shape, carrier(part.dtype)) for role, part in parts.items()}

    def run(meter: Any = None) -> None:
        survey = given.survey(source, box) if given.surveyed else None
        memo: dict[str, Any] = {}
        for role, array in out.items():
            whole = tuple((0, n) for n in array.shape)
            if role == "weight":
                given.encode(source, role, whole, array, meter, memo, survey)
            elif not given.recall(role, whole, array, memo, survey):
                raise SystemExit(f"the {role} is not known")

    run()
    codes = torch.from_numpy(out["weight"])
    work: Work = {
        "migrate": run,
        "migrate, measured": lambda: run(Nobody()),
    }
    for who, peer in peers.items():
        theirs = peer(numbers.clone())[0].view(torch.uint8).reshape(codes.shape)
        compare(f"{who} encodes {name}", who, theirs == codes)
        # one of them works on what it is given
        work[who] = lambda peer=peer: peer(numbers)
    return race(work, rounds)


# -- figures -------------------------------------------------------------------------------------


def best_peer(times: Mapping[str, float]) -> str | None:
    """The fastest of the peers, if there is any."""
    ours = ("clone", "copy_", "migrate", "migrate, measured", "without torch")
    return min((who for who in times if who not in ours), key=times.__getitem__, default=None)


def table(title: str, found: Mapping[str, Mapping[str, float]]) -> None:
    print(title)
    for name, times in found.items():
        print(f"  {name}")
        for who, ms in times.items():
            clones = f"{ms / times['clone']:6.2f} x clone  " if "clone" in times else ""
            print(f"    {who:<20} {ms:8.2f} ms  {clones}{ms / times['migrate']:6.2f} x migrate")


def formats(migrate: list[str], python: str, folder: Path, checkpoint: Path) -> list[Limit]:
    """Decoding and encoding each number format in memory, one thread, against a clone of the result
    and against the fastest peer.
    """
    out = folder / "formats.json"
    interpreter = str(PEERS) if PEERS.exists() else python
    process.run([interpreter, HERE / "format_speed.py", "--json", out])
    measured = json.loads(out.read_text())
    limits = []
    for name, times in measured["decoded"].items():
        bar, clone = DECODED[name], times["clone"]
        faster = _faster(f"decode {name}", times, bar.faster)
        if bar.clones is not None:
            note = (
                f" ({times['without torch'] / clone:.2f} without torch; "
                f"{times['migrate'] / times['copy_']:.2f} of copy_ into warm memory)"
            )
            # a clone is as fast as the pages that it is given; peers are given the same
            aim = "(aim) " if faster else ""
            what = f"{aim}decode {name}: against clone of the result"
            limits.append(Limit(what, times["migrate"] / clone, bar.clones, note=note))
        limits += faster
    for name, times in measured["encoded"].items():
        limits += _faster(f"encode {name}", times, ENCODED_FASTER[name])
    return limits


def _faster(what: str, times: Mapping[str, float], bar: float | None) -> list[Limit]:
    who = best_peer(times)
    if bar is None or who is None:
        return []
    ratio = times[who] / times["migrate"]
    return [Limit(f"{what}: faster than {who}", ratio, bar, at_least=True)]


COMMANDS: dict[str, Callable[[list[str], str, Path, Path], list[Limit]]] = {"formats": formats}


def main() -> None:
    parser = argparse.ArgumentParser(description="speed of number formats in memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="formats whose names have this in them")
    parser.add_argument("--device", default="cpu", help="cuda: decoding alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", action="store_true", help="print the times without torch")
    given = parser.parse_args()
    if given.alone:
        print(json.dumps(alone(given.rounds, given.only)))
        return
    apart = {}
    if given.device == "cpu":
        command = [sys.executable, __file__, "--alone", f"--rounds={given.rounds}"]
        made = subprocess.run([*command, f"--only={given.only}"], capture_output=True, check=True)
        apart = json.loads(made.stdout)
    import torch

    torch.set_num_threads(1)
    plain = copies(max(given.rounds, 5), given.device)
    import format_peers

    if given.device == "cpu" and format_peers.missing():
        print(f"not installed, and left out: {', '.join(format_peers.missing())}")
    others = format_peers.peers()
    decoded, encoded = {}, {}
    for name, make in cases().items():
        if given.only not in name:
            continue
        peers = others.decoders.get(name, {})
        decoded[name] = plain | decoding(name, make, peers, given.rounds, given.device)
        if name in apart:
            decoded[name]["without torch"] = apart[name]
    for name in ENCODED if given.device == "cpu" else ():
        if given.only in name:
            encoded[name] = encoding(name, others.encoders.get(name, {}), given.rounds)
    thp = os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
    allocator = "THP_MEM_ALLOC_ENABLE=1" if thp else "default allocator"
    where = f"{SIDE} x {SIDE}, {given.device}, one thread, {allocator}"
    table(f"decode, {where}", decoded)
    table(f"encode bfloat16, {where}", encoded)
    if given.json:
        found = {
            "torch": torch.__version__, "numpy": np.__version__, "device": given.device,
            "allocator": allocator, "decoded": decoded, "encoded": encoded,
        }  # fmt: skip
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
