"""A family of known parts: Llama with a plain feed-forward, relu² and LayerNorm."""

from jingu.model.families.tabled import tabled_family

EXAMPLE = tabled_family(
    "example",
    {
        "architectures": ["ExampleForCausalLM"],
        "activation": "relu2",
        "layers": {"window": "none"},
        "template": {
            "norm": {"type": "layer", "eps": 1e-5},
            "feed_forward": {"type": "plain", "intermediate_size": 3072, "activation": "relu2", "bias": False},
        },
        "keys": {"norm.eps": {"key": "layer_norm_eps", "default": 1e-5}},
        "names": {
            "model.layers.*.mlp.{gate,up,down}_proj": False,
            "model.layers.*.mlp.{up,down}_proj": "blocks.*.feed_forward.{up,down}",
        },
        "presets": {
            "example-1b": {"num_layers": 16, "hidden_size": 2048, "attention.num_heads": 16, "vocab_size": 32000},
        },
    },
)
