"""Training: configuration, the loop, exact resume, progress."""
