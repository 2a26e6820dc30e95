"""Routing traces: what a model's routers saw and chose, as frozen records."""

from tieline.trace.record import LayerFacts, LayerTrace, RoutingTrace

__all__ = ["LayerFacts", "LayerTrace", "RoutingTrace"]
