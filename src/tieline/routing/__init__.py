"""Routers, gates, experts, dispatch and the layer that composes them."""
