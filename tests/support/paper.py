"""The paper's equations written naively: loops over positions, one sequence at a time, nothing of the library.

All indices are 0-based. A pattern is a bool matrix, True where A_ij = 0 (query i attends to key j).

Shapes: N slots of the network's input, L length, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Masked = Sequence[bool]
Order = Sequence[int]


def positions(masked: Masked, kind: bool) -> list[int]:
    """M(z) for kind True, C(z) for kind False."""
    return [i for i, m in enumerate(masked) if m == kind]


def invert(sigma: Order) -> list[int]:
    """sigma^-1."""
    return [list(sigma).index(i) for i in range(len(sigma))]


def none(slots: int) -> Tensor:
    return torch.zeros(slots, slots, dtype=torch.bool)


def bidirectional(length: int) -> Tensor:
    """MDLM: A = 0."""
    return ~none(length)


def left_to_right(length: int) -> Tensor:
    """AR: i >= j."""
    a = none(length)
    for i in range(length):
        for j in range(length):
            a[i, j] = i >= j
    return a


def diffusion_b(sigma: Order) -> Tensor:
    """Eso-LM (B), diffusion phase: A_ij = 0 if sigma^-1(i) >= sigma^-1(j)."""
    inverse, a = invert(sigma), none(len(sigma))
    for i, j in itertools.product(range(len(sigma)), repeat=2):
        a[i, j] = inverse[i] >= inverse[j]
    return a


def diffusion_a(sigma: Order, masked: Masked) -> Tensor:
    """Eso-LM (A), diffusion phase: clean tokens see each other; masks what comes before them in sigma."""
    inverse, a = invert(sigma), none(len(sigma))
    clean, masks = positions(masked, False), positions(masked, True)
    for i, j in itertools.product(clean, clean):
        a[i, j] = True
    for i, j in itertools.product(masks, range(len(sigma))):
        if inverse[i] >= inverse[j]:
            a[i, j] = True
    return a


def sequential_b(sigma: Order, masked: Masked) -> Tensor:
    """Eso-LM (B), sequential phase on z_0 + x, [2L, 2L]: the seven lines, in natural order."""
    length, inverse = len(sigma), invert(sigma)
    a = none(2 * length)
    clean, masks = positions(masked, False), positions(masked, True)
    for i, j in itertools.product(masks, masks):
        if i == j:
            a[i, j] = True  # line 1
        if i > j:
            a[i, j + length] = True  # line 3
        if i >= j:
            a[i + length, j + length] = True  # line 6
    for i, j in itertools.product(masks, clean):
        a[i, j + length] = True  # line 2
        a[i + length, j + length] = True  # line 5
    for i, j in itertools.product(clean, clean):
        if inverse[i] >= inverse[j]:
            a[i + length, j + length] = True  # line 4
    return a  # line 7


def sequential_a(masked: Masked) -> Tensor:
    """Eso-LM (A), sequential phase on z_0 + x, [2L, 2L], in natural order."""
    length = len(masked)
    a = sequential_b(range(length), masked)
    for i, j in itertools.product(positions(masked, False), repeat=2):
        a[i + length, j + length] = True  # line 4 of (A)
    return a


def blocks(length: int, size: int) -> Tensor:
    """BD3-LM on z + x, [2L, 2L]: z sees its own block of z and the x of earlier blocks; x is causal over blocks."""
    a = none(2 * length)
    for i, j in itertools.product(range(length), repeat=2):
        a[i, j] = i // size == j // size
        a[i, j + length] = i // size > j // size
        a[i + length, j + length] = i // size >= j // size
    return a


def sampling_b(sigma: Order, decoded: int, now: int) -> tuple[list[int], Tensor]:
    """Eso-LM (B), a sampling step after `decoded` tokens that denoises the next `now`: its tokens and pattern."""
    tokens, inverse = sorted(sigma[: decoded + now]), invert(sigma)
    a = none(len(tokens))
    for (p, i), (q, j) in itertools.product(enumerate(tokens), repeat=2):
        a[p, q] = inverse[i] >= inverse[j]
    return tokens, a


def sampling_a(sigma: Order, by_diffusion: int, left_to_right: int, now: int) -> tuple[list[int], Tensor]:
    """Eso-LM (A), a sampling step: the five lines over D_MDM, D_AR and S_k."""
    inverse, end = invert(sigma), by_diffusion + left_to_right
    d_mdm, d_ar, s_k = set(sigma[:by_diffusion]), set(sigma[by_diffusion:end]), set(sigma[end : end + now])
    tokens = sorted(d_mdm | d_ar | s_k)
    a = none(len(tokens))
    for (p, i), (q, j) in itertools.product(enumerate(tokens), repeat=2):
        a[p, q] = (
            (i in d_mdm and j in d_mdm)
            or (i in d_ar and j in d_mdm)
            or (i in d_ar and j in d_ar and i >= j)
            or (i in s_k and (j in d_mdm or j in d_ar))
            or (i in s_k and j in s_k and inverse[i] >= inverse[j])
        )
    return tokens, a


def flow(seen: Tensor, layers: int) -> Tensor:
    """Whose input reaches whose output in so many layers: through attention and the residual, step by step."""
    one = seen | torch.eye(len(seen), dtype=torch.bool)
    reach = torch.eye(len(seen), dtype=torch.bool)
    for _ in range(layers):
        reach = one.int() @ reach.int() > 0
    return reach


def logits(net: Any, tokens: Sequence[int], place: Sequence[int], seen: Tensor, time: float = 0.0) -> Tensor:
    """The transformer of the paper or of another family, one sequence, every softmax written out: [N, V]. Reads only
    the parameters and the configuration."""
    w, c = {name: p.detach() for name, p in net.named_parameters()}, net.config
    h = w["embed.weight"][torch.tensor(tokens)]
    if c.positions == "learned":
        h = h + w["places.weight"][torch.tensor(place)]
    width, dtype = h.shape[1], h.dtype
    condition = None
    if c.adaln:
        frequency = torch.tensor([math.exp(-math.log(10000) * i / 128) for i in range(128)], dtype=dtype)
        feature = torch.cat([torch.cos(time * frequency), torch.sin(time * frequency)])
        condition = silu(linear(silu(linear(feature, w, "time.0")), w, "time.2"))
    for n in range(c.layers):
        p = {name.removeprefix(f"blocks.{n}."): t for name, t in w.items() if name.startswith(f"blocks.{n}.")}
        one, zero = torch.ones(width, dtype=dtype), torch.zeros(width, dtype=dtype)
        shift1, scale1, gate1, shift2, scale2, gate2 = zero, zero, one, zero, zero, one
        if condition is not None:
            shift1, scale1, gate1, shift2, scale2, gate2 = modulation(condition, p, 6)
        mixed = attention(norm(h, p, "norm1", c) * (1 + scale1) + shift1, p, c, place, seen)
        h = h + gate1 * linear(mixed, p, "attn_out")
        a = linear(norm(h, p, "norm2", c) * (1 + scale2) + shift2, p, "mlp.0")
        a = silu(a[:, : a.shape[1] // 2]) * a[:, a.shape[1] // 2 :] if c.mlp == "swiglu" else gelu(a)
        h = h + gate2 * linear(a, p, "mlp.2")
    h = norm(h, w, "norm", c)
    if condition is not None:
        shift, scale = modulation(condition, w, 2)
        h = h * (1 + scale) + shift
    return linear(h, {"head.weight": w["embed.weight"], **w}, "head")


def attention(a: Tensor, p: dict[str, Tensor], c: Any, place: Sequence[int], seen: Tensor) -> Tensor:
    """[N, W] -> [N, H D], one row and one head at a time."""
    heads, kept = c.heads, c.kv_heads or c.heads
    wide = c.head_width or c.width // heads
    q, k, v = linear(a, p, "attn_qkv").split((heads * wide, kept * wide, kept * wide), -1)
    q, k, v = (t.reshape(len(a), -1, wide) for t in (q, k, v))
    if c.qk_norm:
        q, k = (t / (t.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() for t in (q, k))
        q, k = q * p["q_norm.weight"], k * p["k_norm.weight"]
    if c.positions == "rotary":
        q, k = rotary(q, place, c), rotary(k, place, c)
    mixed = torch.zeros_like(q)
    for i in range(len(a)):
        keys = seen[i].nonzero()[:, 0]
        for head in range(heads):
            score = k[keys, head * kept // heads] @ q[i, head] / math.sqrt(wide)
            weight = (score - score.max()).exp()
            mixed[i, head] = weight @ v[keys, head * kept // heads] / weight.sum()
    return mixed.reshape(len(a), -1)


def linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def silu(t: Tensor) -> Tensor:
    return t / (1 + torch.exp(-t))


def gelu(t: Tensor) -> Tensor:
    return 0.5 * t * (1 + torch.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3)))


def norm(h: Tensor, weights: dict[str, Tensor], name: str, c: Any) -> Tensor:
    centred = h - h.mean(-1, keepdim=True) if c.norm == "layer" else h
    scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt()
    return scaled * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0)


def modulation(condition: Tensor, weights: dict[str, Tensor], parts: int) -> tuple[Tensor, ...]:
    return (condition @ weights["modulation.weight"].T + weights["modulation.bias"]).chunk(parts)


def rotary(t: Tensor, place: Sequence[int], c: Any) -> Tensor:
    """Rotates the pair (i, i + D/2) of [N, H, D] by place * frequency, as complex numbers."""
    half = t.shape[-1] // 2
    speeds = [frequency(c.rotary_base ** (-i / half), c) for i in range(half)]
    angle = torch.tensor([[p * speed for speed in speeds] for p in place], dtype=t.dtype)
    turned = torch.complex(t[..., :half], t[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def frequency(plain: float, c: Any) -> float:
    """The frequency after scaling: linear or, as in the report on Llama 3, by its wavelength."""
    if c.rotary_length is None:
        return plain / c.rotary_factor
    wavelength = 2 * math.pi / plain
    if wavelength < c.rotary_length / c.rotary_high:
        return plain
    if wavelength > c.rotary_length / c.rotary_low:
        return plain / c.rotary_factor
    smooth = (c.rotary_length / wavelength - c.rotary_low) / (c.rotary_high - c.rotary_low)
    return (1 - smooth) * plain / c.rotary_factor + smooth * plain


def nats(row: Tensor, target: int, mask_id: int) -> float:
    """-log softmax over the vocabulary without the mask."""
    rest = [v for v in range(len(row)) if v != mask_id]
    return (torch.logsumexp(row[rest], 0) - row[target]).item()


def query_nats(net: Any, x: Order, sigma: Order, step: int, mask_id: int, num_clean: int = 0) -> float:
    """-log p(x^sigma(l) | x^sigma(<l)) by a pass of its own: the clean tokens before it, sorted, and one mask.

    The clean tokens are causal in sigma; the first num_clean of them see each other (Eso-LM (A))."""
    seen = left_to_right(step + 1)
    seen[:num_clean, :num_clean] = True
    place = list(sigma[: step + 1])
    out = logits(net, [x[i] for i in place[:-1]] + [mask_id], place, seen)
    return nats(out[-1], x[place[-1]], mask_id)


def shifted_logits(
    net: Any, x: Any, clean: Order, asked: Order, mask_id: int, start: int, chain: bool = False, together: int = 0
) -> Tensor:
    """Logits of shifted queries for the positions `asked`, [n, V], after the start token and the tokens `clean`.

    Rotary positions count the start token: it has 0, token i has i + 1, and the query of i has i. A query holds the
    token before it if that is clean, and the mask otherwise. It sees the start and all clean tokens. No query sees one
    that holds a token, not even itself; one that holds a mask sees itself and is seen, if `chain`, by the queries after
    it. Clean tokens are causal in their order; the first `together` of them and the start see each other (Eso-LM (A)).
    """
    known = {-1: start, **{i: int(x[i]) for i in clean}}
    held = [known.get(i - 1, mask_id) for i in asked]
    copies = [i - 1 in known for i in asked]
    first = 1 + len(clean)
    a = none(first + len(asked))
    for i, j in itertools.product(range(first), repeat=2):
        a[i, j] = i >= j or (together > 0 and max(i, j) <= together)
    for i in range(len(asked)):
        a[first + i, :first] = True
        for j in range(i + 1):
            a[first + i, first + j] = not copies[j] and (chain or i == j)
    tokens, place = [start, *(known[i] for i in clean), *held], [0, *(i + 1 for i in clean), *asked]
    return logits(net, tokens, place, a)[first:]


def all_masks(length: int) -> Iterator[tuple[bool, ...]]:
    return itertools.product([False, True], repeat=length)


def orders(masked: Masked, ascending: bool) -> list[list[int]]:
    """Every sigma with clean tokens before masks; `ascending` keeps the masks left to right."""
    clean, masks = positions(masked, False), positions(masked, True)
    tails = [tuple(masks)] if ascending else list(itertools.permutations(masks))
    return [[*head, *tail] for head in itertools.permutations(clean) for tail in tails]
