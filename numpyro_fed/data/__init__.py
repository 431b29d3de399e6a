"""What the silos hold: their arguments, checked, named, padded and stacked."""
