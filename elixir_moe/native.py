"""The module that csrc/ is built to, or None in a source tree that was never built.

Owns this import alone. Without the module everything works, the step on a CPU several times slower.
"""

try:
    from elixir_moe import _native as native
except ImportError:
    native = None  # type: ignore[assignment]
