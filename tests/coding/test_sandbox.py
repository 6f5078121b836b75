"""A completion gets the reward that its answers deserve, and nothing else comes of it, whatever it tries."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from isopo_trl.coding import Limits, sandbox
from isopo_trl.coding.confined import CALLS, MODULES, literal, read
from isopo_trl.coding.sandbox import Confined, in_form, passes, share_passed
from tests.coding.confinement import confines


PLENTY = Limits(processor_seconds=60, seconds=600)
SCARCE = Limits(processor_seconds=1, seconds=20, memory=96 * 2**20)
RIGHT = "def f(x):\n    return x + 1\n"
TESTS = [(literal((n,)), literal(n + 1)) for n in range(3)]
LIBC = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"

# What is tried before a right answer is given: where it works, the reward is 1
ATTEMPTS = {
    "end": "raise SystemExit(0)",
    "end_at_once": "import os; os._exit(0)",
    "end_on_end": "import sys; sys.exit()",
    "loop": "while True: pass",
    "loop_and_ignore_signals": "import _signal\n_signal.signal(15, _signal.SIG_IGN)\nwhile True: pass",
    "loop_in_native_code": "sum(range(10**15))",
    "loop_and_print": "while True: print('x' * 10**6)",
    "wait": "import time; time.sleep(10**6)",
    "fork": "import os; os.fork()",
    "fork_in_native_code": LIBC + "assert libc.fork() >= 0",
    "daemon": "import os\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)",
    "thread": "import threading; threading.Thread(target=int).start()",
    "run_a_program": "import os; os.execv('/bin/true', ['true'])",
    "run_a_shell": "import os\nassert os.system('true') == 0",
    "new_session": "import os; os.setsid()",
    "network": LIBC + "assert libc.socket(2, 1, 0) >= 0",
    "local_network": LIBC + "assert libc.socket(1, 1, 0) >= 0",
    "much_memory_at_once": "x = bytes(2**29)",
    "much_memory_bit_by_bit": "x = []\nwhile True: x.append(bytearray(2**20))",
    "take_more_memory": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
    "shared_memory": LIBC + "assert libc.shmget(0, 4096, 0o1666) >= 0",
    "advice_on_memory": LIBC + "assert libc.madvise(None, 0, 4) == 0",
    "file_in_memory": "import os; os.memfd_create('x')",
    "write_a_file": "open({file!r}, 'a').write('x')",
    "make_a_file": "open({file!r} + '.new', 'w')",
    "make_a_folder": "import os; os.mkdir({file!r} + '.new')",
    "remove_a_file": "import os; os.remove({file!r})",
    "cut_a_file": "import os; os.truncate({file!r}, 0)",
    "rename_a_file": "import os; os.rename({file!r}, {file!r} + '.new')",
    "change_a_file's_rights": "import os; os.chmod({file!r}, 0)",
    "read_a_file": "open({file!r}).read()",
    "list_a_folder": "import os; os.listdir('/')",
    "read_the_parent's_memory": "open('/proc/{parent}/mem', 'rb')",
    "read_the_parent's_environment": "open('/proc/{parent}/environ', 'rb')",
    "attach_to_the_parent": LIBC + "assert libc.ptrace(0x4206, {parent}, 0, 0) == 0",
    "kill_the_parent": "import os; os.kill({parent}, 0)",
    "kill_the_parent_in_native_code": LIBC + "assert libc.kill({parent}, 0) == 0",
    "kill_the_group": "import os; os.killpg(0, 0)",
    "limit_the_parent": "import resource\nresource.prlimit({parent}, resource.RLIMIT_CPU)",
    "slow_the_parent": LIBC + "assert libc.getpriority(0, {parent}) != -1 or libc.setpriority(0, {parent}, 0) == 0",
    "import_a_package": "import subprocess",
    "fail_in_native_code": "import ctypes; ctypes.string_at(0)",
    "endless_recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef g(): g()\ng()",
    "no_python": "def f(x) return x",
    "half_a_character": "'\ud800'",
    "a_null_character": "'\0'",
}


@pytest.fixture
def traces(tmp_path, capfd):
    """A file that has to stay as it is; afterwards nothing has been printed, and no process is left."""
    file = tmp_path / "file"
    file.write_text("kept")
    yield file
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and file.read_text() == "kept"
    assert file.stat().st_mode & 0o600 == 0o600
    assert capfd.readouterr() == ("", "")
    assert not processes()


def processes():
    """Numbers of the processes of completions that this one has."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"confined.py" in (folder / "cmdline").read_bytes():
                found.append(folder.name)
        except OSError:  # it has just ended
            pass
    return found


@confines
def test_right_functions_pass(traces):
    assert share_passed(RIGHT, "f", TESTS, PLENTY, partial=False) == 1.0
    printing = "import math, re, hashlib, datetime\nprint('x' * 10**6)\n" + RIGHT.replace(":\n", ":\n    print(x)\n")
    assert share_passed(printing, "f", TESTS, PLENTY) == 1.0
    recursive = "def f(x):\n    return 1 if x == 0 else 1 + f(x - 1)\n"
    assert share_passed(recursive, "f", [("(300,)", "301")], PLENTY) == 1.0
    large = "def f(x):\n    y = [bytearray(2**20) for _ in range(300)]\n    del y[::2]\n    return x + len(y) - 149\n"
    assert share_passed(large, "f", TESTS, PLENTY) == 1.0
    standard = "from datetime import datetime\nimport random, hashlib\n\ndef f(x):\n    random.random()\n"
    standard += "    return hashlib.md5(str(datetime.strptime(x, '%Y').year).encode()).hexdigest()\n"
    assert share_passed(standard, "f", [("('2020',)", "'7b7a53e239400a13bd6be6c91c4f6c4e'")], PLENTY) == 1.0


# What modules import only once a function of theirs is called
LATER = {
    "collections.Counter(x).most_common(1)": ("'aab'", [("a", 2)]),
    "statistics.mode(x)": ("[3, 1, 3]", 3),
    "functools.singledispatch(len)(x)": ("'abc'", 3),
    "time.strptime(x, '%Y').tm_year": ("'2020'", 2020),
    "datetime.datetime.strptime(x, '%Y').year": ("'2020'", 2020),
    "x + '\\N{DEGREE SIGN}'": ("'20'", "20\u00b0"),
    "re.findall('\\\\N{DEGREE SIGN}', x)": ("'20\u00b0'", ["\u00b0"]),
    "re.findall('[[a]', x)": ("'ab'", ["a"]),  # which warns
    "collections.UserDict(a=x).copy()['a']": ("1", 1),
    "isinstance(x, typing.runtime_checkable(type('P', (typing.Protocol,), {})))": ("1", True),
    "bool(typing.Pattern) and x": ("1", 1),
    "os.path.expandvars(x)": ("'$none'", "$none"),
    "calendar.monthrange(x, 2)[1]": ("2020", 29),
    "str(fractions.Fraction(decimal.Decimal(x)))": ("'0.5'", "1/2"),
    "x.encode('utf-16').decode('utf-16').encode('latin-1').decode('ascii')": ("'a'", "a"),
}


@confines
@pytest.mark.parametrize("expression", LATER)
def test_what_modules_import_later_is_there(expression):
    argument, result = LATER[expression]
    modules = set(re.findall(r"\w+", expression)) & MODULES
    source = "".join(f"import {name}\n" for name in modules) + f"def f(x):\n    return {expression}\n"
    assert share_passed(source, "f", [(f"({argument},)", literal(result))], PLENTY) == 1.0


@confines
@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_is_tried_fails_and_leaves_nothing(name, traces):
    parts = {"{file!r}": repr(str(traces)), "{parent}": str(os.getpid())}
    source = ATTEMPTS[name]
    for part, value in parts.items():
        source = source.replace(part, value)
    assert share_passed(f"{source}\n{RIGHT}", "f", TESTS, SCARCE) == 0.0


# What is given for an answer, each of them wrong
FORGED = {
    "a_number_equal_to_all": "class All(int):\n    def __eq__(self, other): return True\ndef f(x): return All(0)",
    "a_thing_equal_to_all": "class All:\n    def __eq__(self, other): return True\ndef f(x): return All()",
    "a_thing_that_prints_well": "class All:\n    def __repr__(self): return '1'\ndef f(x): return All()",
    "other_functions": "import builtins\nbuiltins.ascii = builtins.repr = lambda x: 'passed'\ndef f(x): return 0",
    "no_asserts": "import builtins\nbuiltins.AssertionError = None\ndef f(x): return 0",
    "markers": "print('ready\\npassed\\n' * 9)\nimport os\nfor n in range(3, 9):\n    try:\n"
    "        os.write(n, b'passed\\n' * 9)\n    except OSError: pass\ndef f(x): return 0",
    "an_end": "def f(x): raise SystemExit(0)",
    "much": "def f(x): return 'x' * 10**7",
    "much_without_end": "import os\nfor n in range(3, 9):\n    try:\n        while True: os.write(n, b'x' * 10**5)\n"
    "    except OSError: pass",
    "a_circle": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "depth": "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    "what_frames_know": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        for name, value in {**frame.f_globals, **frame.f_locals}.items():\n"
    "            if '90' + '210' in repr(value) and name != 'source': return 90210\n        frame = frame.f_back",
    "another_type": "def f(x): return str(x + 90209)",
}


@confines
@pytest.mark.parametrize("name", FORGED)
def test_no_answer_is_right_but_the_right_one(name, traces):
    assert share_passed(FORGED[name], "f", [("(1,)", "90210")], SCARCE) == 0.0
    checks = "def check(candidate):\n    assert candidate(1) == 90210\n"
    assert not passes(FORGED[name], "f", "", checks, SCARCE)


@confines
def test_who_waits_is_ended_by_the_clock(traces):
    limits = Limits(processor_seconds=60, seconds=0.3)
    for waiting in ("lock = __import__('threading').Lock()\nwith lock, lock: pass", "__import__('os').read(3, 99)"):
        assert share_passed(f"{waiting}\n{RIGHT}", "f", TESTS, limits) == 0.0
    # More is asked than the pipe takes, and nothing is read
    with Confined("lock = __import__('threading').Lock()\nwith lock, lock: pass", "f", limits) as process:
        with pytest.raises(sandbox.Ended):
            process.ask(b"x" * 10**6)


@confines
def test_a_share_of_the_tests_counts_only_if_asked_for():
    half = "def f(x):\n    if x == 2:\n        raise ValueError\n    return x + (x < 2)\n"
    tests = [(literal((n,)), literal(n + 1)) for n in range(4)]
    assert share_passed(half, "f", tests, PLENTY, partial=True) == 0.5
    assert share_passed(half, "f", tests, PLENTY, partial=False) == 0.0
    ending = "import os\ndef f(x):\n    return x + 1 if x < 3 else os._exit(0)\n"
    assert share_passed(ending, "f", tests, PLENTY, partial=True) == 0.75
    assert share_passed(ending, "f", tests, PLENTY, partial=False) == 0.0


@confines
def test_checks_call_the_function_and_what_stands_before_it(traces):
    head = "def half(x):\n    return x / 2\n\ndef f(x):\n    '''More.'''\n"
    checks = """
from random import random

def check(candidate):
    for _ in range(20):
        x = random()
        assert abs(candidate(half(x)) - half(x) - 1) < 1e-9, "no"
    assert f([1]) == ([1], {"b": 1, "a": None}) and list(f({"b": 1, "a": 2})) == ["b", "a"]
"""
    right = head + "    return list(x) if isinstance(x, dict) else x + 1 if isinstance(x, float) else "
    assert passes(right + "(x, {'a': None, 'b': 1})", "f", head, checks, PLENTY)
    assert not passes(right + "[x, {'a': None, 'b': 1}]", "f", head, checks, PLENTY)  # no tuple
    assert not passes("def half(x): return 0\n" + RIGHT, "f", head, checks, PLENTY)
    assert not passes(
        right + "(x, {'a': None, 'b': 1})", "f", head, "def check(candidate):\n    while True: pass", SCARCE
    )


@confines
def test_numbers_without_a_literal_and_named_arguments_are_passed_on():
    echo = "def f(x, *more, y=0, **others):\n    return x, y, more, others\n"
    checks = """
from math import copysign, inf, isnan, nan

def check(candidate):
    assert candidate(1, y=2) == (1, 2, (), {}) and candidate(y=1, x=2) == (2, 1, (), {})
    assert candidate(1, 2, 3, z=[4]) == (1, 0, (2, 3), {"z": [4]})
    (x, y, *_), (z, *_) = candidate(-inf, y=inf), candidate(complex(-inf, inf))
    assert (x, y) == (-inf, inf) and z == complex(-inf, inf) and copysign(1, candidate(-0.0)[0]) == -1
    x, y, *_ = candidate([nan], y=complex(1, nan))
    assert isnan(x[0]) and y.real == 1 and isnan(y.imag)
"""
    assert passes(echo, "f", "", checks, PLENTY)
    assert not passes("def f(x):\n    return x\n", "f", "", checks, PLENTY)
    numbers = [literal((value,)) for value in (float("inf"), float("-inf"), float("nan"), complex("-inf+nanj"))]
    tests = [*((text, text) for text in numbers), ("(float('inf'), )", "(inf, )")]
    assert share_passed("def f(x):\n    return (x,)\n", "f", tests, PLENTY) == 1.0


@confines
def test_a_result_is_expected_however_it_is_written():
    returning = "def f(x):\n    return eval(x)\n"
    for answer, result in (
        ("{'b': 1, 'a': [{'d': 1, 'c': 2}]}", literal({"b": 1, "a": [{"d": 1, "c": 2}]})),
        ("[1, 2]", "[1, 2]"),
        ("(1, 'a')", ' (1, "a")\n'),
        ("{3, 20}", "{20, 3}"),
        ("-1.5", "-1.50"),
        ("[float('-inf'), float('nan')]", "[-inf, nan]"),
        ("{frozenset({1})}", literal({frozenset({1})})),
    ):
        assert share_passed(returning, "f", [(literal((answer,)), result)], PLENTY) == 1.0, result
    for answer, result in (("(1, 2)", "[1, 2]"), ("True", "1"), ("1", "1.0"), ("'[1, 2]'", "[1, 2]")):
        assert share_passed(returning, "f", [(literal((answer,)), result)], PLENTY) == 0.0, result


def test_a_test_that_is_none_is_an_error():
    for test in (["(1,)", 2], [(1,), "2"], ["(1,)", None], ["(1,)", "2", "3"]):
        with pytest.raises(TypeError, match="is no test: .* both as text"):
            in_form(test)
    with pytest.raises(ValueError, match=r"arguments of a test, 1, are no tuple: write \(1,\)"):
        in_form(["1", "2"])
    assert in_form(["(\n1, {'b': 2, 'a': 3})", "x"]) == (b"((1,{'b':2,'a':3},),{})", b"x")


def test_the_same_calls_are_allowed_on_all_machines():
    x86, arm = (set(CALLS[machine]) for machine in ("x86_64", "aarch64"))
    assert x86 - arm == {"time"} and not arm - x86  # which arm64 has only as clock_gettime


@confines
def test_a_process_has_no_capability():
    with Confined(RIGHT, "f", PLENTY) as process:
        status = Path(f"/proc/{process.process.pid}/status").read_text().split("\n")
    found = dict(line.split(":\t") for line in status if line.startswith("Cap"))
    assert {int(found[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}


@confines
def test_a_process_leaves_no_core_file():
    program = "import ctypes, confined; confined.give_up_rights(); print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    command = [sys.executable, "-c", program]  # 3 is PR_GET_DUMPABLE
    assert subprocess.run(command, cwd=sandbox.PROGRAM.parent, capture_output=True, text=True).stdout == "0\n"


@confines
def test_a_process_ends_with_the_thread_that_started_it():
    started = []
    thread = threading.Thread(target=lambda: started.append(Confined(RIGHT, "f", PLENTY)))
    thread.start()
    thread.join()
    assert started[0].process.wait(timeout=60) == -9
    started[0].end()


def test_where_a_process_cannot_be_confined_nothing_runs(tmp_path, monkeypatch):
    program = tmp_path / "confined.py"
    text = sandbox.PROGRAM.read_text()
    for machine in CALLS:
        text = text.replace(f'"{machine}"', '"another"')
    program.write_text(text)
    monkeypatch.setattr(sandbox, "PROGRAM", program)
    with pytest.raises(RuntimeError, match="not run here.*: .*seccomp filters.*container"):
        Confined(f"open({str(tmp_path / 'ran')!r}, 'w')", "f", PLENTY)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match="this is darwin"):
        Confined(f"open({str(tmp_path / 'ran')!r}, 'w')", "f", PLENTY)
    assert not (tmp_path / "ran").exists() and not processes()


@pytest.mark.parametrize(
    "setting",
    [
        *({"processor_seconds": value} for value in (0.5, 0, 1e3, 10**30)),
        *({"seconds": value} for value in (0, -1, 1e7, float("inf"), float("nan"))),
        *({"memory": value} for value in (2**20, 1e9, 2**63)),
        *({"answer": value} for value in (0, 1e4, 2**40)),
    ],
)
def test_limits_that_no_process_could_have_are_refused(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} must be ")):
        Limits(**setting)


@confines
def test_the_widest_limits_can_be_had():
    widest = Limits(processor_seconds=24 * 3600, seconds=24 * 3600, memory=2**40, answer=2**30)
    assert share_passed(RIGHT, "f", TESTS, widest) == 1.0


def test_a_literal_is_read_back_as_what_it_was():
    from ast import literal_eval

    values = [0, -5, True, None, 1.5, 1e300, "a'\"\n\u00e9\ud800", b"\0x", (), (1,), [], [1, [2]], set(), {2, 1}, {}]
    values += [{"b": [1], "a": {1: (None,)}}, 2 + 3j]
    for value in values:
        text = literal(value)
        assert literal_eval(text) == value and type(literal_eval(text)) is type(value) and text.isascii()
        assert read(text) == value and type(read(text)) is type(value)
        assert "\n" not in text
    assert literal({"b": 1, "a": 2}) == "{'b':1,'a':2}" and literal({"b": 1, "a": 2}, sort=True) == "{'a':2,'b':1}"
    assert literal({3, 20, 1}) == literal({20, 1, 3}) and literal([True]) != literal([1])
    number = type("Number", (int,), {"__repr__": lambda self: "7"})
    assert literal([number(3)]) == "[3,]"
    with pytest.raises(TypeError, match="object"):
        literal([object()])
    for text in ("x", "print(1)", "inf()", "nan.real", "1 if inf else 2", "[inf for inf in (1,)]"):
        with pytest.raises(ValueError, match="malformed"):
            read(text)
