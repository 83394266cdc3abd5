"""Draws the panels of `charts` as SVG, with matplotlib: text as text, and no colour of its own.

Colours are CSS variables, which the page gives for light and for dark. `COLOURS` has both. The same
panel always gives the same bytes.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from disagg.bench.charts import Panel, Series
from disagg.bench.shown import DIGITS, number
from disagg.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL = 'needs matplotlib; pip install "disagg[report]"'
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
# By name: on light, and on dark. Series beside each other differ in brightness, too.
COLOURS: Mapping[str, tuple[str, str]] = {
    "text": ("#1f2328", "#e6edf3"),
    "back": ("#ffffff", "#0d1117"),
    "grid": ("#d0d7de", "#3d444d"),
    "c0": ("#0a3d7a", "#8cc4ff"),
    "c1": ("#d9730d", "#c46a1b"),
    "c2": ("#116b5b", "#7ee2c8"),
    "c3": ("#b86adf", "#a04fd0"),
    "c4": ("#8f1d2c", "#ffb3b8"),
    "c5": ("#1f97b8", "#1f86a6"),
    "c6": ("#4d4d4d", "#e0e0e0"),
    "c7": ("#8a8f1c", "#82871a"),
}
_SERIES = [name for name in COLOURS if re.fullmatch(r"c\d", name)]
# What matplotlib is given for each of them, and what is replaced in its SVG.
_MARKS = {name: f"#0102{number:02x}" for number, name in enumerate(COLOURS, start=16)}
_SIZE_IN = (5.8, 3.4)
_ROW_IN = 0.3  # of a bar that lies
_LONG_LABEL, _LONG_TEXT = 14, 60  # longer ones, alone or together, are beside bars that lie
_MOST_LABELLED = 16  # bars with their values
_WIDE_LEGEND = 20
_MARKERS = "osD^vPX*"
_DASHES = ("solid", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "disagg",
    "svg.image_inline": True,
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.8,
}


def require(option: str) -> None:
    """Raise `ConfigError` if matplotlib is missing, before anything is measured for it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{option}: {INSTALL}")


def svg(panel: Panel, name: str) -> str:
    """An <svg> for a page. `name`: begins all its ids, so it must be unique in the page."""
    with _settings():
        figure = _figure((_SIZE_IN[0], _height(panel)))
        _draw(figure.subplots(), panel)
        _legend(figure, [panel])
        return _inlined(_written(figure), panel, name)


def picture(panels: Sequence[Panel], title: str, caption: Sequence[str]) -> str:
    """An SVG file of several panels beside each other, with its colours in it."""
    with _settings():
        figure = _figure((5.0 * len(panels), 4.3))
        parts = figure.subfigures(1, len(panels), squeeze=False)[0]
        for part, panel in zip(parts, panels, strict=True):
            part.set_facecolor("none")
            axes = part.subplots()
            axes.set_title(panel.title, color=_MARKS["text"], fontsize=12, loc="left")
            _draw(axes, panel)
            _legend(part, [panel])
        figure.supxlabel("\n".join(caption), color=_MARKS["text"], fontsize=9, x=0.01, ha="left")
        text = _coloured(_written(figure))
    head = f'<title id="title">{escape(title)}</title>'
    said = " ".join([*(f"{panel.title}: {panel.text}" for panel in panels), *caption])
    head += f'<desc id="desc">{escape(said)}</desc>'
    head += f"<style>{css('svg')} svg {{ background: var(--back); }}</style>"
    attributes = 'role="img" aria-labelledby="title desc"'
    return re.sub(r"<svg ([^>]*)>", rf"<svg {attributes} \1>{_kept(head)}", text, count=1)


def css(selector: str) -> str:
    """The colours, for light and for dark."""
    light, dark = (
        " ".join(f"--{name}: {both[n]};" for name, both in COLOURS.items()) for n in (0, 1)
    )
    return (
        f"{selector} {{ {light} }} "
        f"@media (prefers-color-scheme: dark) {{ {selector} {{ {dark} }} }}"
    )


# ---- axes --------------------------------------------------------------------------------------


def _lies(panel: Panel) -> bool:
    """Whether its bars lie, because they are a request's time, or their names are long."""
    if panel.kind == "lines":
        return False
    together = sum(len(place) for place in panel.places)
    longest = max(len(place) for place in panel.places)
    return panel.kind == "stacked" or longest > _LONG_LABEL or together > _LONG_TEXT


def _height(panel: Panel) -> float:
    if not _lies(panel):
        return _SIZE_IN[1]
    bars = len(panel.places) * (1 if panel.kind == "stacked" else len(panel.series))
    return max(2.0, 1.2 + _ROW_IN * (bars + 0.5 * len(panel.places)))


def _draw(axes: Axes, panel: Panel) -> None:
    if panel.kind == "lines":
        _lines(axes, panel)
    else:
        _bars(axes, panel)
    lies, text = _lies(panel), _MARKS["text"]
    axes.tick_params(colors=text, labelcolor=text, which="both")
    for spine in axes.spines.values():
        spine.set_color(text)
    axes.grid(axis="x" if lies else "y", color=_MARKS["grid"], linewidth=0.8)
    unit = panel.unit + (" (logarithmic)" if "y" in panel.log else "")
    x = panel.x + (" (logarithmic)" if "x" in panel.log else "")
    axes.set_xlabel(unit if lies else x, color=text)
    axes.set_ylabel("" if lies else unit, color=text)
    if panel.limit is not None:
        draw = axes.axvline if lies else axes.axhline
        draw(panel.limit[1], color=text, linestyle=(0, (4, 2)), linewidth=1.2)


def _lines(axes: Axes, panel: Panel) -> None:
    assert panel.numbers is not None
    axes.set_xscale("log" if "x" in panel.log else "linear")
    axes.set_yscale("log" if "y" in panel.log else "linear")
    for index, one in enumerate(panel.series):
        for values, dashed in ((one.values, False), (one.low, True)):
            known = [
                (x, y) for x, y in zip(panel.numbers, values or [], strict=False) if y is not None
            ]
            points = sorted(known)
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                **_line(index, one, dashed=dashed),
            )
    axes.set_xticks(panel.numbers, panel.places)
    axes.set_xticks([], minor=True)
    if "y" in panel.log:
        from matplotlib.ticker import FuncFormatter

        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, DIGITS)))
    else:
        axes.set_ylim(bottom=0)
    if "x" not in panel.log:
        axes.set_xlim(left=0)


def _line(index: int, one: Series, *, dashed: bool) -> dict[str, Any]:
    colour = _MARKS["text"] if one.reference else _MARKS[_SERIES[index % len(_SERIES)]]
    style = _DASHES[index // len(_SERIES) % len(_DASHES)] if not dashed else (0, (2, 2))
    return {
        "color": colour,
        "linestyle": (0, (6, 2)) if one.reference else style,
        "linewidth": 1.4 if dashed else 2.2,
        "marker": None if one.reference else _MARKERS[index % len(_MARKERS)],
        "markersize": 3.5 if dashed else 6,
    }


def _bars(axes: Axes, panel: Panel) -> None:
    lies, stacked = _lies(panel), panel.kind == "stacked"
    count = 1 if stacked else len(panel.series)
    thick = 0.8 / count
    places = list(range(len(panel.places)))
    before = [0.0] * len(places)
    draw = axes.barh if lies else axes.bar
    labelled = not stacked and len(places) * count <= _MOST_LABELLED
    for index, one in enumerate(panel.series):
        at = [place + (0 if stacked else (index - (count - 1) / 2) * thick) for place in places]
        filled = one.low or one.values
        values = [value or 0.0 for value in filled]
        colour = _MARKS[_SERIES[index % len(_SERIES)]]
        start: dict[str, Any] = {"left" if lies else "bottom": before} if stacked else {}
        width: dict[str, Any] = {"height" if lies else "width": thick * 0.92}
        draw(at, values, color=colour, **width, **start)
        if one.low:  # up to p50 the bar is full, from there to p99 it is an outline
            high = [value or 0.0 for value in one.values]
            draw(at, high, facecolor="none", edgecolor=colour, linewidth=1.6, **width)
        if stacked:
            before = [old + new for old, new in zip(before, values, strict=True)]
        elif labelled:
            _label(axes, at, one.values, lies=lies)
    ends = axes.set_xlim if lies else axes.set_ylim
    if not any((value or 0) < 0 for one in panel.series for value in one.values):
        ends(0, None)
    axes.margins(*((0.12, None) if lies else (None, 0.1)))
    (axes.set_yticks if lies else axes.set_xticks)(places, panel.places)
    if lies:
        axes.invert_yaxis()


def _label(axes: Axes, at: Sequence[float], values: Sequence[float | None], *, lies: bool) -> None:
    for place, value in zip(at, values, strict=True):
        if value is None:
            continue
        axes.annotate(
            number(value, DIGITS),
            (value, place) if lies else (place, value),
            (3, 0) if lies else (0, 2),
            textcoords="offset points",
            ha="left" if lies else "center",
            va="center" if lies else "bottom",
            fontsize=8.5,
            color=_MARKS["text"],
        )


def _legend(figure: Any, panels: Sequence[Panel]) -> None:
    """Below the axes: each series, and what full and open, whole and dotted mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for panel in panels:
        # The title says what the only series is.
        series = panel.series if len(panel.series) > 1 else []
        for index, one in enumerate(series):
            # matplotlib leaves out names that begin with an underscore.
            name = f" {one.name}" if one.name.startswith("_") else one.name
            if panel.kind == "lines":
                shown = f"{name} (reference)" if one.reference else name
                look = _line(index, one, dashed=False)
                handles.append(Line2D([], [], label=shown, **look))
            else:
                handles.append(Patch(color=_MARKS[_SERIES[index % len(_SERIES)]], label=name))
        if any(one.low for one in panel.series):
            grey = _MARKS["text"]
            if panel.kind == "lines":
                handles.append(Line2D([], [], color=grey, linewidth=2.2, label="p99"))
                handles.append(
                    Line2D([], [], color=grey, linewidth=1.4, linestyle=(0, (2, 2)), label="p50")
                )
            else:
                handles.append(Patch(color=grey, label="up to p50"))
                handles.append(Patch(facecolor="none", edgecolor=grey, label="up to p99"))
        if panel.limit is not None:
            words = f"{panel.limit[0]} {number(panel.limit[1], DIGITS)}"
            look = {"color": _MARKS["text"], "linestyle": (0, (4, 2)), "linewidth": 1.2}
            handles.append(Line2D([], [], label=words, **look))
    if handles:
        wide = max(len(handle.get_label()) for handle in handles) > _WIDE_LEGEND
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=2 if wide else min(4, len(handles)),
            frameon=False,
            labelcolor=_MARKS["text"],
            fontsize=9.5,
        )


# ---- SVG ---------------------------------------------------------------------------------------


@contextmanager
def _settings() -> Iterator[None]:
    """matplotlib's own defaults with ours, whatever the user's file says."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        for name, value in _SETTINGS.items():
            matplotlib.rcParams[name] = value  # type: ignore[index]
        yield


def _figure(size: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained", facecolor="none")


def _written(figure: Figure) -> str:
    """The <svg> alone: no prolog, no metadata, no style for the page around it."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    for axes in figure.axes:
        axes.set_facecolor("none")
    figure.savefig(file, format="svg", metadata=nothing, facecolor="none")
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.S)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.S)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r"(font: (?:\d+ )?[\d.]+px) [^;\"]*", rf"\1 {FONT}", text)
    return re.sub(r"[ \t]*\n\s*", "\n", text)


def _coloured(text: str) -> str:
    for name, mark in _MARKS.items():
        text = text.replace(mark, f"var(--{name})")
    return text


def _inlined(text: str, panel: Panel, name: str) -> str:
    text = re.sub(r'\bid="', f'id="{name}-', _coloured(text))
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    head = f'<title id="{name}-title">{escape(panel.title)}</title>'
    head += f'<desc id="{name}-desc">{escape(panel.text)}</desc>'
    attributes = f'role="img" aria-labelledby="{name}-title {name}-desc"'
    return re.sub(r"<svg ([^>]*)>", rf"<svg {attributes} \1>{_kept(head)}", text, count=1)


def _kept(text: str) -> str:
    """As the replacement of `re.sub`: backslashes stand for themselves."""
    return text.replace("\\", r"\\")
