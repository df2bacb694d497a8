"""Style every figure: one color per weight format, also in the paper's curves; dashes and markers separate arms."""

import io
import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib import rc_params_from_file
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from PIL import Image

from qerl_lab.config.conf_folder import choices_of
from qerl_lab.config.schema import DENSE_FORMAT
from qerl_lab.report.reference import is_plain
from qerl_lab.report.runs import Run

STYLE = Path(__file__).with_name("report.mplstyle")
DPI = 160
PANEL_PIXELS = 704  # width of a panel, 4.4 inches: sharp on a phone and at half the width of a page
# Okabe and Ito's colors, which color-blind readers can distinguish; FP8's is Tol's indigo.
KNOWN = {DENSE_FORMAT: "#000000", "nvfp4": "#0072B2", "mxfp4": "#D55E00", "nf4": "#009E73", "fp8": "#332288"}
NEW = ("#882255", "#44AA99", "#F0E442")  # for formats that `KNOWN` lacks, by alphabet
OTHERS = ("#56B4E9", "#CC79A7", "#E69F00", "#777777", "#8C564B", "#BCBD22")  # colors of no format
FORMATS: dict[str, str] = KNOWN | dict(zip(sorted({*choices_of("format")} - {*KNOWN}), NEW, strict=False))
# Noise schedules that the paper draws. A figure of arms in several formats shows the colors of formats instead.
SCHEDULES = {"exponential": "#56B4E9", "linear": "#E69F00", "cosine": "#CC79A7", "logarithmic": "#777777"}
# Four dashes and nine markers: with eight markers the ninth arm of a format would have both of the first arm.
DASHES, MARKERS = ("-", "--", "-.", ":"), "os^Dv" + "PX*<"
PAPER_NAMES = {"bf16/float16": DENSE_FORMAT}  # names in the paper's figures that differ from ours


@contextmanager
def styled() -> Iterator[None]:
    """Draw figures in the style of the file `STYLE`, as a context manager or a decorator.

    Unlike `plt.style.context` it leaves a notebook interactive.
    """
    style = rc_params_from_file(STYLE, use_default_template=False)
    before = {key: plt.rcParams[key] for key in style}
    plt.rcParams.update(style)
    try:
        yield
    finally:
        plt.rcParams.update(before)


def color(name: str, number: int = OTHERS.index("#777777")) -> str:
    """Return the hex color of a weight format, named as in the lab or as in the paper's figures.

    Any other name gets color `number` of `OTHERS`, by default gray.
    """
    name = name.lower()
    return FORMATS.get(PAPER_NAMES.get(name, name), OTHERS[number % len(OTHERS)])


def styles_of_arms(arms: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Any]]:
    """Return the `styles` of arms, which `arms` maps to their runs. Plain arms (`is_plain`) have filled markers."""
    formats = {label: runs[0].value("format.name") for label, runs in arms.items()}
    return styles(formats, [label for label, runs in arms.items() if not is_plain(runs[0])])


def styles(formats: Mapping[str, str], hollow: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return color, line style and marker of each arm as arguments of `plot`; `formats` maps arms to weight formats.

    Arms of one format differ in dashes. The markers of the arms `hollow` are hollow; with None, of all arms but the
    first of each format.
    """
    colors, found, arms_of_format = _colors(formats), {}, Counter[str]()
    for index, (arm, weight_format) in enumerate(formats.items()):
        number = arms_of_format[weight_format]  # arms of this format so far
        arms_of_format[weight_format] += 1
        is_hollow = number > 0 if hollow is None else arm in hollow
        looks = {"linestyle": DASHES[number % len(DASHES)], "marker": MARKERS[index % len(MARKERS)]}
        found[arm] = {"color": colors[arm], **looks, "markerfacecolor": "white" if is_hollow else colors[arm]}
    return found


def _colors(formats: Mapping[str, str]) -> dict[str, str]:
    """Choose the color of each arm: the color of its weight format, which arms of one format share.

    If all arms have one format, an arm that names a schedule of `SCHEDULES` has the color of the schedule. The first
    of the other arms has the color of the format, and the rest have colors of `OTHERS`.
    """
    if len(set(formats.values())) > 1:
        return {arm: color(weight_format) for arm, weight_format in formats.items()}
    chosen = dict[str, str]()
    names = sorted({*choices_of("aqn"), *SCHEDULES}, key=len, reverse=True)  # cosine_restarts before cosine
    for arm in formats:
        for name in re.findall(rf"(?<![a-z])(?:{'|'.join(names)})(?![a-z])", arm.lower()):
            if name in SCHEDULES:
                chosen.setdefault(arm, SCHEDULES[name])
    free = [shade for shade in OTHERS if shade not in chosen.values()]
    if chosen:  # the colors of other schedules come last, because the paper's figures below may show them
        free.sort(key=lambda shade: shade in SCHEDULES.values())
    shades = itertools.chain(map(color, set(formats.values())), itertools.cycle(free))
    return {arm: chosen.get(arm) or next(shades) for arm in formats}


def format_tick(value: float, _: object = None) -> str:
    """Format a tick's number without trailing zeros. The second argument, which matplotlib passes, is ignored.

    Numbers of 1,000 or more are rounded to whole numbers and written with commas and no exponent.
    """
    return f"{value:g}" if abs(value) < 1000 else f"{value:,.0f}"


def add_title(figure: Figure, title: str) -> None:
    """Add a title to a whole figure, aligned left like the titles of panels, in lines as wide as the figure."""
    lines = [textwrap.fill(line, int(11 * figure.get_figwidth())) for line in title.splitlines()]
    figure.suptitle("\n".join(lines), x=0.01, ha="left")


def add_legend_below(figure: Figure) -> None:
    """Add one legend below all panels, of the first line or bar with each label, and make the figure higher for it."""
    handles = dict[str, Artist]()
    for axis in figure.axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    width = figure.get_figwidth()
    names = [textwrap.fill(name, int(10 * width), break_on_hyphens=False) for name in handles]
    columns = max(1, min(len(names), int(width / (0.6 + 0.08 * max(map(len, names))))))  # inches
    lines = math.ceil(sum(name.count("\n") + 1 for name in names) / columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * lines)
    figure.legend(handles.values(), names, loc="outside lower left", ncols=columns)


def png(figure: Figure) -> bytes:
    """Render a figure as a PNG of few colors and close it."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI, pil_kwargs={"compress_level": 0})  # it is compressed below
    plt.close(figure)
    return with_fewer_colors(drawn.getvalue())


def with_fewer_colors(png: bytes) -> bytes:
    """Reduce a PNG to at most 256 colors, which makes it a third of its size."""
    image, written = Image.open(io.BytesIO(png)).convert("RGB"), io.BytesIO()
    # Of Pillow's methods this one keeps the colors of lines and pale bands best.
    image.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(written, "PNG")
    return written.getvalue()
