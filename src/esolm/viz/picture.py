"""Animated pictures of denoising, as SVG or GIF: every token at its final place, a dot until it is committed.

A token that a chain draws several times appears when it is drawn for good.
"""

from __future__ import annotations

import functools
import importlib.util
import io
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from ..data import Tokenizer
from .frames import BREAK, DIFFUSION, GIVEN, SEQUENTIAL, Film, Span, layout, pieces

COLOURS = {GIVEN: "#f0f3f6", DIFFUSION: "#6cb6ff", SEQUENTIAL: "#ffa657"}
PANEL, BORDER, MASK, QUIET, FRESH = "#161b22", "#3d444d", "#3a414a", "#6e7681", "#ffffff"
COLUMNS = 80
FONT, WIDTH, LINE, PADDING, HEAD = 15, 9, 24, 28, 44  # font size, column width, line height, margin, header height
BEFORE, PLAY, PAUSE, AFTER = 0.8, 8.0, 0.3, 4.0  # seconds: dots only, all passes, one pass at most, the finished text
FADE = 0.6  # seconds in which a new token fades to the colour of its phase
MOMENTS = 160  # by default, at most; more passes are merged
SCALE = 8 / 3  # of the GIF, before it is reduced by half
FADES = 3  # shades of a new token in a GIF
FAMILY = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"


@dataclass(frozen=True)
class Scene:
    """A finished film on a grid, for both kinds of picture. A moment is one pass, or several merged ones."""

    phase: list[str]  # of each token
    moment: list[int]  # of each token; -1 if given
    counts: list[int]  # passes so far at each moment
    letters: list[Span]
    dots: list[Span]  # placeholders of tokens that are not given

    @classmethod
    def of(cls, film: Film, tokenizer: Tokenizer, most: int = MOMENTS) -> Scene:
        """The scene of a complete film, in `most` moments at most."""
        passes = film.needed
        moments = min(len(passes), most)
        rank = {-1: -1} | {when: k * moments // len(passes) for k, when in enumerate(passes)}
        spans = [_bare(span) for span in layout(pieces(tokenizer, film), COLUMNS)]
        dots = [span for span in spans if film.when[span.token] >= 0]
        letters = [part for span in spans if span.text.strip() for part in _parts(span)]
        counts = [sum(rank[when] <= m for when in passes) for m in range(moments)]
        return cls(film.phase, [rank[when] for when in film.when], counts, letters, dots)

    def at(self, moment: int, spans: list[Span]) -> list[Span]:
        """The spans that belong to a moment."""
        return [span for span in spans if self.moment[span.token] == moment]

    def kind(self, moment: int) -> str:
        """The phase of a moment; DIFFUSION if no token appears, as may happen in a chain."""
        return self.phase[self.moment.index(moment)] if moment in self.moment else DIFFUSION

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        lines = 1 + max([0, *(span.line for span in (*self.letters, *self.dots))])
        return 2 * PADDING + COLUMNS * WIDTH, 2 * PADDING + HEAD + lines * LINE - (LINE - FONT)

    @property
    def pause(self) -> float:
        """Seconds between two moments."""
        return min(PAUSE, PLAY / max(len(self.counts), 1))

    @property
    def seconds(self) -> float:
        """Duration of one loop."""
        return BEFORE + len(self.counts) * self.pause + AFTER


def _bare(span: Span) -> Span:
    """The span without surrounding spaces, unless it is all spaces."""
    text = span.text.strip() or span.text
    return span._replace(column=span.column + span.text.index(text), text=text)


def _parts(span: Span) -> Iterator[Span]:
    """The letters and, separately, the signs for line breaks."""
    letters = span.text.rstrip(BREAK)
    if letters.strip():
        yield span._replace(text=letters)
    if breaks := span.text[len(letters) :]:
        yield span._replace(text=breaks, column=span.column + cell_len(letters))


def _baseline(line: int) -> int:
    return PADDING + HEAD + line * LINE + FONT - 3


def svg(film: Film, tokenizer: Tokenizer, most: int = MOMENTS, label: str = "NFE") -> str:
    """An animated SVG without scripts; without animation it shows the finished text.

    most: moments; more passes are merged. label: of the number that counts them.
    """
    scene = Scene.of(film, tokenizer, most)
    width, height = scene.size
    body = [_head(scene, label), *_dots(scene), *_letters(scene)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'class="e" role="img" aria-label="Text appearing out of dots, token by token">\n'
        f"<style>\n{_style(scene)}</style>\n"
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="12" fill="{PANEL}" stroke="{BORDER}"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _style(scene: Scene) -> str:
    """The style sheet: colours, and for each moment when its tokens appear and its dots disappear."""
    total, moments = scene.seconds, len(scene.counts)

    def at(seconds: float) -> str:
        return f"{100 * seconds / total:.2f}%"

    begin, end = at(BEFORE), at(BEFORE + moments * scene.pause)
    rules = [
        f".e{{font:{FONT}px {FAMILY};white-space:pre}}",
        f".t,.d,.n,.b{{animation:{total:.2f}s linear infinite}}",
        f".d{{opacity:0;fill:{MASK}}}.q{{fill:{QUIET}}}.g{{font-weight:bold}}",
        f".n{{animation-name:n;transform:translateY({-moments * LINE}px)}}",
        f"@keyframes n{{0%{{transform:none}}"
        f"{begin}{{transform:none;animation-timing-function:steps({max(moments, 1)},start)}}"
        f"{end},100%{{transform:translateY({-moments * LINE}px)}}}}",
        ".b{animation-name:b;transform-box:fill-box;transform-origin:right;transform:scaleX(0)}",
        f"@keyframes b{{0%,{begin}{{transform:none}}{end},100%{{transform:scaleX(0)}}}}",
    ]
    for m in range(moments):
        seconds = BEFORE + m * scene.pause
        before, after = at(seconds), at(seconds + total / 5000)
        colour = COLOURS[scene.kind(m)]
        rules += [
            f"@keyframes t{m}{{0%,{before}{{opacity:0;fill:{FRESH}}}{after}{{opacity:1;fill:{FRESH}}}"
            f"{at(seconds + FADE)}{{fill:{colour}}}}}",
            f"@keyframes d{m}{{0%,{before}{{opacity:1}}{after},100%{{opacity:0}}}}",
        ]
    rules.append("@media(prefers-reduced-motion:reduce){*{animation:none!important}}")
    return "\n".join(rules) + "\n"


def legend(scene: Scene) -> Iterator[tuple[int, str]]:
    """The phases that occur, each with the column of its label."""
    column = 0
    for phase in (phase for phase in COLOURS if phase in scene.phase):
        yield column, phase
        column += len(phase) + 4


def _head(scene: Scene, name: str) -> str:
    """The legend, the number of network evaluations (or what `name` says), and a progress line."""
    right, y = PADDING + COLUMNS * WIDTH, PADDING + FONT - 3
    parts = []
    for column, phase in legend(scene):
        x, colour = PADDING + column * WIDTH, COLOURS[phase]
        parts.append(f'<circle cx="{x + 5}" cy="{y - 5}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{x + 2 * WIDTH}" y="{y}" fill="{colour}">{phase}</text>')
    counts = [0, *scene.counts]
    numbers = "".join(f'<text x="{right}" y="{y + k * LINE}">{n}</text>' for k, n in enumerate(counts))
    label = right - (len(str(counts[-1])) + 1) * WIDTH
    parts += [
        f'<clipPath id="c"><rect x="{label}" y="{y - FONT}" width="{right - label}" height="{LINE - 4}"/></clipPath>',
        f'<text class="q" x="{label}" y="{y}" text-anchor="end">{name}</text>',
        f'<g clip-path="url(#c)"><g class="n" fill="{COLOURS[GIVEN]}" text-anchor="end">{numbers}</g></g>',
        _bar(scene, y + 14),
    ]
    return "\n".join(parts)


def _bar(scene: Scene, y: int) -> str:
    """The progress line in the colours of the phases, under a cover that shrinks."""
    parts, x = [], float(PADDING)
    for phase, width in shares(scene).items():
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="2" fill="{COLOURS[phase]}"/>')
        x += width
    cover = f'<rect class="b" x="{PADDING}" y="{y}" width="{COLUMNS * WIDTH}" height="2" fill="{BORDER}"/>'
    return "".join([*parts, cover])


def shares(scene: Scene) -> dict[str, float]:
    """The width of each phase on the progress line, in proportion to its moments."""
    kinds = [scene.kind(m) for m in range(len(scene.counts))]
    return {kind: COLUMNS * WIDTH * kinds.count(kind) / len(kinds) for kind in (DIFFUSION, SEQUENTIAL) if kinds}


def _dots(scene: Scene) -> Iterator[str]:
    """The dots of each moment, each as wide as its token."""
    for m in range(len(scene.counts)):
        yield f'<g class="d" style="animation-name:d{m}">{"".join(map(_dot, scene.at(m, scene.dots)))}</g>'


def _dot(span: Span) -> str:
    x, y, width = PADDING + span.column * WIDTH + 1, _baseline(span.line) - 9, cell_len(span.text) * WIDTH - 2
    return f'<rect x="{x}" y="{y}" width="{width}" height="8" rx="4"/>'


def _letters(scene: Scene) -> Iterator[str]:
    """The letters of each moment, given ones first."""
    for m in range(-1, len(scene.counts)):
        if spans := scene.at(m, scene.letters):
            kind = 'class="g"' if m < 0 else f'class="t" style="animation-name:t{m}"'
            yield f'<g {kind} fill="{COLOURS[scene.kind(m)]}">{"".join(map(_text, spans))}</g>'


def _text(span: Span) -> str:
    """One span, stretched to its columns in any font."""
    cells = cell_len(span.text)
    hold = f' textLength="{cells * WIDTH}"' if cells > 1 else ""
    quiet = ' class="q"' if span.text[0] == BREAK else hold
    return f'<text x="{PADDING + span.column * WIDTH}" y="{_baseline(span.line)}"{quiet}>{escape(span.text)}</text>'


def need_gif() -> None:
    """Raise ValueError if the packages that draw GIFs are missing."""
    if any(importlib.util.find_spec(name) is None for name in ("PIL", "matplotlib")):
        raise ValueError("a GIF needs an extra: pip install 'esolm[plot]'; an SVG does not")


def gif(film: Film, tokenizer: Tokenizer) -> bytes:
    """An animated GIF of the same picture."""
    need_gif()
    scene, palette = Scene.of(film, tokenizer), _palette()
    moments = len(scene.counts)
    frames = [image.quantize(palette=palette, dither=0) for image in paint(scene)]
    file, seconds = io.BytesIO(), [BEFORE, *[scene.pause] * moments, AFTER]
    times = [10 * round(100 * s) for s in seconds]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=times, loop=0)
    return file.getvalue()


def paint(scene: Scene) -> Iterator[Any]:
    """Pillow images: dots only, one for each moment, and the finished text. All share one canvas."""
    pen, moments, fading = Pen(*scene.size), len(scene.counts), 1 + int(FADE / scene.pause)
    for span in scene.dots:
        x, y = PADDING + span.column * WIDTH + 1, _baseline(span.line) - 9
        pen.box(x, y, cell_len(span.text) * WIDTH - 2, 8, MASK)
    _paint_letters(pen, scene, -1, 1.0)
    for now in (*range(-1, moments), moments + fading):
        _paint_head(pen, scene, now)
        for m in range(max(0, now - 2 * fading), min(now + 1, moments)):
            _paint_letters(pen, scene, m, min((now - m) * scene.pause / FADE, 1.0))
        yield pen.image.reduce(2)


def _paint_letters(pen: Pen, scene: Scene, moment: int, age: float) -> None:
    """Paint the tokens of a moment, from bright at age 0 to the colour of their phase at age 1."""
    for span in (*scene.at(moment, scene.dots), *scene.at(moment, scene.letters)):
        pen.clear(PADDING + span.column * WIDTH, _baseline(span.line) - FONT, cell_len(span.text) * WIDTH, LINE - 2)
    for span in scene.at(moment, scene.letters):
        colour = _mix(FRESH, COLOURS[scene.phase[span.token]], int(age * FADES) / FADES)
        colour = QUIET if span.text[0] == BREAK else colour
        pen.text(span.column, _baseline(span.line), span.text, colour, bold=moment < 0)


class Pen:
    """A Pillow image in the units of the SVG, drawn large and then reduced to smooth it."""

    def __init__(self, width: int, height: int) -> None:
        from PIL import Image, ImageDraw

        self.image = Image.new("RGB", (round(width * SCALE), round(height * SCALE)), PANEL)
        self.draw = ImageDraw.Draw(self.image)

    def text(self, column: int, y: int, text: str, colour: str, bold: bool = False) -> None:
        """Draw text from a column on."""
        place = ((PADDING + column * WIDTH) * SCALE, y * SCALE)
        self.draw.text(place, text, colour, _font(bold), anchor="ls")

    def clear(self, x: int, y: int, width: int, height: int) -> None:
        """Clear a rectangle to the background."""
        self.draw.rectangle((x * SCALE, y * SCALE, (x + width) * SCALE - 1, (y + height) * SCALE - 1), PANEL)

    def box(self, x: float, y: int, width: float, height: int, colour: str) -> None:
        """Draw a rectangle with round ends."""
        corners = (x * SCALE, y * SCALE, (x + width) * SCALE, (y + height) * SCALE)
        self.draw.rounded_rectangle(corners, min(width, height) * SCALE / 2, colour)


def _paint_head(pen: Pen, scene: Scene, now: int) -> None:
    """Paint the legend, the number of network evaluations and the progress line."""
    y, full, counts = PADDING + FONT - 3, COLUMNS * WIDTH, [0, *scene.counts]
    pen.clear(0, 0, scene.size[0], PADDING + HEAD - 4)
    for column, phase in legend(scene):
        pen.box(PADDING + column * WIDTH, y - 10, 10, 10, COLOURS[phase])
        pen.text(column + 2, y, phase, COLOURS[phase])
    done = min(now + 1, len(scene.counts))
    pen.text(COLUMNS - len(str(counts[done])), y, str(counts[done]), COLOURS[GIVEN])
    pen.text(COLUMNS - len(str(counts[-1])) - 4, y, "NFE", QUIET)
    pen.box(PADDING, y + 14, full, 2, BORDER)
    x, reached = 0.0, full * done / max(len(scene.counts), 1)
    for phase, width in shares(scene).items():
        if reached > x:
            pen.box(PADDING + x, y + 14, min(width, reached - x), 2, COLOURS[phase])
        x += width


@functools.cache
def _font(bold: bool) -> Any:
    """DejaVu Sans Mono, which is part of matplotlib."""
    import matplotlib
    from PIL import ImageFont

    name = "DejaVuSansMono-Bold.ttf" if bold else "DejaVuSansMono.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", name)), round(FONT * SCALE))


def _mix(one: str, other: str, share: float) -> str:
    """Interpolate between two colours."""
    pairs = ((int(one[k : k + 2], 16), int(other[k : k + 2], 16)) for k in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _palette() -> Any:
    """Every colour in even shades down to the background: one palette for all frames, to avoid flicker."""
    from PIL import Image

    fading = (_mix(FRESH, COLOURS[p], k / FADES) for p in (DIFFUSION, SEQUENTIAL) for k in range(1, FADES + 1))
    inks = [COLOURS[GIVEN], BORDER, MASK, QUIET, FRESH, *fading]
    shades = 256 // len(inks)
    colours = [_mix(PANEL, ink, k / (shades - 1)) for ink in inks for k in range(shades)]
    image = Image.new("P", (1, 1))
    image.putpalette(bytes.fromhex("".join(colour[1:] for colour in colours)))
    return image
