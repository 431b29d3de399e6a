"""The user's NumPyro model: traced, divided between server and silos, and evaluated."""
