"""Pictures of denoising: frames of a running sample, an animation in the terminal, SVG and GIF files, and the HTML that
notebooks show.

Owns how a partly decided text is spelt and laid out. Imports data and sampling; Pillow and matplotlib only for a GIF.
"""
