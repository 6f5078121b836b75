"""
Completions run in processes of their own, which can compute and nothing else.

Each process is fresh, has limits of time and memory, and can make no system call but the few of `confined.CALLS`: it
opens no file and no socket, starts no process or thread, sends no signal. It is ended when its verdict is known. What
it answers is compared as text, and never parsed here.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .confined import PASSED, READY, literal, read


PROGRAM = Path(__file__).with_name("confined.py")
DAY = 24 * 60 * 60
START = 120  # seconds until a process must have started, on a machine that has much else to do
REFUSAL = (
    "Completions are not run here, since their process cannot be confined: {reason}. That needs Linux on x86_64 or "
    "aarch64, with seccomp filters, and Python with ctypes. On other systems, a Linux container or virtual machine "
    "has all of it."
)
UNREADABLE = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)  # what `read` raises


@dataclass(frozen=True)
class Limits:
    """
    What one completion may take.

    Args:
        processor_seconds (`int`): time on a processor, at most a day, the start of the interpreter (some hundredths)
            included.
        seconds (`float`): time by the clock, which ends a completion that waits; at most a day.
        memory (`int`): bytes of address space, from 64 MiB, which the interpreter needs, to 1 TiB.
        answer (`int`): bytes of one answer; at most 1 GiB.
    """

    processor_seconds: int = 4
    seconds: float = 30.0
    memory: int = 512 * 2**20
    answer: int = 2**16

    def __post_init__(self):
        whole = {"processor_seconds": (1, DAY), "memory": (64 * 2**20, 2**40), "answer": (1, 2**30)}
        for name, (least, most) in whole.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"{name}={value!r} must be a whole number from {least} to {most}.")
        if not 0 < self.seconds <= DAY:
            raise ValueError(f"seconds={self.seconds} must be positive, and at most {DAY}, which is a day.")


class Ended(Exception):
    """The process is at its end or at one of its limits."""


class Confined:
    """
    A process in which a source runs, as a context manager: at its end the process is gone.

    Args:
        source (`str`): defines `function`.
        function (`str`): what is called, or, with `checks`, what the checks call.
        limits ([`Limits`]): of the process.
        checks (`str`): code that defines `check(candidate)`. The process then runs the checks: it asks for what the
            candidate returns, and ends with `PASSED`. The candidate itself runs in another one.
    """

    def __init__(self, source: str, function: str, limits: Limits, checks: str = ""):
        if sys.platform != "linux":
            raise RuntimeError(REFUSAL.format(reason=f"this is {sys.platform}"))
        self.limits = limits
        environment = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env=environment,
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.to, self.back = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.to, False)
        self.read = b""
        self.deadline = time.monotonic() + START
        job = literal((limits.processor_seconds, limits.memory, source, function, checks))
        try:
            started = self.ask(job.encode())
        except Ended:
            started = b"it said nothing"
        except BaseException:
            self.end()
            raise
        if started != READY:
            self.end()
            raise RuntimeError(REFUSAL.format(reason=started.decode(errors="replace")))
        self.deadline = time.monotonic() + limits.seconds

    def ask(self, *requests: bytes) -> bytes:
        """The next line of the process, once it has been sent these; raises `Ended` where there is none."""
        unsent = b"".join(request + b"\n" for request in requests)
        while True:
            end = self.read.find(b"\n")
            if end >= 0 and not unsent:
                line, self.read = self.read[:end], self.read[end + 1 :]
                return line
            if len(self.read) > self.limits.answer:
                raise Ended
            poll = select.poll()
            if end < 0:
                poll.register(self.back, select.POLLIN)
            if unsent:
                poll.register(self.to, select.POLLOUT)
            left = self.deadline - time.monotonic()
            ready = poll.poll(left * 1000) if left > 0 else []
            if not ready:
                raise Ended
            for descriptor, _ in ready:
                if descriptor == self.to:
                    try:
                        unsent = unsent[os.write(self.to, unsent) :]
                    except BrokenPipeError:
                        raise Ended from None
                elif chunk := os.read(self.back, self.limits.answer + 1 - len(self.read)):
                    self.read += chunk
                else:
                    raise Ended

    def end(self) -> None:
        """Kill the process, which is the only one there is, and wait until it is gone."""
        with self.process:  # which closes the pipes
            self.process.kill()

    def __enter__(self) -> "Confined":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def share_passed(
    source: str, function: str, tests: Sequence[Sequence[str]], limits: Limits, partial: bool = True
) -> float:
    """
    Share of `tests` that a source's function passes; unless `partial`, 0.0 from the first one that it does not.

    Args:
        tests (`Sequence[Sequence[str]]`): arguments, and what is to come back, as [`~coding.literal`] writes them,
            or as a person does.
    """
    passed, exchanges = 0, [in_form(test) for test in tests]
    with Confined(source, function, limits) as process:
        try:
            for request, expected in exchanges:
                right = process.ask(request) == expected
                passed += right
                if not (right or partial):
                    return 0.0
        except Ended:
            pass
    return passed / len(tests) if partial or passed == len(tests) else 0.0


def in_form(test: Sequence[str]) -> tuple[bytes, bytes]:
    """What a test sends to a process, and what is to come back, byte for byte: equal values have one text."""
    if len(test) != 2 or not all(isinstance(text, str) for text in test):
        raise TypeError(
            f"{list(test)!r} is no test: give arguments and result, both as text, such as "
            "[literal((1, 2)), literal(3)], with literal of isopo_trl.coding."
        )
    arguments, result = test
    try:
        given = read(arguments)
    except UNREADABLE:
        request = f"(({arguments}),{{}})"
    else:
        if not isinstance(given, list | tuple):
            raise ValueError(f"The arguments of a test, {arguments}, are no tuple: write ({arguments},).")
        request = f"({literal(given)},{{}})"
    try:
        expected = literal(read(result), sort=True)
    except UNREADABLE:  # such as a set of sets, which `literal` writes and nothing reads
        expected = result
    return request.encode(), expected.encode()


def passes(source: str, function: str, head: str, checks: str, limits: Limits) -> bool:
    """
    Whether a source's function passes checks, code that defines `check(candidate)`. They run in a process of their
    own, after `head`, and get plain values from that of the source.
    """
    with Confined(source, function, limits) as candidate, Confined(head, function, limits, checks) as checker:
        try:
            request = checker.ask()
            while request != PASSED:
                request = checker.ask(candidate.ask(request))
        except Ended:
            return False
    return True
