"""How long a user waits before anything happens: imports and the command line, as whole processes."""

import statistics
import subprocess
import sys

from benchmarks.timing import Row, alternate

ROUNDS = 9


def main() -> list[Row]:
    """Measures processes in alternating rounds, files in the page cache."""

    def python(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)

    calls = {
        "import jax": lambda: python("-c", "import jax"),
        "import oneflax": lambda: python("-c", "import oneflax"),
        "--help": lambda: python("-m", "oneflax", "--help"),
        "schedule": lambda: python("-m", "oneflax", "schedule", "1f1b", "--workers", "4", "--microbatches", "8"),
        "python": lambda: python("-c", "pass"),
    }
    for call in calls.values():
        call()
    seconds = {name: statistics.median(values) for name, values in alternate(calls, ROUNDS).items()}
    jax_s, ours_s = (seconds[name] - seconds["python"] for name in ("import jax", "import oneflax"))
    return [
        Row("startup: import oneflax / import jax", ours_s / jax_s, "ratio", 1.1, f"{ours_s:.3f} s / {jax_s:.3f} s"),
        *(
            Row(
                f"startup: python -m oneflax {name}",
                seconds[name] - seconds["python"],
                "s",
                bound,
                "beyond bare python",
            )
            for name, bound in (("--help", 0.3), ("schedule", 0.5))
        ),
    ]
