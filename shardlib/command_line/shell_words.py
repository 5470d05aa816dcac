"""Rewrites errors for the shell: options of `shardlib plan` replace the arguments of Python."""

from __future__ import annotations

import re
from collections.abc import Callable

from shardlib.core.errors import ShardingError

Rewriting = tuple[str, str | Callable[[re.Match[str]], str]]  # a pattern of Python, and the words of the shell

_AXES = r"\w+=\d+(?:, \w+=\d+)*"
_ALWAYS: tuple[Rewriting, ...] = (
    (rf"\bMesh(?:\.abstract)?\(({_AXES})\)", lambda m: f"--mesh {m[1].replace(', ', ',')}"),
    (r"Machine\(device=.*\), or Machine\.measure\(\)", "--machine h100"),
    (r"\bmachine=(['\"])(.+?)\1(?:, or an sl\.Machine)?", r"--machine \2"),
    (r"^the page cannot be written to (.+)", r"--html \1 cannot be written"),
    (r"such as \"plan\.html\"", "--html plan.html"),
)
# With MODULE:FUNCTION, code of the user passes these arguments.
_OF_MODELS: tuple[Rewriting, ...] = (
    (r"\b(strategy|remat)=(['\"])(.+?)\2", r"--\1 \3"),
    (r"\bprecision=torch\.(\w+)", r"--precision \1"),
    (r", or sl\.strategies\.\w+\(.*?\)", ""),
    (r"name them: strategies\.fsdp.*", "name an axis of the mesh as above: --mesh data=512,tensor=8"),
)


def in_shell_words(error: ShardingError, *, has_model: bool) -> ShardingError:
    """Returns the error with options in place of arguments; `has_model` says whether `--model` names the program.

    Example:
        >>> error = ShardingError("strategy='zero4' is no strategy on Mesh.abstract(data=2, tensor=4)")
        >>> print(in_shell_words(error, has_model=True))
        --strategy zero4 is no strategy on --mesh data=2,tensor=4
    """
    table = (*_ALWAYS, *_OF_MODELS) if has_model else _ALWAYS

    def rewrite(text: str) -> str:
        for pattern, words in table:
            text = re.sub(pattern, words, text)
        return text

    return ShardingError(
        rewrite(error.what),
        [rewrite(x) for x in error.offenders],
        rule=error.rule and rewrite(error.rule),
        remedy=error.remedy and rewrite(error.remedy),
    )
