"""Checked records from plain data: the fields of a dataclass and what each accepts. Imports no torch."""

from elixir_moe.records import ABOVE_0, Check, Respelled, at_least, build, check, keys, unknown
