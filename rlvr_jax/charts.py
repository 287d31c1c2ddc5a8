"""Charts as inline SVG: readable offline and without script, coloured by the page's CSS (so dark mode works)."""

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from rlvr_jax import page

# The page defines these CSS variables; the colours here only mark the places in matplotlib's output.
_PLACES = {"--ink": "#010101", "--rule": "#020202"} | {f"--c{i}": f"#0101{i + 16:02x}" for i in range(8)} | {"--good": "#030303", "--bad": "#040404"}
MAX_POINTS = 400
"""Most points per line; longer runs are drawn as means of equal blocks of steps."""


class Series(NamedTuple):
    """One line: ``steps[n]``, ``values[n]`` (NaN = gap), palette index ``color``, whether it is dashed, and a band around it."""

    label: str
    steps: np.ndarray
    values: np.ndarray
    color: int = 0
    dashed: bool = False
    band: tuple[np.ndarray, np.ndarray] | None = None
    """``low[n], high[n]``, for a line that is short enough to be drawn as it is."""


class Span(NamedTuple):
    """A row of a forest plot: an estimate with its interval (NaN = none), and what its colour says: 'good', 'bad' or ''."""

    label: str
    value: float
    low: float
    high: float
    tone: str = ""


def line_chart(series: Sequence[Series], *, key: str, unit: str = "", percent: bool = False, log: bool = False,
               markers: bool = False, smooth: bool = True, robust: bool = False, title: str = "", across: str = "trainer step") -> str:
    """``<svg>`` of the lines over trainer steps; the same input gives the same bytes.

    Long lines are drawn faint with their :func:`running_mean` on top. Labels are left to the page (see ``color``).

    Args:
      series: lines, each with at least one finite value.
      key: unique on the page: it keeps the ids of two charts apart.
      unit: label of the vertical axis.
      percent: values are fractions, shown as percent.
      log: logarithmic axis, used only when every value is positive and they span more than a decade.
      markers: mark every point, for values measured now and then.
      smooth: draw the running mean of long lines.
      robust: let the highest 2% leave the axis when they would flatten the rest.
      title: what a screen reader says.
      across: label of the horizontal axis.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    with _figure(key, 2.35) as (figure, out):
        # Fixed margins: matplotlib's automatic ones take ten times as long.
        axes = figure.add_axes((0.13 if unit else 0.1, 0.18, 0.84 if unit else 0.87, 0.8))
        for one in series:
            _draw(axes, one, markers, smooth)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if max(one.steps.max() for one in series) >= 100_000:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel(across, color=_PLACES["--ink"])
        axes.set_ylabel(unit, color=_PLACES["--ink"])
        _vertical(axes, np.concatenate([one.values[np.isfinite(one.values)] for one in series]), percent, log, robust)
        _frame(axes)
    return _themed(out.getvalue(), title)


def forest_chart(spans: Sequence[Span], *, key: str, unit: str = "", title: str = "") -> str:
    """``<svg>`` of estimates with their intervals around a line at zero, one a row from the top; foreign labels are safe.

    A filled mark is a row with a tone; the others are hollow, so colour does not tell alone.

    Args:
      spans: at least one; an interval that is NaN is not drawn.
      key, title: as in :func:`line_chart`.
      unit: label of the horizontal axis.
    """
    labels = [page.visible(s.label if len(s.label) <= 28 else f"{s.label[:27]}…") for s in spans]
    height = 0.55 + 0.23 * len(spans)
    left = min(0.03 + 0.0145 * max(map(len, labels)), 0.45)
    with _figure(key, height) as (figure, out):
        axes = figure.add_axes((left, 0.47 / height, 0.97 - left, 1 - 0.5 / height))
        axes.axvline(0, color=_PLACES["--ink"], linewidth=0.9)
        for row, span in enumerate(spans):
            color = _PLACES.get(f"--{span.tone}", _PLACES["--c7"])
            if np.isfinite([span.low, span.high]).all():
                axes.plot([span.low, span.high], [row, row], color=color, linewidth=1.6, solid_capstyle="butt")
            axes.plot([span.value], [row], color=color, linestyle="none", marker="o", markersize=4.6, markerfacecolor=color if span.tone else "none")
        axes.set_ylim(len(spans) - 0.5, -0.5)
        axes.set_yticks(range(len(spans)), labels)
        axes.margins(x=0.04)
        axes.set_xlabel(unit, color=_PLACES["--ink"])
        _frame(axes)
    return _themed(out.getvalue(), title)


def standalone(svg: str, labels: Sequence[tuple[str, int]] = ()) -> str:
    """A chart as a file of its own, for a paper or a README: with its colours (light or dark as the reader's) and a legend.

    ``labels``: (label, palette index) of the lines, four a row below the chart; an index from 8 on is dashed, as in the chart.
    """
    width, height = map(float, svg[svg.index('viewBox="') + 9:].split('"')[0].split()[2:])
    below = "".join(
        f'<path d="M{x:g},{y - 3:g}h14" style="stroke:var(--c{color % 8});stroke-width:2{";stroke-dasharray:4,2" if color >= 8 else ""}"/>'
        f'<text x="{x + 18:g}" y="{y:g}" style="font-size:8.5px;fill:var(--ink)">{escape(page.visible(label if len(label) <= 15 else f"{label[:14]}…"))}</text>'
        for i, (label, color) in enumerate(labels) for x, y in [(12 + i % 4 * (width - 12) / 4, height + 9 + i // 4 * 12)])
    full = height + (12 * -(-len(labels) // 4) + 4 if labels else 0)
    style = f'<style>{page.COLOURS}text{{font-family:system-ui,sans-serif}}</style><rect width="100%" height="100%" style="fill:var(--card)"/>'
    svg = re.sub(r'viewBox="[^"]*"', f'xmlns="http://www.w3.org/2000/svg" width="{1.5 * width:g}" viewBox="0 0 {width:g} {full:g}"', svg, count=1)
    return svg.replace("</title>", f"</title>{style}", 1).removesuffix("</svg>") + f"{below}</svg>\n"


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over a centred window that shrinks at both ends; gaps (NaN) are left out of it. ``[n] -> [n]``."""
    known = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    at = np.arange(len(values))
    low, high = np.maximum(at - window // 2, 0), np.minimum(at + window // 2 + 1, len(values))
    n = count[high] - count[low]
    return np.where(n > 0, (total[high] - total[low]) / np.maximum(n, 1), np.nan)


def smoothing(n: int) -> int:
    """Window of the running mean for a line of ``n`` points; 1 = drawn as it is."""
    return 1 if n < 40 else n // 20 | 1


@contextlib.contextmanager
def _figure(key: str, height: float) -> Iterator[tuple[Any, io.StringIO]]:
    """A figure of the page's width; its SVG is in the buffer when the block has ended."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: Any = {"svg.hashsalt": key, "svg.fonttype": "none", "text.parse_math": False, "font.size": 8.5,
                  "axes.formatter.useoffset": False, "path.simplify": True}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        figure, out = Figure(figsize=(4.6, height)), io.StringIO()
        canvas = FigureCanvasSVG(figure)
        figure.patch.set_visible(False)
        yield figure, out
        canvas.print_svg(out, metadata={"Date": None, "Creator": None})


def _frame(axes: Any) -> None:
    axes.patch.set_visible(False)
    axes.grid(color=_PLACES["--rule"], linewidth=0.6)
    axes.tick_params(colors=_PLACES["--ink"], which="both", length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_PLACES["--rule"])


def _vertical(axes: Any, values: np.ndarray, percent: bool, log: bool, robust: bool) -> None:
    """Scale and tick labels of the vertical axis; no label is mathtext, which a page cannot show."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, NullFormatter, PercentFormatter

    if values.min() == values.max() == 0:
        axes.set_ylim(-0.03, 1)
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(bottom=-0.03 * axes.get_ylim()[1])  # from zero, with room for a line that lies there
    elif values.max() >= 10_000:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    if log and values.min() > 0 and values.max() > 10 * values.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    usual = np.quantile(values, 0.98)
    if robust and 0 < 2 * usual < values.max():
        axes.set_ylim(min(values.min(), -0.03 * usual), 1.3 * usual)


def _draw(axes: Any, one: Series, markers: bool, smooth: bool) -> None:
    color, dash = _PLACES[f"--c{one.color % 8}"], (0, (4, 2)) if one.dashed or one.color >= 8 else "solid"
    steps, values = _thin(one.steps, one.values)
    window = 1 if markers or one.dashed or not smooth else smoothing(len(values))
    if window > 1:
        axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.3)
        values = running_mean(values, window)
    if one.band is not None:
        axes.fill_between(one.steps, *one.band, color=color, alpha=0.15, linewidth=0)
    lonely = np.isfinite(values).sum() == 1
    axes.plot(steps, values, color=color, linewidth=1.5, linestyle=dash, marker="o" if markers or lonely else None, markersize=3.2)


def _thin(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(steps) <= MAX_POINTS:
        return steps, values
    size = -(-len(steps) // MAX_POINTS)
    starts = np.arange(0, len(steps), size)
    known = np.isfinite(values)
    count = np.add.reduceat(known.astype(int), starts)
    total = np.add.reduceat(np.where(known, values, 0.0), starts)
    return steps[starts], np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _themed(svg: str, title: str) -> str:
    """Drops what only a separate file needs, lets CSS give size and colours, and removes ids that repeat on a page."""
    svg = svg[svg.index("<svg"):].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m[0]), svg)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r' id="(?![mp][0-9a-f]{10}")[^"]*"', "", svg)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg role="img" xmlns:xlink="http://www.w3.org/1999/xlink" \1>', svg, count=1)
    svg = re.sub(r"font-family: [^;\"]*|font: ([\d.]+px) [^;\"]*", lambda m: f"font-size: {m[1]}" if m[1] else "", svg)
    for variable, place in _PLACES.items():
        svg = svg.replace(place, f"var({variable})")
    return svg.replace(">", f"><title>{escape(title)}</title>", 1)
