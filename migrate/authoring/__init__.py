"""What writes and releases rule files: made from nothing or from two checkpoints, and sealed."""
