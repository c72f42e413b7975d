"""Runs a file of unittest cases and reports them as GoogleTest does.

usage: run_python_tests.py FILE REPORT

The report has the fields that tests/check_counts.py reads.
"""

import importlib.util
import json
import sys
import unittest


class Recorder(unittest.TextTestResult):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.cases = {}

    def startTest(self, test):
        super().startTest(test)
        self.cases[test.id()] = {
            "name": test.id().split(".")[-1],
            "result": "COMPLETED",
        }

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.cases[test.id()]["result"] = "SKIPPED"


def main(path, report):
    spec = importlib.util.spec_from_file_location("tests", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tests"] = module
    spec.loader.exec_module(module)
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    result = unittest.TextTestRunner(
        sys.stdout, verbosity=2, resultclass=Recorder
    ).run(suite)
    for test, trace in result.failures + result.errors:
        if test.id() in result.cases:
            result.cases[test.id()]["failures"] = [{"failure": trace}]
    cases = list(result.cases.values())
    name = path.rsplit("/", 1)[-1].removesuffix(".py")
    with open(report, "w") as out:
        json.dump({"testsuites": [{"name": name, "testsuite": cases}]}, out)
    return 0 if result.wasSuccessful() and result.testsRun else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
