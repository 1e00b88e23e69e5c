import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The package of this tree; FLASHATTN_LIBRARY names the library under test.
sys.path.insert(0, str(ROOT / "bindings" / "python"))
