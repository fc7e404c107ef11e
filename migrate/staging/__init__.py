"""Snapshots of a training state, in memory of its own, and what is made of them behind it."""
