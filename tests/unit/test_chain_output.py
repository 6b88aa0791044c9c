"""What a user sees of a chain: samples, events, the animation, pictures and the server, while tokens change."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from rich.console import Console

import esolm
from esolm import cli
from esolm.core.order import Chain
from esolm.net.conditioned import Conditioned
from esolm.sampling.options import SamplingOptions
from esolm.serving.choices import Choice, step_event
from esolm.serving.engine import Engine
from esolm.serving.request import Chosen, Generation
from esolm.viz import frames, picture, terminal
from support import served, toy
from support.runs import make_run

STEPS, LENGTH = 6, 12
CHAINS = [name for name, options in toy.one_of_each().items() if not toy.make(name, 9, **options).masks]


@pytest.fixture(params=CHAINS)
def lm(request: pytest.FixtureRequest) -> Any:
    return served.model(request.param, length=LENGTH)


@pytest.fixture(params=[name for name in CHAINS if name in served.SERVED])
def servable(request: pytest.FixtureRequest) -> Any:
    return served.model(request.param, length=LENGTH)


def test_a_sample_is_its_last_event(lm: Any) -> None:
    options = {"num_samples": 3, "length": LENGTH, "num_steps": STEPS, "seed": 1}
    seen = [event.tokens.clone() for event in lm.stream("ab", **options)]
    found = lm.sample("ab", **options)
    assert len(seen) == STEPS
    assert seen[-1].tolist() == found.tokens
    assert all(torch.equal(tokens[:, :2], seen[0][:, :2]) for tokens in seen)
    changes = sum(int((one != two).sum()) for one, two in itertools.pairwise(seen))
    assert changes > 3 * (LENGTH - 2)  # many positions change more than once
    assert found.nfe == [STEPS] * 3
    assert found.passes == STEPS
    assert found.steps == [[list(range(2, LENGTH))] * STEPS] * 3
    assert lm.infill("a____b", tokens_per_blank=3, num_steps=2).tokens[0][0] == ord("a")


def test_by_default_a_chain_has_128_steps(lm: Any) -> None:
    assert lm.sample(num_samples=1, length=2).nfe == [128]


def test_films_show_what_changed_and_pictures_what_stayed(lm: Any) -> None:
    films: list[frames.Film] = []
    meter, console = frames.Meter(), Console(force_terminal=True, width=60, file=open("/dev/null", "w"))  # noqa: SIM115
    events = meter.measure(lm.stream("ab", 1, LENGTH, num_steps=STEPS, seed=2))
    before: list[int] | None = None
    for event in terminal.animate(frames.record(events, films), films, lm.tokenizer, meter, console):
        now = event.tokens[0].tolist()
        fresh = [at for at, when in enumerate(films[0].when) if when == event.step]
        assert films[0].ids == now
        assert fresh == [at for at in range(2, LENGTH) if before is None or before[at] != now[at]]
        before = now
    film = films[0]
    assert film.passes == STEPS
    assert meter.tokens == pytest.approx(LENGTH - 2)
    scene = picture.Scene.of(film, lm.tokenizer)
    assert scene.counts == list(range(1, STEPS + 1))
    assert [moment + 1 for moment in scene.moment] == [0, 0, *(when + 1 for when in film.when[2:])]
    drawn = picture.svg(film, lm.tokenizer)
    assert ET.fromstring(drawn).get("viewBox")
    assert drawn.count("@keyframes t") == STEPS


def test_a_chain_in_which_nothing_changes_is_still_a_picture() -> None:
    film = frames.Film([97, 98], [frames.GIVEN, frames.DIFFUSION], [-1, 0], [0, 1, 2])
    scene = picture.Scene.of(film, served.BYTES)
    assert (scene.counts, scene.kind(2)) == ([1, 2, 3], frames.DIFFUSION)
    assert ET.fromstring(picture.svg(film, served.BYTES)) is not None


@pytest.mark.parametrize("name", [name for name in CHAINS if name not in served.SERVED])
def test_what_cannot_be_served_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot be served"):
        Engine(served.model(name))


def test_served_tokens_change_and_a_text_is_final_at_the_end(servable: Any) -> None:
    lm = servable
    news: list[tuple[Chosen, ...]] = []
    texts: list[tuple[str, str | None]] = []
    choice = Choice(0, 2, LENGTH - 2, [], lm.tokenizer)

    def listen(generation: Generation, new: Any) -> None:
        choice.generation = generation
        choice.update()
        texts.append((choice.text, choice.reason))
        news.append(tuple(new))

    engine = Engine(lm)
    row = [97, 98, *[None] * (LENGTH - 2)]
    options = SamplingOptions(num_steps=STEPS, seed=4)
    generation = engine.generation(row, options, top_logprobs=2, listen=listen)
    engine.submit(generation)
    engine.finish()
    assert isinstance(generation.schedule, Chain)
    assert generation.passes == STEPS
    assert news[-1] == ()
    assert all(news[:-1])  # only the end has no tokens
    assert texts[:-1] == [("", None)] * (len(texts) - 1)
    assert texts[-1][1] in ("stop", "length")
    tokens: list[int | None] = list(row)
    for new in news:
        for each in new:
            assert tokens[each.position] != each.token
            assert each.logprob is None
            tokens[each.position] = each.token
    assert tokens == generation.tokens == lm.sample(tokens=[row], num_steps=STEPS, seed=4).tokens[0]
    assert sum(map(len, news)) > LENGTH - 2
    assert set(step_event(0, generation, news[0])["phases"]) == {"diffusion"}
    assert engine.committed == LENGTH - 2


def test_a_failed_chain_has_no_final_text(servable: Any) -> None:
    engine = Engine(servable)
    generation = engine.generation([97, None, None], SamplingOptions(num_steps=STEPS))
    engine.submit(generation)
    engine.step()
    engine.step()
    engine.cancel(generation)
    engine.finish()
    assert generation.leading(1) == ([], False)


@pytest.mark.parametrize("name", CHAINS)
def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    run = make_run(tmp_path / "run", name, **toy.one_of_each()[name])
    words = ["sample", str(run), "--num_steps=3", "--length=8", "--prompt=ab", "--json", "--precision=float32"]
    assert cli.main([*words, f"--svg={tmp_path / 'a.svg'}"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["nfe"] == [3]
    assert made["schedule"] == [[[2, 3, 4, 5, 6, 7]] * 3]
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert cli.main([*words, "--show"]) == 0
    (tmp_path / "a.txt").write_text("hello there, all of you")
    assert cli.main(["score", str(run), str(tmp_path / "a.txt"), "--json"]) == 0
    assert cli.main(["sample", str(run), "--alpha_0=0.5"]) == 2
    assert "does not use alpha_0" in capsys.readouterr().err


def test_a_precision_keeps_the_time(tmp_path: Path) -> None:
    """float32 draws the same tokens as the network itself; rounded weights and the native engine are refused."""
    run = make_run(tmp_path / "run", "udlm")
    lm, folded = esolm.load(run), esolm.load(run, precision="float32")
    assert isinstance(folded.net, Conditioned)
    options = {"num_samples": 2, "length": 8, "num_steps": 4}
    assert folded.sample(**options).tokens == lm.sample(**options).tokens
    for wrong in ({"precision": "int8"}, {"precision": "float32", "engine": "native"}):
        with pytest.raises(ValueError, match="time"):
            esolm.load(run, **wrong)


@pytest.mark.usefixtures("bf16")
def test_bf16_keeps_the_time(tmp_path: Path) -> None:
    found = esolm.load(make_run(tmp_path / "run", "duo"), precision="bf16")
    assert found.net.dtype == torch.bfloat16
    assert len(found.sample(num_samples=1, length=8, num_steps=4, sampler="greedy_tail").tokens[0]) == 8
