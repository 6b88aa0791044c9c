"""The worked examples of the paper's figures, typed out.

x = ABCDEF, z = AMCMMF, sigma = (3, 1, 6, 4, 5, 2) in the diffusion phase and (3, 1, 6, 2, 4, 5) in the sequential
phase. Rows are queries, columns keys; # is attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esolm.core import order
from esolm.core.visibility import Visibility, by_order, causal, full, prefix, sorted_two_stream, two_stream
from support import paper

DIFFUSION = torch.tensor([[3, 1, 6, 4, 5, 2]]) - 1
SEQUENTIAL = torch.tensor([[3, 1, 6, 2, 4, 5]]) - 1
MASKED = torch.tensor([c == "M" for c in "AMCMMF"])
NUM_CLEAN = torch.tensor([3])

DIFFUSION_B = """
    # . # . . .
    # # # # # #
    . . # . . .
    # . # # . #
    # . # # # #
    # . # . . #
"""
DIFFUSION_A = """
    # . # . . #
    # # # # # #
    # . # . . #
    # . # # . #
    # . # # # #
    # . # . . #
"""
CAUSAL = """
    # . . . . .
    # # . . . .
    # # # . . .
    # # # # . .
    # # # # # .
    # # # # # #
"""
PREFIX = """
    # # # . . .
    # # # . . .
    # # # . . .
    # # # # . .
    # # # # # .
    # # # # # #
"""
# z: A M C M M F, x: A B C D E F. The rows of z's clean tokens (A, C, F) are free: "can attend to anything".
SEQUENTIAL_B = """
    ? ? ? ? ? ?   ? ? ? ? ? ?
    . # . . . .   # . # . . #
    ? ? ? ? ? ?   ? ? ? ? ? ?
    . . . # . .   # # # . . #
    . . . . # .   # # # # . #
    ? ? ? ? ? ?   ? ? ? ? ? ?

    . . . . . .   # . # . . .
    . . . . . .   # # # . . #
    . . . . . .   . . # . . .
    . . . . . .   # # # # . #
    . . . . . .   # # # # # #
    . . . . . .   # . # . . #
"""
SEQUENTIAL_A = """
    ? ? ? ? ? ?   ? ? ? ? ? ?
    . # . . . .   # . # . . #
    ? ? ? ? ? ?   ? ? ? ? ? ?
    . . . # . .   # # # . . #
    . . . . # .   # # # # . #
    ? ? ? ? ? ?   ? ? ? ? ? ?

    . . . . . .   # . # . . #
    . . . . . .   # # # . . #
    . . . . . .   # . # . . #
    . . . . . .   # # # # . #
    . . . . . .   # # # # # #
    . . . . . .   # . # . . #
"""
# Sorted, with the extra connections (green in the figure) of the clean z: 3 1 6 2 4 5 in both halves.
SORTED_B = """
    # . . . . .   . . . . . .
    . # . . . .   # . . . . .
    . . # . . .   # # . . . .
    . . . # . .   # # # . . .
    . . . . # .   # # # # . .
    . . . . . #   # # # # # .

    . . . . . .   # . . . . .
    . . . . . .   # # . . . .
    . . . . . .   # # # . . .
    . . . . . .   # # # # . .
    . . . . . .   # # # # # .
    . . . . . .   # # # # # #
"""
SORTED_A = """
    ? ? ? ? ? ?   ? ? ? ? ? ?
    ? ? ? ? ? ?   ? ? ? ? ? ?
    ? ? ? ? ? ?   ? ? ? ? ? ?
    . . . # . .   # # # . . .
    . . . . # .   # # # # . .
    . . . . . #   # # # # # .

    . . . . . .   # # # . . .
    . . . . . .   # # # . . .
    . . . . . .   # # # . . .
    . . . . . .   # # # # . .
    . . . . . .   # # # # # .
    . . . . . .   # # # # # #
"""


def check(found: Visibility | Tensor, picture: str) -> None:
    """Equal to the picture where it says # or dot."""
    seen = found.dense()[0, 0] if isinstance(found, Visibility) else found
    rows = [line.split() for line in picture.splitlines() if line.strip()]
    assert seen.shape == (len(rows), len(rows[0]))
    for i, row in enumerate(rows):
        drawn = "".join("#" if s else "." for s in seen[i].tolist())
        assert all(a in ("?", b) for a, b in zip(row, drawn)), f"row {i}: {drawn} is not {''.join(row)}"


def test_mdlm() -> None:
    check(full(6), "# # # # # #\n" * 6)


def test_diffusion_phase_b() -> None:
    check(by_order(order.inverse(DIFFUSION)), DIFFUSION_B)
    check(paper.diffusion_b(DIFFUSION[0].tolist()), DIFFUSION_B)
    check(causal(6), CAUSAL)
    check(by_order(order.inverse(DIFFUSION)).dense()[0, 0][DIFFUSION[0]][:, DIFFUSION[0]], CAUSAL)


def test_diffusion_phase_a() -> None:
    check(prefix(order.inverse(DIFFUSION), NUM_CLEAN), DIFFUSION_A)
    check(paper.diffusion_a(DIFFUSION[0].tolist(), MASKED.tolist()), DIFFUSION_A)
    check(prefix(torch.arange(6)[None], NUM_CLEAN), PREFIX)


def test_sequential_phase_b() -> None:
    step = order.inverse(SEQUENTIAL)
    check(two_stream(step, step, step), SEQUENTIAL_B)
    check(sorted_two_stream(6, 6), SORTED_B)
    naive = paper.sequential_b(SEQUENTIAL[0].tolist(), MASKED.tolist())
    assert not naive[:6][~MASKED].any()  # line 7 of the equations; free rows in the figure
    check(naive, SEQUENTIAL_B)


def test_sequential_phase_a() -> None:
    step = order.inverse(SEQUENTIAL)
    check(two_stream(prefix(step, NUM_CLEAN).rank, step, step), SEQUENTIAL_A)
    check(sorted_two_stream(6, 6, NUM_CLEAN), SORTED_A)
    check(paper.sequential_a(MASKED.tolist()), SEQUENTIAL_A)


def test_the_clean_part_of_z_is_not_needed() -> None:
    """Three masks: the last three rows of z over their own columns and x."""
    rows = [line for line in SORTED_B.splitlines() if line.strip()]
    kept = "\n".join(" ".join(rows[i].split()[3:]) for i in (3, 4, 5, 6, 7, 8, 9, 10, 11))
    check(sorted_two_stream(6, 3), kept)


def test_the_order_is_drawn_as_in_the_figure() -> None:
    """Clean tokens by their uniforms, then masks by theirs, or left to right."""
    u = torch.tensor([[0.2, 0.9, 0.1, 0.3, 0.5, 0.8]])
    group = order.groups(MASKED[None], None, None)
    assert torch.equal(order.sort(group, u), DIFFUSION)
    assert torch.equal(order.sort(group, u, ascending=True), SEQUENTIAL)
