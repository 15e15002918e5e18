# ruff: noqa: E501
"""Attacks on the sandbox: code whose function `f` returns True if it reached something that it must not."""

from __future__ import annotations

PRELUDE = """
import ctypes, errno, gc, json, os, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.mmap.restype = ctypes.c_void_p
X86 = os.uname().machine == "x86_64"
def call(x86, arm, *args):
    return libc.syscall(x86 if X86 else arm, *args) >= 0
def tries(*functions):
    for function in functions:
        try:
            if function():
                return True
        except (OSError, MemoryError, RuntimeError, ValueError, AttributeError, ImportError):
            pass
    return False
def reads(*paths):
    return tries(*((lambda path=path: bool(open(path, "rb").read(100))) for path in paths))
"""

# What works on the host, where it does no harm: so the attack itself is right.
HARMLESS = {
    "reads users": "def f(): return reads('/etc/passwd', '/etc/shadow', '/etc/hostname', '/etc/hosts')",
    # Python and its packages may lie in any folder, but not in these.
    "lists the root": "def f(): return bool({*os.listdir('/')} & {'boot', 'media', 'mnt', 'run', 'srv', 'sys', 'var'})",
    "lists a home": "def f(): return tries(lambda: {*os.listdir(HOME)} - {'.pyenv', '.local', 'work'})",
    "reads a file of the host": "def f(): return reads(SECRET)",
    "reads the source tree": "def f(): return tries(lambda: os.listdir(TESTS))",
    "sees processes": "def f(): return tries(lambda: len([n for n in os.listdir('/proc') if n.isdigit()]) > 2)",
    "reads a command line": "def f(): return any(reads(f'/proc/{n}/cmdline') for n in range(3, 100_000)) ",
    "reads settings of the kernel": "def f(): return reads('/proc/sys/kernel/core_pattern', '/proc/version')",
    "sees devices of the kernel": "def f(): return os.path.exists('/sys/kernel')",
    "connects to a socket": "def f():\n    s = socket.socket(socket.AF_UNIX)\n    s.connect(SOCKET)\n    return True",
    "connects to an abstract socket": "def f():\n    s = socket.socket(socket.AF_UNIX)\n"
    "    s.connect('\\0' + SOCKET)\n    return True",
    "connects to a port": "def f():\n    s = socket.create_connection(('127.0.0.1', PORT), 2)\n    return True",
    "opens a netlink socket": "def f(): return bool(socket.socket(16, socket.SOCK_RAW, 0))",
    "opens a socket of the hypervisor": "def f(): return bool(socket.socket(40, socket.SOCK_STREAM, 0))",
    "has a supplementary right": "def f(): return open('/proc/self/status').read().count('NoNewPrivs:\\t1') == 0",
    "forks": "def f():\n    pid = os.fork()\n    if not pid: os._exit(0)\n    return True",
    "starts a program": "import subprocess\ndef f(): return subprocess.run([sys.executable, '-c', '']).returncode == 0",
    "starts a program without a fork": "def f(): return tries(lambda: os.posix_spawn(sys.executable, ['p', '-c', ''],"
    " {}))",
    "clones with vfork": "def f(): return ctypes.CDLL(None).system(b'true') == 0",
    "allocates shared memory": "def f():\n    n = libc.shmget(0, 1 << 20, 0o1600)\n    libc.shmctl(n, 0, None)\n"
    "    return n >= 0",
    "allocates an anonymous file": "def f(): return os.memfd_create('x') >= 0",
    "allocates a message queue": "def f():\n    n = libc.msgget(0, 0o1600)\n    libc.msgctl(n, 0, None)\n"
    "    return n >= 0",
    "allocates semaphores": "def f():\n    n = libc.semget(0, 8, 0o1600)\n    libc.semctl(n, 0, 0)\n    return n >= 0",
    "keeps pages in a pipe": "import mmap\ndef f():\n    r, w = os.pipe()\n    page = ctypes.create_string_buffer(4096)\n"
    "    vector = struct.pack('PN', ctypes.addressof(page), 4096)\n    return libc.vmsplice(w, vector, 1, 0) == 4096",
    "watches files": "def f(): return libc.inotify_init() >= 0",
    "makes a device": "def f():\n    os.mkfifo('fifo')\n    return True",
    "makes an executable": "def f():\n    open('x', 'w').write('#!/bin/sh\\nexit')\n    os.chmod('x', 0o755)\n"
    "    return os.spawnv(os.P_WAIT, './x', ['x']) == 0",
    "starts a shell": "def f(): return os.system('true') == 0",
    "lists programs": "def f(): return tries(lambda: os.listdir('/bin'), lambda: os.listdir('/usr/bin'))",
    "writes to a home": "def f():\n    open(f'{FOLDER}/written', 'w').write('x')\n    return True",
    "follows a link": "def f():\n    os.symlink('/etc/passwd', 'link')\n    return reads('link')",
    "sends a signal to others": "def f(): return tries(lambda: os.kill(HOST, 0) is None)",
    "inspects another process": "def f(): return tries(lambda: os.listdir(f'/proc/{HOST}/fd'))",
    "opens a descriptor of a process": "def f(): return tries(lambda: os.pidfd_open(HOST) >= 0)",
    "reads its environment": "def f(): return 'MARK' in os.environ or b'MARK' in open('/proc/self/environ', 'rb').read()",
    "starts 2,000 threads": "def f():\n    threading.stack_size(1 << 15)\n    event = threading.Event()\n"
    "    threads = [threading.Thread(target=event.wait, daemon=True) for _ in range(2000)]\n"
    "    [t.start() for t in threads]\n    event.set()\n    return True",
    "opens 1,000 files": "def f(): return len([os.open('/dev/null', 0) for _ in range(1000)]) == 1000",
    "makes 100,000 files": "def f():\n    for n in range(6000): open(f'{n}', 'w').close()\n    return True",
    "fills memory": "def f(): return len(bytearray(700 * 2**20)) > 0",
    "fills shared memory": "import mmap\ndef f():\n    maps = [mmap.mmap(-1, 2**27) for _ in range(6)]\n    return True",
    "fills the scratch folder": "def f():\n    for n in range(40): open(f'{n}', 'wb').write(bytes(2**20))\n    return True",
    "makes a sparse file": "def f():\n    os.truncate(os.open('s', os.O_CREAT | os.O_RDWR), 2**34)\n    return True",
    "reserves space": "def f():\n    os.posix_fallocate(os.open('s', os.O_CREAT | os.O_RDWR), 0, 2**26)\n    return True",
}

DANGEROUS = {
    "opens a block device": "def f(): return tries(*((lambda p=p: os.open(p, os.O_RDWR) >= 0) for p in ('/dev/loop0',"
    " '/dev/vda', '/dev/sda', '/dev/loop-control', '/dev/mem', '/dev/kmsg', '/dev/fuse', '/dev/kvm', '/dev/tty')))",
    "makes a block device": "def f():\n    os.mknod('disk', 0o60600, os.makedev(7, 0))\n    return True",
    "sets the core pattern": "def f():\n    open('/proc/sys/kernel/core_pattern', 'r+').write('|/x')\n    return True",
    "sends SysRq": "def f():\n    open('/proc/sysrq-trigger', 'w').write('h')\n    return True",
    "writes to Python": "def f():\n    open(os.__file__, 'a').close()\n    return True",
    "writes to installed packages": "import site\ndef f():\n    path = site.getsitepackages()[0]\n"
    "    open(path + '/x.pth', 'w').close()\n    return True",
    "mounts": "def f(): return libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0) == 0",
    "remounts": "def f(): return libc.mount(b'none', b'/', b'', 4096 | 32, 0) == 0",
    "mounts over packages": "def f(): return call(429, 429, 0, 0) or call(430, 430, b'tmpfs', 0)",
    "unmounts": "def f(): return libc.umount2(b'/tmp', 2) == 0",
    "changes its root": "def f(): return libc.chroot(b'/tmp') == 0 or libc.pivot_root(b'.', b'.') == 0",
    "leaves by a folder": "def f():\n    folder = os.open('/', os.O_RDONLY)\n    os.fchdir(folder)\n"
    "    for _ in range(50): os.chdir('..')\n    return tries(lambda: os.listdir('sys'), lambda: os.listdir('var'))",
    "leaves by a descriptor": "def f(): return tries(*((lambda n=n: os.listdir(f'/proc/self/fd/{n}/../etc/ssl'))"
    " for n in range(64)))",
    "opens by a handle": "def f(): return call(303, 264, -100, b'/', bytes(136), bytes(4), 0)",
    "makes namespaces": "def f(): return libc.unshare(0x10000000) == 0",
    "makes namespaces with a thread": "def f(): return call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "makes namespaces with clone3": "def f(): return call(435, 435, struct.pack('11Q', 0x10000000, *[0] * 10), 88)",
    "enters namespaces": "def f(): return libc.setns(os.open('/proc/self/ns/net', 0), 0) == 0",
    "traces": "def f(): return libc.ptrace(0, 0, 0, 0) == 0 or libc.ptrace(16, 1, 0, 0) == 0",
    "reads the memory of init": "def f(): return reads('/proc/1/mem', '/proc/1/maps', '/proc/1/environ')",
    "writes its own memory": "def f():\n    open('/proc/1/mem', 'r+b').write(b'x')\n    return True",
    "reads memory of others": "def f(): return call(310, 270, 1, bytes(16), 1, bytes(16), 1, 0)",
    "takes descriptors": "def f(): return call(438, 438, 3, 0, 0)",
    "stops init": "def f():\n    os.kill(1, signal.SIGSTOP)\n    os.kill(1, signal.SIGKILL)",
    "slows init": "def f(): return tries(lambda: os.setpriority(0, 1, 19) is None, lambda: os.sched_setaffinity(1, {0})"
    " is None, lambda: os.sched_setscheduler(1, 5, os.sched_param(0)) is None)",
    "limits init": "import resource\ndef f(): return resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)) is not None",
    "raises a limit": "import resource\ndef f():\n    resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))\n    return True",
    "gains rights": "def f(): return tries(lambda: os.setuid(0) is None) or libc.capset(struct.pack('Ii', 0x20080522, 0),"
    " b'\\xff' * 24) == 0",
    "allows core dumps": "def f(): return libc.prctl(4, 1, 0, 0, 0) == 0",
    "becomes a subreaper": "def f(): return libc.prctl(36, 1, 0, 0, 0) == 0",
    "forgets its parent": "def f(): return libc.prctl(1, 0, 0, 0, 0) == 0",
    "adds keys": "def f(): return call(248, 217, b'user', b'x', b'y', 1, -3) or call(250, 219, 0, -3, 1)",
    "loads BPF": "def f(): return call(321, 280, 0, bytes(128), 128)",
    "uses io_uring": "def f(): return call(425, 425, 8, bytes(120))",
    "uses userfaultfd": "def f(): return call(323, 282, 0)",
    "measures performance": "def f(): return call(298, 241, bytes(128), 0, -1, -1, 0)",
    "makes secret memory": "def f(): return call(447, 447, 0)",
    "splices": "def f():\n    r, w = os.pipe()\n    return call(275, 76, os.open('/dev/zero', 0), 0, w, 0, 4096, 0)",
    "reboots": "def f(): return libc.reboot(0x89ABCDEF) == 0",
    "loads a kernel": "def f(): return call(246, 104, 0, 0, 0, 0) or call(175, 105, 0, 0, b'')",
    "sets the time": "def f(): return libc.settimeofday(bytes(16), 0) == 0",
    "names the host": "def f(): return libc.sethostname(b'x', 1) == 0",
    "quotas, swap and accounting": "def f(): return libc.swapon(b'/tmp/x', 0) == 0 or libc.acct(b'/tmp/x') == 0",
    "locks memory": "def f(): return libc.mlockall(3) == 0",
    "injects into a terminal": "import fcntl\ndef f(): return tries(*((lambda n=n: fcntl.ioctl(n, 0x5412, b'x') == 0)"
    " for n in range(3)))",
    "uses 32-bit calls": "def f(): return X86 and call(0x40000000 | 39, 0)",
    "removes its filter": "def f(): return libc.prctl(22, 0, 0, 0, 0) == 0 or call(317, 277, 0, 0, 0)",
    "answers for its supervisor": "def f(): return tries(*((lambda n=n: libc.ioctl(n, 0xC0502100, bytes(80)) == 0)"
    " for n in range(3, 64)))",
}

# What does not end by itself, or not soon.
ENDLESS = {
    "loops": "def f():\n    while True: pass",
    "sleeps": "def f():\n    for n in range(1, 65):\n        try: signal.signal(n, signal.SIG_IGN)\n"
    "        except (OSError, ValueError): pass\n    os.setsid()\n    time.sleep(1000)",
    "leaves threads": "def f():\n    threading.Thread(target=time.sleep, args=(1000,)).start()\n    time.sleep(1000)",
    "deadlocks": "def f():\n    lock = threading.Lock()\n    lock.acquire()\n    lock.acquire()",
    "a bomb of forks": "def f():\n    while True:\n        try: os.fork()\n        except OSError: pass",
    "a bomb of threads": "def f():\n    while True:\n        try: threading.Thread(target=time.sleep, args=(99,)).start()\n"
    "        except RuntimeError: pass",
    "floods its output": "def f():\n    while True: os.write(1, b'x' * 65536)",
    "floods the pipes": "def f():\n    while True:\n        for n in range(3, 64):\n"
    "            try: os.write(n, b'x' * 4096)\n            except OSError: pass",
    "a huge number": "def f(): return 10 ** 10 ** 10",
    "recursion without a limit": "sys.setrecursionlimit(10**9)\ndef f(): return f()",
    "all values": "import itertools\ndef f(): return list(itertools.count())",
}

# Values that cannot be returned.
BROKEN = {
    "a huge text": "def f(): return 'x' * 2**28",
    "nested values": "def f():\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "a cycle": "def f():\n    x = []\n    x.append(x)\n    return x",
    "crashes": "def f(): return ctypes.string_at(0)",
    "aborts": "def f(): os.abort()",
}

# Answers to "return the square of x", which do not compute it.
CHEATS = {
    "wrong": "def f(x): return 5",
    "nothing": "",
    "other name": "def g(x): return x * x",
    "exits": "import sys\nsys.exit(0)",
    "exits with the code of a failed setup": "import sys\nsys.exit(97)",
    "exits at once": "import os\nos._exit(0)",
    "exits in the function": "import os\ndef f(x): os._exit(0)",
    "raises SystemExit": "def f(x): raise SystemExit(0)",
    "raises AssertionError": "def f(x): raise AssertionError",
    "raises GeneratorExit": "def f(x): raise GeneratorExit",
    "stops the iteration": "def f(x): raise StopIteration",
    "is equal to all": "class A:\n    def __eq__(self, other): return True\ndef f(x): return A()",
    "is equal to all and not less": "class A:\n    __eq__ = __le__ = __ge__ = __lt__ = __gt__ = lambda *_: True\n"
    "    __sub__ = __rsub__ = __add__ = __abs__ = lambda *_: 0\ndef f(x): return A()",
    "is a number equal to all": "class A(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
    "    def __sub__(self, other): return 0\ndef f(x): return A()",
    "is a text equal to all": "class A(str):\n    def __eq__(self, other): return True\ndef f(x): return A('')",
    "is a float equal to all": "class A(float):\n    __eq__ = __le__ = lambda *_: True\n    __sub__ = lambda *_: 0.0\n"
    "def f(x): return A()",
    "pretends to be a number": "class A:\n    __class__ = int\n    def __eq__(self, other): return True\ndef f(x):"
    " return A()",
    "has an equal class": "class M(type):\n    def __eq__(self, other): return True\n    __hash__ = type.__hash__\n"
    "class A(metaclass=M): pass\ndef f(x): return A",
    "is equal by reflection": "class A:\n    def __req__(self, o): return True\n    def __ne__(self, o): return False\n"
    "    def __hash__(self): return 4\n    def __eq__(self, o): return True\ndef f(x): return A()",
    "is an argument": "def f(x): return x",
    "is the function": "def f(x): return f",
    "changes builtins": "import builtins\nfor n in ('abs', 'len', 'all', 'any', 'isinstance', 'type', 'eq'):\n"
    "    setattr(builtins, n, lambda *_: 0)\ndef f(x): return 5",
    "shadows builtins": "abs = round = set = sorted = lambda *_: 0\ndef f(x): return 5",
    "shadows math": "class math:\n    isclose = staticmethod(lambda *_, **__: True)\n    fabs = staticmethod(lambda _: 0)\n"
    "def f(x): return 5",
    "replaces math": "import math, sys\nmath.isclose = lambda *_, **__: True\ndef f(x): return 5",
    "changes assertion errors": "import builtins\nbuiltins.AssertionError = ValueError\ndef f(x): return 5",
    "jumps over the tests": "import sys\ndef trace(frame, event, arg):\n    return trace\nsys.settrace(trace)\n"
    "sys._getframe(1).f_trace = trace\ndef f(x): return 5",
    "profiles": "import sys\nseen = []\nsys.setprofile(lambda frame, event, arg: seen.append(arg))\n"
    "def f(x): return next((a for a in seen if a == x * 2 and False), 5)",
    "searches frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        for v in [*frame.f_locals.values(), *frame.f_code.co_consts]:\n"
    "            if type(v) is int and v > 100: return v\n        frame = frame.f_back\n    return 5",
    "searches objects": "import gc\ndef f(x):\n    for o in gc.get_objects():\n        if isinstance(o, (tuple, list)):\n"
    "            for v in o:\n                if type(v) is int and v == 144: return v\n"
    "        if isinstance(o, dict) and 'assert' in str(o.get('code')): return int(o['code'].split()[3])\n    return 5",
    "searches source files": "import os, re\ndef f(x):\n    for folder, _, names in os.walk('/tmp'):\n        for n in names:\n"
    "            m = re.search(r'== *(\\d+)', open(folder + '/' + n).read())\n            if m: return int(m[1])\n"
    "    return 5",
    "searches lines": "import linecache, re\ndef f(x):\n    text = str(linecache.cache) + ''.join(linecache.getlines"
    "('tests.py'))\n    m = re.search(r'f.12.. ?== ?(\\d+)', text)\n    return int(m[1]) if m else 5",
    "reads its pipes": "import os, re\ndef f(x):\n    for n in range(3, 64):\n        try:\n"
    "            os.set_blocking(n, False)\n            m = re.search(rb'== *(\\d+)', os.read(n, 9999))\n"
    "            if m: return int(m[1])\n        except OSError: pass\n    return 5",
    "searches memory": "import re\ndef f(x):\n    memory = open('/proc/self/mem', 'rb', 0)\n"
    "    for line in open('/proc/self/maps'):\n        if 'rw' not in line: continue\n"
    "        a, b = (int(n, 16) for n in line.split()[0].split('-'))\n        memory.seek(a)\n"
    "        try: m = re.search(rb'assert f.12. == (\\d+)', memory.read(b - a))\n        except OSError: continue\n"
    "        if m: return int(m[1])\n    return 5",
    "writes a verdict": "import os\nfor n in range(3, 64):\n    try: os.write(n, b'1')\n    except OSError: pass\n"
    "def f(x): return 5",
    "writes a verdict and exits": "import os\nfor n in range(64):\n    try: os.write(n, b'1')\n    except OSError: pass\n"
    "os._exit(0)",
    "writes later": "import atexit, os, threading\ndef w():\n    for n in range(3, 64):\n        try: os.write(n, b'1')\n"
    "        except OSError: pass\natexit.register(w)\nthreading.Thread(target=w).start()\ndef f(x): return 5",
    "answers for the tests": "import json, os\ndef send(n, m):\n    d = json.dumps(m).encode()\n"
    "    os.write(n, len(d).to_bytes(4, 'big') + d)\nfor n in range(3, 64):\n    try:\n"
    "        send(n, [['f', 'builtins:type', ['builtin', 'type']]])\n        send(n, ['value', ['bool', True], []])\n"
    "    except OSError: pass\ndef f(x): return 5",
    "claims a module": "import json, os, sys\nfor n in range(3, 64):\n    d = json.dumps([['f', 'unittest.mock:MagicMock',"
    " ['mine', 0]]]).encode()\n    try: os.write(n, len(d).to_bytes(4, 'big') + d)\n    except OSError: pass\n"
    "def f(x): return 5",
    "claims names of the tests": "class A: pass\nA.__module__, A.__qualname__ = 'operator', 'eq'\nf = A",
    "changes the protocol": "import gc, sys\nm = sys.modules['sandbox_guest']\nm.encode = lambda *_: ['NotImplemented',"
    " None]\ndef f(x): return 5",
    "sends functions": "import sys\nm = sys.modules['sandbox_guest']\nm.encode = lambda *_: ['builtin', 'print']\n"
    "def f(x): return 5",
    "sends what is no value": "import sys\nm = sys.modules['sandbox_guest']\nm.encode = lambda *_: ['end', None]\n"
    "def f(x): return 5",
    "changes the argument": "import sys\nm = sys.modules['sandbox_guest']\nm._MUTABLE = (int,)\ndef f(x): return x",
    "tests with other tests": "def f(x): return NotImplemented",
    "all values": "import itertools\ndef f(x): return itertools.count()",
    "a generator": "def f(x): yield x * x",
    "NaN": "def f(x): return float('nan')",
    "a list": "def f(x): return [x * x]",
    "a coroutine": "async def f(x): return x * x",
    "numbers as text": "def f(x): return str(x * x)",
    "reads no tests": "def f(x): return open('tests.py').read()",
    "no Python": "def f(x) return",
    "bytes without a meaning": "def f(x): return 5\n\0\x01\ud800",
    "a long line": "x = " + "(" * 5000,
}
