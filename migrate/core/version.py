"""The version of migrate, written here alone: the build reads this file."""

__version__ = "0.1.0"
