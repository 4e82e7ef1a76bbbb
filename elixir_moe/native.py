"""The native module built from csrc/, or None in a source tree that was never built.

Owns only this import. Without the module everything works, but steps on a CPU are several times slower.
"""

try:
    from elixir_moe import _native as native
except ImportError:
    native = None  # type: ignore[assignment]
