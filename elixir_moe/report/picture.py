"""The picture of a run: losses against steps, with the bigram model's loss as a line.

Owns `loss.png`, its appearance, and the check of a file that `--picture` names. Draws off screen and uses no global
state of matplotlib.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from elixir_moe.errors import ConfigError
from elixir_moe.report.history import WINDOW, smooth


def draw_losses(
    path: Path,
    title: str,
    train: Sequence[tuple[int, float]],
    validation: Sequence[tuple[int, float]],
    bigram: float | None,
) -> None:
    """Draws the losses of a run as PNG.

    Args:
        path: the file to write.
        title: title of the picture.
        train: (step, loss) of each step in nats per token; at least one.
        validation: (step, loss) of each evaluation.
        bigram: loss of the bigram model on the validation bytes, if known.
    """
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses = [s for s, _ in train], [v for _, v in train]
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=1, label="training, each step")
    axes.plot(steps, smooth(losses), color="tab:blue", linewidth=1.8, label=f"training, mean of {WINDOW} steps")
    if validation:
        axes.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", markersize=5, label="validation")
        place, last = validation[-1], f"{validation[-1][1]:.3f}"
        axes.annotate(last, place, xytext=(0, -14), textcoords="offset points", ha="center")
    if bigram is not None:
        axes.axhline(bigram, color="dimgray", linestyle="--", linewidth=1.3, label=f"bigram model, {bigram:.3f}")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.set_title(title.encode(errors="replace").decode(), parse_math=False)
    axes.set_xlim(0, steps[-1] * 1.04)
    axes.margins(y=0.08)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, format="png")


@contextmanager
def png_asked_for(path: Path) -> Iterator[None]:
    """Around the drawing of the PNG that `--picture` names.

    Raises:
        ConfigError: `path` does not end in .png, or cannot be written.
    """
    if path.suffix != ".png":
        raise ConfigError(f"--picture {str(path)!r}: expected a file that ends in .png")
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--picture: cannot write {str(path)!r}: {error.strerror}; choose another file") from error
