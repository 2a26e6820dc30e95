"""Definitions written as slowly and plainly as they read, to compare the package with."""

import itertools
import math

import torch


def ranking(row):
    """Indices of a row of scores in descending order, equal scores by index."""
    return sorted(range(len(row)), key=lambda e: (-row[e], e))


def topk_weights(row, k):
    """Softmax over the k best of a row, zero elsewhere."""
    chosen = ranking(row)[:k]
    total = sum(math.exp(row[e]) for e in chosen)
    return [math.exp(row[e]) / total if e in chosen else 0.0 for e in range(len(row))]


def smooth_weights(row, k, epsilon, a, b):
    """Softmax of z + h(u), h the log-smoothstep of paper 1, with exp(-inf) = 0."""
    threshold = row[ranking(row)[k - 1]]
    mass = [math.exp(z) * ramp((z - threshold + epsilon) / epsilon, a, b) for z in row]
    return [m / sum(mass) for m in mass]


def ramp(u, a, b):
    """exp(h(u))."""
    if u <= 0:
        return 0.0
    return 1.0 if u >= 1 else u**a / (u**a + (1 - u) ** b)


def quadratic_programme(row, caps, k):
    """argmin Σ (r_i - row_i)² over 0 <= r_i <= caps_i, Σ r_i = k, by trying every face."""
    best, least = None, math.inf
    for face in itertools.product((0, 1, 2), repeat=len(row)):  # at zero, at its cap, free
        free = [i for i, kind in enumerate(face) if kind == 2]
        r = [caps[i] if kind == 1 else 0.0 for i, kind in enumerate(face)]
        if free:
            shift = (sum(row[i] for i in free) + sum(r) - k) / len(free)
            for i in free:
                r[i] = row[i] - shift
        inside = all(-1e-12 <= r[i] <= caps[i] + 1e-12 for i in range(len(row)))
        cost = sum((a - b) ** 2 for a, b in zip(r, row, strict=True))
        if inside and abs(sum(r) - k) < 1e-9 and cost < least:
            best, least = r, cost
    return best


def group_limited(row, n_groups, chosen_groups, k, group_score):
    """Indices of the k best experts within the best groups."""
    size = len(row) // n_groups
    groups = [row[g * size : (g + 1) * size] for g in range(n_groups)]
    totals = [max(g) if group_score == "max" else sum(sorted(g)[-2:]) for g in groups]
    kept = ranking(totals)[:chosen_groups]
    allowed = [e for e in range(len(row)) if e // size in kept]
    return sorted(allowed, key=lambda e: (-row[e], e))[:k]


def mixture(x, weights, experts):
    """Σ_e w_te f_e(x_t), token by token and expert by expert."""
    phi = {"swiglu": torch.nn.functional.silu, "geglu": torch.nn.functional.gelu}
    phi |= {"relu": torch.relu, "gelu": torch.nn.functional.gelu}
    rows = []
    for token, gate in zip(x, weights, strict=True):
        total = torch.zeros_like(token)
        for e, weight in enumerate(gate):
            if weight != 0:
                pre = experts.w_in[e] @ token
                pre = pre if experts.b_in is None else pre + experts.b_in[e]
                if experts.activation.endswith("glu"):
                    first, second = pre.chunk(2)
                    hidden = phi[experts.activation](first) * second
                else:
                    hidden = phi[experts.activation](pre)
                out = experts.w_out[e] @ hidden
                out = out if experts.b_out is None else out + experts.b_out[e]
                total = total + weight * out
        rows.append(total)
    return torch.stack(rows)
