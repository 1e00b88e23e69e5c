"""What the GPU's clock did while a row was measured, by nvidia-smi."""
from __future__ import annotations

import subprocess

_FIELDS = ("clocks.sm", "power.draw", "clocks_event_reasons.active")
# Bits of clocks_event_reasons that name no fault: idle, the clock that was set, the power limit,
# which long work on a large GPU always meets.
_USUAL = 0x1 | 0x2 | 0x4


def now() -> str:
    """"1755 MHz, 643.21 W, 0x0000000000000004"; empty where nvidia-smi does not say."""
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.partition("\n")[0].strip()


def throttled(state: str) -> bool:
    """Whether heat, a fault of the board or another GPU held the clock back."""
    reasons = state.rpartition(",")[2].strip()
    try:
        return bool(int(reasons, 16) & ~_USUAL)
    except ValueError:
        return False
