"""The ops by name. One file per op; importing this package imports none of them."""

from __future__ import annotations

from .base import get as get
from .base import names as names
from .base import registry as registry
