"""Foundations of all other packages: errors, source lines, torch's private names, small tools."""
