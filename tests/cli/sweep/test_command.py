from __future__ import annotations

import pytest

from lightning_axosparse.cli.sweep.command import main
from tests.cli.sweep.jobs import write_job


def test_the_command_gathers_and_says_what_there_is(tmp_path, capsys):
    write_job(tmp_path / "0", "ticket", 0.8)
    main([str(tmp_path)])
    assert capsys.readouterr().out == (
        f"1 of 1 jobs have finished.\nReport of the sweep: {tmp_path}/sweep.html\n"
    )


def test_a_folder_without_jobs_ends_it(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert ended.value.code == 1
    assert "No job has begun" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none")])
    assert "is not a folder" in capsys.readouterr().err
