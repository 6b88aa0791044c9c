"""The options that `esolm sample` and `esolm infill` share. Imports nothing heavy, so that `--help` answers at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..sampling.options import SamplingOptions
from .parsing import announce

if TYPE_CHECKING:
    from ..model import LanguageModel
    from .generate import Job

MODEL: dict[str, Any] = {
    "type": str,
    "metavar": "MODEL",
    "help": "A run, a checkpoint, a model folder, or a bundled model by its name.",
}
"""The argument of commands that load a model."""
DELIVERY = ("json", "show", "out", "svg", "gif", "force")
"""Options that say where samples go, and do not change them."""


PATTERNS = {"regex": "regular expression", "json_schema": "JSON schema, as text or as a file"}
"""Options that may be given several times."""
CONSTRAINTS = (*PATTERNS, "match")


def add_options(made: Any) -> None:
    """Add the sampling options, and those that load the model and deliver the samples."""
    made.add_argument("--num_samples", type=int, default=1, help="Number of samples.")
    made.add_class_arguments(SamplingOptions, skip=set(PATTERNS))
    for name, kind in PATTERNS.items():
        about = f"What is generated must match this {kind}; several times, one for each blank, empty where it is free."
        made.add_argument(f"--{name}", type=str, action="append", help=about)
    add_loading(made)
    option = made.add_argument
    option("--json", action="store_true", help="Print one JSON object and nothing else.")
    option("--show", action="store_true", help="Animate the denoising in the terminal.")
    option("--svg", type=str, help="Draw the denoising of the first sample as an animated SVG.")
    option("--gif", type=str, help="The same as a GIF (needs esolm[plot]).")
    option("--out", type=str, help="Write one JSON line per sample to this file; the same command resumes it.")
    option("--force", action="store_true", help="Replace files that exist.")


def add_loading(made: Any) -> None:
    """Add the options that say how a model is loaded."""
    option = made.add_argument
    option("--device", type=str, default="auto", help="auto (a GPU if there is one), cpu, cuda or mps.")
    about = "Of the weights; auto is bf16 where that is faster, otherwise float32."
    option("--precision", type=Literal["auto", "float32", "bf16", "int8", "int4"], default="auto", help=about)
    about = "auto is native where it can be used."
    option("--engine", type=Literal["auto", "native", "torch"], default="auto", help=about)
    option("--threads", type=int, help="CPU threads; PyTorch's choice if not given.")
    option("--weights", type=Literal["ema", "model"], default="ema", help="The averaged weights, or the raw ones.")
    option("--which", type=Literal["best", "last"], default="best", help="The best or the last checkpoint of a run.")


def run_generation(options: Mapping[str, Any], plan: Callable[[LanguageModel, Mapping[str, Any]], Job]) -> int:
    """Load the model and generate what `plan` returns."""
    options = with_patterns(options)
    announce(f"loading {options['run']} …", quiet=options["json"])
    from .generate import generate

    return generate(options, plan)


def with_patterns(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the content of schema files, and a single pattern not in a list."""
    found = dict(options)
    for name in PATTERNS:
        given = [read_schema(each) if name == "json_schema" else each for each in found[name] or ()]
        found[name] = given[0] if len(given) == 1 else given or None
    return found


def read_schema(text: str) -> str:
    """A schema that is given as text, or the content of the file that is named."""
    if text.lstrip()[:1] in ("{", "[", "") or text.strip() in ("true", "false"):
        return text
    if not (path := Path(text)).is_file():
        raise ValueError(f"no file {text}: give a JSON schema as text, or the path of a file that holds one")
    return path.read_text(encoding="utf-8")


def sampling_options(options: Mapping[str, Any]) -> SamplingOptions:
    """Those of the options that are fields of `SamplingOptions`; raises ValueError for a wrong value."""
    return SamplingOptions(**{name: options[name] for name in SamplingOptions.__dataclass_fields__})
