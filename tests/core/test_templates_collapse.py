import random

import pytest

from migrate.core.templates import collapse


def texts(keys, tag=None):
    return [(line.text, line.count) for line in collapse(keys, tag)]


LLAMA = [
    "model.embed_tokens.weight",
    *(f"model.layers.{n}.{name}" for n in range(32) for name in (
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
        "input_layernorm.weight", "post_attention_layernorm.weight",
    )),
    "model.norm.weight",
    "lm_head.weight",
]  # fmt: skip
SHAPES = {
    "q_proj": "q",
    "o_proj": "q",
    "k_proj": "kv",
    "v_proj": "kv",
    "gate_proj": "in",
    "up_proj": "in",
    "down_proj": "out",
    "embed_tokens": "e",
    "lm_head": "e",
}


def test_a_model_is_a_few_lines():
    def shape(key):
        word = key.split(".")[-2]
        return "n" if "norm" in word else SHAPES.get(word, word)

    assert texts(LLAMA, shape) == [
        ("model.embed_tokens.weight", 1),
        ("model.layers.{0..31}.self_attn.{q,o}_proj.weight", 64),
        ("model.layers.{0..31}.self_attn.{k,v}_proj.weight", 64),
        ("model.layers.{0..31}.mlp.{gate,up}_proj.weight", 64),
        ("model.layers.{0..31}.mlp.down_proj.weight", 32),
        ("model.layers.{0..31}.{input,post_attention}_layernorm.weight", 64),
        ("model.norm.weight", 1),
        ("lm_head.weight", 1),
    ]


def test_without_a_tag_all_alike_words_come_together():
    assert texts(LLAMA)[1:4] == [
        ("model.layers.{0..31}.self_attn.{q,k,v,o}_proj.weight", 128),
        ("model.layers.{0..31}.mlp.{gate,up,down}_proj.weight", 96),
        ("model.layers.{0..31}.{input,post_attention}_layernorm.weight", 64),
    ]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], []),
        ([""], [("", 1)]),
        (["a.3.x"], [("a.3.x", 1)]),
        (["a.0", "a.1"], [("a.{0,1}", 2)]),
        (["a.0", "a.1", "a.3", "a.9"], [("a.{0,1,3,9}", 4)]),
        (["a.0", "a.1", "a.2", "a.9"], [("a.{0..2,9}", 4)]),
        ([f"a.{n}" for n in range(0, 62, 2)], [("a.{0..60..2}", 31)]),
        ([f"a.{n * n}" for n in range(20)], [("a.{0,1,4,9,…,361}", 20)]),
        (["x.0.a", "x.1.a", "x.2.b"], [("x.{0,1}.a", 2), ("x.2.b", 1)]),
        (["b.w1", "b.w3"], [("b.w{1,3}", 2)]),
        ([f"m.weight{i}" for i in range(16)], [("m.weight{0..15}", 16)]),
        (["b.gamma", "b.beta"], [("b.{gamma,beta}", 2)]),
        (["b.lora_A.w", "b.lora_B.w"], [("b.lora_{A,B}.w", 2)]),
        (
            ["n.running_mean", "n.running_var", "n.num_batches_tracked"],
            [("n.running_{mean,var}", 2), ("n.num_batches_tracked", 1)],
        ),
        (["a.q.weight", "a.q.bias", "a.k.weight", "a.k.bias"], [("a.{q,k}.{weight,bias}", 4)]),
        (["a.q.weight", "a.q.bias", "a.k.weight"], [("a.q.{weight,bias}", 2), ("a.k.weight", 1)]),
        (list("abcdef"), [(c, 1) for c in "abcdef"]),
        (["weight", "weight_scale"], [("{weight,weight_scale}", 2)]),
        (["a.{x}.b"], [("a.{{x}}.b", 1)]),
        (["a.\x1b[2J.é\n"], [("a.\\x1b[2J.\\xe9\\n", 1)]),
        (["a.01", "a.1"], [("a.01", 1), ("a.1", 1)]),
        (
            ["l.0.e.0", "l.0.e.1", "l.1.e.0", "l.1.e.1", "l.2.e.0"],
            [("l.{0,1}.e.{0,1}", 4), ("l.2.e.0", 1)],
        ),
    ],
)
def test_keys_are_put_together_as_a_reader_would(keys, expected):
    assert texts(keys) == expected


def test_a_key_that_holds_the_slot_character_is_printed_escaped():
    found = texts(["\ue000.1", "5.1"])
    assert sum(count for _, count in found) == 2
    assert all(text.isascii() for text, _ in found)


def test_many_alternatives_are_shortened_and_still_counted():
    (line,) = collapse([f"a.{chr(97 + i)}_proj" for i in range(20)])
    assert (line.text, line.count) == ("a.{a,b,c,d,…,t}_proj", 20)


def test_keys_with_other_tags_or_integers_stay_apart():
    keys = [f"l.{n}.{w}_proj" for n in range(4) for w in "qk"] + ["l.0.v_proj"]
    assert texts(keys) == [("l.{0..3}.{q,k}_proj", 8), ("l.0.v_proj", 1)]
    assert texts(keys, lambda key: key.split(".")[1] == "0") == [
        ("l.0.{q,k,v}_proj", 3),
        ("l.{1..3}.{q,k}_proj", 6),
    ]


def test_the_sample_is_the_first_key():
    assert collapse(["m.é.5", "m.é.7"])[0].sample == "m.é.5"
    assert [line.sample for line in collapse(["l.0.e.0", "l.1.e.0", "l.1.e.1"])] == [
        "l.0.e.0",
        "l.1.e.0",
    ]


def test_every_key_is_counted_once_and_text_is_safe():
    rng = random.Random(8)
    words = [
        "q_proj",
        "k_proj",
        "w1",
        "w2",
        "0",
        "1",
        "2",
        "5",
        "weight",
        "bias",
        "{x}",
        "\x07",
        "ü",
        "01",
    ]
    for _ in range(200):
        keys = list(
            dict.fromkeys(".".join(rng.choices(words, k=rng.randint(1, 4))) for _ in range(60))
        )
        lines = collapse(keys, lambda key: len(key) % 2)
        assert sum(line.count for line in lines) == len(keys)
        assert {line.sample for line in lines} <= set(keys)
        assert all(
            line.text.replace("…", "").isascii() and line.text.isprintable() for line in lines
        )
