"""The OpInfo sweep: every op that PyTorch itself tests, under many shardings, against plain torch on one device.

`python -m tests.validation.sweep --out sweep.jsonl` runs everything (it may be stopped and started again) and prints
the table; `python -m tests.validation.sweep --only linalg.qr` runs one entry. One unit of work is a *cell*: an entry of
torch's `op_db`, with even or uneven sizes, on one mesh, eagerly or jitted. A cell is a fixed list of trials, each a
sample of the entry under one placement of its tensors; a trial compares values, shapes, dtypes and gradients.

`entries` reads `op_db`, `placements` lists where tensors may live, `trial` runs one of them in three ways, `cell` runs
all of one cell and says how it came out, `workers` runs cells in processes of their own, `report` makes the table.
"""
