"""Entry point of ``forge-bench``: an interrupt while torch is being imported ends it quietly.

Beside the package, not in it: importing any part of ``forge`` imports torch, which takes seconds.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run :func:`forge.harness.cli.main`."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        # A KeyboardInterrupt amid imports would be a traceback, or another error made of it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from forge.harness.cli import main

    signal.signal(signal.SIGINT, before)
    main()


if __name__ == "__main__":
    main()
