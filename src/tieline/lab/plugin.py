"""Plug-in of the laboratory: its commands, result formats and restorers of changed models.

The entry point "lab" of the group "tieline.plugins" names this module (`tieline.core.plugins`).
"""

from tieline.core.plugins import Plugin, ResultFormat

COMMANDS = (
    *("soften", "slice", "walks", "attention", "frontier", "reroute", "upcycle", "design"),
    *("train", "rates", "reproduce"),
)

PLUGIN = Plugin(
    commands={"Lab": dict.fromkeys(COMMANDS, "tieline.lab.commands")},
    results={
        "tieline-softening": ResultFormat(
            "tieline.lab.on_model.soften:Softening", "tieline.lab.report.soften"
        ),
        "tieline-slice": ResultFormat(
            "tieline.lab.on_model.slice:RouterSlice", "tieline.lab.report.slices"
        ),
        "tieline-walks": ResultFormat(
            "tieline.lab.on_model.walks:FlipWalks", "tieline.lab.report.walks"
        ),
        "tieline-attention": ResultFormat(
            "tieline.lab.attention.head_view:AttentionView", "tieline.lab.report.attention"
        ),
        "tieline-frontier": ResultFormat(
            "tieline.lab.on_model.frontier:Frontier", "tieline.lab.report.frontier"
        ),
        "tieline-reroute": ResultFormat(
            "tieline.lab.on_model.reroute:Rerouted", "tieline.lab.report.changed_models"
        ),
        "tieline-upcycling": ResultFormat(
            "tieline.lab.on_model.upcycle:Upcycled", "tieline.lab.report.changed_models:UPCYCLED"
        ),
        "tieline-design": ResultFormat(
            "tieline.lab.tropical.layer_shape_advice:Advice", "tieline.lab.report.design"
        ),
        "tieline-rates": ResultFormat(
            "tieline.lab.estimation.rates:RateStudy", "tieline.lab.report.rates"
        ),
        "tieline-ledger": ResultFormat(
            "tieline.lab.claims.ledger:Ledger", "tieline.lab.report.ledger"
        ),
        "tieline-claims": ResultFormat(
            "tieline.lab.claims.ledger:Catalogue", "tieline.lab.report.ledger:CATALOGUE"
        ),
        "tieline-training": ResultFormat(
            "tieline.lab.training.training_run:TrainingResult", "tieline.lab.report.training"
        ),
        "tieline-training-plan": ResultFormat(
            "tieline.lab.training.training_run:TrainingPlan", "tieline.lab.report.training:PLAN"
        ),
        "tieline-recipes": ResultFormat(
            "tieline.lab.training.recipes:RecipeList", "tieline.lab.report.training:RECIPES"
        ),
    },
    restorers={
        "attention": "tieline.lab.attention.model_attention",
        "reroute": "tieline.lab.on_model.rerouted_model",
        "upcycle": "tieline.lab.on_model.upcycled_model",
    },
)
