"""Names that a plan and `quantize` choose among.

Owns the names alone, without torch, so that help is quick. What a name stands for is said where it is used.
"""

from typing import Literal

Master = Literal["fp32", "bf16"]
"""How weights are kept for the update."""
Moments = Literal["fp32", "bf16", "int8"]
"""How Adam's moments are kept."""
SchemeName = Literal["nf4", "mxfp4", "fp8", "int8"]
"""Formats of frozen weights."""
