"""The port of the library: what programs use besides the public names of `elixir_moe` and its errors.

Owns the list, by topic, and no code. The programs of `elixir_tools` are written on it, and so may yours be: import a
topic, as in ``from elixir_moe.ext.ranks import gathered``. A name that goes or changes its meaning raises `VERSION`.
"""

VERSION = 1
"""Compared by programs that live elsewhere."""
