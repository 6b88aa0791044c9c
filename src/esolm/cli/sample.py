"""`esolm sample`: text from a trained model, from scratch or from a prompt."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .generation_options import CONSTRAINTS, MODEL, add_options, run_generation
from .layout import group
from .parsing import parse, parser

if TYPE_CHECKING:
    from ..model import LanguageModel
    from .generate import Job


def make_parser() -> Any:
    """The parser."""
    made = parser("sample MODEL", "Generate text from scratch or from a prompt.")
    made.add_argument("run", **MODEL)
    option = made.add_argument
    option("--length", type=int, help="Tokens of a sample, the prompt included (default: the training length).")
    option("--prompt", type=str, help="The text that every sample begins with.")
    option("--prompt_file", type=str, help='One prompt per line, or .jsonl with "prompt"; num_samples for each.')
    option("--chat", action="store_true", help="The prompt is a question, rendered by the tokenizer's chat template.")
    about = "A text before which a sample ends, as well as at the end-of-text token; may be given several times."
    option("--stop", type=str, action="append", help=about)
    add_options(made)
    group(made, "text", ("length", "prompt", "prompt_file", "chat", "stop", "num_samples"))
    group(made, "constraints", CONSTRAINTS)
    return made


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    options = parse(make_parser(), argv)
    if options["prompt"] is not None and options["prompt_file"] is not None:
        raise ValueError("give either --prompt or --prompt_file")
    return run_generation(options, plan)


def plan(lm: LanguageModel, options: Mapping[str, Any]) -> Job:
    """The samples of one prompt, or of each prompt of a file."""
    from ..generation.collect import stops_of
    from .generate import Job

    number, stops = options["num_samples"], stops_of(options["stop"] or ())
    trained = lm.net.config.length
    length = trained if options["length"] is None else options["length"]
    if length > trained:
        print(f"length {length} is beyond the {trained} tokens that the model was trained with", file=sys.stderr)
    if options["chat"]:
        return chat_job(lm, options, length, stops)
    if options["prompt_file"] is None:
        prompt = options["prompt"] or ""
        stream = functools.partial(lm.stream, prompt, number, length)
        return Job(number, length, stream, lambda i: {"prompt": prompt}, cut=True, stops=stops)
    records = read_prompts(Path(options["prompt_file"]))
    texts = [record["prompt"] for record in records for _ in range(number)]
    content = hashlib.sha256(json.dumps(records).encode()).hexdigest()
    stream = functools.partial(lm.stream, texts, len(texts), length)
    return Job(len(texts), length, stream, lambda i: dict(records[i // number]), True, content, stops=stops)


def chat_job(lm: LanguageModel, options: Mapping[str, Any], length: int, stops: Sequence[str]) -> Job:
    """The answers to a question, or to each question of a file."""
    from .generate import Job

    if options["prompt"] is None and options["prompt_file"] is None:
        raise ValueError("--chat needs a question: give --prompt or --prompt_file")
    file, number = options["prompt_file"], options["num_samples"]
    records = [{"prompt": options["prompt"]}] if file is None else read_prompts(Path(file))
    rows = [lm.tokenizer.chat.row(record["prompt"], length) for record in records for _ in range(number)]
    content = hashlib.sha256(json.dumps([records, lm.tokenizer.chat_template]).encode()).hexdigest()
    stream = functools.partial(lm.stream, tokens=rows)
    return Job(len(rows), length, stream, lambda i: dict(records[i // number]), True, content, True, stops)


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The prompts of a file: each line, or the field `prompt` of each line of a .jsonl, whose other fields are kept."""
    if not path.is_file():
        raise ValueError(f"no file {path}: give a file with one prompt per line, or .jsonl whose lines have a prompt")
    from ..runtime.files import read_json_lines

    if path.suffix == ".jsonl":
        found = [_with_prompt(record, f"line {n} of {path}") for n, record in read_json_lines(path)]
    else:
        text = path.read_text(encoding="utf-8").removesuffix("\n")
        found = [{"prompt": line.removesuffix("\r")} for line in text.split("\n")] if text else []
    if not found:
        raise ValueError(f"{path} has no prompts")
    return found


def _with_prompt(record: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(record.get("prompt"), str):
        raise ValueError(f'{where} must have a text as its "prompt"')
    return record
