"""Runs one command, and ends it for certain: with all that it started, whenever whoever asked for it goes away.

    python keeper.py STOP_S COMMAND...

Standard input is a pipe whose other end the asker holds and never writes to. When it closes, because the asker closed
it or was killed, the command is asked to end (SIGTERM), and after STOP_S seconds it is killed. What it leaves behind,
in whatever group or session, is ended likewise. A program of its own, on the standard library alone.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.02
_libc = ctypes.CDLL(None)


def main() -> int:
    stop_s, command = float(sys.argv[1]), sys.argv[2:]
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command become children of this process
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_die_with_the_keeper)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"cannot start {command[0]}: {error}\n")
        return 127
    asker_gone = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asker_gone.set())
    threading.Thread(target=_end_when, args=(asker_gone, child, stop_s), daemon=True).start()
    threading.Thread(target=_watch_standard_input, args=(asker_gone,), daemon=True).start()
    code = child.wait()
    _end_what_is_left(stop_s)
    return code if code >= 0 else 128 - code


def _die_with_the_keeper() -> None:
    """In the child, before it becomes the command. The keeper has one thread then."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch_standard_input(asker_gone: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    asker_gone.set()


def _end_when(asker_gone: threading.Event, child: "subprocess.Popen[bytes]", stop_s: float) -> None:
    asker_gone.wait()
    child.send_signal(signal.SIGTERM)  # to itself only: engines end their workers in an order of their own
    try:
        child.wait(stop_s)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"the command did not end within {stop_s:g} s of SIGTERM: killing it\n")
        child.kill()


def _end_what_is_left(stop_s: float) -> None:
    """Until this process has no child: first asked to end, then killed. Ending one may bring its children here."""
    due_s, asked = time.monotonic() + stop_s, set[int]()
    while found := _children():
        is_late = time.monotonic() > due_s
        for pid in found if is_late else [pid for pid in found if pid not in asked]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            asked.add(pid)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_S)


def _children() -> list[int]:
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent = (place / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) == os.getpid() and state != "Z":
                    found.append(int(place.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
