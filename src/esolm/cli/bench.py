"""`esolm bench`: measure speed on this machine."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..bench import NAMES, check_name
from ..runtime.signatures import signature
from .examples import EXAMPLES
from .parsing import add_json, parse, parser


def run(argv: Sequence[str]) -> int:
    """Run one benchmark; `--json` prints its results and `--out FILE` writes them."""
    if not argv or argv[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:11} {what}" for name, what in NAMES.items())
        examples = "\n".join(f"  {line}" for line in EXAMPLES["bench"])
        last = "esolm bench NAME --help lists the options."
        print(f"usage: esolm bench NAME [--option VALUE ...]\n\n{lines}\n\nexamples:\n{examples}\n\n{last}")
        return 0 if argv else 2
    name, *words = argv
    options = parse(make_parser(name), with_out(words))
    as_json, file = options.pop("json"), options.pop("out")
    from .output import check_writable

    if file is not None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        check_writable(Path(file), "--out")
    from ..bench.report import measure, save

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        result = measure(name, **options)
    if as_json:
        print(json.dumps(result))
    if file is not None:
        save(file, result)
    return 0


def make_parser(name: str = "machine") -> Any:
    """The parser of one benchmark."""
    check_name(name)
    function = signature(f"esolm.bench.{name}", "run")
    made = parser(f"bench {name}", str(inspect.getdoc(function)).split("\n\nArgs:")[0])
    made.prog = f"esolm bench {name}"
    made.add_function_arguments(function, as_group=False)
    made.add_argument("--threads", type=int, default=None, help="Number of threads; PyTorch's default if not given.")
    add_json(made)
    made.add_argument("--out", type=str, default=None, metavar="FILE", help="Write the results to FILE as JSON.")
    return made


def with_out(words: Sequence[str]) -> list[str]:
    """The words with `--json FILE`, as it was once written, as `--out FILE`, and `--json -` as `--json`."""
    found = list[str]()
    parts = (each.split("=", 1) if each.startswith("--json=") else [each] for each in words)
    for word in itertools.chain.from_iterable(parts):
        value = found[-1:] == ["--json"] and not word.startswith("--") and word not in ("true", "false")
        if value and word != "-":
            found[-1] = "--out"
        if not value or word != "-":
            found.append(word)
    return found
