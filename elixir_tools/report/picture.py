"""Pictures as PNG: the losses of a run against steps, and bars of what fits a machine.

Owns what is drawn, and the check of a file that `--picture` names. `figures` draws lines.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from elixir_moe.errors import ConfigError
from elixir_moe.ext.page import SERIES
from elixir_tools.report import figures, history
from elixir_tools.report.figures import Point, Series


def loss_lines(
    train: Sequence[Point], validation: Sequence[Point], bigram: float | None, *, run: str = "", color: str = SERIES[0]
) -> list[Series]:
    """The lines of a run: (step, loss) of each step, of each evaluation, and the bigram model's if it is known.

    Of several runs, each has a name, a color and two lines.
    """
    before, smooth = f"{run}, " if run else "", history.smooth([loss for _, loss in train])
    mean = [(step, loss) for (step, _), loss in zip(train, smooth, strict=True)]
    lines = [
        Series(label="each step", points=[] if run else train, style="faint"),
        Series(label=f"{before}training, mean of {history.WINDOW} steps", points=mean, color=color),
        Series(label=f"{before}validation", points=validation, color=color if run else SERIES[1], style="dots"),
    ]
    if bigram is not None and train and not run:
        ends = [(train[0][0], bigram), (train[-1][0], bigram)]
        lines.append(Series(label="bigram model", points=ends, color=SERIES[-1], style="dashed"))
    return [line for line in lines if line.points]


def draw_losses(
    path: Path,
    title: str,
    train: Sequence[Point],
    validation: Sequence[Point],
    bigram: float | None,
) -> None:
    """Draws the losses of a run, each at its step, as PNG; `bigram` is the bigram model's on the validation bytes."""
    lines = loss_lines(train, validation, bigram)
    figure = figures.lines(lines)
    labels = [f"{line.label} {figures.number_text(line.points[-1][1])}" for line in lines]
    figure.axes[0].legend(labels, frameon=False, fontsize="small")
    figure.axes[0].set_title(title.encode(errors="replace").decode(), fontsize="small")
    figure.set_size_inches(7, 4)
    figures.literal(figure)
    figure.savefig(path, format="png", dpi=150)


def draw(path: Path, directory: Path, found: Mapping[str, Any]) -> None:
    """Draws the losses of a run, finished or not, as PNG. `found`: as `history.account` gives it.

    Raises ConfigError if the run has no losses yet, or `path` is not a PNG file that can be written.
    """
    records = (record for _, record in history.records_of(directory / "metrics.jsonl"))
    train, validation = history.losses_of(records)
    if not train:
        raise ConfigError(f"--picture: {str(directory)!r} has no losses yet: ask again after the first step")
    with png_asked_for(path):
        draw_losses(path, f"{directory}: {found['state']}", train, validation, found["bigram_loss"])


def draw_largest(path: Path, title: str, unit: str, found: Sequence[tuple[str, float | None, str]]) -> None:
    """Draws bars of the largest that fits under each strategy, like ZeRO-Infinity's Figure 6a.

    `found` has each bar's strategy, length, if any, and label; `unit` is what they count. Raises ConfigError if `path`
    is not a PNG file that can be written.
    """
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars = axes.bar([name for name, *_ in found], [size or 0 for _, size, _ in found], color="tab:blue")
    axes.bar_label(bars, [label for *_, label in found], padding=3)
    axes.set(ylabel=unit, yscale="symlog" if any(size for _, size, _ in found) else "linear")
    axes.set_title(title.encode(errors="replace").decode(), parse_math=False, fontsize=10, wrap=True)
    axes.margins(y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    with png_asked_for(path):
        figure.savefig(path, format="png")


@contextmanager
def png_asked_for(path: Path) -> Iterator[None]:
    """Around the drawing of the PNG that `--picture` names.

    Raises ConfigError if `path` does not end in .png, or cannot be written.
    """
    if path.suffix != ".png":
        raise ConfigError(f"--picture {str(path)!r}: expected a file that ends in .png")
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--picture: cannot write {str(path)!r}: {error.strerror}; choose another file") from error
