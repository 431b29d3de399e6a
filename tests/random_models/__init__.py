"""Programs at random: a description, the NumPyro model and silos it makes, and what must be true of their split.

``description`` says what a program is, ``writing`` turns it into readable Python, ``drawing`` draws one, ``oracle``
asks NumPyro itself for its density, ``judging`` compares. ``make random-models N=1000`` counts.
"""
