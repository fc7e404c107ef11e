"""What the hook of `migrate.attach` takes of one `load_state_dict` of 20,000 small tensors, the
first time and the second.

Only the hook is timed: what torch does with what it is handed is the same with any state dict of
the new layout. A small load before has imported what is imported once.
"""

from __future__ import annotations

import json
import time

import torch
from live_load import module_of
from tasks import HOOK_KEYS

import migrate

EXPERTS = 40


def old_layout(layers: int) -> dict[str, torch.Tensor]:
    """A state dict of the layout v4, 128 tensors a layer; each tensor is small, because nobody
    reads it.
    """
    state = {}
    for layer in range(layers):
        p = f"model.layers.{layer}."
        for expert in range(EXPERTS):
            for w in ("w1", "w2", "w3"):
                state[f"{p}block_sparse_moe.experts.{expert}.{w}.weight"] = torch.empty(4, 4)
        for w in "qkvo":
            state[f"{p}self_attn.{w}_proj.weight"] = torch.empty(4, 4)
        state[f"{p}block_sparse_moe.gate.weight"] = torch.empty(EXPERTS, 4)
        state[f"{p}input_layernorm.weight"] = torch.empty(4)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.empty(4, 4)
    state["model.norm.weight"] = torch.empty(4)
    return state


def hooked(state: dict[str, torch.Tensor]) -> tuple[float, list[float]]:
    """Seconds that torch takes to load what the hook makes, and seconds of the hook of one module,
    each time.
    """
    new = migrate.migrate_state_dict(state, "hf-mixtral@v5")
    model = module_of(
        {key: (tensor.shape, tensor.dtype) for key, tensor in ((key, new[key]) for key in new)}
    )
    start = time.perf_counter()
    model.load_state_dict(dict(new))
    plain = time.perf_counter() - start
    migrate.attach(model, "hf-mixtral@v5")
    (hook,) = model._load_state_dict_pre_hooks.values()
    seconds = []
    for _ in range(3):
        given, errors = dict(state), []
        start = time.perf_counter()
        hook(given, "", {}, True, [], [], errors)
        seconds.append(time.perf_counter() - start)
        if errors or given.keys() != new.keys():
            raise SystemExit(f"the hook did not migrate: {errors[:1]}")
    return plain, seconds


def main() -> None:
    hooked(old_layout(1))
    plain, (first, *others) = hooked(old_layout(HOOK_KEYS // 126))
    print(json.dumps({"first": first, "second": min(others), "plain": plain}))


if __name__ == "__main__":
    main()
