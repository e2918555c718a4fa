#!/usr/bin/env python3
"""Reads matrix.csv of `sublet interfere`, with Python alone: which pairs may share a GPU.

    examples/experiments/read_matrix.py report/matrix.csv --most 1.3

Prints the pairs in which no job gets slower than --most, by the upper end of its interval. Ends
with 1 where there is none.
"""

import argparse
import csv
import sys


def slowdowns(path):
    """Slowdown of each job of a combination, as (mode, combination) -> [(job, value, high)]."""
    found = {}
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            value = float(row["slowdown"]) if row["slowdown"] else None
            high = float(row["high95"]) if row["high95"] else None
            found.setdefault((row["mode"], row["combination"]), []).append((row["job"], value, high))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("matrix", help="matrix.csv of a report")
    parser.add_argument("--most", type=float, default=1.3, help="a slowdown that is fine (default: %(default)s)")
    arguments = parser.parse_args()
    fine = 0
    for (mode, combination), jobs in slowdowns(arguments.matrix).items():
        if any(high is None for _, _, high in jobs):
            print(f"{mode}\t{combination}\tnot measured")
        elif all(high <= arguments.most for _, _, high in jobs):
            fine += 1
            figures = ", ".join(f"{job} {value:.2f}" for job, value, _ in jobs)
            print(f"{mode}\t{combination}\tmay share: {figures}")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
