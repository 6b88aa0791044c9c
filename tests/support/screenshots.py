"""Take the pictures of docs/serving.md again: `make screenshots MODEL=stories`. Needs Chromium."""

from __future__ import annotations

import sys
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
PHONE = {"width": 375, "height": 760}


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
        light.generate(PROMPT, seed=seed, count=80)
        light.tool("lock")
        light.click(18)
        light.tool("rewrite")
        light.drag(22, 27)
        light.word(25).hover()
        light.expect(light["#peek"]).to_be_visible()
        take(light, "page", folder)

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
