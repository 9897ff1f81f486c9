"""A contender of a benchmark as a process of its own, pinned to its cores: it measures when told to, so contenders take turns.

Its program prints one line of facts as JSON, then a rate for every line that it reads, until its input ends.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence


class Child:
    """`command` on `cores`; `facts` is what it said of itself."""

    def __init__(self, command: Sequence[str], cores: Sequence[int], environment: Mapping[str, str]):
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, cores) if hasattr(os, "sched_setaffinity") else None,
        )  # fmt: skip
        self.facts = json.loads(self.process.stdout.readline())

    def start(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def rate(self) -> float:
        return float(self.process.stdout.readline())

    def end(self) -> None:
        self.process.communicate()
