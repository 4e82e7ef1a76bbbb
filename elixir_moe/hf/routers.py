"""The routers of Hugging Face's mixtures: their load, fp32 weights, and load balancing without a loss.

Owns hooks on the routers and the counts of tokens. A router is a module named ...Router with `num_experts`; it keeps
its class. It returns (logits, weights, indices) in nearly all mixtures of `transformers` 5, (weights, logits) in Llama
4, and (choices, weights, logits) in Switch Transformers and NLLB. All of these but the indices have a column for each
expert, which is 0 for tokens that go to other experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elixir_moe.errors import ConfigError
from elixir_moe.parallel.mesh import init_mesh
from elixir_moe.parallel.meta_tensors import has_data
from elixir_moe.parallel.pattern import Pattern
from elixir_moe.parallel.rules import attach, pattern_of
from elixir_moe.runtime.autograd import in_backward

_BIAS = "e_score_correction_bias"


class Routers:
    """Counts the tokens that each router of a model sends to each expert, over all ranks.

    Each token of a training pass counts once. A pass under `no_grad` counts only if it is the first pass of a reentrant
    activation checkpoint, which backward runs again; any other, such as that of a reference model, trains nothing.
    """

    def __init__(self, model: nn.Module, *, fp32: bool = False, balance: float = 0.0) -> None:
        """Finds the routers. Call it before `em.wrap`, and `step` after each ``optimizer.step()``.

        Args:
            model: a model of `transformers`, or one that contains such a model (peft).
            fp32: keep the routers' weights in fp32 and compute in fp32, whatever `compute_dtype` is.
            balance: after each step, add this to the selection bias of experts that got fewer tokens than the mean, and
                take it from those that got more (DeepSeek-V3, 2.1.2: gamma, 0.001 there). The bias becomes fp32.

        Raises:
            ConfigError: there is no router, or `balance` is given for routers without a selection bias.
        """
        self.modules = _routers(model)
        if not self.modules:
            raise ConfigError("the model has no router: expected modules named ...Router with num_experts")
        without = [name for name, module in self.modules.items() if not _has_bias(module)]
        if balance and without:
            raise ConfigError(
                f"balance={balance}: {without[0]} has no {_BIAS} of one number for each expert, as DeepSeek's routers "
                f"have; leave it out"
            )
        self._balance = balance
        self._counts: dict[str, Tensor] = {}
        self._since: dict[str, Tensor] = {}
        for name, module in self.modules.items():
            module.register_forward_hook(self._counting(name))
            if fp32:
                self._keep_fp32(module)
            if balance:
                _widen_bias(module)

    def _counting(self, name: str) -> Any:
        def add(found: Tensor) -> None:
            self._counts[name] = self._counts[name] + found if name in self._counts else found

        def count(module: nn.Module, args: Sequence[Any], output: Sequence[Tensor]) -> None:
            if not (module.training and torch.is_grad_enabled() and has_data(output[0])):
                return  # the planner's trace counts nothing
            found, weights = _sent(output, int(module.num_experts))  # type: ignore[arg-type]
            if not in_backward():
                add(found)
            elif weights.requires_grad:
                # A recomputation. Gradients reach its tensors only if the checkpoint is reentrant, whose first pass ran
                # under no_grad and was not counted.
                weights.register_hook(lambda _: add(found))

        return count

    @staticmethod
    def _keep_fp32(module: nn.Module) -> None:
        for parameter in module.parameters():
            _exempt(parameter)

        def widen(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            dtypes.append(args[0].dtype)
            return (args[0].float(), *args[1:])

        def narrow(_: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            dtype = dtypes.pop()
            kept = (_place_of_logits(output), 3)  # 3: the state that ZAYA's router hands to the next
            return tuple(
                each if place in kept or not each.is_floating_point() else each.to(dtype)
                for place, each in enumerate(output)
            )

        dtypes: list[torch.dtype] = []
        module.register_forward_pre_hook(widen)
        module.register_forward_hook(narrow)

    @torch.no_grad()
    def step(self) -> None:
        """Sums the counts of the step over all ranks, and updates the biases. Collective."""
        names = list(self.modules)
        sizes = [int(module.num_experts) for module in self.modules.values()]  # type: ignore[arg-type]
        some = next(iter(self._counts.values()), None)
        if some is None:
            counts = torch.zeros(sum(sizes), dtype=torch.int64)
        else:
            counts = torch.cat(
                [self._counts.get(name, some.new_zeros(size)) for name, size in zip(names, sizes, strict=True)]
            )
        if dist.is_initialized():
            dist.all_reduce(counts)
        self._counts.clear()
        for name, found in zip(names, counts.split(sizes), strict=True):
            self._since[name] = self._since[name] + found if name in self._since else found
            if self._balance:
                bias: Any = getattr(self.modules[name], _BIAS)
                bias += self._balance * (found.float().mean() - found).sign().to(bias)

    def loads(self) -> dict[str, Tensor]:
        """Returns {router: tokens sent to each expert since the last call}, over all ranks."""
        found, self._since = self._since, {}
        return {name: counts.cpu() for name, counts in found.items()}


def _widen_bias(router: Any) -> None:
    """Makes a selection bias fp32: in 16 bits, adding 0.001 to 0.5 or more changes nothing."""
    bias = getattr(router, _BIAS)
    bias.data = bias.data.float()
    if isinstance(bias, nn.Parameter):
        _exempt(bias)


def _exempt(parameter: nn.Parameter) -> None:
    """Keeps a parameter that has no pattern in fp32, whatever `compute_dtype` is."""
    if pattern_of(parameter) is None:
        attach(parameter, Pattern(init_mesh(), replicate=("dp",), dtype=torch.float32))


def _has_bias(router: Any) -> bool:
    """Whether a router has a bias of one number per expert; LongCat-Flash's has more, for identities after experts."""
    bias = getattr(router, _BIAS, None)
    return bias is not None and len(bias) == router.num_experts


def _place_of_logits(output: Sequence[Tensor]) -> int:
    if len(output) == 2:
        return 1
    return 2 if output[2].is_floating_point() else 0


def _sent(output: Sequence[Tensor], num_experts: int) -> tuple[Tensor, Tensor]:
    """Returns the (E,) tokens that a router has sent to each expert, and the weights in its output.

    Tokens that LongCat-Flash and ZAYA skip go to no expert.
    """
    if _place_of_logits(output) == 0:
        weights, chosen = output[1], output[2].detach()
        counted = weights.detach() != 0 if weights.shape == chosen.shape else torch.ones_like(chosen, dtype=torch.bool)
        found = chosen.new_zeros(num_experts + 1, dtype=torch.int64)  # the last for the tokens of no expert
        found.scatter_add_(0, chosen.reshape(-1).clamp(max=num_experts).long(), counted.reshape(-1).long())
        return found[:num_experts], weights
    weights = output[1] if len(output) == 3 and output[1].shape[-1] == num_experts else output[0]
    return weights.detach().reshape(-1, num_experts).count_nonzero(dim=0), weights


def has_routers(model: nn.Module) -> bool:
    """Whether a model has routers that `Routers` knows."""
    return bool(_routers(model))


def _routers(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Router") and isinstance(getattr(module, "num_experts", None), int)
    }


def busiest(loads: dict[str, Tensor]) -> dict[str, float]:
    """Returns {router: tokens of its busiest expert, as a multiple of an even share}."""
    return {name: float(counts.max() / counts.float().mean().clamp(min=1e-9)) for name, counts in loads.items()}


def load_table(loads: dict[str, Tensor]) -> str:
    """Formats the loads: a line for each router, a column for each expert, in percent of the router's tokens."""
    width = max(map(len, loads), default=0)
    lines = [f"{'router':{width}}  % of tokens by expert"]
    for name, counts in loads.items():
        shares = 100 * counts / counts.sum().clamp(min=1)
        lines.append(f"{name:{width}}  {' '.join(f'{share:5.1f}' for share in shares.tolist())}")
    return "\n".join(lines)
