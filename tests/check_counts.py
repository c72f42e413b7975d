"""Checks that each tier ran at least as many test cases as it must.

usage: check_counts.py RESULTS_FOLDER EXPECTED_FILE

The folder holds GoogleTest's JSON reports, named <tier>.<test>.json. The file
has one line per tier: its name and the least number of test cases.
"""

import collections
import json
import pathlib
import sys


def main(results, expected):
    ran = collections.Counter()
    failed = 0
    skipped = collections.defaultdict(list)
    for report in sorted(pathlib.Path(results).glob("*.json")):
        tier = report.name.split(".")[0]
        for suite in json.loads(report.read_text())["testsuites"]:
            for case in suite["testsuite"]:
                name = f"{suite['name']}.{case['name']}"
                if case.get("result") == "COMPLETED":
                    ran[tier] += 1
                    failed += bool(case.get("failures"))
                else:
                    skipped[tier].append(name)

    short = False
    for line in pathlib.Path(expected).read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        tier, least = line.split()
        enough = ran[tier] >= int(least)
        short |= not enough
        print(
            f"{tier}: {ran[tier]} test cases ran (at least {least} expected), "
            f"{len(skipped[tier])} skipped{'' if enough else '  TOO FEW'}"
        )
        for name in skipped[tier]:
            print(f"  skipped: {name}")
    print(
        f"total: {ran.total() - failed} passed, {failed} failed, "
        f"{sum(map(len, skipped.values()))} skipped"
    )
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
