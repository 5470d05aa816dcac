"""Detects what a traced function may not do, and explains it in errors on the user's line."""
