"""``python -m benchmarks [NAME ...]``: runs the benchmarks and prints one table; exit status 1 if a bound is broken."""

import argparse
import importlib
import os
import sys

NAMES = ("startup", "schedules", "one_program", "executor_overhead", "demo")


def main(argv: list[str]) -> int:
    """Runs the benchmarks named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What oneflax costs, as ratios.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)}; all if none is named")
    names = parser.parse_args(argv).names or NAMES
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    # Eight virtual devices where there is no accelerator, and a thread pool that their collectives fit into.
    flags = os.environ.get("XLA_FLAGS", "")
    if "host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
    os.environ.setdefault("NPROC", "32")
    from benchmarks.timing import table

    rows = []
    for name in names:
        rows.extend(importlib.import_module(f"benchmarks.{name}").main())
    import jax

    print(f"jax {jax.__version__}, {len(jax.devices())} {jax.devices()[0].platform} devices, {os.cpu_count()} cores")
    print(table(rows))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
