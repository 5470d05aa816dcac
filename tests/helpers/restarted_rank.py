"""One rank of `shardlib.examples.restarts` that a test starts by torchrun, and that may be killed once.

The folder holds `kill.json`: a rank, and a shell command that returns when it is to be killed. A rank's errors are in
`errors/START.RANK`, where START is the time of its start in ns; the time of the kill is in `killed`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from shardlib.examples import restarts


def main() -> int:
    folder = Path(sys.argv[sys.argv.index("--out") + 1])
    rank = int(os.environ["RANK"])
    errors = folder / "errors" / f"{time.time_ns()}.{rank}"
    errors.parent.mkdir(exist_ok=True)
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
    kill = folder / "kill.json"
    if kill.exists() and not (folder / "killed").exists():
        victim, moment = json.loads(kill.read_text())
        if rank == victim:
            script = f"{moment}; date +%s%N > {folder}/killed; kill -9 {os.getpid()}"
            subprocess.Popen(["sh", "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return restarts.main()


if __name__ == "__main__":
    sys.exit(main())
