"""`python -m experiments [NAME ...]`: run the missing experiments and write docs/results.md."""

from __future__ import annotations

import sys

from experiments.runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
