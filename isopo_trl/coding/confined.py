"""
The program of the process in which a completion runs, started by `sandbox.py` as `python -I -S confined.py`.

It reads a job, imports those of `MODULES` that the source names, takes its limits, gives up its rights and all system
calls but those of `CALLS`, says `READY`, and only then runs the source. From there on it answers lines with lines:
positional and named arguments with what the function returns, as [`literal`] writes them.

A completion has the whole interpreter to itself. It can change any name, including those of this file, and write any
line. So nothing of what is expected is here, and what comes out is compared by the other side of the pipe.
"""

import sys


READY, PASSED, ERROR = b"ready", b"passed", b"error"

# What a source may import; they are read before files can no longer be opened
MODULES = frozenset(
    "abc array bisect calendar cmath collections contextlib copy dataclasses datetime decimal enum fractions "
    "functools hashlib heapq io itertools json math numbers operator os queue random re statistics string struct sys "
    "textwrap threading time types typing unicodedata".split()
)
# What these import only where a function of theirs needs it: in all of them, or by a word of the source
ALWAYS = ("unicodedata", "warnings")
LATER = {
    "collections": ("collections.abc",),
    **dict.fromkeys(("most_common", "mode"), ("heapq",)),
    **dict.fromkeys(("singledispatch", "singledispatchmethod"), ("typing", "weakref")),
    **dict.fromkeys(("ContextManager", "AsyncContextManager"), ("contextlib",)),
    **dict.fromkeys(("Match", "Pattern", "expandvars"), ("re",)),
    "coroutine": ("functools",),
    "runtime_checkable": ("inspect",),
    "strptime": ("_strptime",),
    "UserDict": ("copy",),
}

# Numbers of system calls (asm/unistd.h) by machine, and its own in the filter (linux/audit.h). They reach the memory
# of the process, its clock, its signal handlers and its two pipes: no file, no socket, no other process
CALLS = {
    "x86_64": {
        "architecture": 0xC000003E,
        **{"read": 0, "write": 1, "close": 3, "fstat": 5, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11},
        **{"brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "sched_yield": 24, "mremap": 25},
        **{"getpid": 39, "exit": 60, "gettimeofday": 96, "sigaltstack": 131, "gettid": 186},
        **{"time": 201, "futex": 202, "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229},
        **{"exit_group": 231, "getrandom": 318},
    },
    "aarch64": {
        "architecture": 0xC00000B7,
        **{"read": 63, "write": 64, "close": 57, "fstat": 80, "lseek": 62, "mmap": 222, "mprotect": 226},
        **{"munmap": 215, "brk": 214, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139},
        **{"sched_yield": 124, "mremap": 216, "getpid": 172, "exit": 93, "gettimeofday": 169},
        **{"sigaltstack": 132, "gettid": 178, "futex": 98, "restart_syscall": 128, "clock_gettime": 113},
        **{"clock_getres": 114, "exit_group": 94, "getrandom": 278},
    },
}
DEPTH = 100  # of containers within containers
PLAIN: list = [int, float, str, bytes, complex]
# Names in the text of numbers that Python has no literals for
NAMED = {"inf": float("inf"), "nan": float("nan"), "infj": complex(0, float("inf")), "nanj": complex(0, float("nan"))}


def literal(value, sort=False, depth=0):
    """
    `value` as Python writes it, in one line. With `sort`, equal dictionaries have one text, whatever their order;
    equal sets do always. A subclass counts as the builtin type that it comes from.
    """
    if depth > DEPTH:
        raise ValueError(f"a value of more than {DEPTH} containers within one another")
    if value is None or isinstance(value, bool):
        return repr(value)
    for kind in PLAIN:
        if isinstance(value, kind):
            return ascii(value if type(value) is kind else kind(value))
    if isinstance(value, dict):
        pairs = [f"{literal(key, sort, depth + 1)}:{literal(item, sort, depth + 1)}" for key, item in value.items()]
        return "{" + ",".join(sorted(pairs) if sort else pairs) + "}"
    if isinstance(value, list | tuple):
        text = "".join(literal(item, sort, depth + 1) + "," for item in value)
        return f"[{text}]" if isinstance(value, list) else f"({text})"
    if isinstance(value, set | frozenset):
        text = ",".join(sorted(literal(item, sort, depth + 1) for item in value))
        return "{" + text + "}" if text else "set()"
    raise TypeError(f"a {type(value).__name__} is none of Python's own plain values")


def read(text):
    """The plain value whose text this is, as [`literal`] or a person writes it; an error where it is anything else."""
    import ast

    class Known(ast.NodeTransformer):
        def visit_Name(self, node):
            return ast.Constant(NAMED[node.id]) if node.id in NAMED else node

    return ast.literal_eval(Known().visit(ast.parse(text.strip(), mode="eval")))


def take_limits(processor_seconds, memory):
    """No more than so many seconds of a processor and bytes of address space; no file of any size, process or core."""
    import resource

    for what, limit in (
        (resource.RLIMIT_CPU, processor_seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        most = resource.getrlimit(what)[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(what, (limit, limit))


def give_up_rights():
    """
    End with the thread that started this process, leave no core file behind, and have no capability, even as root. No
    program that it might run would have more.
    """
    import ctypes
    import os

    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    none = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: twice 32 of each
    if libc.capset(header, none):
        raise OSError(f"capset is refused: {os.strerror(ctypes.get_errno())}")
    control("PR_SET_PDEATHSIG", 1, 9)
    control("PR_SET_DUMPABLE", 4, 0)
    control("PR_SET_NO_NEW_PRIVS", 38, 1)


def control(name, *arguments):
    """Set something of this process (`prctl`); an `OSError` says what is refused, and why."""
    import ctypes
    import os

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if prctl(*arguments, *[0] * (5 - len(arguments))):
        raise OSError(f"{name} is refused: {os.strerror(ctypes.get_errno())}")


def give_up_calls():
    """Let every system call but those of `CALLS` fail, for good; an `OSError` says why that cannot be."""
    import ctypes
    import os

    machine = os.uname().machine
    if sys.platform != "linux" or machine not in CALLS or sys.maxsize < 2**32:
        raise OSError(f"no list of system calls for {sys.platform} on {machine}")
    calls = dict(CALLS[machine])
    architecture = calls.pop("architecture")
    load, equal, give = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
    kill, refuse, allow = 0x80000000, 0x00050000 | 1, 0x7FFF0000  # the process; with EPERM
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    left = len(calls)
    for number in calls.values():
        program.append((equal, left, 0, number))
        left -= 1
    program += [(give, 0, 0, refuse), (give, 0, 0, allow)]

    class Instruction(ctypes.Structure):
        _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("k", ctypes.c_uint)]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("first", ctypes.POINTER(Instruction))]

    instructions = (Instruction * len(program))(*[Instruction(*parts) for parts in program])
    rules = Program(len(program), instructions)
    control("PR_SET_SECCOMP", 22, 2, ctypes.addressof(rules))  # SECCOMP_MODE_FILTER


def prepare(source):
    """Import what the source names, and what that imports later."""
    words = set("".join(letter if letter.isalnum() or letter == "_" else " " for letter in source).split())
    for name in (*ALWAYS, *MODULES & words):
        __import__(name)
    for word in LATER.keys() & words:
        for name in LATER[word]:
            __import__(name)


def main():
    import os

    requests, answers, nothing = os.dup(0), os.dup(1), os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):  # what the source prints goes nowhere
        os.dup2(nothing, descriptor)
    os.close(nothing)
    lines = open(requests, "rb")

    def send(line):
        line += b"\n"
        while line:
            line = line[os.write(answers, line) :]

    def receive():
        return lines.readline().decode()[:-1]

    processor_seconds, memory, source, function, checks = eval(receive())
    prepare(source + checks)
    if checks:
        __import__("ast")  # for `read`
    try:
        take_limits(processor_seconds, memory)
        give_up_rights()
        give_up_calls()
    except (OSError, ValueError, ImportError, AttributeError) as error:
        send(ascii(str(error)).encode())
        return
    send(READY)
    names: dict = {"__name__": "solution"}
    exec(compile(source, "solution", "exec"), names)
    if checks:

        def candidate(*arguments, **named):
            send(literal((arguments, named)).encode())
            return read(receive())

        names[function] = candidate
        exec(compile(checks, "checks", "exec"), names)
        names["check"](candidate)
        send(PASSED)
        return
    called = names[function]
    while request := receive():
        try:
            arguments, named = eval(request, dict(NAMED))
            answer = literal(called(*arguments, **named), sort=True).encode()
        except BaseException:
            answer = ERROR
        send(answer)


if __name__ == "__main__":
    import os

    try:
        main()
    finally:
        os._exit(0)  # nothing that the source has left to be run at the end
