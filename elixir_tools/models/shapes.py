"""Shapes of models to plan for, by name.

Owns the names. Builds nothing, and needs no torch. Sources: GPT-2 of Elixir v2, Table 6; OPT, Table 1 of its paper
(vocabulary 50272, 2048 + 2 positions). The models of ZeRO-Infinity's Table 1 have a width of 128 a head, where its
appendix names no heads. PR-MoE follows DeepSpeed-MoE's recipe, a 1.3 B base of 24 layers, experts in every other one,
about twice as many in the last two, in numbers that give the sizes of v1.
"""

GPT2 = {"gpt2-4b": (32, 3072, 24), "gpt2-10b": (48, 4096, 32), "gpt2-15b": (18, 8192, 64), "gpt2-20b": (24, 8192, 64)}
"""(layers, width, heads)."""
OPT = {
    "opt-2.7b": (32, 2560, 32),
    "opt-6.7b": (32, 4096, 32),
    "opt-13b": (40, 5120, 40),
    "opt-30b": (48, 7168, 56),
    "opt-66b": (64, 9216, 72),
    "opt-175b": (96, 12288, 96),
}
"""(layers, width, heads)."""
INFINITY = {
    "infinity-10b": (50, 4096, 16),
    "infinity-50b": (62, 8192, 64),
    "infinity-100b": (125, 8192, 64),
    "infinity-500b": (124, 18432, 144),
    "infinity-1t": (128, 25600, 256),
    "infinity-5t": (174, 49152, 384),
    "infinity-10t": (200, 65536, 512),
    "infinity-20t": (205, 90112, 704),
}
"""(layers, width, heads)."""
PR_MOE = {"pr-moe-16b": (32, 64), "pr-moe-25b": (48, 112), "pr-moe-29b": (56, 128)}
"""Experts of a mixture layer, and of each of the last two."""
LARGE_MOE = {"moe-1t": (64, 7680, 60, 64)}
"""(layers, width, heads, experts of every other layer): two experts a token, a trillion parameters."""


def names() -> list[str]:
    """The names of all named models."""
    return [*GPT2, *OPT, *INFINITY, *PR_MOE, *LARGE_MOE]


def is_mixture(name: str) -> bool:
    """Whether the model has experts, which are spread over ranks."""
    return name in PR_MOE or name in LARGE_MOE
