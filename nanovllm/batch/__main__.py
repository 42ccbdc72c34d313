"""Run: python -m nanovllm.batch INPUT OUTPUT --model DIR [options]."""

import sys
from collections.abc import Sequence

from nanovllm.batch import job, options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job that a command line describes and returns the exit code."""
    what = options.parse(argv)
    try:
        summary = job.run(what)
    except (TypeError, ValueError) as error:  # the user can mend it; the message says how
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it was", file=sys.stderr)
        return 130
    except (OSError, RuntimeError) as error:
        print(f"error: {error}; the same command goes on where it was", file=sys.stderr)
        return 1
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
