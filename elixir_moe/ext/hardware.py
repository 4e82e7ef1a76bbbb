"""A machine as the planner sees it. Imports no torch."""

from elixir_moe.planner.hardware import Hardware, Links
