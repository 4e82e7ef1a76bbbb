"""Names that a plan and `quantize` choose among. Imports no torch."""

from elixir_moe.names import Master, Moments, SchemeName
