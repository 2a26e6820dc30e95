"""Softmax and sigmoid attention as mixtures of experts (paper 4).

sigmoid, tiles    the two attentions; the sigmoid one in tiles of bounded memory
moe               a head as a mixture whose experts are the tokens
in_models         sigmoid attention in a model of transformers
view              the heads of a user's model seen as mixtures of keys
"""

from tieline.lab.attention.moe import *  # noqa: F403
from tieline.lab.attention.sigmoid import *  # noqa: F403
