"""Shardy (openxla/shardy) as an oracle: the same generated programs, propagated by both."""
