"""The printable result of compiling: what each device does, why, at what cost, on which backends."""
