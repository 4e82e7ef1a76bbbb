"""The choices of some options of a plan and of `quantize`.

Owns only the names, without torch, so that help is fast. Their meaning is documented where they are used.
"""

from typing import Literal

Master = Literal["fp32", "bf16"]
"""Dtype of the master weights."""
Moments = Literal["fp32", "bf16", "int8"]
"""Dtype of Adam's moments."""
SchemeName = Literal["nf4", "mxfp4", "fp8", "int8"]
"""Formats of frozen weights."""
