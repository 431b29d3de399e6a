"""What comes back from a run: draws, predictions, tables, files."""
