"""Loading by torch.distributed.checkpoint (DCP): a reader that migrates, and a planner that
executes nothing.

This module imports torch; `import migrate` does not, and loads it on first use.
"""

from __future__ import annotations

from .live.dcp_reader import MigratingReader
from .live.stream_values import SafeLoadPlanner

__all__ = ["MigratingReader", "SafeLoadPlanner"]
