"""Several optimizers as one, as `em.wrap` makes them."""

from elixir_moe.optim.joined import join
