"""Pictures of denoising: frames of a running sample, an animation in the terminal, and SVG and GIF files.

Owns how a partly decided text is spelt and laid out. Imports data and sampling; Pillow and matplotlib only for a GIF.
"""
