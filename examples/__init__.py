"""Examples; each runs by itself."""
