"""Several optimizers as one, as `em.wrap` makes them, and what Muon trains of a model."""

from elixir_moe.optim.division import matrices_of_layers
from elixir_moe.optim.joined import join
