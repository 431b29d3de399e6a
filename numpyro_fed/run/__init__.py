"""From a method and its silos to a fit: preparation, start, rounds, and what is asked at the end."""
