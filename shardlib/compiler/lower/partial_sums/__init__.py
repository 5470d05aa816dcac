"""Decides how far partial sums pass through the program before they are reduced."""
