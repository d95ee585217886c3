"""The embedded engine: the whole round, readable and runnable on one machine."""
