"""The notation in which rules are written.

    ... m k, k n -> ... m n | k:sum {0} {1}

Before the arrow the tensor operands, behind it the results, a term each; in a term one word per dim. The same word is
the same factor everywhere.

| written | means |
|---|---|
| `m` | a dim that is the factor `m` |
| `(kv g)` | a dim made of factors, major first |
| `1` | a dim of size 1 |
| `_` | a dim that stays whole, a factor of its own wherever it is written |
| `...` | any dims, broadcast against each other from the right |
| `~m n` | an operand that is broadcast from the right against `m n`: fewer dims, or of size 1 |
| `[dim]` | all dims, of which the op's argument `dim` names one or several: these are `dim`, and `...` are the others |
| `[_]` | the same, but what the argument names is a factor of its own there, which stays whole |
| `[two dim]` | the same, but what the argument names is `(two dim)`; a term `dim` has these dims alone |

An operand that a call leaves out has a term all the same. Where a result keeps what `[dim]` names with size 1, as by
`keepdim`, `...` stands for that, too. Behind the bar, in any order:

| written | means |
|---|---|
| `k:sum` (`max`, `min`) | cutting `k` leaves results that lack it pending that way |
| `k:none` | results that lack `k` are complete although it is cut |
| `k:whole` | `k` must not be cut; `k:whole(flag)`: where the op's argument `flag` says so |
| `k:size(n)` | the op's argument `n` is the size of `k`; `n.0` is the first of a list of sizes |
| `(g c):size(n)` | the argument `n` is the product of their sizes |
| `n:size(n)` | of `[n]`: the argument lists the sizes of the last dims, and so names them |
| `h:halo(n)` | a result reads `n` elements of `h` to both sides of its own; `h:halo(3,n)`: 3 in front, `n` behind |
| `b:gather` | `b` may stay whole although it is wanted cut: operands are gathered where a sum costs more |
| `t:ring(n)`, `t:ring(3,n)` | the same, but the dim goes round: in front of its first element is its last |
| `o:windows(i,n,3,1)` | element j of `o` reads n of `i` from 3j - 1 on; the op itself pads that 1, at both ends |
| `k:local` | when `k` is cut, the op's local form runs instead of the op |
| `t:round(s)` | `t` may be cut only together with `s` and as `s` is; the local form passes its pieces round |
| `i:with(o)` | `i` may be cut only together with `o`, and who wants one of them cut wants both |
| `h:lend(s)` | `h` may take over, for this op, a mesh axis that only `s` wants |
| `{0}`, `{0,1}` | the op is linear in operand 0, jointly linear in operands 0 and 1 |

A factor that some result lacks and of which nothing is said stays whole: that is always right. `...` may stand for a
factor in front of the colon. Where windows are of operands and what they read is of results, it is a gradient.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from shardlib.core.errors import ShardingError
from shardlib.rules.iteration_space import Dim

_WORD = re.compile(r"\.\.\.|\([^()]*\)|\[[A-Za-z_][\w ]*\]|[A-Za-z_]\w*|1")
_NUMBERED = re.compile(r"(?<!\w)_\d+(?!\w)")  # what a `_` is called
_OWN = re.compile(r"(?<!\w)_(?!\w)")
_NAME = r"[A-Za-z_]\w*"
_NUMBER = rf"(?:{_NAME}|\d+)"
_HALO = rf"(?:halo|ring)\({_NUMBER}(?:, ?{_NUMBER})?\)|windows\({_NAME}(?:, ?{_NUMBER}){{1,3}}\)"
_OF = rf"whole\({_NAME}\)|whole|size\({_NAME}(?:\.\d+)?\)|round\({_NAME}\)|with\({_NAME}\)|lend\({_NAME}\)"
_KIND = rf"sum|max|min|none|local|gather|{_HALO}|{_OF}"
_NOTE = re.compile(rf"(\.\.\.|{_NAME}|\([^()]*\)):({_KIND})|\{{(\d+(?:,\d+)*)\}}")
ELLIPSIS = ("...",)
REDUCED = ("sum", "max", "min")


@dataclass(frozen=True)
class Term:
    """One tensor of a pattern: a tuple of factor names per dim; `fits` marks a broadcast operand (`~`)."""

    dims: tuple[Dim, ...]
    fits: bool = False

    @property
    def rank(self) -> int:
        """How many dims the words stand for, without the ellipsis."""
        return sum(d != ELLIPSIS for d in self.dims)

    @property
    def names(self) -> set[str]:
        """The factors that it names, `...` among them."""
        return {f.strip("[]") for d in self.dims for f in d} | ({"..."} if self.named else set())

    @property
    def named(self) -> str | None:
        """The argument that names some of its dims: `dim` of `[dim]`, and of `[two dim]`."""
        last = self.dims[0][-1] if self.dims and self.dims[0] else ""
        return last[:-1].lstrip("[") if last.endswith("]") else None

    @property
    def majors(self) -> Dim:
        """What else a dim is made of that an argument names: `two` of `[two dim]`."""
        return tuple(f.lstrip("[") for f in self.dims[0][:-1]) if self.named else ()

    def __str__(self) -> str:
        named = [[_NUMBERED.sub("_", f) for f in d] for d in self.dims]
        plain = [len(d) == 1 or self.named is not None for d in named]
        words = " ".join(
            " ".join(d) if as_is else f"({' '.join(d)})" if d else "1" for d, as_is in zip(named, plain, strict=True)
        )
        return f"~{words}" if self.fits else words


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern; `str` gives it back.

    Example:
        >>> str(parse("... m k,k n->... m n|{0}{1} k:sum"))
        '... m k, k n -> ... m n | k:sum {0} {1}'
        >>> str(parse("... _ _ -> ... _"))
        '... _ _ -> ... _'
    """

    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    notes: tuple[tuple[str, str], ...] = ()
    linear: tuple[frozenset[int], ...] = ()

    @cached_property
    def named(self) -> str | None:
        """The argument that names dims."""
        return next((t.named for t in (*self.operands, *self.results) if t.named and not is_own(t.named)), None)

    def __str__(self) -> str:
        notes = [f"{f}:{kind}" for f, kind in self.notes]
        notes += ["{" + ",".join(map(str, sorted(s))) + "}" for s in self.linear]
        left, right = (", ".join(map(str, terms)) for terms in (self.operands, self.results))
        text = " ".join(f"{left} -> {right}".split())
        return f"{text} | {' '.join(notes)}" if notes else text


@lru_cache(maxsize=1024)
def parse(text: str) -> Pattern:
    """Read a pattern.

    Raises:
        ShardingError: the text is not in the notation, or names a factor that no tensor has.
    """
    body, _, tail = text.partition("|")
    number = itertools.count()
    body = _OWN.sub(lambda _: f"_{next(number)}", body)
    left, arrow, right = body.partition("->")
    wrong = [] if arrow else ["it has no `->` between operands and results"]
    operands, results = (tuple(_term(t, wrong) for t in side.split(",")) for side in (left, right))
    if not left.strip():
        operands = ()
    if any(t.fits for t in results):
        wrong.append("`~` marks operands, not results")
    notes, linear = _notes(tail, wrong)
    known = {f for t in (*operands, *results) for f in t.names}
    wrong += [
        f"`{f}:{kind}` names a factor that no tensor has"
        for f, kind in notes
        if not known.issuperset(f.strip("()").split()) or (other(kind) not in (None, *known) and not argument(kind))
    ]
    named = dict.fromkeys(t.named for t in (*operands, *results) if t.named)
    given = [f"`[{n}]`" for n in named if not is_own(n)]
    if len(given) > 1:
        wrong.append(f"dims are named by {' and by '.join(sorted(given))}: one argument names them")
    if named and not given:
        wrong.append("`[_]` is what an argument names, and no `[dim]` says which argument")
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
def gradient(text: str, saved: str = "", of: str = "0") -> str:
    """The rule of an op's gradient, from the op's own: it takes that of the first result, then what was `saved`.

    That names operands (`0`) and results (`r1`). It returns gradients of the operands `of`, which have their operands'
    dims and are sums over all others; all are linear in the result's.

    Example:
        >>> gradient("... m k, k n -> ... m n | k:sum {0} {1}", "0 1", of="0 1")
        '... m n, ... m k, k n -> ... m k, k n | ...:sum m:sum n:sum {0}'
    """
    op = parse(text)
    goes = {f: source(f, kind) for f, kind in op.notes if reach(kind)}
    assert not any(f == i for f, i in goes.items()), "a gradient of what is read around goes back"
    given = [op.results[0]]
    given += [op.results[int(w[1:])] if w[0] == "r" else op.operands[int(w)] for w in saved.split()]
    made = [op.operands[int(w)] for w in of.split()]
    here = [f for f in dict.fromkeys(f for t in (*given, *made) for f in sorted(t.names)) if not is_own(f)]
    notes = [
        (f, kind) for f, kind in op.notes if {*f.strip("()").split()} <= {*here} and kind not in ("sum", "max", "min")
    ]
    notes += [(f, "sum") for f in here if f not in goes and any(f not in t.names for t in made)]
    return str(Pattern(tuple(given), tuple(made), tuple(notes), (frozenset({0}),)))


def _halo_faults(notes: Sequence[tuple[str, str]], operands: Sequence[Term], results: Sequence[Term]) -> Iterator[str]:
    """A device drops what it computed for others, so a dim that reads around itself is there in every result.

    Windows are dims of results and read a dim of operands, or the other way round, in a gradient.
    """
    for f, kind in notes:
        if reach(kind) is None:
            continue
        dims, i = [d for t in (*operands, *results) for d in t.dims], source(f, kind)
        back = i != f and any((i,) in t.dims for t in results) and any((f,) in t.dims for t in operands)
        made, read = (i, f) if back else (f, i)
        if parts := [g for g in (f, i) if g == "..." or any(g in d and d != (g,) for d in dims)]:
            yield f"`{f}:{kind}` is of a dim that is more than {parts[0]!r}"
        elif any((made,) not in t.dims and t.named != made for t in results):
            yield f"`{f}:{kind}` is of a dim that a result lacks: make that by an op of its own"
        elif i != f and not any((read,) in t.dims for t in operands):
            yield f"`{f}:{kind}` names a factor that no operand has"
        elif i != f and (any(made in t.names for t in operands) or any(read in t.names for t in results)):
            yield f"`{f}:{kind}` reads {i!r} of operands for {f!r} of results, and one is on both sides"
        elif back and any(reach(k) and (source(g, k) == g or (g,) in results[0].dims) for g, k in notes):
            yield f"`{f}:{kind}` is of a gradient, and all that is read has to be"
        if more := [k for g, k in notes if g in (f, i) and k != kind and not k.startswith("size(")]:
            yield f"`{f}:{kind}` says all of {f!r}, and there is `{f}:{more[0]}`"
        if any(k == "local" for _, k in notes):
            yield f"`{f}:{kind}` has a local form of its own, and some dim is marked `:local`"


def is_own(factor: str) -> bool:
    """Whether a factor was written `_`."""
    return factor[0] == "_" and factor[1:].isdecimal()


def argument(kind: str) -> str | None:
    """The argument that a note reads: `flag` of `whole(flag)`, `n` of `size(n)`."""
    return other(kind) if kind.startswith(("whole(", "size(")) else None


@lru_cache(maxsize=1024)
def other(kind: str) -> str | None:
    """The factor that a note names besides its own: `s` of `round(s)`."""
    return kind[:-1].partition("(")[2] or None if reach(kind) is None else None


@lru_cache(maxsize=1024)
def reach(kind: str) -> tuple[str, ...] | None:
    """How far a dim reads around itself, by numbers or arguments: in front and behind, `3`, `n` of `halo(3,n)`; or the
    size of a window, from one to the next, and the padding."""
    word, _, given = kind.removesuffix(")").partition("(")
    if word in ("halo", "ring"):
        before, _, after = given.partition(",")
        return before, after or before
    if word != "windows":
        return None
    numbers = given.split(",")[1:]
    return (*numbers, *("1", "0")[len(numbers) - 1 :])


def source(factor: str, kind: str) -> str:
    """The factor of operands that it reads: `i` of `o:windows(i,3)`, or itself."""
    return kind.partition("(")[2].partition(",")[0] if kind.startswith("windows(") else factor


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


def _notes(text: str, wrong: list[str]) -> tuple[list[tuple[str, str]], list[frozenset[int]]]:
    if rest := _NOTE.sub("", text).strip():
        wrong.append(f"{rest!r} behind the bar is neither `factor:kind` nor a set of operands like `{{0,1}}`")
    found = _NOTE.findall(text)
    notes = [(f, kind.replace(" ", "")) for f, kind, _ in found if f]
    linear = [frozenset(map(int, s.split(","))) for _, _, s in found if s]
    return notes, linear
