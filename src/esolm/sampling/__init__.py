"""Sampling: the options, the request, and the loops that carry out a complete denoising schedule.

Owns every loop that calls a network to draw tokens (ordered, bidirectional, left to right, blockwise, speculative, by
confidence) and knows no system: a system chooses a loop. Imports core, runtime and net.
"""
