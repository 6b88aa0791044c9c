"""Import every module of esolm and use the bundled model, with none of the optional packages.

Run by a job of its own, in an environment without extras, and by the tests, which block the extras:
python tests/minimal_imports.py
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any

import esolm

EXTRAS = {
    "accelerate", "datasets", "huggingface_hub", "lm_eval", "matplotlib", "rdkit", "tensorboard", "transformers",
    "wandb", "zstandard", "gguf", "llama_cpp", "peft", "fastapi", "uvicorn", "starlette", "pydantic", "ray",
    "outlines_core",
}  # fmt: skip
SERVING = ("api", "bodies", "refusals", "replies", "routes", "server")
WRAPPERS = {
    "esolm.interop.hf": "esolm[hf]",
    "esolm.interop.harness": "esolm[eval]",
    **{f"esolm.serving.{name}": "esolm[serve]" for name in SERVING},
    "esolm.serving.ray_app": "esolm[ray]",
}
"""What their error must name."""


class Without:
    """A finder that does not find the extras, as if they were not installed."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.split(".")[0] in EXTRAS else self.finder.find_spec(name, path, target)


def main() -> None:
    sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
    names = [m.name for m in pkgutil.walk_packages(esolm.__path__, "esolm.") if not m.name.endswith("__main__")]
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            if name not in WRAPPERS or WRAPPERS[name] not in str(error):
                raise
        else:
            assert name not in WRAPPERS, f"{name} needs no extra: take it out of WRAPPERS"
    assert len(esolm.load("stories").sample(length=8, seed=0).texts) == 1
    print(f"imported {len(names) - len(WRAPPERS)} modules without extras")


if __name__ == "__main__":
    main()
