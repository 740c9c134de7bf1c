"""Threads that get in the way."""

import contextlib
import sys
import threading


@contextlib.contextmanager
def busy(*works):
    """Let other threads do these works without a pause, one thread each, and switch between threads all the time."""
    stop, failed, interval = threading.Event(), [], sys.getswitchinterval()

    def run(work):
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not failed


@contextlib.contextmanager
def held(*locks):
    """Let another thread hold these locks."""
    have, stop = threading.Event(), threading.Event()

    def hold():
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            have.set()
            stop.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    have.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()
