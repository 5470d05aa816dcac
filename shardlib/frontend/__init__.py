"""User function -> one functional ATen graph, with a source line on every node."""
