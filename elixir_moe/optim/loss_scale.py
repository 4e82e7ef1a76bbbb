"""Dynamic loss scaling for fp16 parameters.

Owns the scale. Never looks at a gradient: `optimizer` reports overflows.
"""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class LossScale:
    """Dynamic loss scaling as in `torch.amp.GradScaler`: halved on overflow, doubled after `growth_interval` steps."""

    scale: float = 65536.0
    growth_interval: int = 2000
    """Steps without overflow after which the scale doubles."""
    clean_steps: int = 0

    def update(self, overflow: bool) -> None:
        """Adjusts the scale after one step."""
        self.clean_steps = 0 if overflow else self.clean_steps + 1
        if overflow:
            self.scale /= 2
        elif self.clean_steps == self.growth_interval:
            self.scale, self.clean_steps = self.scale * 2, 0
