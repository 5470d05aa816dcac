"""Sample calls for the rows of the rule tables, a module per family; `tests.rules.rule_samples` collects them."""

from __future__ import annotations

import importlib
import pkgutil

_modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
SAMPLES = tuple(sample for family in _modules if hasattr(family, "SAMPLES") for sample in family.SAMPLES)
