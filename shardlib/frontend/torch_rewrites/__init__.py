"""Replaces parts of torch while a function is traced, by forms that read no values of tensors."""
