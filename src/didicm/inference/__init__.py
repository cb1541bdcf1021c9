"""A trained classifier in use: predictions for image files, the same answers faster, and elsewhere."""
