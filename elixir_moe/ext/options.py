"""The options of plans: the arguments of the presets, as settings of programs. Imports no torch."""

from elixir_moe.chunks.plan_options import Option, field_docstrings, options
