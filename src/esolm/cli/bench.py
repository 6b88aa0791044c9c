"""`esolm bench`: measure speed on this machine."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..bench import NAMES, find
from .output import check_writable
from .parsing import parse, parser


def run(argv: Sequence[str]) -> int:
    """Run one benchmark; `--json` prints its results and `--out FILE` writes them."""
    if not argv or argv[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:11} {what}" for name, what in NAMES.items())
        print(f"usage: esolm bench NAME [--option VALUE ...]\n\n{lines}\n\nesolm bench NAME --help lists the options.")
        return 0 if argv else 2
    name, *words = argv
    function = find(name)
    made = parser(f"bench {name}", str(function.__doc__).split("\n\n    Args:")[0])
    made.prog = f"esolm bench {name}"
    made.add_function_arguments(function)
    made.add_argument("--threads", type=int, default=None, help="Number of threads; PyTorch's default if not given.")
    made.add_argument(
        "--json", type=str, nargs="?", const="-", default=None, metavar="FILE",
        help="Print JSON and nothing else to standard output. With FILE: the same as --out FILE.",
    )  # fmt: skip
    made.add_argument("--out", type=str, default=None, metavar="FILE", help="Write the results to FILE as JSON.")
    options = parse(made, words)
    target, files = options.pop("json"), [options.pop("out")]
    if target not in (None, "-"):
        files.append(target)
    for file in filter(None, files):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        check_writable(Path(file), "--out")
    from ..bench.report import measure, save

    with contextlib.redirect_stdout(sys.stderr) if target == "-" else contextlib.nullcontext():
        result = measure(name, **options)
    if target == "-":
        print(json.dumps(result))
    for file in filter(None, files):
        save(file, result)
    return 0
