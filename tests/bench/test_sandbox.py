"""What a hostile program can do in the sandbox, and what the result says of it."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ddtree.bench import sandbox
from ddtree.bench.sandbox import OUTPUT_BYTES, Protection, SandboxError, SandboxLimits, run_python
from ddtree.errors import ConfigError

LIMITS = SandboxLimits(wall_s=10, cpu_s=4, memory_bytes=256 << 20, file_bytes=100_000, disk_bytes=1 << 20)
SHORT = SandboxLimits(wall_s=1.5, cpu_s=4)
SYSTEM_PYTHON = "/usr/bin/python3"
SOURCE = Path(sandbox.__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")


@pytest.fixture(scope="module")
def granted():
    """The protections that this machine's kernel grants."""
    return run_python("", LIMITS).protections


def need(granted, *protections):
    missing = set(protections) - granted
    if missing:
        pytest.skip(f"the kernel does not grant {sorted(missing)}")


def commands():
    """The command lines of all processes."""
    texts = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            texts.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    assert any("pytest" in text for text in texts)
    return "\n".join(texts)


def wait_until(condition):
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("waited 20 seconds in vain")


def test_a_program_runs_and_its_end_is_told():
    result = run_python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", LIMITS)
    assert (result.exit_code, sorted(result.output.split())) == (3, ["err", "out"])
    assert 0 < result.wall_s < LIMITS.wall_s


def test_its_folder_is_writable_and_removed():
    result = run_python(
        "import os; open('mine', 'w').write('x'); print(open('mine').read(), os.getcwd())", LIMITS
    )
    mark, folder = result.output.split()
    assert (result.exit_code, mark) == (0, "x")
    assert not os.path.exists(folder)
    assert not os.path.exists(os.path.dirname(folder))


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret-1")
    source = (
        "import os, glob\n"
        "print(dict(os.environ))\n"
        "for path in glob.glob('/proc/*/environ'):\n"
        "    try: print(open(path, errors='replace').read())\n"
        "    except OSError: pass\n"
    )
    result = run_python(source, LIMITS)
    assert result.exit_code == 0
    assert "secret-1" not in result.output
    assert "PATH" not in result.output


def test_standard_input_is_at_its_end():
    assert run_python("import sys; print(repr(sys.stdin.read()))", LIMITS).output == "''\n"


def test_an_endless_loop_is_killed_at_the_wall_limit():
    begin = time.monotonic()
    result = run_python("while True: pass", SHORT)
    assert result.exit_code is None
    assert result.wall_s >= 1.5
    assert time.monotonic() - begin < 15  # of the limits' sum, not a speed


def test_a_busy_program_is_killed_at_the_cpu_limit():
    result = run_python("while True: pass", SandboxLimits(wall_s=30, cpu_s=1))
    assert result.exit_code in (-signal.SIGKILL, -signal.SIGXCPU)


def test_ignoring_signals_does_not_help():
    source = (
        "import signal, time\n"
        "for number in range(1, 32):\n"
        "    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except OSError: pass\n"
        "time.sleep(60)\n"
    )
    assert run_python(source, SHORT).exit_code is None


def test_a_memory_hog_fails():
    result = run_python("x = bytearray(300 << 20)", LIMITS)
    assert result.exit_code == 1
    assert "MemoryError" in result.output


def test_endless_output_is_cut_and_its_end_kept():
    source = "import os, sys\nfor i in range(5000): os.write(1, b'y' * 1000)\nprint('the end')"
    result = run_python(source, LIMITS)
    assert result.exit_code == 0
    assert len(result.output) == OUTPUT_BYTES
    assert result.output.endswith("the end\n")


def test_output_without_end_ends_with_the_program():
    result = run_python("import os\nwhile True: os.write(1, b'y' * 65536)", SHORT)
    assert result.exit_code is None
    assert len(result.output) == OUTPUT_BYTES


def test_a_fork_bomb_is_held_and_leaves_nothing():
    source = (
        "import os, time\n"
        "mark = 'sandbox-bomb-5417'\n"
        "made = 0\n"
        "while made < 500:\n"
        "    try:\n"
        "        if os.fork() == 0: made = 0\n"
        "        else: made += 1\n"
        "    except OSError as error: print(error, flush=True); time.sleep(0.05)\n"
    )
    result = run_python(source, SHORT)
    assert result.exit_code is None
    assert "Resource temporarily unavailable" in result.output
    assert result.output.count("\n") < 8 * 100


def test_a_daemon_does_not_outlive_it():
    source = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(247.5417)'])\n"
        "    os._exit(0)\n"
        "time.sleep(0.3)\n"
        "print('parent')\n"
    )
    result = run_python(source, LIMITS)
    assert (result.exit_code, result.output) == (0, "parent\n")
    assert "sleep(247.5417)" not in commands()


def test_it_cannot_write_outside_its_folder(granted, tmp_path):
    need(granted, Protection.FILES)
    tmp_path.chmod(0o777)
    places = ["/", "/tmp", "/dev/shm", "/var/tmp", str(tmp_path), ".."]
    source = (
        f"import os\nfor place in {places!r}:\n"
        "    try: open(os.path.join(place, 'ddtree-written'), 'w'); print('wrote', place)\n"
        "    except OSError: print('refused')\n"
    )
    assert run_python(source, LIMITS).output.split() == ["refused"] * len(places)


def test_it_cannot_fill_the_disk(granted):
    need(granted, Protection.FILES)
    source = (
        "try:\n    for i in range(100): open(str(i), 'wb').write(bytes(90_000))\n"
        "except OSError as error: print(error.strerror)\n"
    )
    assert run_python(source, LIMITS).output == "No space left on device\n"


def test_one_file_has_a_limit():
    source = (
        "import os, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "open('x', 'wb', 0).write(bytes(100_001))\n"
        "print(os.stat('x').st_size); open('x', 'ab', 0).write(b'x')"
    )
    result = run_python(source, LIMITS)
    assert result.exit_code == 1
    assert result.output.startswith("100000\n")
    assert "File too large" in result.output


def test_home_and_temporary_folders_are_hidden(granted, tmp_path):
    need(granted, Protection.HOME)
    secret = tmp_path / "secret"
    secret.write_text("secret-2", encoding="utf-8")
    if not tmp_path.is_relative_to("/tmp"):
        pytest.skip("the test's folder is not under /tmp")
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    if os.geteuid() == 0:
        subprocess.run(["cat", secret], user=65534, check=True, stdout=subprocess.DEVNULL)
    result = run_python(f"open('/etc/passwd')\nopen({str(secret)!r})", LIMITS)
    assert f"No such file or directory: {str(secret)!r}" in result.output


def test_it_has_no_network(granted):
    need(granted, Protection.NETWORK)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = (
            f"import socket\nfor host in ('127.0.0.1', '1.1.1.1'):\n"
            f"    try: socket.create_connection((host, {port}), 2); print('connected')\n"
            "    except OSError as error: print(error.strerror)\n"
        )
        assert run_python(source, LIMITS).output.splitlines() == ["Network is unreachable"] * 2


def test_it_cannot_reach_other_processes(granted):
    need(granted, Protection.PROCESSES)
    source = (
        "import os, signal\n"
        "print(os.getppid())\n"
        f"for pid in (-1, os.getppid() or {os.getpid()}, {os.getpid()}):\n"
        "    try: os.kill(pid, signal.SIGKILL); print('killed', pid)\n"
        "    except OSError as error: print(error.strerror)\n"
    )
    assert run_python(source, LIMITS).output.splitlines() == ["0"] + ["No such process"] * 3


def test_it_cannot_get_rights_back(granted):
    need(granted, Protection.FILES)
    source = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "mount, chroot = libc.mount, libc.chroot\n"
        "for call in (lambda: mount(b'/', b'/', None, 0x1020, None), lambda: chroot(b'/'),\n"
        "             lambda: libc.sethostname(b'x', 1), lambda: libc.setuid(0)):\n"
        "    print(call())\n"
        "print([line for line in open('/etc/passwd')][:0], 0 in (os.getuid(), os.geteuid()))\n"
    )
    assert run_python(source, LIMITS).output.splitlines() == ["-1"] * 4 + ["[] False"]


def test_root_does_not_run_programs_as_root():
    if os.geteuid() != 0:
        pytest.skip("not root, and only root could run programs as root")
    with pytest.raises(SandboxError, match="must run as the user nobody"):
        run_python("print('ran')", LIMITS, set(Protection) - {Protection.USER})


def test_the_result_names_the_protections_that_were_on(granted):
    need(granted, Protection.NETWORK, Protection.IPC)
    wanted = {Protection.NETWORK, Protection.IPC, Protection.USER, Protection.HOME}
    result = run_python("", LIMITS, wanted)
    assert result.protections == wanted & granted
    assert (Protection.USER in granted) == (os.geteuid() == 0)


AS_NOBODY = """
import sys
sys.path.insert(0, {source!r})
from ddtree.bench.sandbox import *
limits = SandboxLimits(wall_s=5)
result = run_python({program!r}, limits, [Protection(name) for name in {protections!r}])
print(sorted(result.protections), result.exit_code, result.output)
"""


def run_as_nobody(program, protections):
    """The same as an ordinary user sees it: rights over namespaces come from one of its own."""
    if os.geteuid() != 0 or not os.access(SYSTEM_PYTHON, os.X_OK):
        pytest.skip("needs root, to become an ordinary user, and a Python of the system")
    text = AS_NOBODY.format(source=str(SOURCE), program=program, protections=[str(p) for p in protections])
    run = subprocess.run(
        [SYSTEM_PYTHON, "-B", "-c", text], capture_output=True, text=True, user=65534, group=65534,
        extra_groups=[], env={"HOME": "/nonexistent"}, cwd="/", timeout=60,
    )  # fmt: skip
    if "No module named" in run.stderr or "Permission denied" in run.stderr:
        pytest.skip("an ordinary user cannot read this checkout")
    return run


def test_an_ordinary_user_gets_the_same_protections(granted):
    program = "import os; print(os.getpid(), os.listdir('/proc')); open('/tmp/x', 'w')"
    run = run_as_nobody(program, Protection)
    need(granted, Protection.FILES)
    assert "PROCESSES" in run.stdout, run
    assert "1 []" in run.stdout
    assert "Read-only file system" in run.stdout


@pytest.mark.parametrize("first", ["ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)", "os.setsid()"])
def test_without_protections_a_program_that_kills_its_launcher_has_failed(first):
    inner = f"import ctypes, os, time; {first}; os.kill(os.getppid(), 9); time.sleep(241.5417)"
    program = f"import os, sys; os.execv(sys.executable, ['python3', '-c', {inner!r}])"
    run = run_as_nobody(program, ())
    assert run.stdout.startswith("[] None"), run
    wait_until(lambda: "sleep(241.5417)" not in commands())


def test_without_protections_daemons_are_killed_all_the_same():
    program = (
        "import os, sys\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.execv(sys.executable, ['python3', '-c', 'import time; time.sleep(243.5417)'])\n"
        "    os._exit(0)\n"
    )
    run = run_as_nobody(program, ())
    assert run.stdout.startswith("[] 0"), run
    assert "sleep(243.5417)" not in commands()


def test_interrupting_the_caller_ends_the_program(monkeypatch):
    def interrupted(*args):
        wait_until(lambda: "sleep(245.5417)" in commands())
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox, "_collect", interrupted)
    program = (
        "import os, sys; os.execv(sys.executable, ['python3', '-c', 'import time; time.sleep(245.5417)'])"
    )
    with pytest.raises(KeyboardInterrupt):
        run_python(program, SandboxLimits(wall_s=300))
    wait_until(lambda: "sleep(245.5417)" not in commands())


def test_a_launcher_that_cannot_start_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "LAUNCHER", tmp_path / "absent.py")
    with pytest.raises(SandboxError, match=r"cannot run Python here: .*absent\.py.*No such file"):
        run_python("", LIMITS)
    monkeypatch.setattr(sandbox.sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(SandboxError, match=r"cannot start .*no-python: No such file"):
        run_python("", LIMITS)


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="on Linux only, not on darwin"):
        run_python("")


@pytest.mark.parametrize(
    ("name", "value"), [("wall_s", 0), ("wall_s", float("nan")), ("cpu_s", 1.5), ("processes", 0)]
)
def test_limits_are_checked(name, value):
    with pytest.raises(ConfigError, match=f"{name}="):
        SandboxLimits(**{name: value})


def test_text_that_is_no_utf_8_is_no_accident():
    assert run_python("print('\ud800')", LIMITS).output == "?\n"
