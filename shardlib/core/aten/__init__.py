"""Facts about torch's own ops."""
