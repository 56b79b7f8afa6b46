"""Ways to run prepared steps, one after the other: in the calling thread, or in a thread of their own.

A step that is launched behind another finds the pools as that one leaves them.
"""

from __future__ import annotations

import queue
import threading
import weakref
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from hybrid_runtime.engine.prepared import PreparedStep
from hybrid_runtime.engine.results import ForwardResult
from hybrid_runtime.engine.runner import LaunchedStep, ModelRunner

_POLL_SECONDS = 1.0  # after which who waits looks whether the thread is still there: a fork leaves it behind


@dataclass(frozen=True)
class StepOutcome:
    """What came of a step: the results of its forwards, or what one of them raised."""

    results: list[ForwardResult]
    error: BaseException | None = None


class FlyingStep(Protocol):
    """A step that was launched."""

    def wait(self) -> StepOutcome:
        """Blocks until the step is over. An exception that comes out of here is not the step's: wait again."""


class StepLauncher(Protocol):
    """Runs steps in the order in which they are launched."""

    def launch(self, prepared: PreparedStep) -> FlyingStep:
        """Starts a step. What its forwards raise is its outcome; an interrupt of the calling thread gets out."""

    def finish(self) -> None:
        """Blocks until the host may write to the pools."""

    def discard(self) -> None:
        """Drops the steps that have not begun and waits for the one that has. Nobody may wait for them afterwards."""

    def close(self) -> None:
        """As `discard`, for good. May be called any number of times."""


class DirectLauncher:
    """Runs steps in the calling thread; on a CUDA device that only enqueues them.

    What the host does to the pools goes through the same stream, so there is nothing to wait for.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, prepared: PreparedStep) -> FlyingStep:
        try:
            return _Launched(self._runner.launch(prepared))
        except Exception as error:
            return _Failed(error)

    def finish(self) -> None:
        pass

    def discard(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class _Launched:
    step: LaunchedStep

    def wait(self) -> StepOutcome:
        try:
            return StepOutcome(self.step.wait())
        except Exception as error:
            return StepOutcome([], error)


@dataclass(frozen=True)
class _Failed:
    error: Exception

    def wait(self) -> StepOutcome:
        return StepOutcome([], self.error)


class ThreadLauncher:
    """Runs steps in a thread of its own, so that the calling one schedules the next meanwhile. For a CPU.

    The thread starts with the first step. It ends with `close`, or when nobody has the launcher any more.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._worker: _Worker | None = None
        self._run = _Run()

    def launch(self, prepared: PreparedStep) -> FlyingStep:
        worker = self._worker
        if worker is None or not worker.thread.is_alive():  # none yet, or lost by a fork
            worker = _Worker(self._runner)
            weakref.finalize(self, worker.tasks.put, None)
            self._worker = worker
        step = _QueuedStep(worker.thread, prepared, self._run)
        worker.tasks.put(step)
        return step

    def finish(self) -> None:
        worker = self._worker
        if worker is not None and worker.thread.is_alive():
            marker = _Task(worker.thread)
            worker.tasks.put(marker)
            marker.wait_until_done()

    def discard(self) -> None:
        self._run.is_over = True
        self.finish()
        self._run = _Run()

    def close(self) -> None:
        self.discard()
        worker = self._worker
        if worker is not None:
            worker.tasks.put(None)
            worker.thread.join()
            self._worker = None


@dataclass
class _Run:
    """Steps that are launched one behind the other. When one fails the others are not run."""

    is_over: bool = False


@dataclass(eq=False)
class _Task:
    """Something for the thread to come to."""

    thread: threading.Thread
    is_done: threading.Event = field(default_factory=threading.Event, init=False)

    def run(self, runner: ModelRunner) -> None:
        pass

    def wait_until_done(self) -> bool:
        """False if that will never be: the thread is gone."""
        while not self.is_done.wait(_POLL_SECONDS):
            if not self.thread.is_alive():
                return self.is_done.is_set()
        return True


@dataclass(eq=False)
class _QueuedStep(_Task):
    prepared: PreparedStep
    of_run: _Run
    outcome: StepOutcome = field(default_factory=lambda: StepOutcome([], RuntimeError("the step was not run")))

    def run(self, runner: ModelRunner) -> None:
        if self.of_run.is_over:
            return
        try:
            self.outcome = StepOutcome(runner.launch(self.prepared).wait())
        except BaseException as error:
            self.of_run.is_over = True
            self.outcome = StepOutcome([], error)

    def wait(self) -> StepOutcome:
        if not self.wait_until_done():
            return StepOutcome([], RuntimeError("the thread that runs the steps is gone"))
        return self.outcome


_Tasks: TypeAlias = "queue.SimpleQueue[_Task | None]"


class _Worker:
    """A thread with what it has to do. It knows nothing of the launcher, which may go before it."""

    def __init__(self, runner: ModelRunner) -> None:
        self.tasks: _Tasks = queue.SimpleQueue()
        self.thread = threading.Thread(target=_work, args=(runner, self.tasks), name="steps", daemon=True)
        self.thread.start()


def _work(runner: ModelRunner, tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task.run(runner)
        task.is_done.set()
        del task  # what it holds must not wait for the next one
