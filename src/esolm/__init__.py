"""Esoteric Language Models: any-order and masked-diffusion language models in PyTorch."""

__version__ = "0.1.0"
