"""The comparison as a picture: one panel a metric, one bar a server."""

from collections.abc import Mapping
from pathlib import Path

_PANELS = (
    ("cold ttft p50", "TTFT, cold (ms)"),
    ("warm ttft p50", "TTFT, next turn (ms)"),
    ("decode", "decode, 1 stream (tokens/s)"),
    ("4 streams", "4 streams (tokens/s)"),
    ("8 streams", "8 streams (tokens/s)"),
    ("p99 pause beside it", "p99 pause beside a prefill (ms)"),
)


def draw(
    results: Mapping[str, Mapping[str, float]], about: Mapping[str, str], file: Path
) -> None:
    """
    Write a PNG.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    names = list(results)
    colors = [f"C{number}" for number in range(len(names))]
    figure, axes = pyplot.subplots(2, 3, figsize=(11, 6))
    for axis, (metric, title) in zip(axes.flat, _PANELS, strict=True):
        bars = axis.bar(
            names, [results[name].get(metric, 0.0) for name in names], color=colors
        )
        axis.bar_label(bars, fmt="%.0f", fontsize=8)
        axis.margins(y=0.1)  # room for the labels
        axis.set_title(title, fontsize=9)
        axis.set_xticks([])
    figure.legend(bars, names, loc="lower center", ncols=len(names), fontsize=9)
    figure.text(0.01, 0.985, "; ".join(about.values()), fontsize=5, va="top")
    figure.tight_layout(rect=(0, 0.05, 1, 0.96))
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
