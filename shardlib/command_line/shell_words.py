"""Rewrites errors for the shell: options of `shardlib plan` replace the arguments of Python."""

from __future__ import annotations

import re

from shardlib.core.errors import ShardingError

Rewriting = tuple[str, str]  # a pattern of Python, and the words of the shell

_ALWAYS: tuple[Rewriting, ...] = (
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


def in_shell_words(error: ShardingError, mesh: str, *, has_model: bool) -> ShardingError:
    """Returns the error with options in place of arguments.

    `mesh` is the text of `--mesh` without spaces: other meshes are those of the user's code. `has_model` says whether
    `--model` names the program.

    Example:
        >>> error = ShardingError("strategy='zero4' is no strategy on Mesh.abstract(data=2, tensor=4)")
        >>> print(in_shell_words(error, "data=2,tensor=4", has_model=True))
        --strategy zero4 is no strategy on --mesh data=2,tensor=4
    """
    axes = re.escape(mesh.replace(",", ", "))
    python = rf"\bMesh(\.abstract)?\({axes}(, machine=(['\"])[^'\"]*\3)?\)"
    table = (*_ALWAYS, *_OF_MODELS) if has_model else _ALWAYS

    def rewrite(text: str) -> str:
        text = re.sub(python, lambda _: f"--mesh {mesh}", text)
        for pattern, words in table:
            text = re.sub(pattern, words, text)
        return text

    return ShardingError(
        rewrite(error.what),
        [rewrite(x) for x in error.offenders],
        rule=error.rule and rewrite(error.rule),
        remedy=error.remedy and rewrite(error.remedy),
    )
