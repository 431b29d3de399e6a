"""The algebra of normal distributions that methods share."""
