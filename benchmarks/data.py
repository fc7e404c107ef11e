"""Mixtral-like checkpoints in the old layout, one tensor per expert, for benchmarks, the demo and
tests.

Standard library only, so that a checkpoint can be made before anything is installed. The values are
pseudo-random bf16 numbers between 2**-7 and 2 in magnitude: no NaN, and nothing that a number
format would treat specially. Every 8 MiB of a file begins at another point of one random block, so
no two tensors are equal and a misplaced one shows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

BLOCK = 8 << 20
ITEM = 2  # bytes of a bf16


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Mixtral-like model; `hidden` is a multiple of `heads`, `heads` of
    `kv_heads`.
    """

    layers: int
    experts: int
    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    shards: int

    def tensors(self, shard: int) -> dict[str, tuple[int, ...]]:
        """Key -> shape of one shard (0-based), in the order that the safetensors library would
        write.
        """
        hidden, kv = self.hidden, self.hidden // self.heads * self.kv_heads
        found: dict[str, tuple[int, ...]] = {}
        if shard == 0:
            found["model.embed_tokens.weight"] = (self.vocab, hidden)
        if shard == self.shards - 1:
            found["lm_head.weight"] = (self.vocab, hidden)
            found["model.norm.weight"] = (hidden,)
        for layer in range(self.layers):
            if layer * self.shards // self.layers != shard:
                continue
            p = f"model.layers.{layer}."
            for w, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
                found[f"{p}self_attn.{w}_proj.weight"] = (rows, hidden)
            found[f"{p}input_layernorm.weight"] = found[f"{p}post_attention_layernorm.weight"] = (
                hidden,
            )
            found[f"{p}block_sparse_moe.gate.weight"] = (self.experts, hidden)
            for e in range(self.experts):
                x = f"{p}block_sparse_moe.experts.{e}."
                found[f"{x}w1.weight"] = found[f"{x}w3.weight"] = (self.intermediate, hidden)
                found[f"{x}w2.weight"] = (hidden, self.intermediate)
        return dict(sorted(found.items()))

    def config(self) -> dict[str, object]:
        """What `config.json` of such a model says."""
        return {
            "architectures": ["MixtralForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "dtype": "bfloat16",
            "eos_token_id": 2,
            "head_dim": self.hidden // self.heads,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 4096,
            "model_type": "mixtral",
            "num_attention_heads": self.heads,
            "num_experts_per_tok": 2,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "num_local_experts": self.experts,
            "output_router_logits": False,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "transformers_version": "4.57.6",
            "use_cache": True,
            "vocab_size": self.vocab,
        }


PRESETS = {
    "tiny": Shape(
        layers=2, experts=4, hidden=128, intermediate=128, vocab=32, heads=1, kv_heads=1, shards=2
    ),
    "demo": Shape(
        layers=4,
        experts=8,
        hidden=1024,
        intermediate=1408,
        vocab=4096,
        heads=8,
        kv_heads=2,
        shards=2,
    ),
    "1.2GB": Shape(
        layers=8,
        experts=16,
        hidden=1024,
        intermediate=1408,
        vocab=8192,
        heads=8,
        kv_heads=2,
        shards=4,
    ),
    "2GB": Shape(
        layers=6,
        experts=16,
        hidden=1536,
        intermediate=2176,
        vocab=8192,
        heads=12,
        kv_heads=3,
        shards=4,
    ),
    "4.4GB": Shape(
        layers=8,
        experts=16,
        hidden=2048,
        intermediate=2688,
        vocab=8192,
        heads=16,
        kv_heads=4,
        shards=4,
    ),
}


class Noise:
    """An endless supply of bf16 bytes: `take(n)` yields buffers of together `n` bytes, none of them
    twice.
    """

    def __init__(self, seed: int) -> None:
        block = bytearray(random.Random(seed).randbytes(BLOCK))
        # the high byte of a little-endian bf16: keep the sign and two exponent bits, fix the others
        block[1::2] = block[1::2].translate(bytes((b & 0x83) | 0x3C for b in range(256)))
        self._twice = memoryview(bytes(block * 2))
        self._chunk = 0

    def take(self, nbytes: int) -> list[memoryview]:
        out = []
        while nbytes:
            # an odd multiplier visits every item of the block once before it repeats
            start = self._chunk * 2654435761 % (BLOCK // ITEM) * ITEM
            size = min(nbytes, BLOCK)
            out.append(self._twice[start : start + size])
            self._chunk += 1
            nbytes -= size
        return out


def header(
    tensors: dict[str, tuple[int, ...]], dtype: str = "BF16", item: int = ITEM
) -> tuple[bytes, int]:
    """The safetensors header of these tensors, its length field included, and how many bytes of
    data follow it.
    """
    offset, entries = 0, {"__metadata__": {"format": "pt"}}
    for key, shape in tensors.items():
        size = item
        for n in shape:
            size *= n
        entries[key] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offset


def make(folder: Path, shape: Shape, seed: int = 0) -> int:
    """Writes the checkpoint into `folder`, which must not hold one yet; the bytes of all its
    tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    noise, weight_map, total = Noise(seed), {}, 0
    for shard in range(shape.shards):
        name = (
            f"model-{shard + 1:05d}-of-{shape.shards:05d}.safetensors"
            if shape.shards > 1
            else "model.safetensors"
        )
        tensors = shape.tensors(shard)
        head, nbytes = header(tensors)
        with (folder / name).open("xb", buffering=0) as file:
            file.write(head)
            for size in tensors.values():
                count = ITEM
                for n in size:
                    count *= n
                for buffer in noise.take(count):
                    file.write(buffer)
        weight_map |= dict.fromkeys(tensors, name)
        total += nbytes
    if shape.shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")
    (folder / "generation_config.json").write_text(
        '{\n  "bos_token_id": 1,\n  "eos_token_id": 2\n}\n'
    )
    return total


def make_headers(path: Path, count: int, files: int | None = None) -> None:
    """A checkpoint of `count` tensors whose data is a hole: nothing but headers costs time or disk.

    Keys are those of a mixture of 256 experts; one file up to 200,000 keys, a folder of shards and
    an index above, because the format ends at 100 MB of header, or where so many `files` are asked
    for.
    """
    keys = _expert_keys(count)
    if files is None and count <= 200_000:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_hole(path, keys)
        return
    path.mkdir(parents=True)
    shards = files or -(-count // 200_000)
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = keys[shard * count // shards : (shard + 1) * count // shards]
        _write_hole(path / name, part)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": count * 4096}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _expert_keys(count: int) -> list[str]:
    keys: list[str] = []
    layer = 0
    while len(keys) < count:
        p = f"model.layers.{layer}."
        keys += [f"{p}self_attn.{w}_proj.weight" for w in "qkvo"]
        keys += [
            f"{p}input_layernorm.weight",
            f"{p}post_attention_layernorm.weight",
            f"{p}mlp.gate.weight",
        ]
        if count - len(keys) < 768:
            # what is left does not fill a layer: plain keys, so that no group of experts is cut
            keys += [f"model.rest.{i}.weight" for i in range(count - len(keys))]
            break
        keys += [
            f"{p}mlp.experts.{e}.{w}_proj.weight"
            for e in range(256)
            for w in ("gate", "up", "down")
        ]
        layer += 1
    return keys[:count]


def _write_hole(path: Path, keys: list[str]) -> None:
    head, nbytes = header(dict.fromkeys(keys, (32, 64)))
    with path.open("xb") as file:
        file.write(head)
        file.truncate(len(head) + nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Make a Mixtral-like checkpoint in the old layout."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="demo")
    parser.add_argument("--seed", type=int, default=0)
    for name in (
        "layers",
        "experts",
        "hidden",
        "intermediate",
        "vocab",
        "heads",
        "kv-heads",
        "shards",
    ):
        parser.add_argument(f"--{name}", type=int, help=f"instead of the preset's {name}")
    args = vars(parser.parse_args())
    folder, preset, seed = args.pop("folder"), args.pop("preset"), args.pop("seed")
    shape = replace(PRESETS[preset], **{k: v for k, v in args.items() if v is not None})
    if folder.exists() and os.listdir(folder):
        sys.exit(f"{folder} exists and is not empty")
    total = make(folder, shape, seed)
    count = sum(len(shape.tensors(s)) for s in range(shape.shards))
    print(
        f"{folder}: {count} tensors, {total:,} bytes in {shape.shards} "
        f"file{'s' * (shape.shards > 1)}"
    )


if __name__ == "__main__":
    main()
