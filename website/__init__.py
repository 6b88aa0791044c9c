"""Builds the documentation site: mkdocs hooks, generated reference pages, and the figures of docs/concepts.md.

Imports the library and never the reverse. `make docs` builds the site; `python -m website.figures` draws the figures.
"""
