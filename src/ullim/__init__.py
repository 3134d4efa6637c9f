"""Ullim: improve a chat model from what its users do."""

__version__ = "0.1.0"
