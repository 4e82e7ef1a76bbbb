"""The arguments of `sft`, `dpo`, `kto`, `reward` and `grpo`: those of TRL's scripts, and what TRL has no word for.

Owns the added arguments and the parser, whose errors are typed. TRL's dataclasses define all other arguments, their
defaults and their checks. Needs the package `trl`.
"""

import ast
import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import trl
import yaml
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from elixir_moe.errors import ConfigError, did_you_mean
from elixir_moe.ext.names import SchemeName
from elixir_moe.ext.plans import size_bytes
from elixir_tools import settings
from elixir_tools.finetune.defaults import LEARNING_RATE, SFT
from elixir_tools.models.lora import EXPERTS
from elixir_tools.names import TRAINERS
from elixir_tools.train.config import PlanConfig
from elixir_tools.watch.supervisor import WatchConfig

LORA_DROPOUT = ModelConfig().lora_dropout
"""The default dropout of adapters of all commands but `sft`. It is 0 where parameters have adapters, since peft refuses
any there."""
PLAN_PREFIX, WATCH_PREFIX = "plan_", "supervise_"
MUON = "muon"
"""The value of ``--optim`` that transformers does not know."""
_LEAST_BYTES = 1000
"""Bytes below which nobody means a size: the unit is missing."""


@dataclass(kw_only=True)
class _Added:
    """The arguments that TRL's scripts lack; those of the plan come from `PlanConfig`."""

    quantize: str | None = field(
        default=None,
        metadata={
            "help": "Keep frozen weights in 4 or 8 bits, as em.quantize does. --load_in_4bit is nf4, --load_in_8bit "
            "is int8.",
            "choices": list(get_args(SchemeName)),
        },
    )
    spread_experts: int = field(
        default=1, metadata={"help": "Ranks that share the experts of each layer (expert parallelism)."}
    )
    supervise: bool = field(
        default=True,
        metadata={
            "help": "Watch each step: losses and gradients that are not finite, divergence, slow ranks, experts "
            "without tokens. A run that diverges is stopped with its state saved apart; dpo, kto, reward and grpo "
            "only note it."
        },
    )
    profile_step: int | None = field(
        default=None,
        metadata={"help": "Number of a step whose gathers, reductions and updates `elixir-moe report --html` draws."},
    )
    tile: str | None = field(
        default=None, metadata={"help": "Bytes of the largest parameter in the dtype of the step; larger ones are cut."}
    )


def _plan_field(name: str, words: str) -> tuple[str, Any, Any]:
    if name == "kind":
        kinds = list(get_args(get_type_hints(PlanConfig)["kind"]))
        return "plan", str, field(default="auto", metadata={"help": f"The plan. {words}", "choices": kinds})
    return f"{PLAN_PREFIX}{name}", str | None, field(default=None, metadata={"help": words})


def _watch_field(name: str, words: str) -> tuple[str, Any, Any]:
    return f"{WATCH_PREFIX}{name}", str | None, field(default=None, metadata={"help": words})


Added: Any = dataclasses.make_dataclass(
    "Added",
    [
        *(_plan_field(name, words) for name, words in settings.docstrings(PlanConfig).items()),
        *(_watch_field(name, words) for name, words in settings.docstrings(WatchConfig).items()),
    ],
    bases=(_Added,),
    kw_only=True,
)
"""All arguments that are added to TRL's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """The arguments of a command."""

    kind: str
    """A command of `names.TRAINERS`."""
    script: Any
    """TRL's ScriptArguments."""
    training: Any
    """The trainer's config."""
    model: Any
    """TRL's ModelConfig."""
    mixture: Any
    """TRL's DatasetMixtureConfig."""
    plan: PlanConfig
    scheme: str | None
    """The format of frozen weights; None: their dtype."""
    ep: int
    """Ranks that share the experts of each layer."""
    watch: WatchConfig | None
    """The rules of supervision and their reactions; None: no supervision."""
    profile_step: int | None
    """The step that is profiled; None: none."""
    tile: int | None
    """Bytes of the largest parameter in the dtype of the step; None: none is cut."""
    muon: dict[str, Any] | None
    """Options of Muon for the matrices of layers; None: one optimizer trains all."""


class _Parser(TrlParser):  # type: ignore[misc]
    """TRL's parser, which raises ConfigError where it would print its usage of several hundred lines.

    It knows ``--optim muon``, which transformers does not: the config keeps its default, for what Muon does not train.
    """

    of_the_rest: Any = None
    """The optimizer of what Muon does not train."""
    by_muon: bool = False
    """Whether the words that were parsed last ask for Muon."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parses words as argparse does, and notes whether they ask for Muon."""
        found, rest = super().parse_known_args(*args, **kwargs)
        self.by_muon = found.optim == MUON
        if self.by_muon:
            found.optim = self.of_the_rest
        return found, rest


def parser_of(kind: str) -> Any:
    """The parser of a command."""
    config = getattr(trl, f"{TRAINERS[kind]}Config")
    script = GRPOScriptArguments if kind == "grpo" else ScriptArguments
    classes: Any = (Added, script, config, ModelConfig, DatasetMixtureConfig)
    parser: Any = _Parser(classes, prog=f"elixir-moe {kind}", allow_abbrev=False)
    optim = next(action for action in parser._actions if action.dest == "optim")
    optim.choices, parser.of_the_rest = [MUON, *optim.choices], optim.default
    optim.help += " muon: Muon for the matrices of layers and experts, the default for all else; --optim_args has its "
    optim.help += "options, as in momentum=0.9,ns_dtype=fp32."
    parser.set_defaults(lora_dropout=SFT["lora_dropout"] if kind == "sft" else None)  # `parse` chooses those of None
    if kind == "sft":
        parser.set_defaults(learning_rate=None)
    if kind == "reward":  # peft then trains and saves the head, and can add adapters to such a model at all
        parser.set_defaults(lora_task_type="SEQ_CLS")
    return parser


def parse(kind: str, words: Sequence[str]) -> Arguments:
    """The arguments in the words of a command line.

    Raises ConfigError if one is unknown, wrong, or asks for what a plan replaces; the message names the nearest right
    one.
    """
    parser, in_line = parser_of(kind), list(words)
    if "--config" in in_line:
        at = in_line.index("--config")
        _, *file = in_line[at : at + 2]
        if not file or not Path(file[0]).is_file():
            raise ConfigError(f"{kind}: --config {shlex.join(file)}: there is no such file; name one with settings")
        del in_line[at : at + 2]
    _refuse_unknown(parser, kind, parser.parse_known_args(in_line)[1])  # before TRL checks the values of the others
    try:
        *found, in_file = parser.parse_args_and_config(words, return_remaining_strings=True)
    except (ValueError, TypeError, OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{kind}: {error}") from error
    _refuse_unknown(parser, kind, in_file)
    added, script, training, model, mixture = found
    _refuse(training, model)
    if training.learning_rate is None:
        training.learning_rate = LEARNING_RATE["adapters" if model.use_peft else "full"]
    if model.lora_dropout is None:
        targets = model.lora_target_modules  # a list of one is its text by now
        on_parameters = model.lora_target_parameters or EXPERTS in (
            [targets] if isinstance(targets, str) else targets or ()
        )
        model.lora_dropout = 0.0 if on_parameters else LORA_DROPOUT
    plan, watch = _sections(kind, added)
    return Arguments(
        kind=kind,
        script=script,
        training=training,
        model=model,
        mixture=mixture,
        plan=plan,
        scheme=_scheme(model, added.quantize),
        ep=added.spread_experts,
        watch=watch,
        profile_step=added.profile_step,
        tile=size_bytes("--tile", added.tile, least=_LEAST_BYTES),
        muon=_muon(training, model) if parser.by_muon else None,
    )


def _refuse_unknown(parser: Any, kind: str, words: Sequence[str]) -> None:
    """Raises ConfigError for the first of the words that a parser has left."""
    for word in words:
        if not word.startswith("--"):
            raise ConfigError(f"{kind}: unexpected {word!r}: arguments are given as --name value")
        hint = did_you_mean(word, [option for action in parser._actions for option in action.option_strings])
        raise ConfigError(f"{kind}: unknown argument {word.partition('=')[0]}{hint and f'; {hint}'}")


def _refuse(training: Any, model: Any) -> None:
    """Raises ConfigError for arguments of TRL that cannot be served under a plan, or would be passed over."""
    template = getattr(training, "chat_template_path", None)
    for asked, why in {
        "--precompute_ref_log_probs": getattr(training, "precompute_ref_log_probs", False)
        and "weights are read when the training begins; leave it out, and the reference is computed in each step",
        "--chat_template_path": template
        and not template.endswith((".jinja", ".j2"))
        and "new tokens of another tokenizer would need rows that the model's folder lacks; give a .jinja file",
        "--model_init_kwargs": training.model_init_kwargs
        and "give --dtype, --attn_implementation and --model_revision instead",
        "--use_bnb_nested_quant": model.use_bnb_nested_quant
        and "scales of --quantize nf4 are not quantized; leave it out",
        "--bnb_4bit_quant_storage": model.bnb_4bit_quant_storage and "bytes of --quantize are bytes; leave it out",
    }.items():
        if why:
            raise ConfigError(f"{asked} is not served under a plan: {why}")


def _muon(training: Any, model: Any) -> dict[str, Any]:
    """The options of Muon in ``--optim_args``, as in ``momentum=0.9,ns_dtype=fp32``. Raises ConfigError."""
    if model.use_peft:
        raise ConfigError(
            "--optim muon trains the matrices of layers, which --use_peft freezes: leave one of them out; adapters are "
            "trained by the default of --optim"
        )
    words, training.optim_args = training.optim_args, None
    pairs = [word.partition("=") for word in (words or "").replace(" ", "").split(",") if word]
    if wrong := [name for name, equals, value in pairs if not equals or not value]:
        raise ConfigError(f"--optim_args {words}: expected NAME=VALUE, separated by commas, got {wrong[0]!r}")
    return {name: _value(text) for name, _, text in pairs}


def _value(text: str) -> Any:
    """A number or a truth value from its text; another text as it is."""
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
    except (ValueError, SyntaxError):
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sections:
    """The added arguments that are settings of `train`, too."""

    plan: PlanConfig
    watch: WatchConfig


def _sections(kind: str, added: Any) -> tuple[PlanConfig, WatchConfig | None]:
    """The plan, and what is watched. The losses of preferences and rewards jump, or are near 0: that is only noted."""
    watched = _given(WatchConfig, added, WATCH_PREFIX)
    if watched and not added.supervise:
        raise ConfigError(f"--{WATCH_PREFIX}{watched[0][0]} with --supervise false: leave one of them out")
    given = [("plan.kind", added.plan)]
    given += [(f"plan.{name}", text) for name, text in _given(PlanConfig, added, PLAN_PREFIX)]
    given += [(f"watch.{name}", text) for name, text in watched]
    try:
        found = settings.build(_Sections, {"watch": {} if kind == "sft" else {"on_divergence": "note"}}, given)
    except ConfigError as error:
        text = str(error).replace("plan.kind", "--plan").replace("plan.", f"--{PLAN_PREFIX}")
        raise ConfigError(text.replace("watch.", f"--{WATCH_PREFIX}")) from error
    return found.plan, found.watch if added.supervise else None


def _given(kind: type, added: Any, prefix: str) -> list[tuple[str, str]]:
    """(setting, text) of the arguments that were given for the fields of a dataclass of settings."""
    texts = ((each.name, getattr(added, f"{prefix}{each.name}", None)) for each in dataclasses.fields(kind))
    return [(name, text) for name, text in texts if text is not None]


def _scheme(model: Any, quantize: str | None) -> str | None:
    """The format of frozen weights, in TRL's words or ours. Raises ConfigError."""
    theirs = {"nf4": model.load_in_4bit, "int8": model.load_in_8bit}
    scheme = quantize or next((name for name, asked in theirs.items() if asked), None)
    if any(theirs.values()) and not theirs.get(scheme or "", False):
        raise ConfigError(f"--quantize {scheme} with --load_in_4bit or --load_in_8bit: give one of them")
    if model.load_in_4bit and model.bnb_4bit_quant_type != "nf4":
        raise ConfigError(f"--bnb_4bit_quant_type {model.bnb_4bit_quant_type}: nf4 is served; --quantize has others")
    if scheme is not None and model.use_dora:
        raise ConfigError(
            f"--use_dora with --quantize {scheme}: DoRA computes with the weights of the base themselves, which are "
            f"bytes then; leave one of them out"
        )
    if scheme is not None and not model.use_peft:
        raise ConfigError(f"--quantize {scheme} keeps frozen weights in fewer bits: train adapters with --use_peft")
    return scheme
