"""Truths that another suite of the same run has worked out already: on a CPU they are most of what
a test takes, and the same for every instruction set, sanitizer and backend."""
import hashlib
import os
import pathlib
import pickle

# Set by run_all.py, which makes the folder and clears it away.
FOLDER = os.environ.get("FLASHATTN_TEST_TRUTHS")


def recall(case, data, work_out):
    """work_out(), or what it gave for the same case and numbers before."""
    if not FOLDER:
        return work_out()
    key = hashlib.sha256(pickle.dumps((case, data), 5)).hexdigest()
    path = pathlib.Path(FOLDER, key)
    if path.exists():
        return pickle.loads(path.read_bytes())
    truth = work_out()
    unfinished = path.with_suffix(".%d" % os.getpid())
    unfinished.write_bytes(pickle.dumps(truth, 5))
    unfinished.replace(path)
    return truth
