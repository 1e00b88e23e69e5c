"""What all tests in Python share: the option --device, and names of failed tests as they come."""
import pytest


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda"],
                     help="of tests/numerics and tests/pytorch: where the library computes; the "
                          "latter uses a GPU that is there without it, too")


def pytest_collection_modifyitems(config, items):
    others = {item.path.parent.name for item in items} - {"numerics", "pytorch"}
    if others and config.getoption("--device") != "cpu":
        raise pytest.UsageError(f"--device is not for tests of {', '.join(sorted(others))}, which "
                                "use what is there; leave it out")


class Failures:
    """A run that is cut by its time limit has no summary; short output shows a letter."""

    def __init__(self, terminal):
        self.terminal = terminal

    @pytest.hookimpl(trylast=True)  # after the letter
    def pytest_runtest_logreport(self, report):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message.partition("\n")[0] if crash else ""
            kind = "FAILED" if report.when == "call" else "ERROR"
            if self.terminal.verbosity < 0:
                self.terminal.write_line("")
            self.terminal.write_line(f"{kind} {report.nodeid}{why and ' - '}{why[:200]}")
            self.terminal.flush()


def pytest_sessionstart(session):
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal and terminal.verbosity <= 0:  # a worker has none
        session.config.pluginmanager.register(Failures(terminal))
