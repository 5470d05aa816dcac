"""Where a user's Python, memory and other ranks meet the program."""
