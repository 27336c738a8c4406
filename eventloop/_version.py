"""The version of eventloop."""

__version__ = "0.1.0"
