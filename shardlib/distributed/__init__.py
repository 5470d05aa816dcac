"""How ranks keep in step, and how those that are not, or are gone, are found out and named."""
