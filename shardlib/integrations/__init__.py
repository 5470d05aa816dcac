"""Parts of torch that access tensors without the dispatcher, patched to support or refuse a `ShardedTensor`.

Ops reach `ShardedTensor` through torch's dispatcher. A few parts of torch read memory or types themselves: c10d,
wrappers of modules, the functions around checkpoints, the compiler. Each has a file here. Nothing is imported for this:
a module is patched when a program imports it.
"""

from shardlib.integrations import (  # noqa: F401  (each registers its patches)
    autograd,
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
