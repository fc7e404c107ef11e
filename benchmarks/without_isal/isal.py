"""On the path of a process, this leaves it zlib's CRC-32, as where isal is not installed."""

raise ImportError("isal is left out")
