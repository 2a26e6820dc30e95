"""Softmax and sigmoid attention as mixtures of experts (paper 4).

softmax_and_sigmoid the two attentions; the sigmoid one in tiles of bounded memory
head_mixture       a head as a mixture whose experts are the tokens
model_attention    sigmoid attention in a model of transformers
head_view          the heads of a user's model seen as mixtures of keys
"""

from tieline.lab.attention.head_mixture import *  # noqa: F403
from tieline.lab.attention.softmax_and_sigmoid import *  # noqa: F403
