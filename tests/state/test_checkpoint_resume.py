"""Save and load in one process: every kind of optimizer and dtype, models that do not fit, and 500 flipped bits."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import elixir_moe as em
from elixir_moe.state.checkpoint.load import load
from elixir_moe.state.checkpoint.save import save
from elixir_moe.state.checkpoint.storage import read_manifest
from elixir_tools.cli.main import main
from tests.runtime.test_habits import Frozen, Net, Tied, Unused, mean_square
from tests.state.test_checkpoint_files import spoilt
from tests.support.cases import with_further

Make = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture(scope="module", autouse=True)
def world() -> None:
    em.init_mesh(device_type="cpu")


@pytest.fixture
def opened() -> Iterator[Callable[..., tuple[nn.Module, Any]]]:
    """Wraps models and closes their optimizers at the end."""
    optimizers = []

    def wrap(model: nn.Module, make: Make = lambda m: adamw(m), blocks: int = 4, **options: Any) -> Any:
        plan = em.Plan.offload(rcache_blocks=blocks, device_chunks=3, chunk_numel=600)
        wrapped, optimizer = em.wrap(model, make(model), plan=plan, **options)
        optimizers.append(optimizer)
        return wrapped, optimizer

    yield wrap
    for optimizer in optimizers:
        optimizer.close()


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


def rows(step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def steps(model: nn.Module, optimizer: Any, first: int, n: int) -> None:
    for step in range(first, first + n):
        optimizer.scale(mean_square(model, rows(step).to(next(model.parameters()).dtype))).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", with_further([0, 2], [2]))
def test_any_optimizer_goes_on_where_it_was(name: str, before: int, tmp_path: Path, opened: Any) -> None:
    """Two steps, a checkpoint, two more; or a checkpoint before the first step."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[name](list(model.parameters()))

    torch.manual_seed(0)
    model, optimizer = opened(Unused(), make)
    steps(model, optimizer, 0, before)
    save(tmp_path / "middle", model, optimizer)
    steps(model, optimizer, before, 2)
    torch.manual_seed(1)
    other, resumed = opened(Unused(), make, blocks=6)
    steps(other, resumed, 7, 1)
    load(tmp_path / "middle", other, resumed)
    steps(other, resumed, before, 2)
    assert_same(em.full_state_dict(model, all_ranks=True), em.full_state_dict(other, all_ranks=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_moments_and_loss_scale_of_narrow_dtypes(dtype: torch.dtype, tmp_path: Path, opened: Any) -> None:
    torch.manual_seed(0)
    model, optimizer = opened(Net(), compute_dtype=dtype)
    if optimizer.loss_scale is not None:
        optimizer.loss_scale.scale = 256.0
    steps(model, optimizer, 0, 2)
    save(tmp_path / "middle", model, optimizer)
    scale = optimizer.loss_scale
    wanted = None if scale is None else (scale.scale, scale.clean_steps)
    steps(model, optimizer, 2, 2)
    other, resumed = opened(Net(), compute_dtype=dtype)
    load(tmp_path / "middle", other, resumed)
    scale = resumed.loss_scale
    assert wanted == (None if scale is None else (scale.scale, scale.clean_steps))
    steps(other, resumed, 2, 2)
    assert_same(em.full_state_dict(model, all_ranks=True), em.full_state_dict(other, all_ranks=True))
    wide, _ = opened(Net())
    load(tmp_path / "middle", wide, _)
    assert next(iter(em.full_state_dict(wide, all_ranks=True).values())).dtype == torch.float32


def test_a_loss_scale_that_was_set_as_a_whole_number_comes_back(tmp_path: Path, opened: Any) -> None:
    model, optimizer = opened(Net(), compute_dtype=torch.float16)
    optimizer.loss_scale.scale = 1024
    save(tmp_path / "middle", model, optimizer)
    other, resumed = opened(Net(), compute_dtype=torch.float16)
    load(tmp_path / "middle", other, resumed)
    assert resumed.loss_scale.scale == 1024


class Named(torch.optim.Optimizer):
    """Keeps values under names that a checkpoint has for itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                if not state:
                    state |= {"weight": torch.zeros_like(parameter), "updates": 0, "codes": 1.0, "optimizer.weight": 1}
                state["weight"] = state["weight"] * 0.9 + parameter.grad
                state["updates"] += 10
                state["codes"] *= 1.5
                state["optimizer.weight"] += 1
                scale = state["codes"] * state["optimizer.weight"] / state["updates"]
                parameter.add_(state["weight"], alpha=-self.param_groups[0]["lr"] * scale)


def test_an_optimizers_own_names_do_not_meet_those_of_a_checkpoint(tmp_path: Path, opened: Any) -> None:
    model, optimizer = opened(Net(), lambda m: Named(m.parameters()))
    steps(model, optimizer, 0, 2)
    save(tmp_path / "middle", model, optimizer)
    saved = em.full_state_dict(model, all_ranks=True)
    steps(model, optimizer, 2, 2)
    other, resumed = opened(Net(), lambda m: Named(m.parameters()))
    load(tmp_path / "middle", other, resumed)
    assert_same(em.full_state_dict(other, all_ranks=True), saved)
    steps(other, resumed, 2, 2)
    assert_same(em.full_state_dict(model, all_ranks=True), em.full_state_dict(other, all_ranks=True))


def test_the_milestones_of_a_schedule_behind_another_come_back(tmp_path: Path, opened: Any) -> None:
    """`SequentialLR` asks `MultiStepLR` for its `elements`."""

    def scheduled() -> tuple[Any, Any, Any]:
        model, optimizer = opened(Net())
        first = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
        then = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
        return model, optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [first, then], [2])

    def rates(model: Any, optimizer: Any, schedule: Any) -> list[float]:
        found = []
        for step in range(4):
            steps(model, optimizer, step, 1)
            schedule.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    model, optimizer, schedule = scheduled()
    save(tmp_path / "start", model, optimizer, extra=schedule.state_dict())
    wanted = rates(model, optimizer, schedule)
    other, resumed, schedule = scheduled()
    schedule.load_state_dict(load(tmp_path / "start", other, resumed))
    assert rates(other, resumed, schedule) == wanted


def of_group(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Writes an option of the first param_group into a manifest."""
    return lambda fields: fields["param_groups"][0]["options"].update({name: value})


def of_piece(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Writes what the optimizer keeps for each piece of a parameter into a manifest."""

    def change(fields: dict[str, Any]) -> None:
        for piece in fields["parameters"]["first.weight"]["pieces"]:
            piece["scalars"][name] = value

    return change


NAN, INF = {"$float": "nan"}, {"$float": "inf"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (of_group("params", []), r"param_groups\[0\]\['params'\]"),
        (lambda f: f["param_groups"][0]["options"].pop("lr"), r"param_groups\[0\]\['lr'\] is missing"),
        (of_group("lr", NAN), r"param_groups\[0\]\['lr'\] is 'nan', expected a finite number, .* 0.01"),
        (of_group("lr", INF), r"param_groups\[0\]\['lr'\] is 'inf', expected a finite number"),
        (of_group("lr", "abc"), r"param_groups\[0\]\['lr'\] is 'abc', expected a finite number"),
        (of_group("lr", True), r"param_groups\[0\]\['lr'\] is 'True', expected a finite number"),
        (of_group("lr", 10**400), r"param_groups\[0\]\['lr'\] is '1000.*', expected a finite number"),
        (of_group("initial_lr", None), r"param_groups\[0\]\['initial_lr'\] is 'None', expected a finite number"),
        (of_group("betas", [0.9]), r"param_groups\[0\]\['betas'\] is '\[0.9\]', expected 2 values, .*\(0.9, 0.999\)"),
        (of_group("betas", [0.9, NAN]), r"param_groups\[0\]\['betas'\] is '\[0.9, nan\]', expected 2 values"),
        (of_group("maximize", 3), r"param_groups\[0\]\['maximize'\] is '3', expected True or False"),
        (of_piece("updates", -1), r"parameter 'first.weight': 'updates' is -1, expected a number of updates, from 0"),
        (of_piece("updates", 1e30), "'updates' is 1e.30, expected a number of updates"),
        (of_piece("updates", 10**30), "'updates' is 10{30}, expected a number of updates"),
        (of_piece("updates", "abc"), "'updates' is abc, expected a number of updates"),
        (lambda f: f.update(loss_scale={"scale": NAN, "growth_interval": 1, "clean_steps": 0}), "'scale': nan"),
        (lambda f: f.update(loss_scale={"scale": 1.0, "growth_interval": 0, "clean_steps": 0}), "'growth_interval': 0"),
    ],
)
def test_an_option_that_cannot_be_right_is_named_before_anything_changes(
    change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path, opened: Any
) -> None:
    refuses(change, said, tmp_path, opened, adamw)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (of_piece("step", -1), "'step' is -1, expected a number of updates, from 0 to 4294967295"),
        (of_piece("step", NAN), "'step' is nan, expected a number of updates"),
        (of_piece("step", {"$tensor": ["F32", [], "AAAAAAA"]}), r"'step': .*AAAAAAA"),
    ],
)
def test_what_any_optimizer_keeps_is_checked_before_anything_changes(
    change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path, opened: Any
) -> None:
    refuses(change, said, tmp_path, opened, lambda m: torch.optim.Adadelta(m.parameters()))


def refuses(change: Callable[[dict[str, Any]], None], said: str, folder: Path, opened: Any, make: Make) -> None:
    """Loads a checkpoint whose manifest was changed, by somebody who can compute its hash; then trains on."""
    model, optimizer = opened(Net(), make)
    steps(model, optimizer, 0, 1)
    save(folder / "first", model, optimizer)
    spoilt(folder / "first", change)
    steps(model, optimizer, 1, 1)
    save(folder / "second", model, optimizer)
    with pytest.raises(em.CheckpointError, match=r"first/manifest\.json: .*" + said):
        load(folder / "first", model, optimizer)
    steps(model, optimizer, 2, 1)
    found = em.full_state_dict(model, all_ranks=True)
    load(folder / "second", model, optimizer)
    steps(model, optimizer, 2, 1)
    assert_same(em.full_state_dict(model, all_ranks=True), found)


def test_options_of_another_form_of_the_same_kind_are_loaded(tmp_path: Path, opened: Any) -> None:
    """A rate as a tensor or of NumPy, a None in the place of a flag, and options that a scheduler has added."""
    model, optimizer = opened(Net())
    given = {"lr": np.float64(0.5), "betas": [0.5, torch.tensor(0.75)], "foreach": True, "initial_lr": 1, "mine": "x"}
    optimizer.param_groups[0].update(given)
    save(tmp_path / "a", model, optimizer)
    other, resumed = opened(Net(), lambda m: adamw(m, foreach=None))
    load(tmp_path / "a", other, resumed)
    assert {name: resumed.param_groups[0][name] for name in given} == given
    steps(other, resumed, 0, 1)


def test_a_buffer_that_cannot_be_written_is_named_before_a_weight_changes(tmp_path: Path, opened: Any) -> None:
    def expanded() -> nn.Module:
        model = Net()
        model.register_buffer("table", torch.zeros(1).expand(4))
        return model

    model, optimizer = opened(expanded())
    save(tmp_path / "start", model, optimizer)
    steps(model, optimizer, 0, 1)
    with pytest.raises(em.CheckpointError, match=r"buffer 'table' is expanded.*contiguous"):
        load(tmp_path / "start", model, optimizer)
    steps(model, optimizer, 1, 1)


def test_what_was_gathered_before_a_load_is_not_read_after_it(tmp_path: Path, opened: Any) -> None:
    """Frozen chunks too, which an update leaves where they are."""
    torch.manual_seed(0)
    model, optimizer = opened(Frozen(), blocks=8)
    save(tmp_path / "a", model, optimizer)
    wanted = model(rows(0))
    torch.manual_seed(1)
    other, resumed = opened(Frozen(), blocks=8)
    with torch.no_grad():
        assert not torch.equal(other(rows(0)), wanted)
        load(tmp_path / "a", other, resumed)
        assert torch.equal(other(rows(0)), wanted)
        other.layers[0].gain.mul_(2)  # a write in a block goes with the load
        load(tmp_path / "a", other, resumed)
        assert torch.equal(other(rows(0)), wanted)


@pytest.mark.fault(38)
def test_learning_rates_and_options_are_those_saved(tmp_path: Path, opened: Any) -> None:
    """Fault 38: an LR schedule goes on, whatever the new optimizer was made with."""
    model, optimizer = opened(Net(), lambda m: adamw(m, betas=(0.8, 0.9)))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
    for step in range(4):
        steps(model, optimizer, step, 1)
        schedule.step()
    save(tmp_path / "a", model, optimizer, extra={"schedule": schedule.state_dict()})
    other, resumed = opened(Net())
    again = torch.optim.lr_scheduler.OneCycleLR(resumed, max_lr=0.2, total_steps=5)
    again.load_state_dict(load(tmp_path / "a", other, resumed)["schedule"])
    for _ in range(3):
        saved, found = ({k: v for k, v in o.param_groups[0].items() if k != "params"} for o in (optimizer, resumed))
        assert saved == found and type(found["betas"]) is tuple
        schedule.step(), again.step()


@pytest.mark.fault(26)
def test_what_was_frozen_can_be_trained_from_the_checkpoint_on(tmp_path: Path, opened: Any) -> None:
    """Fault 26."""
    torch.manual_seed(0)
    model, optimizer = opened(Frozen(), lambda m: torch.optim.AdamW(m.parameters()))
    steps(model, optimizer, 0, 2)
    save(tmp_path / "a", model, optimizer)
    other, resumed = opened(Net())
    load(tmp_path / "a", other, resumed)
    assert_same(em.full_state_dict(model, all_ranks=True), em.full_state_dict(other, all_ranks=True))
    steps(other, resumed, 2, 1)
    save(tmp_path / "b", other, resumed)
    load(tmp_path / "b", model, optimizer)
    assert_same(em.full_state_dict(model, all_ranks=True), em.full_state_dict(other, all_ranks=True))


@pytest.mark.fault(25)
def test_tied_parameters_are_saved_once_with_both_names(tmp_path: Path, opened: Any) -> None:
    """Fault 25."""
    model, optimizer = opened(Tied())
    steps(model, optimizer, 0, 1)
    save(tmp_path / "a", model, optimizer)
    entry = read_manifest(tmp_path / "a").parameters["first.weight"]
    assert entry.names == ("first.weight", "last.weight")
    other, resumed = opened(Tied())
    load(tmp_path / "a", other, resumed)
    state = em.full_state_dict(other, all_ranks=True)
    assert_same(em.full_state_dict(model, all_ranks=True), state)
    with pytest.raises(em.CheckpointError, match=r"first.weight' has the names \['first.weight', 'last.weight'\] in"):
        load(tmp_path / "a", *opened(Net()))
    assert main(["ckpt", "export", str(tmp_path / "a"), str(tmp_path / "hf")]) == 0
    assert main(["ckpt", "export", str(tmp_path / "a"), str(tmp_path / "a.pt"), "--format", "torch"]) == 0
    plain = torch.load(tmp_path / "a.pt", weights_only=True)
    assert_same(plain, state)
    assert list(plain) == list(state) and plain["first.weight"].data_ptr() == plain["last.weight"].data_ptr()
    from safetensors.torch import load_file

    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(state) - set(written) == {"last.weight", "layers.3.up.weight"}
    assert_same(written, {name: state[name] for name in written})


class Wide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 17)
        self.more = nn.Parameter(torch.ones(2))
        del self.first.bias
        self.first.register_parameter("bias", None)


def regrouped(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.AdamW([{"params": others}, {"params": [first]}])


@pytest.mark.parametrize(
    ("model", "make", "said"),
    [
        (Wide, adamw, "parameter 'more' of the model is not in the checkpoint"),
        (Wide, adamw, "parameter 'first.bias' of the checkpoint is not in the model"),
        (Wide, adamw, r"'last.weight' is of shape \(16, 16\) in the checkpoint, \(17, 16\) in the model"),
        (Net, lambda m: torch.optim.SGD(m.parameters()), "saved with the optimizer 'AdamW, AdamUpdate', this is 'SGD"),
        (Net, regrouped, "has 1 param_groups, the optimizer has 2"),
    ],
)
def test_a_model_or_optimizer_that_does_not_fit_is_told_how(
    model: type[nn.Module], make: Make, said: str, tmp_path: Path, opened: Any
) -> None:
    save(tmp_path / "a", *opened(Net()))
    other, optimizer = opened(model(), make)
    before = em.full_state_dict(other, all_ranks=True)
    with pytest.raises(em.CheckpointError, match=said):
        load(tmp_path / "a", other, optimizer)
    assert_same(before, em.full_state_dict(other, all_ranks=True))


def test_param_groups_with_other_members_are_refused(tmp_path: Path, opened: Any) -> None:
    save(tmp_path / "a", *opened(Net(), regrouped))

    def otherwise(model: nn.Module) -> torch.optim.Optimizer:
        first, second, *others = model.parameters()
        return torch.optim.AdamW([{"params": others}, {"params": [first, second]}])

    with pytest.raises(em.CheckpointError, match=r"param_group 0 has other parameters .*\['first.bias'\]"):
        load(tmp_path / "a", *opened(Net(), otherwise))


def test_plain_models_and_strangers_optimizers_are_refused(tmp_path: Path, opened: Any) -> None:
    model, optimizer = opened(Net())
    with pytest.raises(em.UsageError, match=r"went through em\.wrap"):
        save(tmp_path / "a", Net(), optimizer)
    with pytest.raises(em.UsageError, match="another model"):
        save(tmp_path / "a", model, opened(Net())[1])
    with pytest.raises(em.ConfigError, match="keep=0"):
        save(tmp_path / "a", model, optimizer, keep=0)


@pytest.mark.fault(8)
def test_every_flipped_bit_is_refused_and_its_file_named(tmp_path: Path, opened: Any) -> None:
    """Fault 8: 500 seeded single bits, of the manifest and of the tensors; nothing of the model has changed."""
    model, optimizer = opened(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, bias=False).requires_grad_(False)))
    steps(model, optimizer, 0, 1)
    save(tmp_path / "a", model, optimizer, extra=VALUE)
    steps(model, optimizer, 1, 1)
    before, drawn = em.full_state_dict(model, all_ranks=True), torch.get_rng_state()
    files = [tmp_path / "a" / name for name in ("manifest.json", "rank-00000.safetensors")]
    generator = random.Random(0)
    for file in files:
        good = file.read_bytes()
        header = len(good) if file == files[0] else 8 + int.from_bytes(good[:8], "little")
        for i in range(250):
            bit = generator.randrange(8 * (header if i % 2 else len(good)))
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            file.write_bytes(bad)
            with pytest.raises(em.CheckpointError, match=file.name):
                load(tmp_path / "a", model, optimizer)
        file.write_bytes(good)
    assert_same(before, em.full_state_dict(model, all_ranks=True))
    assert torch.equal(drawn, torch.get_rng_state())
    assert load(tmp_path / "a", model, optimizer) == VALUE
    shutil.rmtree(tmp_path / "a")


VALUE = {"step": 3, "data": {"position": (1, 2), "seed": 2**63}, "text": "é", "rates": [1e-3, float("inf")]}
