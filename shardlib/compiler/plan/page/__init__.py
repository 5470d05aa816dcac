"""The plan as one HTML file that people look at."""
