"""The search for a decision: its problem, its costs, its bounds."""
