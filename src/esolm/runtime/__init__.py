"""The machine that the library runs on: devices and precisions, process groups, atomic files and hashes, and the
progress bar. May import `core`.
"""
