"""The parts of a model: layers of the mixture, cut layers, packed weights, and the record of `wrap`."""

from elixir_moe.kernels import sum_of_squares
from elixir_moe.moe.experts import MLP, GroupedExperts
from elixir_moe.moe.layer import LayerRanks
from elixir_moe.moe.router import TopKRouter
from elixir_moe.parallel.linear import CutLinear, TensorRanks, linear
from elixir_moe.parallel.rules import logical_numel
from elixir_moe.parallel.state_dict import persistent_buffers
from elixir_moe.quantized.formats import SCHEMES, scheme_named
from elixir_moe.quantized.packed import SCALES, packed_parameters, weights_behind
from elixir_moe.state.checkpoint.held import held_pieces, share_of
from elixir_moe.state.wrapped import Wrapped, require_wrapped
from elixir_moe.torch_private import Dropout, tree_leaves, tree_map
