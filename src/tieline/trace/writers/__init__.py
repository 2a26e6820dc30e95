"""Traces in the forms of other programs.

export        write a trace in one of `FORMS`
replay_list   the tensors that Megatron's `RouterReplay.set_replay_data` takes
padded        the batch (sequences, length, layers, k) that verl and NeMo-RL take
layer_numbers  the place of each layer among all layers of the model
"""

from tieline.trace.writers.batches import layer_numbers, padded
from tieline.trace.writers.export import FORMS, export, replay_list

__all__ = ["FORMS", "export", "layer_numbers", "padded", "replay_list"]
