"""Versions of torch that the library is tested with."""

from elixir_moe.torch_private import IMPORTED_LATE, NEWEST, OLDEST, untested
