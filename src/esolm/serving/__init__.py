"""Serving: an engine with continuous batching, and what stands before it.

Owns the state of requests, the KV pool, the scheduler and the runner of shared passes (`engine.py` joins them), the
HTTP API and the web page. Knows no sampler: every request runs the library's own loop. Imports everything up to model.
"""
