"""`pytest --record FILE`: what became of every test, or of every notebook cell under nbval, as a recorded run."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--record", metavar="FILE", help="write the outcome of every test as a recorded run")


def pytest_configure(config):
    path = config.getoption("record")
    if path and not hasattr(config, "workerinput"):  # of xdist: the controller hears of every test
        config.pluginmanager.register(Recorder(path))


class Recorder:
    """Outcomes by node id. A test that failed in any phase has failed; a run that was cut short leaves no record."""

    def __init__(self, path: str) -> None:
        self.path, self.outcomes = path, {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            known = self.outcomes.get(report.nodeid)
            self.outcomes[report.nodeid] = known if known == "failed" else report.outcome

    def pytest_sessionfinish(self, session, exitstatus):
        from dcp_fix.records import machine, records

        whole = not (session.shouldfail or session.shouldstop)  # -x and its like
        if whole and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            outcomes = dict(sorted(self.outcomes.items()))
            records.record(self.path, machine.command_line(), {"tests": outcomes})
