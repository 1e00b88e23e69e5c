"""python -m flashattn: the build, the devices, and what they can do."""
from __future__ import annotations

import argparse

from . import _library, build_info, devices
from ._matrix import as_markdown, as_text, matrix


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flashattn", description=__doc__)
    parser.add_argument("--markdown", action="store_true",
                        help="print only the support matrix, as Markdown")
    parser.add_argument("--device", default="cpu", help="the matrix of: cpu, cuda, cuda:1")
    arguments = parser.parse_args()
    table = matrix(arguments.device)
    if arguments.markdown:
        print(as_markdown(table))
        return
    print(build_info())
    print(f"library: {_library.path}")
    for device in devices():
        units = (f"{device.multiprocessors} multiprocessors" if device.compute_capability else
                 f"{device.threads} threads")
        print(f"{device.kind}:{device.device_index}  {device.name}, {device.isa}, {units}, "
              f"{device.memory / 2**30:.1f} GiB")
    print(f"\nSupport on {arguments.device}, as flashattn_check answers "
          "(8 heads, dim 64 unless said):\n")
    print(as_text(table))


if __name__ == "__main__":
    main()
