"""Image classification with a posterior you can trust."""

__version__ = "0.1.0"
