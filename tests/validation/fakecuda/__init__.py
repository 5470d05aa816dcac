"""A GPU's rules without a GPU: programs for device cuda on fake tensors.

torch's fake tensors take `device="cuda"` on any machine, refuse to mix devices, and have no values that anything could
read. `gpu` makes such a world, `ranks` puts a fake process group for NCCL into it, `watch` looks at every op that a
program calls there, `programs` lists the programs: all rules' samples, W1, models of transformers, eager ops.

`python -m tests.validation.fakecuda --report` runs them all and writes REPORT.md.
"""
