"""Snapshots of a training state: copied at once, held in memory of its own, migrated behind the training."""
