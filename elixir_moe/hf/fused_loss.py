"""Trains Hugging Face's causal language models without materializing logits, by `linear_cross_entropy`.

Owns the replacement of the head's product and the loss during a forward: the head computes the logits of one token
only, and the loss is computed from the head's input. The model's own forward does the rest as usual: it adds auxiliary
losses of routers, shifts labels and divides losses. No forward is replaced. A Trainer with label smoothing withholds
the labels from the model and computes the loss from its output; `smoothed` does that without logits. Each thread may
run a forward of its own, as in `accumulate`. Needs the package `transformers`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elixir_moe.errors import ConfigError
from elixir_moe.hf.peft import base_of
from elixir_moe.linear_cross_entropy import check_head, linear_cross_entropy
from elixir_moe.parallel.meta_tensors import has_data

_INSTEAD = "train with the whole loss, or call em.linear_cross_entropy in a loss of your own"


class _Seen(threading.local):
    """Input and output of the head in the forward that runs on this thread, until its loss is computed."""

    hidden: Tensor | None = None
    raw: Tensor | None = None
    recompute: bool = False


class FusedLoss:
    """``with FusedLoss(model)(): loss = model(**batch).loss``; the output then has the logits of one token only."""

    def __init__(self, model: nn.Module) -> None:
        """Checks the model, which may have peft's adapters; changes nothing.

        Raises:
            ConfigError: the model is not a causal language model of `transformers`, or its head is more than a product.
        """
        from transformers.loss.loss_utils import ForCausalLMLoss
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        self.model = model
        causal: Any = base_of(model)
        self._causal = causal
        self._kind = type(causal).__name__
        known = self._kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        if not known or causal.loss_function is not ForCausalLMLoss:
            raise ConfigError(
                f"a loss without logits of {self._kind}: expected a causal language model with its own loss; {_INSTEAD}"
            )
        check_head(causal.get_output_embeddings())
        config = causal.config.get_text_config()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale = float(getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1))
        self._checked = False
        self._seen = _Seen()
        self._threads: set[int] = set()
        """The threads that have the context open."""
        self._undo: list[Callable[[], object]] = []

    @contextmanager
    def __call__(self, *, recompute: bool = False) -> Iterator[None]:
        """While open, each forward of the model computes its loss without logits.

        `recompute` is that of `linear_cross_entropy`, for a head that trains; one that does not keeps no gradient.
        """
        self._seen.recompute = recompute
        if not self._threads:
            self._replace()
        self._threads.add(threading.get_ident())
        try:
            yield
            if self._seen.hidden is not None:
                raise ConfigError(
                    f"a loss without logits of {self._kind}: its forward computes its loss itself, or had no labels; "
                    f"{_INSTEAD}"
                )
        finally:
            self._seen.hidden = self._seen.raw = None
            self._threads.discard(threading.get_ident())
            while not self._threads and self._undo:
                self._undo.pop()()

    def _replace(self) -> None:
        """Replaces the product of the head, and the loss."""
        head, causal = self._causal.get_output_embeddings(), self._causal
        own = vars(causal).get("_loss_function")
        if own is None:
            self._undo.append(lambda: vars(causal).pop("_loss_function"))
        else:
            self._undo.append(lambda: setattr(causal, "loss_function", own))
        causal.loss_function = self._loss
        self._undo.append(head.register_forward_pre_hook(self._shorten).remove)
        # Before hooks that change the logits.
        self._undo.append(head.register_forward_hook(self._note, prepend=True).remove)

    @property
    def awaits_loss(self) -> bool:
        """Whether the forward that has run on this thread has left its loss to `smoothed`."""
        return self._seen.hidden is not None

    def _shorten(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        """Keeps the input of the head, and passes on one token of it."""
        (hidden,) = args
        if self._seen.hidden is not None:
            raise ConfigError(f"a loss without logits of {self._kind}, which runs its head more than once; {_INSTEAD}")
        self._seen.hidden = hidden
        return (hidden[(slice(0, 1),) * (hidden.dim() - 1)],)

    def _note(self, _: nn.Module, args: Any, logits: Tensor) -> None:
        self._seen.raw = logits.detach()

    def _loss(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        label_smoothing: float = 0.0,
        **_: Any,
    ) -> Tensor:
        """Computes `transformers.loss.loss_utils.ForCausalLMLoss`, with label smoothing."""
        hidden, self._seen.hidden = self._seen.hidden, None
        if hidden is None:
            raise ConfigError(f"a loss without logits of {self._kind}, whose forward has not run its head; {_INSTEAD}")
        self._check(logits)
        if shift_labels is None:
            assert labels is not None, "transformers computes a loss of labels"
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        head = self._causal.get_output_embeddings()
        total = linear_cross_entropy(
            hidden if self._scale == 1 else hidden * self._scale,
            head,
            shift_labels.reshape(hidden.shape[:-1]),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            softcap=self._softcap,
            reduction="mean" if num_items_in_batch is None else "sum",
            recompute=self._seen.recompute and any(p.requires_grad for p in head.parameters()),
        )
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total if num_items_in_batch is None else total / num_items_in_batch

    def smoothed(self, factor: float) -> Callable[..., Tensor]:
        """Returns a `transformers.trainer_pt_utils.LabelSmoother` of that factor for the outputs of such a forward."""

        def smooth(outputs: Any, labels: Tensor, *, num_items_in_batch: Tensor | int | None = None, **_: Any) -> Tensor:
            return self._loss(outputs["logits"], labels, None, num_items_in_batch, label_smoothing=factor)

        return smooth

    def _check(self, logits: Tensor) -> None:
        """Raises ConfigError if the model changes its logits in a way that its config does not describe."""
        if self._checked or not has_data(logits):
            return
        raw = self._seen.raw
        assert raw is not None
        expected = raw.float() * self._scale
        if self._softcap is not None:
            expected = self._softcap * torch.tanh(expected / self._softcap)
        tolerance = 8 * torch.finfo(raw.dtype).eps  # of the few operations that the model rounds after
        if logits.shape != expected.shape or not torch.allclose(
            logits.detach().float(), expected, tolerance, tolerance
        ):
            raise ConfigError(
                f"a loss without logits of {self._kind}: after its head it changes its logits in a way that its config "
                f"does not state (final_logit_softcapping, logit_scale and logits_scaling are known); {_INSTEAD}"
            )
        self._checked = True
