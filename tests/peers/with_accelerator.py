"""A pytest plugin that puts `ElixirAccelerator` in the place of Accelerate's `Accelerator`.

Tests find the class by its name in the package, so the name is exchanged before any is imported.
"""

import accelerate
import accelerate.accelerator

from elixir_moe.hf.accelerate import ElixirAccelerator

for module in (accelerate, accelerate.accelerator):
    setattr(module, "Accelerator", ElixirAccelerator)  # noqa: B010
