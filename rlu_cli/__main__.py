"""``rlu`` and ``python -m rlu_cli``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it quietly, even while modules are still loading."""
    try:
        from rlu_cli.interrupts import listen

        listen()
        from rlu_cli.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
