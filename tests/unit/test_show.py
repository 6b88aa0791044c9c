"""What is seen of denoising: partial texts, their layout, frames of the terminal, and the pictures."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from esolm.core.order import Schedule
from esolm.data.tokenizer import tokenizer
from esolm.model import Event
from esolm.sampling.request import Drafts, Step
from esolm.viz import picture
from esolm.viz import terminal as show
from esolm.viz.frames import (
    DIFFUSION,
    DOT,
    GIVEN,
    SEQUENTIAL,
    UNDECIDED,
    Film,
    Meter,
    layout,
    pieces,
    record,
    spell,
    visible,
)

BYTES = tokenizer("bytes")
SVG = "{http://www.w3.org/2000/svg}"


def film(text: str, given_tokens: int = 4, together: int = 2, diffusion: int = 3) -> Film:
    """Bytes of a text: some given, then `together` in each diffusion pass, then the rest left to right."""
    ids = BYTES.encode(text)
    when = [-1 if at < given_tokens else (at - given_tokens) // together for at in range(len(ids))]
    phase = [GIVEN if k < 0 else DIFFUSION if k < diffusion else SEQUENTIAL for k in when]
    return Film(ids, phase, when, list(range(max(when) + 1)))


def events() -> list[Event]:
    """Two rows of 'abcd' and 'wxyz': the second has one token given, both a diffusion pass and then left to right."""
    sigma = torch.tensor([[2, 0, 1, 3], [1, 3, 0, 2]])
    sizes, given_tokens = torch.tensor([[2, 1, 1], [1, 1, 1]]), torch.tensor([0, 1])
    schedule = Schedule(sigma, sizes, given_tokens, torch.tensor([1, 1]))
    target = torch.tensor([list(b"abcd"), list(b"wxyz")])
    tokens = torch.tensor([[BYTES.mask_id] * 4, [BYTES.mask_id, ord("x"), BYTES.mask_id, BYTES.mask_id]])
    made = []
    for k, positions in enumerate(([[2, 0], [3, 0]], [[1], [0]], [[3], [2]])):
        position = torch.tensor(positions)
        drawn = torch.ones_like(position, dtype=torch.bool)
        if k == 0:
            drawn[1, 1] = False
        step = Step(position, target.gather(1, position), drawn)
        row, column = drawn.nonzero(as_tuple=True)
        tokens[row, position[row, column]] = step.token[row, column]
        made.append(Event(k, 3, step, tokens.clone(), schedule, 0))
    return made


@given(st.text() | st.binary().map(lambda b: b.decode(errors="surrogateescape")))
def test_tokens_spell_the_text_of_the_whole(text):
    ids = list(text.encode(errors="surrogateescape"))
    texts = spell(BYTES.decode, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == BYTES.decode(ids)


def test_a_character_in_several_tokens_comes_with_its_last():
    assert spell(BYTES.decode, list("aé中b".encode())) == ["a", "", "é", "", "", "中", "b"]
    broken = list("中".encode())[:2]
    assert "".join(spell(BYTES.decode, broken)) == "�"


def test_undecided_tokens_are_dots_between_runs_of_their_own():
    row = film("aé中b", given_tokens=0, together=1)
    row.when[4] = UNDECIDED  # inside 中
    assert pieces(BYTES, row) == ["a", "", "é", "�", DOT, "", "�b"]
    row.when[:] = [UNDECIDED] * 7
    assert pieces(BYTES, row) == [DOT] * 7
    end = Film([97, BYTES.eos_id, 98], [DIFFUSION] * 3, [0, 1, 2])
    assert pieces(BYTES, end) == ["a", "¶", "b"]


def test_control_characters_cannot_reach_the_terminal():
    assert visible("a\x1b[2Jb\tc\r\nd\x00") == "a�[2Jb  c\nd�"


@pytest.mark.parametrize(
    ("texts", "lines"),
    [
        (["the", " qu", "ick", " fox"], ["the ", "quick ", "fox"]),
        (["a\n\n", "b"], ["a↵↵", "b"]),
        (["·"] * 10, ["·" * 8, "··"]),
        (["abcdefgh", "ijkl"], ["abcdefgh", "ijkl"]),
        (["中中中中中"], ["中中中中", "中"]),
        (["abcdefgh\n", "x"], ["abcdefgh↵", "x"]),
    ],
)
def test_layout_breaks_between_words_and_at_line_breaks(texts, lines):
    spans = layout(texts, 8)
    found = [""] * len(lines)
    for span in spans:
        found[span.line] += span.text
    assert found == lines


def test_films_know_when_and_in_which_phase():
    films: list[Film] = []
    passed = list(record(iter(events()), films))
    assert len(passed) == 3
    one, two = films
    assert (one.ids, two.ids) == (list(b"abcd"), list(b"wxyz"))
    assert one.when == [0, 1, 0, 2]
    assert one.phase == [DIFFUSION, SEQUENTIAL, DIFFUSION, SEQUENTIAL]
    assert two.when == [1, -1, 2, 0]
    assert two.phase == [SEQUENTIAL, GIVEN, SEQUENTIAL, DIFFUSION]
    assert (one.passes, two.passes) == (3, 3)


def test_guesses_have_a_colour_of_their_own_until_they_are_decided():
    """Three drafts after 'a': the first is kept, the second replaced by 'c', the third dropped and drawn later."""
    order = torch.arange(5)[None]
    schedule = Schedule(order, torch.ones(1, 5, dtype=torch.long), torch.tensor([0]), torch.tensor([0]))
    tokens = torch.full((1, 5), BYTES.mask_id)
    drafts = Drafts(order[:, 1:4], torch.tensor([list(b"bXY")]), torch.ones(1, 3).bool(), torch.tensor([1]), order[0])
    none = Drafts(order[:, :0], order[:, :0], torch.zeros(1, 0).bool(), torch.tensor([0]), order[0])
    steps = [(0, "a", none), (1, "bc", drafts), (3, "de", none)]
    films: list[Film] = []
    found = []
    made = [
        Step(order[:, at : at + len(text)], torch.tensor([list(text.encode())]), torch.ones(1, len(text)).bool(), tried)
        for at, text, tried in steps
    ]
    for event in record((Event(k, 5, step, tokens, schedule, 0) for k, step in enumerate(made)), films):
        text = show.draw(films[0], BYTES, 20, 20, event.step)
        found.append((text.plain, [str(span.style) for span in text.spans]))
        legend = show.frame(films, event, BYTES, Meter(), 20, 20).renderables[-1]
        assert "● draft" in str(legend)
    bright, old = (show.STYLES[SEQUENTIAL] + suffix for suffix in (" bold reverse", ""))
    rejected = show.STYLES["rejected draft"] + " bold reverse"
    assert found == [
        ("a····", [bright, *["dim"] * 4]),
        ("abcY·", [old, bright, rejected, show.STYLES["draft"], "dim"]),
        ("abcde", [old, old, old, bright, bright]),
    ]


def test_frames_colour_the_phases_and_light_up_the_newest():
    films: list[Film] = []
    frames = {}
    for event in record(iter(events()), films):
        frames[event.step] = [show.draw(row, BYTES, 20, 20, event.step) for row in films]
    assert [text.plain for text in frames[0]] == ["a·c·", "·x·z"]
    assert [text.plain for text in frames[2]] == ["abcd", "wxyz"]
    styles = [str(span.style) for span in frames[1][0].spans]
    assert styles == [show.STYLES[DIFFUSION], show.STYLES[SEQUENTIAL] + " bold reverse", show.STYLES[DIFFUSION], "dim"]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_show_passes_events_on_and_ends_with_the_text(terminal, monkeypatch):
    monkeypatch.setattr(show, "PLAY", 0.2)
    file, films, meter = io.StringIO(), list[Film](), Meter()
    console = Console(file=file, force_terminal=terminal, width=120, color_system=None)
    for first in (0, 2):
        stream = record(meter.measure(event._replace(first=first, seconds=0.5) for event in events()), films)
        assert [event.step for event in show.animate(stream, films, BYTES, meter, console)] == [0, 1, 2]
    assert (meter.tokens, meter.seconds) == (14, 3.0)
    said = file.getvalue()
    assert ("a·c·" in said) == terminal
    if not terminal:
        words = [line for line in said.splitlines() if line and not line.startswith("step 3/3 · 3 passes · ")]
        assert words == ["sample 1", "abcd", "sample 2", "wxyz", "sample 3", "abcd", "sample 4", "wxyz"]


def test_the_last_frame_is_the_text():
    """With line breaks, up to the end of the text behind what was given."""
    row = film("One\ntwo three.")
    end = BYTES.eos_id
    ended = Film([*row.ids, end, ord("x")], [*row.phase, SEQUENTIAL, SEQUENTIAL], [*row.when, 3, 4])
    assert show.read(ended, BYTES).plain == "One\ntwo three."
    given = Film([*row.ids, end, ord("x")], [*row.phase, SEQUENTIAL, GIVEN], [*row.when, 3, -1])
    assert show.read(given, BYTES).plain == "One\ntwo three.¶x"


def test_the_last_frame_counts_the_steps_that_were_run():
    """The speculative sampler plans one step for each token, and needs fewer."""
    films, file = list[Film](), io.StringIO()
    planned = (event._replace(steps=9) for event in events())
    list(show.animate(record(planned, films), films, BYTES, Meter(), Console(file=file, width=80)))
    assert "step 3/3 " in file.getvalue()


def test_tokens_stay_on_their_line_while_the_text_appears():
    row = film("The quick brown fox jumps over\nthe lazy dog and runs away.", given_tokens=4)
    last, tokens = max(row.when), 10
    lines = []
    for now in range(-1, last + 1):
        seen = Film(row.ids, row.phase, [when if when <= now else UNDECIDED for when in row.when])
        lines.append([len(line) for line in show.draw(seen, BYTES, 20, tokens, now).plain.split("\n")])
    assert all(found == lines[-1] for found in lines)
    assert show.tokens_per_line(BYTES, 60) >= 30


def test_svg_has_every_token_once_in_the_colour_of_its_phase():
    row = film("The <b> & c\nfoo bar")
    root = ET.fromstring(picture.svg(row, BYTES))
    drawn = {kind: [g for g in root.iter(f"{SVG}g") if g.get("class") == kind] for kind in "gtd"}
    assert len(drawn["t"]) == len(drawn["d"]) == row.passes
    assert len([dot for g in drawn["d"] for dot in g]) == len(row.ids) - 4
    texts = {
        phase: "".join(t.text or "" for g in (*drawn["g"], *drawn["t"]) if g.get("fill") == colour for t in g)
        for phase, colour in picture.COLOURS.items()
    }
    assert texts == {GIVEN: "The", DIFFUSION: "<b>&", SEQUENTIAL: "c↵foobar"}
    labels = [text.text for text in root.findall(f"{SVG}text")]
    assert labels[:3] == ["given", "diffusion", "left to right"]
    style = root.findtext(f"{SVG}style") or ""
    assert style.count("@keyframes t") == style.count("@keyframes d") == row.passes
    assert style.count("{") == style.count("}")


def test_svg_is_well_formed_whatever_the_bytes_and_bounded_however_many_passes():
    ids = list(range(256)) * 4
    row = Film(ids, [DIFFUSION] * len(ids), list(range(len(ids))), list(range(len(ids))))
    drawn = picture.svg(row, BYTES)
    assert ET.fromstring(drawn).get("viewBox")
    assert drawn.count("@keyframes t") == picture.MOMENTS
    assert f">{len(ids)}</text>" in drawn


def test_a_row_of_which_all_is_given_is_a_picture_that_stands_still():
    row = film("given", given_tokens=5)
    root = ET.fromstring(picture.svg(row, BYTES))
    assert [text.text for text in root.findall(f"{SVG}g[@class='g']/{SVG}text")] == list("given")
    assert not root.findall(f"{SVG}g[@class='d']")


def test_gif_has_a_frame_for_each_pass():
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    row = film("The quick fox")
    with image.open(io.BytesIO(picture.gif(row, BYTES))) as opened:
        assert opened.n_frames == row.passes + 2
        first = opened.convert("RGB")
        opened.seek(opened.n_frames - 1)
        last = opened.convert("RGB")
    inks = {phase: tuple(bytes.fromhex(colour[1:])) for phase, colour in picture.COLOURS.items()}
    below = (0, int(100 * picture.SCALE / 2 * 0.7), *first.size)

    def shown(frame, phase):
        colours = {colour for _, colour in frame.crop(below).getcolors(1 << 20)}
        return min(sum(abs(a - b) for a, b in zip(inks[phase], colour)) for colour in colours) < 24

    assert [shown(last, phase) for phase in inks] == [True] * 3
    assert not shown(first, SEQUENTIAL)


def test_gif_without_its_extra_says_what_to_install(monkeypatch):
    monkeypatch.setattr(picture.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"esolm\[plot\]"):
        picture.gif(film("abcdefgh"), BYTES)
