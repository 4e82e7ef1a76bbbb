"""What only a GPU can show, in one command that can be called again: `python -m benchmarks.proof` (docs/gpu.md)."""
