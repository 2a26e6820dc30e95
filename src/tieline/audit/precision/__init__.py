"""What low precision and noise do to a model's routing, and what that costs."""

from tieline.audit.precision.perturbations import Perturbation, standard_perturbations
from tieline.audit.precision.records import (
    KeepList,
    LayerEffect,
    PerturbationEffect,
    PrecisionAudit,
)
from tieline.audit.precision.run import audit_precision

__all__ = [
    "KeepList",
    "LayerEffect",
    "Perturbation",
    "PerturbationEffect",
    "PrecisionAudit",
    "audit_precision",
    "standard_perturbations",
]
