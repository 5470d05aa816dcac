"""Checks against one device: of functions, of rules, of what a machine does."""
