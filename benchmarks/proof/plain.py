"""`python -m benchmarks.proof.plain MODEL`: how long plain torch computes, with nothing away from the device.

Owns this measurement: forward and backward of a micro-batch in bf16, without an optimizer, of the model cut to a few
layers and to twice as many. The difference is the time of the layers in between, so that the time of any depth follows,
also where the whole model does not fit.
"""

import sys

import torch

from benchmarks.proof.models import build, fill
from benchmarks.proof.rates import seconds_of
from benchmarks.proof.steps import tell
from benchmarks.workload import SEED

LAYERS = 2
"""A mixture has experts in every second layer."""


def main() -> int:
    """Measures and tells."""
    name, cuda = sys.argv[1], torch.cuda.is_available()
    shallow, deep = (_seconds(name, depth, cuda) for depth in (LAYERS, 2 * LAYERS))
    tell({"layers": LAYERS, "seconds": shallow, "layer_seconds": (deep - shallow) / LAYERS})
    return 0


def _seconds(name: str, layers: int, cuda: bool) -> float:
    model = build(name, toy=not cuda, layers=layers)
    fill(model.module)
    model.ties(model.module)
    module = model.module.to("cuda" if cuda else "cpu")
    model.ties(module)
    shape = (model.batch, model.seq_len + 1)
    batch = torch.randint(model.vocab_size, shape, generator=torch.Generator().manual_seed(SEED))
    batch = batch.cuda() if cuda else batch

    def run() -> None:
        model.loss(module, batch).backward()
        module.zero_grad()

    return seconds_of(run)


if __name__ == "__main__":
    sys.exit(main())
