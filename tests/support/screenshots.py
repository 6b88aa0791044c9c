"""Take the pictures of README.md and docs/serving.md again: `make screenshots MODEL=stories`. Needs Chromium."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import esolm
from esolm.serving.engine import Engine
from support import browser, served
from support.browser import Window

FOLDER = Path(__file__).parents[2] / "docs" / "images"
PROMPT = "Once upon a time, there was a little girl named Lily. She"
DESK = {"width": 1180, "height": 830}
FRAME = {"width": 1100, "height": 660}
PHONE = {"width": 375, "height": 760}


class Film:
    """Pictures of a page while something happens on it, as an animated GIF."""

    def __init__(self, window: Window) -> None:
        self.window, self.frames, self.times = window, list[Any](), list[int]()
        slow = {"offline": False, "latency": 0, "downloadThroughput": 4000, "uploadThroughput": -1}
        window.page.context.new_cdp_session(window.page).send("Network.emulateNetworkConditions", slow)

    def shoot(self, milliseconds: int) -> None:
        """Take a picture that is shown for so long."""
        import io

        from PIL import Image

        picture = Image.open(io.BytesIO(self.window.page.screenshot(animations="disabled"))).convert("RGB")
        if self.frames and picture.tobytes() == self.frames[-1].tobytes():
            self.times[-1] += milliseconds
        else:
            self.frames.append(picture)
            self.times.append(milliseconds)

    def watch(self, action: Callable[[], Any]) -> None:
        """Take pictures from an action on until the page rests."""
        action()
        while self.window["#halt"].is_visible() or self.window["#text"].get_attribute("aria-busy") == "true":
            self.shoot(120)
        self.shoot(1800)

    def save(self, path: Path, colours: int = 32) -> None:
        """Write the film; all pictures have the colours of the last one."""
        from PIL import Image

        last = self.frames[-1].quantize(colours, dither=Image.Dither.NONE)
        frames = [frame.quantize(palette=last, dither=Image.Dither.NONE) for frame in self.frames]
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=self.times, loop=0, optimize=True)


def take(window: Window, name: str, folder: Path = FOLDER) -> None:
    """Write a picture with 256 colours, which is a third of the size."""
    import io

    from PIL import Image

    picture = Image.open(io.BytesIO(window.page.screenshot(animations="disabled")))
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(folder / f"{name}.png", optimize=True)


def main(model: str, folder: Path = FOLDER, seed: int = 3) -> None:
    """A text after a rewrite with a locked word, its probabilities in the dark, two samplers, and a phone."""
    torch.set_num_threads(1)
    engine = Engine(esolm.load(model, precision="auto"))
    with served.live(engine, name=model) as url, browser.chromium() as found:

        def window(**options: Any) -> Window:
            return Window(found.new_context(**options).new_page(), url)

        light = window(viewport=DESK)
        light.generate(PROMPT, seed=seed, count=80, sampler="confidence")
        light.tool("lock")
        light.click(18)
        light.tool("rewrite")
        light.drag(19, 24)
        light.word(24).hover()
        light.expect(light["#peek"]).to_be_visible()
        take(light, "page", folder)

        small = window(viewport=FRAME)
        small.set(seed=seed, count=72)
        small["#source"].fill(PROMPT)
        film = Film(small)
        film.shoot(1500)
        film.watch(small["#go"].click)
        small.word(19).hover()
        film.shoot(900)
        film.watch(lambda: small.sweep(19, 24))
        film.save(folder / "page.gif")

        dark = window(viewport={**DESK, "height": 960}, color_scheme="dark")
        dark["#tint"].check()
        dark.generate(PROMPT, seed=seed, count=80, sampler="left_to_right", other="speculative")
        take(dark, "page-compare", folder)

        phone = window(viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=2)
        phone["summary"].tap()
        phone.set(seed=seed, per_blank=2)
        phone["summary"].tap()
        phone["#source"].fill("Tom ____ the big red ball. His dog was very ____.")
        phone["#go"].tap()
        phone.rest()
        phone["html"].evaluate("page => page.scrollTo(0, 0)")
        take(phone, "page-phone", folder)


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(Path, sys.argv[2:3]))
