"""How near tokens are to a tie: boundary masses, densities, orders, distances."""
