"""The notation in which rules are written.

    ... m k, k n -> ... m n | k:sum {0} {1}

Before the arrow stands a term per tensor operand, after it a term per result. A term has one word per dim. The same
word is the same factor everywhere.

* `m`: a dim that is the factor `m`
* `(kv g)`: a dim of several factors, major first
* `1`: a dim of size 1
* `_`: a dim that stays whole, a different factor wherever it is written
* `...`: any number of dims, which broadcast from the right
* `~m n`: an operand that broadcasts from the right against `m n`, with fewer dims or dims of size 1
* `[dim]`: all dims; the op's argument `dim` names one or several, which are `dim`, and `...` are the others
* `[_]`: the same, but the named dims are factors of their own in this term, which stay whole
* `[two dim]`: the same, but the named dim is `(two dim)`; a term `dim` has the named dims alone

An operand that a call leaves out has a term all the same. Where a result keeps the dims named by `[dim]` with size 1,
as by `keepdim`, `...` stands for these, too. After the bar stand notes, in any order:

* `k:sum` (`max`, `min`): sharding `k` makes results that lack it partial in this way
* `k:none`: results that lack `k` are complete although it is sharded
* `k:whole`: `k` must not be sharded; `k:whole(flag)`: if the op's argument `flag` is true
* `k:size(n)`: the op's argument `n` is the size of `k`; `n.0` is the first of a list of sizes
* `(g c):size(n)`: the argument `n` is the product of the sizes
* `n:size(n)`, with `[n]`: the argument lists the sizes of the last dims, and thereby names them
* `h:halo(n)`: a result reads `n` elements of `h` on both sides of its own; `h:halo(3,n)`: 3 before it, `n` after it
* `b:gather`: `b` may stay whole against a request, where gathering the operands sends less than a sum
* `t:ring(n)`, `t:ring(3,n)`: as `halo`, but the last element comes before the first
* `o:windows(i,n,3,1)`: element j of `o` reads n elements of `i` from 3j - 1 on; the op itself pads 1 at both ends
* `k:local`: while `k` is sharded, the op's local form runs instead of the op
* `t:round(s)`: `t` may be sharded only as `s` is; the local form sends its shards around the ring
* `i:with(o)`: `i` may be sharded only together with `o`, and a request for one requests both
* `h:lend(s)`: `h` may take over, for this op, a mesh axis that only `s` requests
* `{0}`, `{0,1}`: the op is linear in operand 0, jointly linear in operands 0 and 1

A factor that some result lacks stays whole without a note, which is always correct. `...` may stand in front of the
colon. A rule whose operands have the windows, and whose results have the dim that they read, is a gradient.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from shardlib.core.errors import ShardingError
from shardlib.rules.iteration_space import Dim

_WORD = re.compile(r"\.\.\.|\([^()]*\)|\[[A-Za-z_][\w ]*\]|[A-Za-z_]\w*|1")
_NUMBERED = re.compile(r"(?<!\w)_\d+(?!\w)")  # the factor that `parse` makes of a `_`
_ANONYMOUS = re.compile(r"(?<!\w)_(?!\w)")
_NAME = r"[A-Za-z_]\w*"
_NUMBER = rf"(?:{_NAME}|\d+)"
_HALO = rf"(?:halo|ring)\({_NUMBER}(?:, ?{_NUMBER})?\)|windows\({_NAME}(?:, ?{_NUMBER}){{1,3}}\)"
_OTHER = rf"whole\({_NAME}\)|whole|size\({_NAME}(?:\.\d+)?\)|round\({_NAME}\)|with\({_NAME}\)|lend\({_NAME}\)"
_KIND = rf"sum|max|min|none|local|gather|{_HALO}|{_OTHER}"
_NOTE = re.compile(rf"(\.\.\.|{_NAME}|\([^()]*\)):({_KIND})|\{{(\d+(?:,\d+)*)\}}")
ELLIPSIS = ("...",)
REDUCED = ("sum", "max", "min")


@dataclass(frozen=True)
class Term:
    """One tensor of a pattern: the factor names of each dim. `fits` marks a broadcast operand (`~`)."""

    dims: tuple[Dim, ...]
    fits: bool = False

    @property
    def rank(self) -> int:
        """The number of dims, without those of the ellipsis."""
        return sum(d != ELLIPSIS for d in self.dims)

    @property
    def names(self) -> set[str]:
        """The factors of the term, with `...`."""
        return {f.strip("[]") for d in self.dims for f in d} | ({"..."} if self.named else set())

    @property
    def named(self) -> str | None:
        """The argument that names dims: `dim` of `[dim]` and of `[two dim]`."""
        last = self.dims[0][-1] if self.dims and self.dims[0] else ""
        return last[:-1].lstrip("[") if last.endswith("]") else None

    @property
    def majors(self) -> Dim:
        """The major factors of a named dim: `two` of `[two dim]`."""
        return tuple(f.lstrip("[") for f in self.dims[0][:-1]) if self.named else ()

    def __str__(self) -> str:
        named = [[_NUMBERED.sub("_", f) for f in d] for d in self.dims]
        plain = [len(d) == 1 or self.named is not None for d in named]
        words = " ".join(
            " ".join(d) if bare else f"({' '.join(d)})" if d else "1" for d, bare in zip(named, plain, strict=True)
        )
        return f"~{words}" if self.fits else words


class Note(NamedTuple):
    """A note after the bar: `factors:word(values)`."""

    factors: str
    word: str
    values: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The factors one by one: `g` and `c` of `(g c)`."""
        return self.factors.strip("()").split()

    @property
    def argument(self) -> str | None:
        """The argument that the note reads: `flag` of `whole(flag)`, `n` of `size(n)`."""
        return self.values[0] if self.values and self.word in ("whole", "size") else None

    @property
    def other(self) -> str | None:
        """The factor that the note ties to its own: `s` of `round(s)`."""
        return self.values[0] if self.word in ("round", "with", "lend") else None

    @property
    def extent(self) -> tuple[str, ...] | None:
        """The numbers or arguments that say how far a dim reads; None for other notes.

        For `halo(3,n)` these are the elements before and after, for `windows` the size, the stride and the padding.
        """
        if self.word in ("halo", "ring"):
            return self.values[0], self.values[-1]
        return (*self.values[1:], *("1", "0")[len(self.values) - 2 :]) if self.word == "windows" else None

    @property
    def source(self) -> str:
        """The factor that a halo or windows note reads: `i` of `o:windows(i,3)`, else the factor itself."""
        return self.values[0] if self.word == "windows" else self.factors

    def __str__(self) -> str:
        return f"{self.factors}:{self.word}" + (f"({','.join(self.values)})" if self.values else "")


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern; `str` returns its text.

    Example:
        >>> str(parse("... m k,k n->... m n|{0}{1} k:sum"))
        '... m k, k n -> ... m n | k:sum {0} {1}'
        >>> str(parse("... _ _ -> ... _"))
        '... _ _ -> ... _'
    """

    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    notes: tuple[Note, ...] = ()
    linear: tuple[frozenset[int], ...] = ()

    @cached_property
    def named(self) -> str | None:
        """The argument that names dims, if any."""
        return next((t.named for t in (*self.operands, *self.results) if t.named and not is_anonymous(t.named)), None)

    def __str__(self) -> str:
        notes = [*map(str, self.notes)]
        notes += ["{" + ",".join(map(str, sorted(s))) + "}" for s in self.linear]
        left, right = (", ".join(map(str, terms)) for terms in (self.operands, self.results))
        text = " ".join(f"{left} -> {right}".split())
        return f"{text} | {' '.join(notes)}" if notes else text


@lru_cache(maxsize=1024)
def parse(text: str) -> Pattern:
    """Parses a pattern.

    Raises:
        ShardingError: the text is not in the notation, or names a factor that no tensor has.
    """
    body, _, tail = text.partition("|")
    number = itertools.count()
    body = _ANONYMOUS.sub(lambda _: f"_{next(number)}", body)
    left, arrow, right = body.partition("->")
    wrong = [] if arrow else ["it has no `->` between operands and results"]
    operands, results = (tuple(_term(t, wrong) for t in side.split(",")) for side in (left, right))
    if not left.strip():
        operands = ()
    if any(t.fits for t in results):
        wrong.append("`~` marks operands, not results")
    notes, linear = _notes(tail, wrong)
    factors = {f for t in (*operands, *results) for f in t.names}
    wrong += [
        f"`{note}` names a factor that no tensor has"
        for note in notes
        if not factors.issuperset(note.names) or note.other not in (None, *factors)
    ]
    named = dict.fromkeys(t.named for t in (*operands, *results) if t.named)
    arguments = [f"`[{n}]`" for n in named if not is_anonymous(n)]
    if len(arguments) > 1:
        wrong.append(f"dims are named by {' and by '.join(sorted(arguments))}: one argument names them")
    if named and not arguments:
        wrong.append("`[_]` needs a `[dim]` in another term: it names the argument")
    wrong += _halo_faults(notes, operands, results)
    wrong += [
        f"{{{i}}} names an operand, but there are {len(operands)}" for s in linear for i in s if i >= len(operands)
    ]
    if wrong:
        raise ShardingError(
            f"rule({text!r}) cannot be read", wrong, remedy='write "... m k, k n -> ... m n | k:sum {0} {1}"'
        )
    return Pattern(operands, results, tuple(notes), tuple(linear))


@lru_cache(maxsize=1024)
def gradient_pattern(text: str, saved: str = "", wrt: str = "0") -> str:
    """Derives the pattern of an op's gradient from the op's own pattern.

    The gradient op takes the gradient of the first result, then the `saved` operands (`0`) and results (`r1`). It
    returns the gradients of the operands `wrt`. They have the dims of these operands, are sums over all others, and are
    linear in the gradient of the result.

    Example:
        >>> gradient_pattern("... m k, k n -> ... m n | k:sum {0} {1}", "0 1", wrt="0 1")
        '... m n, ... m k, k n -> ... m k, k n | ...:sum m:sum n:sum {0}'
    """
    op = parse(text)
    windows = {note.factors: note.source for note in op.notes if note.extent}
    assert all(f != read for f, read in windows.items()), "the gradient of a halo has no pattern"
    operands = [op.results[0]]
    operands += [op.results[int(w[1:])] if w[0] == "r" else op.operands[int(w)] for w in saved.split()]
    results = [op.operands[int(w)] for w in wrt.split()]
    names = dict.fromkeys(f for t in (*operands, *results) for f in sorted(t.names))
    factors = [f for f in names if not is_anonymous(f)]
    notes = [note for note in op.notes if {*note.names} <= {*factors} and note.word not in REDUCED]
    notes += [Note(f, "sum") for f in factors if f not in windows and any(f not in t.names for t in results)]
    return str(Pattern(tuple(operands), tuple(results), tuple(notes), (frozenset({0}),)))


def _halo_faults(notes: Sequence[Note], operands: Sequence[Term], results: Sequence[Term]) -> Iterator[str]:
    """Yields what is wrong with notes on halos and windows.

    A device drops the results of others, so every result has the dim that reads around itself. Windows are dims of
    results and read a dim of operands; in a gradient it is the reverse.
    """
    for note in notes:
        if note.extent is None:
            continue
        f, i = note.factors, note.source
        dims = [d for t in (*operands, *results) for d in t.dims]
        back = i != f and any((i,) in t.dims for t in results) and any((f,) in t.dims for t in operands)
        reader, read = (i, f) if back else (f, i)
        if "..." in (f, i):
            yield f"`{note}` needs the name of one dim, not `...`"
        elif merged := [(g, d) for g in (f, i) for d in dims if g in d and d != (g,)]:
            g, d = merged[0]
            yield f"`{note}` needs `{g}` as a dim of its own, not as part of `({' '.join(d)})`"
        elif any((reader,) not in t.dims and t.named != reader for t in results):
            yield f"with `{note}` every result must have `{reader}`; compute the others in another op"
        elif i != f and not any((read,) in t.dims for t in operands):
            yield f"`{note}` names a factor that no operand has"
        elif i != f and (any(reader in t.names for t in operands) or any(read in t.names for t in results)):
            yield f"`{note}` reads {i!r} of operands for {f!r} of results, and one is on both sides"
        elif back and any(n.extent and (n.source == n.factors or (n.factors,) in results[0].dims) for n in notes):
            yield f"`{note}` is of a gradient, and all that is read has to be"
        if more := [n for n in notes if n.factors in (f, i) and n != note and n.word != "size"]:
            yield f"`{note}` cannot be combined with `{more[0]}`"
        if any(n.word == "local" for n in notes):
            yield f"`{note}` brings its own local form: remove `:local`"


def is_anonymous(factor: str) -> bool:
    """Returns whether a factor was written `_`."""
    return factor[0] == "_" and factor[1:].isdecimal()


def _term(text: str, wrong: list[str]) -> Term:
    text = text.strip()
    fits = text.startswith("~")
    text = text.removeprefix("~")
    if rest := _WORD.sub("", text).strip():
        wrong.append(f"{rest!r} in the term {text!r} is not a name, `1`, `...` or `(a b)`")
    words = _WORD.findall(text)
    if words.count("...") > 1:
        wrong.append(f"the term {text!r} has more than one `...`")
    dims = tuple(() if w == "1" else tuple(w.strip("()").split()) for w in words)
    if len(words) > 1 and any(w[0] == "[" for w in words):
        wrong.append(f"the term {text!r} has more than the dims that an argument names, which are all dims")
    names = [f for d in dims for f in d if d != ELLIPSIS]
    wrong += [f"the term {text!r} has {f!r} twice" for f in sorted({f for f in names if names.count(f) > 1})]
    return Term(dims, fits)


def _notes(text: str, wrong: list[str]) -> tuple[list[Note], list[frozenset[int]]]:
    if rest := _NOTE.sub("", text).strip():
        wrong.append(f"{rest!r} after the bar is neither `factor:kind` nor a set of operands like `{{0,1}}`")
    matches = _NOTE.findall(text)
    notes = []
    for factors, kind, _ in matches:
        if factors:
            word, *values = re.split(r"[(),]+", kind.replace(" ", "").removesuffix(")"))
            notes.append(Note(factors, word, tuple(values)))
    linear = [frozenset(map(int, s.split(","))) for _, _, s in matches if s]
    return notes, linear
