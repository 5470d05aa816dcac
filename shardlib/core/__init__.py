"""What every other package may use: errors, source lines, torch's private names, small tools."""
