"""The automatic classes of transformers load smoothed models once Tieline is imported.

    import tieline
    AutoModelForCausalLM.from_pretrained("smoothed")      # no trust_remote_code: our own code runs

`import tieline` arranges that `register_auto_classes` is called after transformers was imported.
"""

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tieline.core.errors import UnsupportedModelError
from tieline.serving.modeling_tieline import TielineConfig

__all__ = ["ChangedModelForCausalLM", "register_auto_classes"]


class ChangedModelForCausalLM(PreTrainedModel):
    """The door to a smoothed model: `from_pretrained` returns the model of transformers itself."""

    config_class = TielineConfig  # type: ignore[assignment]

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, config: Any = None, **options: Any) -> Any:
        """Load a model with everything that Tieline changed in it.

        Args:
            source: folder or hub id.
            args: none that a smoothed model takes.
            config: as the automatic class read it; the record is read again, and checked.
            options: of `tieline.models.load_pretrained`.
        """
        from tieline.models.saved_models import load_pretrained

        if args:
            raise UnsupportedModelError("a smoothed model takes no arguments beside its folder")
        options.pop("trust_remote_code", None)  # our own code is here
        return load_pretrained(source, **options)


def register_auto_classes() -> None:
    """Let `AutoConfig` and `AutoModelForCausalLM` know smoothed models."""
    AutoConfig.register(TielineConfig.model_type, TielineConfig, exist_ok=True)
    AutoModelForCausalLM.register(TielineConfig, ChangedModelForCausalLM, exist_ok=True)
