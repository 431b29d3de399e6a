"""Federated Bayesian inference on NumPyro."""
