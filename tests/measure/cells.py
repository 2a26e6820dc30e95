"""Top-k cells with faces at chosen distances and angles."""

import math

import torch

from tieline.lab.geometry.exit_time import top_k_cell


def one_face(r=1.0):
    """Two experts, one face at distance r."""
    weight = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    return top_k_cell(torch.tensor([r, 0.0], dtype=torch.float64), 1, weight)


def two_faces(r1=0.7, r2=1.0, cosine=0.0):
    """Three experts, the first chosen, two faces whose inward normals have that cosine."""
    second = [cosine, math.sqrt(1 - cosine**2)]
    weight = -torch.tensor([[0.0, 0.0], [1.0, 0.0], second], dtype=torch.float64)
    return top_k_cell(torch.tensor([0.0, -r1, -r2], dtype=torch.float64), 1, weight)
