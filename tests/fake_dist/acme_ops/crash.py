"""An op whose module does not import."""

raise RuntimeError("acme needs a licence")
