# ruff: noqa: E501
"""The sandbox: attacks by code that leaves, cheats, outlives or starves, and programs that must work."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from jingu.runtime.python_tests import parse_tests
from jingu.runtime.sandbox import Limits, Sandbox, SandboxError, passes_output, passes_statements, passes_tests
from tests.limits import PATIENCE
from tests.runtime.sandbox_attacks import BROKEN, CHEATS, DANGEROUS, ENDLESS, HARMLESS, PRELUDE

ATTACK_WORKS = parse_tests("assert f() is True or f() == 1")
SQUARES = parse_tests("assert f(12) == 144\nassert f(-3) == 9\nassert abs(f(0.5) - 0.25) < 1e-9")
PATIENT = Limits(seconds=60.0)
BRIEF = Limits(seconds=0.5)


def allows_namespaces() -> bool:
    command = [shutil.which("unshare") or "unshare", "--user", "--mount", "true"]
    try:
        return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not allows_namespaces(), reason="this machine allows no namespaces")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox()
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def constants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What attacks know of the host: a secret file, listening sockets, a process."""
    folder = tmp_path_factory.mktemp("host")
    secret = folder / "secret"
    secret.write_text("a key")
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as abstract, socket.socket() as port:
        named.bind(str(folder / "socket"))
        abstract.bind("\0" + str(folder / "socket"))
        port.bind(("127.0.0.1", 0))
        for listener in (named, abstract, port):
            listener.listen(100)
        values = {
            "SECRET": str(secret),
            "FOLDER": str(folder),
            "SOCKET": str(folder / "socket"),
            "PORT": port.getsockname()[1],
            "HOST": os.getpid(),
            "HOME": str(Path.home()),
            "TESTS": str(Path(__file__).parent),
        }
        yield "".join(f"{name} = {value!r}\n" for name, value in values.items())


@pytest.mark.parametrize("name", HARMLESS | DANGEROUS | BROKEN)
def test_no_attack_succeeds(name: str, sandbox: Sandbox, constants: str) -> None:
    code = PRELUDE + constants + (HARMLESS | DANGEROUS | BROKEN)[name]
    assert not passes_tests(sandbox, code, ATTACK_WORKS, PATIENT)
    assert not passes_statements(sandbox, code, ATTACK_WORKS.code, PATIENT)


@pytest.mark.parametrize("name", ENDLESS)
def test_what_does_not_end_is_ended(name: str, sandbox: Sandbox) -> None:
    others = children()
    assert not passes_tests(sandbox, PRELUDE + ENDLESS[name], ATTACK_WORKS, BRIEF)
    assert not passes_statements(sandbox, f"{PRELUDE}{ENDLESS[name]}\nf()", "", BRIEF)
    assert not passes_output(sandbox, f"{PRELUDE}{ENDLESS[name]}\nf()", "", "", BRIEF)
    wait_for(lambda: children() <= others)


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, or fail."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.01)


def test_attacks_that_succeed_are_seen(sandbox: Sandbox) -> None:
    assert passes_tests(sandbox, PRELUDE + "def f(): return True", ATTACK_WORKS, PATIENT)


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_attacks_work_outside(name: str, constants: str, tmp_path: Path) -> None:
    """So that those in the sandbox fail for the right reason."""
    code = f"{PRELUDE}{constants}import os\nos.environ['MARK'] = ''\n{HARMLESS[name]}\nassert f()\nprint('reached')"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "reached" in result.stdout, result.stderr


@pytest.mark.parametrize("name", CHEATS)
def test_no_cheat_passes(name: str, sandbox: Sandbox) -> None:
    tests = "assert f(12) == 144\nassert abs(f(3) - 9) < 1e-9\nassert f(5) in {25}\nassert math.isclose(f(2), 4)"
    tests += "\nassert not f(1) != 1"
    assert not passes_tests(sandbox, CHEATS[name], parse_tests(tests), Limits(seconds=3.0))
    assert passes_tests(sandbox, "def f(x): return x * x", parse_tests(tests), PATIENT)


# Statements that a program of an answer may need, each with the functions that it calls.
PROGRAMS = {
    "a value": ("def f(x): return x + 1", "assert f(1) == 2"),
    "a constant": ("f = 3", "assert f == 3"),
    "keywords": ("def f(x, *, y=2): return x * y", "assert f(2, y=3) == 6 and f(x=1) == 2"),
    "tuples and sets": (
        "def f(x): return (x, {x}, frozenset([x]), {x: [x]})",
        "assert f(1) == (1, {1}, {1}, {1: [1]})",
    ),
    "types": ("def f(x): return (x,)", "assert isinstance(f(1), tuple) and type(f(1)) is tuple and f(1) != [1]"),
    "numbers": (
        "def f(): return 1 << 70000, 1 + 2j, float('inf'), -0.0, True, None, b'x', ...",
        "assert f() == (1 << 70000, 1 + 2j, math.inf, 0.0, True, None, b'x', ...)",
    ),
    "NaN": ("def f(x): return float('nan')", "assert f(1) != f(1) and math.isnan(f(1))"),
    "decimals": (
        "import decimal\ndef f(x): return decimal.Decimal(x) / 3",
        "from decimal import *\nassert f(1) * 3 < 1",
    ),
    "fractions": ("from fractions import Fraction\ndef f(x): return Fraction(1, x)", "assert f(3) == Fraction(1, 3)"),
    "dates": (
        "import datetime\ndef f(x): return x + datetime.timedelta(1)",
        "import datetime\nassert f(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)",
    ),
    "surrogates": ("def f(x): return x", r"assert f('\ud800\0') == '\ud800\0'"),
    "subclasses": (
        "import collections\nP = collections.namedtuple('P', 'x y')\ndef f(x): return P(x, collections.Counter([x]))",
        "assert f(1) == (1, {1: 1})",
    ),
    "numpy": (
        "import numpy as np\ndef f(x): return np.int64(x), np.arange(x), np.mean(x)",
        "import numpy as np\nassert f(3)[0] == 3 and f(3)[1].tolist() == [0, 1, 2] and np.allclose(f(3)[2], 3)",
    ),
    "an argument that changes": ("def f(x): x.sort()", "x = [2, 1]\nassert f(x) is None and x == [1, 2]"),
    "an argument that returns": ("def f(x):\n    x.append(1)\n    return x", "x = []\nassert f(x) is x and x == [1]"),
    "an argument that is copied": ("def f(x): return list(x)", "x = [1]\nassert f(x) == x and f(x) is not x"),
    "an exception": (
        "def f(x):\n    if x < 0: raise ValueError('negative', x)",
        "try:\n    f(-1)\nexcept ValueError as error:\n    assert error.args == ('negative', -1)\nelse:\n    assert False",
    ),
    "an exception of its own": (
        "class E(KeyError): pass\ndef f(x): raise E(x)",
        "try:\n    f(1)\nexcept E as error:\n    assert error.args == (1,)\nelse:\n    assert False",
    ),
    "a loop": ("def f(x): return x * x", "for i in range(5):\n    assert f(i) == i ** 2"),
    "a check": ("def f(x): return x", "def check(candidate):\n    assert candidate(1) == 1\n\ncheck(f)"),
    "a class": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def __len__(self): return len(self.items)\n    def __getitem__(self, n): return self.items[n]",
        "s = Stack()\ns.push(3)\ns.push(4)\nassert s.items == [3, 4] and len(s) == 2 and s[1] == 4 and list(s) == [3, 4]\n"
        "assert isinstance(s, Stack) and 4 in s",
    ),
    "equal objects": (
        "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\n    def __add__(self, o): return P(self.x + o.x)",
        "assert P(1) == P(1) and P(1) != P(2) and P(1) + P(2) == P(3) and repr(P(1)) == 'P(x=1)'",
    ),
    "linked objects": (
        "class Node:\n    def __init__(self, v): self.v, self.next = v, None\ndef f(n): return n.v + (f(n.next) if n.next else 0)",
        "a, b = Node(1), Node(2)\na.next = b\nassert f(a) == 3 and a.next is b and b.next is None",
    ),
    "a generator": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6"),
    "a closure": ("def f(n): return lambda x: x + n", "assert f(1)(2) == 3"),
    "functions": ("def f(g, x): return g(g(x))", "assert f(lambda x: x * 2, 3) == 12 and f(abs, -1) == 1"),
    "a decorator": (
        "def f(g):\n    def h(*a): return g(*a) + 1\n    return h",
        "@f\ndef g(x): return x\nassert g(1) == 2",
    ),
    "an iterator": ("def f(x): return next(x) + next(x)", "assert f(iter([1, 2])) == 3"),
    "imports of the answer": (
        "import math\nfrom collections import Counter\ndef f(x): return x",
        "assert Counter(f('aa')) == {'a': 2}",
    ),
    "a name of a builtin": ("def sum(x, y): return x + y + 1", "assert sum(1, 2) == 4"),
    "a context": (
        "class f:\n    n = 0\n    def __enter__(self): return self\n    def __exit__(self, *_): f.n += 1",
        "with f() as x:\n    assert x.n == 0\nassert f.n == 1",
    ),
    "recursion": ("def f(n): return 0 if n == 0 else 1 + f(n - 1)", "assert f(900) == 900"),
    "threads": (
        "import concurrent.futures\ndef f(x):\n    with concurrent.futures.ThreadPoolExecutor(8) as e:\n"
        "        return list(e.map(abs, x))",
        "assert f([-1, 2]) == [1, 2]",
    ),
    "asyncio": ("import asyncio\nasync def g(): return 3\ndef f(): return asyncio.run(g())", "assert f() == 3"),
    "files": (
        "import tempfile\ndef f(x):\n    with tempfile.TemporaryFile('w+') as t:\n        t.write(x)\n        t.seek(0)\n"
        "        return t.read()",
        "assert f('ä') == 'ä'",
    ),
    "the null device": ("import os\ndef f(): return open(os.devnull).read()", "assert f() == ''"),
    "randomness": (
        "import os, random, secrets\ndef f(): return len(os.urandom(4)) + 0 * random.random()",
        "assert f() == 4",
    ),
    "zones": (
        "import datetime, zoneinfo\ndef f(): return datetime.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo('Asia/Tokyo'))",
        "assert f().isoformat() == '2024-01-01T00:00:00+09:00'",
    ),
    "extension modules": (
        "import bz2, ctypes, hashlib, lzma, sqlite3, ssl, zlib\n"
        "def f(): return sqlite3.connect(':memory:').execute('select 1').fetchone()",
        "assert f() == (1,)",
    ),
    "a module guard": ("def f(): return 1\nif __name__ == '__main__':\n    raise ValueError", "assert f() == 1"),
    "annotations": (
        "def f(x: int) -> 'int': return x\nA = f.__annotations__",
        "assert A == {'x': int, 'return': 'int'}",
    ),
    "a large value": ("def f(n): return list(range(n))", "assert len(f(100_000)) == 100_000"),
    "inputs of tests": ("def f(x): return x[0]", "x = [[1], 2]\nassert f(x) == [1]\nassert f((7,)) == 7"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_work(name: str, sandbox: Sandbox) -> None:
    code, tests = PROGRAMS[name]
    parsed = parse_tests(tests)
    assert not parsed.is_weak
    assert passes_tests(sandbox, code, parsed, PATIENT)
    # The same tests must be able to fail.
    assert not passes_tests(sandbox, code, parse_tests(f"{tests}\nassert False"), PATIENT)


WEAK = {
    "output": (
        "def f(): print('x')",
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    f()\nassert out.getvalue() == 'x\\n'",
    ),
    "a derived class": ("class A: pass", "class B(A): pass\nassert issubclass(B, A)"),
    "a text that runs": ("def f(): return '1 + 1'", "assert eval(f()) == 2"),
    "a seed": (
        "import random\ndef f(): return random.random()",
        "import random\nrandom.seed(1)\nx = f()\nrandom.seed(1)\nassert f() == x",
    ),
    "other packages": ("def f(): return 1", "import packaging\nassert f() == 1"),
    "a coroutine": ("async def f(): return 1", "import asyncio\nassert asyncio.run(f()) == 1"),
    "patches": ("def f(): return 1", "from unittest import mock\nassert mock.Mock(return_value=f())() == 1"),
}


@pytest.mark.parametrize("name", WEAK)
def test_tests_that_need_the_process_are_weak(name: str, sandbox: Sandbox) -> None:
    code, tests = WEAK[name]
    parsed = parse_tests(tests)
    assert parsed.is_weak
    assert passes_tests(sandbox, code, parsed, PATIENT)
    assert not passes_tests(sandbox, code, parse_tests(f"{tests}\nassert False"), PATIENT)
    assert not passes_tests(sandbox, "import sys\nsys.exit(0)", parsed, PATIENT)


def test_programs_are_judged_by_their_output(sandbox: Sandbox) -> None:
    double = "import sys\nfor line in sys.stdin:\n    print(int(line) * 2)"
    assert passes_output(sandbox, double, "1\n2\n", "2\n4", PATIENT)
    assert passes_output(sandbox, double, "1\r\n2", "2  \n4\n\n", PATIENT)
    assert not passes_output(sandbox, double, "1\n2\n", "2\n5", PATIENT)
    assert not passes_output(sandbox, double, "x", "", PATIENT)
    assert passes_output(sandbox, "print(input() + 'é')", "ä", "äé", PATIENT)
    assert passes_output(sandbox, "def main():\n    print(1)\nif __name__ == '__main__':\n    main()", "", "1", PATIENT)
    assert passes_output(sandbox, "print(1)\nexit()", "", "1", PATIENT)
    assert not passes_output(sandbox, "print(1)\nexit(1)", "", "1", PATIENT)
    assert not passes_output(sandbox, "print(1, flush=True)\n1 / 0", "", "1", PATIENT)
    assert not passes_output(sandbox, "import os\nprint(1, flush=True)\nos._exit(0)", "", "1", PATIENT)
    # An input that is never read, and more of both than a pipe holds.
    assert passes_output(sandbox, "print(1)", "x" * 2**20, "1", PATIENT)
    assert passes_output(sandbox, "print(input())", "x" * 2**19, "x" * 2**19, PATIENT)
    assert not passes_output(sandbox, "while True: print('x' * 1000)", "", "1", PATIENT)


def test_runs_do_not_see_each_other(sandbox: Sandbox) -> None:
    write = "open('mark', 'w').write('1')\nimport math\nmath.pi = 3\ndef f(): return 1"
    look = "import math, os\ndef f(): return int(os.path.exists('mark') or math.pi == 3)"
    assert passes_tests(sandbox, write, ATTACK_WORKS, PATIENT)
    assert not passes_tests(sandbox, look, ATTACK_WORKS, PATIENT)


def test_many_runs_at_once(sandbox: Sandbox) -> None:
    tests = [parse_tests(f"assert f({number}) == {number + number % 3}") for number in range(40)]
    with ThreadPoolExecutor(8) as executor:
        results = list(executor.map(lambda test: passes_tests(sandbox, "def f(x): return x", test, PATIENT), tests))
    assert results == [number % 3 == 0 for number in range(40)]


def test_everything_ends_with_the_sandbox() -> None:
    others = children()
    sandbox = Sandbox()
    with ThreadPoolExecutor(1) as executor:
        run = executor.submit(passes_tests, sandbox, "import time\ntime.sleep(1000)", SQUARES, PATIENT)
        wait_for(lambda: len(children() - others) >= 6)
        sandbox.close()
        with suppress(SandboxError):
            assert not run.result()
    wait_for(lambda: children() <= others)
    with pytest.raises(SandboxError, match="its server ended"):
        passes_tests(sandbox, "", SQUARES, PATIENT)


def test_python_below_the_scratch_folder(tmp_path: Path) -> None:
    """As with a virtual environment in /tmp."""
    venv.create(tmp_path / "venv", symlinks=True)
    code = "import os, site\nopen('x', 'w').close()\ndef f(): return os.path.isdir(site.getsitepackages()[0])"
    script = (
        "from jingu.runtime.python_tests import parse_tests\nfrom jingu.runtime.sandbox import *\n"
        f"print(passes_tests(Sandbox(), {code!r}, parse_tests('assert f() is True'), Limits(60.0)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [str(tmp_path / "venv" / "bin" / "python"), "-c", script]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "True\n"


def test_an_answer_cannot_end_the_loops_of_its_tests(sandbox: Sandbox) -> None:
    tests = parse_tests("assert all(map(lambda x: f(x) == x * x, range(1, 4)))")
    assert passes_tests(sandbox, "def f(x): return x * x", tests, PATIENT)
    assert not passes_tests(sandbox, "def f(x): raise StopIteration", tests, PATIENT)


def test_a_value_that_takes_too_long_to_send_is_wrong(sandbox: Sandbox) -> None:
    code = "def f():\n    x = []\n    for _ in range(60): x = [x, x]\n    return x"
    assert not passes_tests(sandbox, code, ATTACK_WORKS, BRIEF)


def test_a_machine_without_namespaces_is_refused() -> None:
    script = (
        "from pathlib import Path\nfrom jingu.runtime.sandbox import *\n"
        "Path('/proc/sys/user/max_user_namespaces').write_text('0')\n"
        "try:\n    Sandbox()\nexcept SandboxError as error:\n    print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "new namespaces" in result.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="it is for root, who becomes another user")
@pytest.mark.parametrize(
    "names",
    [
        "no_attack and (reads or starts)",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("no_attack", "no_cheat or does_not_end")),
    ],
)
def test_an_ordinary_user_has_the_same_sandbox(names: str) -> None:
    """Run the other tests as the user nobody, who may read the folder of Python even if it is below /root."""
    python, root = Path(sys.base_prefix), Path(__file__).parents[2]
    script = (
        'mount --bind "$1" "$2" && mount -t tmpfs -o mode=755 none /root && mkdir -p "$1" && mount --bind "$2" "$1"'
    )
    if not python.is_relative_to("/root"):
        script = "true"
    user = "exec setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all --bounding-set=-all"
    tests = f'"$3" -m pytest -p no:cacheprovider -p no:schemathesis --basetemp="$2/../t" {__file__} -k "{names}"'
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        (Path(folder) / "python").mkdir()
        command = ["unshare", "--mount", "sh", "-c", f"{script} && {user} {tests}", "sh"]
        result = subprocess.run(
            [*command, str(python), f"{folder}/python", sys.executable],
            cwd=root,
            env={**os.environ, "HOME": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 0, result.stdout
