"""The bookkeeping of `make conformance`: what counts as explained, and the page that it writes. No network."""

from tests.conformance.reasons import ADAPTIONS, REASONS, Adaption, Reason
from tests.conformance.run import CONFIGURATIONS, PARTS, Recorder, Result, Sources, judge, write_report

ROW = Reason("plain", "test_resize*", "no attribute 'weight'", "Why.")
FAILURE = Result("plain", "test_resize_tokens", "failed", "AttributeError: 'X' has no attribute 'weight'")


def test_the_table_is_complete() -> None:
    """R22: a reason for each row, patterns that can match, and parts that exist."""
    for row in REASONS:
        assert row.test.startswith("test_") and row.message and row.reason.endswith(".")
        assert row.configurations == "*" or row.configurations in CONFIGURATIONS.values()
        assert row.part in ("", *PARTS)
    for adaption in ADAPTIONS:
        assert adaption.name and adaption.change and adaption.reason.endswith(".")


def test_a_failure_needs_a_row_and_a_row_a_failure() -> None:
    verdict = judge([FAILURE], [ROW], [])
    assert verdict.explained == [(FAILURE, ROW)] and not verdict.unexplained and not verdict.unused
    for other in (
        FAILURE._replace(configuration="zeros"),
        FAILURE._replace(test="test_training"),
        FAILURE._replace(message="AttributeError: another"),
    ):
        verdict = judge([other], [ROW], [])
        assert verdict.unexplained == [other] and verdict.unused == [ROW]
    assert judge([FAILURE._replace(outcome="passed")], [ROW], []).unused == [ROW]
    assert judge([], [ROW._replace(part="generation")], ["generation"]).unused == []


def test_a_failure_of_the_control_needs_no_row_if_it_is_of_one_kind() -> None:
    control = FAILURE._replace(configuration="GPT-2", message="AttributeError: something else")
    assert judge([FAILURE, control], [], []).as_control == [FAILURE, control]
    control = control._replace(message="ValueError: something else")
    verdict = judge([FAILURE, control], [], [])
    assert verdict.as_control == [control] and verdict.unexplained == [FAILURE]


def test_the_report_says_what_ran_what_did_not_and_why() -> None:
    skip = Result("zeros", "test_flash", "skipped", "needs | a kernel")
    results = [FAILURE, skip, Result("plain", "test_save", "passed")]
    sources = Sources("nowhere", "9.1.0", ("generation",), "9.0.0")  # type: ignore[arg-type]
    text = write_report(results, judge(results, [ROW], []), sources, [Adaption("setUp", "a change", "A reason.")])
    assert "| plain | 1 | 0 | 1 | 0 | 0 |" in text and "| zeros | 0 | 1 | 0 | 0 | 0 |" in text
    assert (
        "| Why. | `test_resize_tokens` | plain |" in text and "| needs \\| a kernel | `test_flash` | zeros |" in text
    )
    assert "`tests/generation`" in text and "9.1.0" in text and "9.0.0" in text
    assert "| `setUp` | a change | A reason. |" in text and "without a reason" not in text
    assert "## Failures without a reason" in write_report(results, judge(results, [], []), sources, [])


def test_the_recorder_keeps_the_worst_of_setup_call_and_teardown(tmp_path) -> None:  # type: ignore[no-untyped-def]
    class Report:
        nodeid, duration, longrepr = "models.py::TestPlain::test_x", 0.5, "ValueError: first\n"

    recorder = Recorder(tmp_path / "log")
    for outcome in ("passed", "failed", "passed"):
        report = Report()
        report.outcome = outcome  # type: ignore[attr-defined]
        recorder.pytest_runtest_logreport(report)
    (result,) = recorder.results.values()
    assert result[:3] == ("plain", "test_x", "failed") and result.message.startswith("ValueError: first")
    assert result.seconds == 1.5
