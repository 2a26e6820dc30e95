"""Running a model for its routing, by the name under which the audits know it (`hf.running`)."""

from tieline.hf.running import batches, forward, model_device, only_running, text_config

__all__ = ["batches", "forward", "model_device", "only_running", "text_config"]
