"""The lookup buffer: index, order, both ends, real processes."""
