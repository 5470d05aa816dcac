"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, FAULT = "ok", "warning", "fault"
PREFIX = "shardlib findings: "  # of the line of JSON that the self-test prints, between lines of other libraries


@dataclass(frozen=True)
class Finding:
    """Names a check, its level (`ok`, `warning`, `fault`), its result, and a remedy for warnings and faults."""

    name: str
    level: str
    text: str
    remedy: str = ""
