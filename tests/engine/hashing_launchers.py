"""Ways to run a hashing runner's steps beside the scheduling of the next: as late as possible, or at random times."""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from hybrid_runtime.engine.launching import FlyingStep, StepLauncher, StepOutcome, ThreadLauncher
from tests.engine.hashing_runner import HashingRunner, PreparedStep

OverlapKind = Literal["late", "thread"]
DELAYS = (0.0, 0.0, 0.0, 1e-5, 1e-4, 5e-4)  # seconds


def launcher_of(kind: OverlapKind, runner: HashingRunner, *, seed: int = 0) -> StepLauncher:
    """`kind`: "late" runs each step when it is waited for, "thread" in a thread, with random delays from `seed`."""
    if kind == "late":
        return LateLauncher(runner)
    delays = random.Random(seed)
    runner.delay = lambda: time.sleep(delays.choice(DELAYS))
    model_runner: Any = runner
    return ThreadLauncher(model_runner)


class LateLauncher:
    """Runs no step before it must: what is scheduled, applied and freed meanwhile must not matter to it."""

    def __init__(self, runner: HashingRunner) -> None:
        self.runner = runner
        self.steps: deque[LateStep] = deque()

    def launch(self, prepared: Any) -> FlyingStep:
        self.steps.append(LateStep(self, prepared))
        return self.steps[-1]

    def finish(self) -> None:
        while self.steps:
            self.steps[0].run()

    def discard(self) -> None:
        self.steps.clear()

    def close(self) -> None:
        self.discard()


@dataclass(eq=False)
class LateStep:
    launcher: LateLauncher
    prepared: PreparedStep
    outcome: StepOutcome | None = None

    def run(self) -> None:
        assert self.launcher.steps.popleft() is self
        try:
            self.outcome = StepOutcome(self.launcher.runner.launch(self.prepared).wait())
        except BaseException as error:
            self.launcher.steps.clear()  # they find what it left half done
            self.outcome = StepOutcome([], error)

    def wait(self) -> StepOutcome:
        if self.outcome is None:
            self.run()
        assert self.outcome is not None
        return self.outcome
