"""Shows what only a GPU can, by one command that can be repeated: `python -m benchmarks.proof` (docs/gpu.md)."""
