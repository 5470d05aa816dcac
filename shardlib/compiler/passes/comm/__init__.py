"""Passes over messages: which are sent, when, together or in parts."""
