"""What rules' local forms write, by hand or as torch code that is recorded."""
