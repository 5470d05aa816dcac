"""Parts of torch that read tensors beside the dispatcher, taught what a `ShardedTensor` is.

Ops come to `ShardedTensor` through torch's dispatcher. A few parts of torch look at memory or types themselves: c10d,
wrappers of modules, the functions around checkpoints, the compiler. Each has a file here, which either makes it work or
refuses in words; a file's `TAUGHT` says which module it changes, and by what. Nothing is imported for it: a module is
changed when somebody imports it.
"""

from __future__ import annotations

from shardlib.beside import (
    autograd,
    checkpoints,
    compiler,
    counts,
    distributed,
    memory,
    modules,
    pretrained,
    recomputing,
    threads,
)
from shardlib.beside.imports import when_imported

for _part in (autograd, checkpoints, compiler, counts, distributed, memory, modules, pretrained, recomputing, threads):
    for _name, _teach in _part.TAUGHT.items():
        when_imported(_name, _teach)
