"""Pages about models and runs as HTML."""

from elixir_moe.page import document, model
from elixir_moe.page.document import SERIES
