"""Lists the names and sentences of the library that would stop a newcomer.

    python -m tests.repository.names_lint shardlib/nn

A name says what a thing is, a docstring begins with a verb, and a sentence names its subject. The lint also lists long
functions and modules.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PLACEHOLDERS = frozenset(
    ["asked", "beside", "found", "given", "heard", "here", "known", "looked_up", "made", "of", "owed", "owes", "owned"]
    + ["said", "staying", "standing", "there", "these", "those", "told", "wants", "what", "whatever", "who", "whose"]
)
PHRASES = {
    "riddle": r"\bwhat\b[^.]*\bis what\b|\bwho\b[^.]{0,40}\bdoes\b|\bwhat\b[^.]*\bwhatever\b",
    "no noun": r"\bwhatever (?:it|they|that)\b|\bas they are\b|\bthe same of\b|\bwhoever\b|\bnobody\b",
    "passive riddle": r"\bmay be had\b|\bis told so\b|\bis to be had\b|\bsay a word\b|\blet stand\b",
    "British": r"\b\w*(?:[^o]lour|aviour|ghbour|alis[ei]|ilis[ei]|inis[ei]|ectoris|ctoris[ei])\w*\b",
}
OPENERS = re.compile(r"(?:What|Whether|That|Those|Who|Whose|Where|How|Of|There)\b(?! to\b)")
LONGEST_SENTENCE, LONGEST_FUNCTION, LONGEST_MODULE = 40, 60, 350  # words, lines, lines


def offenders(path: Path) -> Iterator[str]:
    """What is wrong in a file, as `path:line: text`."""
    source = path.read_text()
    tree = ast.parse(source)
    lines = source.count("\n")
    if ast.get_docstring(tree) is None:
        yield f"{path}:1: the module has no docstring"
    if lines > LONGEST_MODULE:
        yield f"{path}:1: {lines} lines; at most {LONGEST_MODULE}"
    for node in ast.walk(tree):
        for line, name in _bound_names(node):
            if name.strip("_") in PLACEHOLDERS:
                yield f"{path}:{line}: `{name}` does not say what it names"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if (length := node.end_lineno - node.lineno + 1) > LONGEST_FUNCTION:
                yield f"{path}:{node.lineno}: `{node.name}` has {length} lines; at most {LONGEST_FUNCTION}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or ""
            if match := OPENERS.match(text):
                yield f"{path}:{getattr(node, 'lineno', 1)}: a docstring begins with {match[0]!r}, not with a verb"
    for line, text in _prose(source, tree):
        for label, pattern in PHRASES.items():
            if match := re.search(pattern, text, re.IGNORECASE):
                yield f"{path}:{line}: {label}: {match[0]!r}"
        for sentence in re.split(r"(?<=[.:;!?])\s|\n\s*\n|\n\s*[*>-]", text):
            if (words := len(sentence.split())) > LONGEST_SENTENCE:
                yield f"{path}:{line}: a sentence of {words} words; at most {LONGEST_SENTENCE}"


def _bound_names(node: ast.AST) -> Iterator[tuple[int, str]]:
    match node:
        case ast.Name(ctx=ast.Store()):
            yield node.lineno, node.id
        case ast.arg():
            yield node.lineno, node.arg
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.lineno, node.name


def _prose(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Comments, one block each, and the text of docstrings and other strings of several words; no doctests."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != last + 1:
                yield first, " ".join(block)
                block = []
            first = first if block else token.start[0]
            last = token.start[0]
            block.append(token.string.lstrip("# "))
    if block:
        yield first, " ".join(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= 3:
            yield node.lineno, re.sub(r"(?m)^\s*(?:>>>|\.\.\.).*$|::\n(?:\n| .*\n)*", "", node.value)


def main(places: list[str]) -> int:
    paths = [
        path for place in places for path in ([Path(place)] if place.endswith(".py") else Path(place).rglob("*.py"))
    ]
    lines = [line for path in sorted(paths) for line in offenders(path)]
    print("\n".join(lines))
    return len(lines) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["shardlib"]))
