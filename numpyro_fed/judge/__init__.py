"""Is it right? Pooled NUTS, comparisons with it, and measures of predictions."""
