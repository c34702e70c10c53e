import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ebbtide.base.errors import ConfigError, DataError
from ebbtide.cli.report import report, run
from tests.unit.report.runs import MIB, write_run


def test_html_goes_into_the_run_folder(tmp_path, capsys):
    write_run(tmp_path)
    assert run([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_text_and_json_are_printed(tmp_path, capsys):
    write_run(tmp_path)
    assert report(tmp_path, format="text") is None
    assert "activation memory   800.0 MiB" in capsys.readouterr().out
    assert report(tmp_path, format="json") is None
    assert json.loads(capsys.readouterr().out)["summary"]["steps"] == 3


def test_bytes_that_are_no_characters_and_a_narrow_terminal_end_no_report(tmp_path):
    """A command's arguments may hold such bytes, which Python reads as lone surrogates."""
    write_run(tmp_path)
    for name in ("run.jsonl", "summary.json"):
        text = (tmp_path / name).read_text()
        assert '"model": "tiny-llama"' in text
        (tmp_path / name).write_text(text.replace('"model": "tiny-llama"', '"model": "caf\\udce9"'))
    assert "caf?" in report(tmp_path, format="html").read_text(encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "ebbtide", "report", str(tmp_path), "--format", "text"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"}, capture_output=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert b"caf?" in result.stdout


def test_the_trace_is_a_file(tmp_path):
    write_run(tmp_path)
    assert json.loads(report(tmp_path, format="trace").read_text())["traceEvents"]


def test_a_killed_run_gets_its_summary_here(tmp_path, capsys):
    write_run(tmp_path)
    (tmp_path / "summary.json").unlink()
    lines = (tmp_path / "run.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run.jsonl").write_text("".join(lines[:-1]) + '{"t": 1')
    report(tmp_path)
    assert "plain has no recorded end" in capsys.readouterr().out
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "killed"


def test_a_stale_summary_is_replaced_only_by_force(tmp_path, capsys):
    write_run(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"schema": 1, "mode": "stale"}))
    report(tmp_path)
    assert capsys.readouterr().out.startswith("stale")
    report(tmp_path, force=True)
    assert capsys.readouterr().out.startswith("plain")


def test_a_run_of_a_comparison_keeps_its_warm_up(tmp_path, capsys):
    run_folder = write_run(tmp_path / "round-1" / "plain", steps=6)
    modes = [{"mode": "plain", "warm_up_steps": 3}, {"mode": "ebbtide", "rounds": 0}]
    (tmp_path / "summary.json").write_text(json.dumps({"schema": 1, "modes": modes, "environment": {}}))
    report(run_folder, format="text", force=True)
    assert json.loads((run_folder / "summary.json").read_text())["warm_up_steps"] == 3


def test_a_run_that_continued_after_its_summary_is_summarised_again(tmp_path, capsys):
    write_run(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"schema": 1, "mode": "stale"}))
    os.utime(tmp_path / "summary.json", (1, 1))
    report(tmp_path)
    assert capsys.readouterr().out.startswith("plain")


def test_an_output_is_replaced_only_by_force(tmp_path):
    write_run(tmp_path)
    target = tmp_path / "there.txt"
    target.write_text("mine")
    with pytest.raises(DataError, match="(?s)already exists.*--force"):
        report(tmp_path, output=target)
    assert target.read_text() == "mine"
    assert report(tmp_path, output=target, force=True) == target
    assert target.read_text().startswith("plain: step 3.300 s, peak 1.84 GiB; it holds: activations")


def test_the_text_names_how_many_steps_count_and_why_memory_is_unknown(tmp_path):
    write_run(tmp_path)
    report(tmp_path, output=tmp_path / "known.txt")
    known, summary = (tmp_path / "known.txt").read_text(), json.loads((tmp_path / "summary.json").read_text())
    assert f"{summary['steps']} steps, {summary['timed_steps']} of them timed" in known
    assert "activation memory is unknown" not in known
    for view in ("inside", "outside"):
        if summary.get(view):
            summary[view]["activation_bytes"] = None
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "device": "cpu", "timed_steps": summary["steps"]}))
    report(tmp_path, output=tmp_path / "unknown.txt")
    unknown = (tmp_path / "unknown.txt").read_text()
    assert "activation memory is unknown where a forward reuses freed memory" in unknown
    assert f"{summary['steps']} steps\n" in unknown
    events = [line for line in (tmp_path / "run.jsonl").read_text().splitlines() if '"forward"' not in line]
    (tmp_path / "run.jsonl").write_text("\n".join(events) + "\n")
    report(tmp_path, output=tmp_path / "no-forward.txt")
    assert "activation memory is unknown" not in (tmp_path / "no-forward.txt").read_text()


def write_comparison(folder):
    for turn, height in ((1, 100), (2, 200), (10, 300)):
        write_run(folder / f"round-{turn}" / "plain", "plain", height=height * 2**20)
        if turn != 10:
            write_run(folder / f"round-{turn}" / "ebbtide", "ebbtide", height=50 * 2**20, engine=True)
    modes = [json.loads((folder / "round-2" / mode / "summary.json").read_text()) for mode in ("plain", "ebbtide")]
    (folder / "summary.json").write_text(json.dumps({"schema": 1, "modes": modes, "environment": {"rounds": 3}}))


def test_the_folder_of_a_comparison_is_known(tmp_path, capsys):
    write_comparison(tmp_path)
    report(tmp_path)
    verdict, empty, *lines = capsys.readouterr().out.splitlines()
    assert verdict.startswith("ebbtide: peak −149.2 MiB (12 %), step") and not empty
    assert [line.split()[0] for line in lines] == ["mode", "plain", "ebbtide"]
    assert "75.0 %" in lines[2]
    page = report(tmp_path, format="html").read_text()
    assert "plain: 3.30 s, peak 1.26 GiB" in page, "the last round that has both modes"
    with pytest.raises(ConfigError, match="(?s)expected text or html.*round-1/plain"):
        report(tmp_path, format="trace")


def test_several_runs_are_held_against_plain_or_the_first(tmp_path, capsys):
    first = write_run(tmp_path / "first", None, height=800 * MIB)
    second = write_run(tmp_path / "second", None, height=300 * MIB, slow=1.5)
    assert run([str(first), str(second), "--format", "text"]) == 0
    verdict, _, heads, *rows = capsys.readouterr().out.splitlines()
    assert verdict.startswith(
        "second: peak −497.0 MiB (26 %), step time not judged (2 steps timed), losses bitwise equal (against first)"
    )
    assert "step / first" in heads and [row.split()[0] for row in rows] == ["first", "second"]
    assert "62.5 %" in rows[1]
    assert run([str(first), str(second)]) == 0
    page = (second / "against-first.html").read_text()
    assert "(against first)" in page and not (second / "report.html").exists()
    plain = write_run(tmp_path / "third", "plain", height=800 * MIB)
    report(second, plain, output=Path("-"))
    assert "(against plain)" in capsys.readouterr().out
    write_comparison(tmp_path / "compared")
    with pytest.raises(ConfigError, match="holds a comparison; expected folders of runs"):
        report(second, tmp_path / "compared")
    with pytest.raises(ConfigError, match="format is 'json' for several runs"):
        report(second, plain, format="json")


def test_only_the_round_that_is_shown_is_read(tmp_path, capsys):
    write_comparison(tmp_path)
    (tmp_path / "round-1" / "plain" / "run.jsonl").unlink()
    report(tmp_path)
    assert capsys.readouterr().out.startswith("ebbtide: peak −149.2 MiB (12 %), step")


def test_each_of_several_runs_has_a_verdict_whatever_its_folder_is_called(tmp_path, capsys):
    folders = [write_run(tmp_path / name, None) for name in ("first", "fsdp", "ebbtide-2")]
    report(*folders)
    verdicts = capsys.readouterr().out.splitlines()[:2]
    assert [verdict.partition(": ")[0] for verdict in verdicts] == ["fsdp", "ebbtide-2"]


@pytest.mark.parametrize("format", ["text", "json", "html", "trace"])
def test_a_dash_prints(tmp_path, monkeypatch, capsys, format):
    monkeypatch.chdir(tmp_path)
    assert run([str(write_run(tmp_path / "run")), "--format", format, "--output", "-"]) == 0
    assert len(capsys.readouterr().out) > 400
    assert not (tmp_path / "-").exists() and not (tmp_path / "run" / "report.html").exists()


def test_a_folder_without_anything_is_an_error(tmp_path):
    with pytest.raises(DataError, match="run.jsonl cannot be read"):
        report(tmp_path)
    (tmp_path / "summary.json").write_text("garbled")
    with pytest.raises(DataError, match="run.jsonl cannot be read"):
        report(tmp_path)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["RUN", "--format", "pdf"], "--format is 'pdf'; expected one of text, html, trace, json\nhint: "),
        (["RUN", "--format", "jsno"], "hint: did you mean 'json'"),
        (["RUN", "--formt", "json"], "unknown argument '--formt'; .*\nhint: did you mean '--format'"),
        (["RUN", "--form", "json"], "unknown argument '--form'"),
        (["RUN", "again"], "run folder 'again' does not exist"),
        (["RUN", "RUN"], "a folder is named twice; expected folders of different runs\nhint: "),
        (["RUN", "--format", "text", "again"], "run folder 'again' does not exist"),
        (["RUN", "--format", "text", "--format", "json"], "--format is set twice: text, json; .*\nhint: leave one out"),
        (["RUN", "--output"], "expected one argument; expected arguments of `ebbtide report`"),
        ([], "arguments are required: run_folder; .*\nhint: `ebbtide report --help`"),
        (["rnu"], "run folder 'rnu' does not exist; .*\nhint: did you mean 'run'"),
        (["file"], "run folder 'file' is a file; expected the folder of a run or of `ebbtide compare`\nhint: "),
        (["RUN", "--output", "."], "is a folder; expected a file in an existing folder\nhint: name one with --output"),
        (["RUN", "--output", "no/such/file"], "cannot be written: there is no folder 'no/such'"),
        (["RUN", "--output", "file"], "file already exists; expected a new file\nhint: pass --force"),
        (["RUN", "--output", "/dev/full", "--force"], "'/dev/full' cannot be written .*; expected .*\nhint: "),
    ],
)
def test_bad_arguments_are_errors_of_this_command_line(tmp_path, monkeypatch, argv, words):
    write_run(tmp_path / "run")
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, DataError), match=f"(?s){words}"):
        run(["run" if word == "RUN" else word for word in argv])
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_killed_run_in_a_folder_that_may_only_be_read_is_reported(tmp_path, capsys, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    write_run(tmp_path)
    (tmp_path / "summary.json").unlink()
    monkeypatch.setattr("ebbtide.cli.report.write_summary", refuse)
    report(tmp_path)
    assert capsys.readouterr().out.startswith("plain")


def test_runs_of_two_models_are_named_as_such(tmp_path, capsys):
    """Their peaks and times say nothing about a mode."""
    for name in ("one", "other"):
        write_run(tmp_path / name, name)
    words = [f"(against one{of})" for of in ("", ", of another model")]
    for expected, absent in (words, reversed(words)):
        assert run([str(tmp_path / "one"), str(tmp_path / "other"), "--format", "text"]) == 0
        shown = capsys.readouterr().out
        assert expected in shown and absent not in shown
        summary = tmp_path / "other" / "summary.json"
        summary.write_text(summary.read_text().replace("tiny-llama", "tiny-qwen"))


def test_what_may_not_be_read_is_an_error(tmp_path, monkeypatch):
    """Root may read everything, so the system's refusals are made up."""

    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "summary.json").write_text("{}")
    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    with pytest.raises(DataError, match=r"summary\.json cannot be read \(Permission denied\); .*\nhint: "):
        report(tmp_path)
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    with pytest.raises(DataError, match="run folder .* may not be read; expected .*\nhint: "):
        report(tmp_path)


@pytest.mark.parametrize("kind", ["run", "summary", "comparison"])
def test_a_record_of_a_later_ebbtide_is_an_error(tmp_path, kind):
    """Its known fields have another meaning."""
    write_run(tmp_path)
    if kind == "run":
        later = (tmp_path / "run.jsonl").read_text().replace('"schema": 1', '"schema": 2')
        (tmp_path / "run.jsonl").write_text(later)
        (tmp_path / "summary.json").unlink()
    else:
        summary = (
            json.loads((tmp_path / "summary.json").read_text()) if kind == "summary" else {"modes": [{"mode": "plain"}]}
        )
        (tmp_path / "summary.json").write_text(json.dumps({**summary, "schema": 2}))
        if kind == "comparison":
            (tmp_path / "run.jsonl").unlink()
    with pytest.raises(DataError, match=r"schema 2; expected schema 1 or older\nhint: .*newer ebbtide"):
        report(tmp_path)


@pytest.mark.parametrize("modes", [[{}], [1], {}, [], None, [{"mode": None}]])
def test_a_damaged_comparison_is_an_error(tmp_path, modes):
    (tmp_path / "summary.json").write_text(json.dumps({"modes": modes}))
    for flags in (["--format", "text"], []):
        with pytest.raises(DataError, match=r"summary\.json .*\nhint: "):
            run([str(tmp_path), *flags])
    write_run(tmp_path / "round-1" / "plain")
    assert run([str(tmp_path / "round-1" / "plain"), "--format", "text"]) == 0  # its comparison is another matter


@pytest.mark.parametrize("format", ["text", "html"])
@pytest.mark.parametrize(
    ("file", "content", "found"),
    [
        ("run.jsonl", "{\n{}\n", "line 1 of .*round-2/plain/run.jsonl is"),
        ("summary.json", "{", "round-2/plain/summary.json is not a summary"),
        ("summary.json", '{"schema": 1, "status": "ok", "phases": 3}', "round-2/plain hold something .*AttributeError"),
    ],
)
def test_a_damaged_run_of_a_comparison_is_left_out_and_named(tmp_path, capsys, format, file, content, found):
    write_comparison(tmp_path)
    (tmp_path / "round-2" / "plain" / file).write_text(content)
    report(tmp_path, format=format, output=Path("-"))
    shown = capsys.readouterr().out
    assert re.search(f"plain: round 2 is left out: .*{found}", html.unescape(shown))
    if format == "html":
        assert "plain: 3.30 s, peak 1.16 GiB" in shown, "the round before it"


def edited(value):
    """Yield a record's values, one of which has another type each time."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from ({**value, key: one} for one in edited(item))
    else:
        yield [1] if isinstance(value, str) else {"of": "another type"} if value is None else "text"


@pytest.mark.parametrize("format", ["text", "html", "json", "trace"])
def test_values_of_another_type_are_no_traceback(tmp_path, capsys, format):
    write_run(tmp_path, steps=1, engine=True)
    summary, record = tmp_path / "summary.json", tmp_path / "run.jsonl"
    before = {file: file.read_text() for file in (summary, record)}
    lines = before[record].splitlines()
    edits = [(summary, json.dumps(one)) for one in edited(json.loads(before[summary]))]
    for number in {json.loads(line)["event"]: number for number, line in enumerate(lines)}.values():
        for one in edited(json.loads(lines[number])):
            edits.append((record, "\n".join([*lines[:number], json.dumps(one), *lines[number + 1 :]]) + "\n"))
    refused = 0
    for file, content in edits:
        file.write_text(content)
        try:
            report(tmp_path, format=format, output=Path("-"))
        except DataError as error:
            refused += 1
            assert str(tmp_path) in str(error) and error.hint
        file.write_text(before[file])
    assert 0 < refused < len(edits)


def test_several_runs_of_which_one_is_damaged_name_it(tmp_path):
    folders = [write_run(tmp_path / name) for name in ("one", "other")]
    summary = folders[1] / "summary.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "phases": 3}))
    with pytest.raises(DataError, match=r"(?s)the files in .*/other hold something .*hint: .*--force"):
        report(*folders)
    report(*folders, output=Path("-"), force=True)


def test_a_warm_up_that_differs_between_rounds_is_the_runs_own(tmp_path, capsys):
    run_folder = write_run(tmp_path / "round-1" / "plain", steps=6)
    modes = [{"mode": "plain", "warm_up_steps": 2.5}]
    (tmp_path / "summary.json").write_text(json.dumps({"schema": 1, "modes": modes, "environment": {}}))
    report(run_folder, format="text", force=True)
    assert json.loads((run_folder / "summary.json").read_text())["warm_up_steps"] == 1
