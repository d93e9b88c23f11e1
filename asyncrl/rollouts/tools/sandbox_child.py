"""The program between a sandbox and the code in it: isolates itself, starts the code, and ends with all of it.

``asyncrl.rollouts.tools.sandbox`` starts this file with ``python -I -S``, so it imports the standard library alone.

    parent ── starter ── init (process 1 of a namespace) ── the code and whatever it starts
                 │          └ ends with the code; the kernel then kills every process of the namespace
                 └ dies with its parent, and init with it

Without namespaces (``mode`` "uid" or "limits") the starter adopts orphans, and kills all descendants when the code
ends.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
"""Linux headers of 6.1; the number of mount_setattr (Linux 5.12) is the same on all architectures."""

WORK = "/tmp/work"
"""Working directory of the code where it has namespaces."""

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        settings = json.load(file)
    report = int(sys.argv[2])
    os.set_inheritable(report, False)
    try:
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.alarm(settings["wall_s"] + 2)  # the parent's own limit comes first
        if settings["mode"] in ("uid", "limits"):
            supervise_tree(settings, report)
        else:
            supervise_namespace(settings, report)
    except OSError as error:
        fail(report, error)


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library.  Raises OSError."""
    result: int = libc[name](*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def fail(report: int, error: OSError | ValueError) -> NoReturn:
    write(report, {"error": getattr(error, "strerror", None) or str(error)})
    os._exit(125)


def write(report: int, values: Mapping[str, Any]) -> None:
    os.write(report, json.dumps(values).encode() + b"\n")


# ---- with namespaces


def supervise_namespace(settings: Mapping[str, Any], report: int) -> None:
    """Start process 1 of new namespaces and wait for it."""
    flags = NEWNS | NEWPID | NEWIPC | (0 if settings["network"] else NEWNET)
    uid, gid = os.getuid(), os.getgid()
    if settings["mode"] == "user":
        call("unshare", NEWUSER | flags)
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(line)
    else:
        call("unshare", flags)
    init = os.fork()
    if init == 0:
        try:
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
            mount_private(settings)
            code, usage = wait_for_all_until(start(settings, report))
        except OSError as error:
            fail(report, error)
        write(report, {"exit": code, "cpu_s": usage})
        os._exit(0)
    os.waitpid(init, 0)


def mount_private(settings: Mapping[str, Any]) -> None:
    """Make every file system read-only, hide private directories, and mount a small /tmp that can be written."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    number, size = ctypes.c_long(MOUNT_SETATTR), ctypes.c_size_t(ctypes.sizeof(attributes))
    call("syscall", number, AT_FDCWD, b"/", AT_RECURSIVE, attributes, size)
    shown = [(path, os.open(path, os.O_PATH)) for path in settings["shown"]]
    hidden = [path for path in settings["hidden"] if os.path.isdir(path) and not os.path.islink(path)]
    for path in hidden:
        mount("none", path, "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,nr_inodes=64,mode=755")
    options = f"size={settings['disk_bytes']},nr_inodes={settings['max_files']},mode=1777"
    mount("none", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    for path, handle in shown:
        if any(path == top or path.startswith(top + "/") for top in [*hidden, "/tmp"]):
            os.makedirs(path, exist_ok=True)
            mount(f"/proc/self/fd/{handle}", path, None, MS_BIND | MS_REC)
        os.close(handle)
    try:
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except OSError:  # in a container with a masked /proc; the host's processes must not be seen
        mount("none", "/proc", "tmpfs", MS_NOSUID | MS_NODEV, "size=4k,nr_inodes=4,mode=755")
    limit_shared_memory(settings["memory_bytes"])
    os.mkdir(WORK)
    os.chmod(WORK, 0o777)


def limit_shared_memory(most: int) -> None:
    """Limit System V's shared memory of the namespace: detached segments count in no limit of a process."""
    # An unprivileged user may not, before Linux 6.1.
    with contextlib.suppress(OSError), open("/proc/sys/kernel/shmall", "w", encoding="ascii") as file:
        file.write(str(most // resource.getpagesize()))


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    try:
        call("mount", *texts, ctypes.c_ulong(flags), options.encode())
    except OSError as error:
        raise OSError(error.errno, f"mount of {target}: {os.strerror(error.errno or 0)}") from error


def wait_for_all_until(pid: int) -> tuple[int, float]:
    """Reap every child until ``pid`` ended; return its exit code (minus the signal) and the CPU seconds of all."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


# ---- without namespaces


def supervise_tree(settings: Mapping[str, Any], report: int) -> None:
    """Start the code; when it ends, or at SIGTERM, kill every process that it left."""
    call("prctl", PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda *_: kill_descendants_and_exit())
    code, usage = wait_for_all_until(start(settings, report))
    write(report, {"exit": code, "cpu_s": usage})
    kill_descendants_and_exit()


def kill_descendants_and_exit() -> NoReturn:
    """Kill children until none is left.  The children of a killed process become ours, because we adopt orphans."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.wait()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    os._exit(0)


def children() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{int(name)}/stat", encoding="ascii", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                found.append(int(name))
    return found


# ---- the code


def start(settings: Mapping[str, Any], report: int) -> int:
    """Start the code in a process with its own session; return the process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        limit_resources(settings)
        drop_rights(settings)
        os.umask(0o077)
        os.chdir(WORK if settings["mode"] in ("root", "user") else settings["directory"])
        for name, text in settings["files"].items():
            with open(name, "w", encoding="utf-8") as file:
                file.write(text)
        os.closerange(3, report)
        os.execvpe(settings["argv"][0], settings["argv"], {**settings["environment"], "HOME": os.getcwd()})
    except (OSError, ValueError) as error:  # ValueError: a NUL, or a surrogate that UTF-8 cannot hold
        fail(report, error)


def limit_resources(settings: Mapping[str, Any]) -> None:
    set_limit: Callable[[int, tuple[int, int]], None] = resource.setrlimit
    cpu_s, memory, file_bytes = settings["cpu_s"], settings["memory_bytes"], settings["file_bytes"]
    set_limit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    set_limit(resource.RLIMIT_AS, (memory, memory))
    set_limit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    set_limit(resource.RLIMIT_NOFILE, (64, 64))
    set_limit(resource.RLIMIT_CORE, (0, 0))
    most = settings["max_processes"] + (num_threads_of_user() if settings["mode"] == "limits" else 0)
    set_limit(resource.RLIMIT_NPROC, (most, most))


def num_threads_of_user() -> int:
    """Count the threads that the limit counts without a namespace of users (proc(5): field 20 of stat)."""
    total = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if os.stat(f"/proc/{int(name)}").st_uid == os.getuid():
                with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                    total += int(file.read().rpartition(")")[2].split()[17])
    return total


def drop_rights(settings: Mapping[str, Any]) -> None:
    """Become a user without rights, if we are root, and give up every way to gain some."""
    if settings["uid"] is not None:
        if settings["mode"] == "uid":
            os.chown(settings["directory"], settings["uid"], settings["uid"])
        os.setgroups([])
        os.setresgid(settings["uid"], settings["uid"], settings["uid"])
        os.setresuid(settings["uid"], settings["uid"], settings["uid"])
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


if __name__ == "__main__":
    main()
