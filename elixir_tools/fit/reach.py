"""The largest known models that a machine can fine-tune, by the formulas of `plan --quick`.

Owns the order in which models are tried. Knows no formula.
"""

import argparse

from elixir_moe.errors import ConfigError
from elixir_moe.ext.hardware import Hardware
from elixir_tools.fit.figures import Figures
from elixir_tools.fit.ways import WAYS, asked_for, figures_of
from elixir_tools.models import known


def largest(question: argparse.Namespace, hardware: Hardware) -> dict[str, str | None]:
    """{way to train: the largest model that ships by name and fits; None if none does}.

    `question`: the arguments of `plan` for the machine and the size of a step.
    """

    def figures(name: str, way: str) -> Figures:
        return figures_of(asked_for(argparse.Namespace(**vars(question) | {"model": name}), WAYS[way]), hardware)[1]

    def fits(name: str, way: str) -> bool:
        try:
            return figures(name, way).fits
        except ConfigError:  # a model cannot have these adapters
            return False

    sizes = {name: figures(name, "full").task.profile.parameters for name in known.names()}
    by_size = sorted(sizes, key=lambda name: -sizes[name])
    return {way: next((name for name in by_size if fits(name, way)), None) for way in WAYS}
