"""The formal specification of the block pool and the scheduler. Imports nothing from ``src``."""
