"""The HTTP server: predictions, other programs' protocols, and a page."""
