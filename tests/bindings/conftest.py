import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The package of this tree, and the reference in tests/numerics; FLASHATTN_LIBRARY names the library
# under test.
sys.path[:0] = [str(ROOT / "bindings" / "python"), str(ROOT / "tests")]
