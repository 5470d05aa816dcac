"""The graph as the compiler reads it, and what is known of its values."""
