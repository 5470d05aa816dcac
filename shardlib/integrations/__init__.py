"""Parts of torch that read tensors beside the dispatcher, taught what a `ShardedTensor` is.

Ops come to `ShardedTensor` through torch's dispatcher. A few parts of torch look at memory or types themselves: c10d,
wrappers of modules, the functions around checkpoints, the compiler. Each has a file here, which either makes it work or
refuses in words; a file's `TAUGHT` says which module it changes, and by what. Nothing is imported for it: a module is
changed when somebody imports it.
"""

from __future__ import annotations

from shardlib.integrations import (
    autograd,
    checkpoint_recompute,
    checkpoints,
    comm_debug,
    compiler,
    distributed,
    exporters,
    memory_access,
    nn_modules,
    save_pretrained,
    threads,
)
from shardlib.integrations.on_import import when_imported

for _part in (
    autograd,
    checkpoints,
    compiler,
    comm_debug,
    distributed,
    exporters,
    memory_access,
    nn_modules,
    save_pretrained,
    checkpoint_recompute,
    threads,
):
    for _name, _teach in _part.TAUGHT.items():
        when_imported(_name, _teach)
